"""Mistral: Llama that looks back over a window."""

from typing import Any

from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)


class FlashMistralAttention(FlashLlamaAttention):
    def window(self, config: Any, layer_id: int) -> int | None:  # noqa: ARG002
        window: int | None = config.sliding_window
        return window


class FlashMistralLayer(FlashLlamaLayer):
    attention_class = FlashMistralAttention

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases()


class FlashMistralForCausalLM(FlashLlamaForCausalLM):
    layer_class = FlashMistralLayer
