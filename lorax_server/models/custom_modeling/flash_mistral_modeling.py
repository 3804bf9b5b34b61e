"""Mistral: Llama with a sliding window."""

from typing import Any

from lorax_server.models.custom_modeling.architecture import Architecture
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashMistralForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(windows=[config.sliding_window] * config.num_hidden_layers)
