"""Phi-1, 1.5 and 2: layer norms, biases in all layers, partial RoPE, and attention parallel to the MLP."""

from functools import partial
from typing import Any

from lorax_server.layers.norm import LayerNorm, ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP, SharedHeadNormAttention
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM
from lorax_server.weights import Weights


class PhiAttention(SharedHeadNormAttention):
    norm_names = "q_layernorm", "k_layernorm"

    def load_head_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        if config.qk_layernorm:
            super().load_head_norms(prefix, config, weights)

    def load_head_norm(self, name: str, config: Any, weights: Weights) -> LayerNorm:
        return LayerNorm(name, weights, self.head_dim, config.layer_norm_eps, is_adaptable=False)


class FlashPhiForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            names=ModuleNames(
                second_norm=None, final_norm="final_layernorm", output="dense", mlp=("mlp.fc1", "mlp.fc2")
            ),
            biases=BiasFlags(qkv=True, output=True, mlp=True),
            attention_class=PhiAttention,
            mlp_class=PlainMLP,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_eps),
            partial_rotary=True,
            head_bias=True,
        )
