"""EXAONE 4: Llama with post-norm layers and QK norms. RoPE and sliding windows are set per layer."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture
from lorax_server.models.custom_modeling.common import PostNormLayer, SharedHeadNormAttention, layer_windows
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashExaone4ForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        windows = layer_windows(config)
        rotates = [config.sliding_window is None or window is not None for window in windows]
        return Architecture(
            attention_class=SharedHeadNormAttention,
            layer_class=PostNormLayer,
            windows=windows,
            rope_kinds=["all" if each else None for each in rotates],
        )
