"""Qwen3: Llama with query and key norms."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture, read_biases
from lorax_server.models.custom_modeling.common import SharedHeadNormAttention, layer_windows
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashQwen3ForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            biases=read_biases(config)._replace(mlp=False),
            attention_class=SharedHeadNormAttention,
            windows=layer_windows(config),
        )
