"""SmolLM3: Llama with some layers without RoPE, and an optional sliding window."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture, read_biases
from lorax_server.models.custom_modeling.common import layer_windows
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashSmolLM3ForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            biases=read_biases(config),
            windows=layer_windows(config),
            rope_kinds=["all" if rotates else None for rotates in config.no_rope_layers],
        )
