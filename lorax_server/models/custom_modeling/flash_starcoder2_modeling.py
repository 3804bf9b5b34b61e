"""StarCoder2: layer norms, biases, a sliding window, and an ungated MLP."""

from functools import partial
from typing import Any

from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashStarCoder2ForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        bias = bool(config.use_bias)
        return Architecture(
            names=ModuleNames(mlp=("mlp.c_fc", "mlp.c_proj")),
            biases=BiasFlags(qkv=bias, output=bias, mlp=bias),
            mlp_class=PlainMLP,
            norm=partial(ResidualLayerNorm, eps=config.norm_epsilon),
            windows=[config.sliding_window] * config.num_hidden_layers,
        )
