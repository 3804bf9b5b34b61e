"""Qwen2: Llama with QKV biases and an optional sliding window on some layers."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags
from lorax_server.models.custom_modeling.common import layer_windows
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashQwen2ForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(biases=BiasFlags(qkv=True), windows=layer_windows(config))
