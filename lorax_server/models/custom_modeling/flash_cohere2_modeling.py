"""Cohere 2: Cohere with sliding windows; layers without a window have no RoPE."""

from dataclasses import replace
from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture
from lorax_server.models.custom_modeling.common import layer_windows
from lorax_server.models.custom_modeling.flash_cohere_modeling import FlashCohereForCausalLM
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaAttention


class FlashCohere2ForCausalLM(FlashCohereForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        windows = layer_windows(config)
        return replace(
            FlashCohereForCausalLM.describe(config),
            attention_class=FlashLlamaAttention,
            windows=windows,
            rope_kinds=[None if window is None else "all" for window in windows],
        )
