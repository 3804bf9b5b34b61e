"""Arcee: Llama with an ungated MLP."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames, read_biases
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashArceeForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        names = ModuleNames(mlp=("mlp.up_proj", "mlp.down_proj"))
        return Architecture(names=names, biases=read_biases(config), mlp_class=PlainMLP)
