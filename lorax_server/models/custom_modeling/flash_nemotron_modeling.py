"""Nemotron: layer norms with an offset, partial RoPE, and an ungated MLP."""

from functools import partial
from typing import Any

from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames, read_biases
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashNemotronForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            names=ModuleNames(mlp=("mlp.up_proj", "mlp.down_proj")),
            biases=read_biases(config),
            mlp_class=PlainMLP,
            norm=partial(ResidualLayerNorm, eps=config.norm_eps, offset=1.0),
            partial_rotary=True,
        )
