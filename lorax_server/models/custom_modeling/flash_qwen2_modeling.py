"""Qwen2: Llama with a bias on query, key and value, and a window on some layers if asked for."""

from typing import Any

from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)


def layer_window(config: Any, layer_id: int) -> int | None:
    """The window of a layer of the Qwen family, whose config lists the type of each."""
    window: int | None = config.sliding_window
    return window if config.layer_types[layer_id] == "sliding_attention" else None


class FlashQwen2Attention(FlashLlamaAttention):
    def qkv_bias(self, config: Any) -> bool:  # noqa: ARG002
        return True

    def o_bias(self, config: Any) -> bool:  # noqa: ARG002
        return False

    def window(self, config: Any, layer_id: int) -> int | None:
        return layer_window(config, layer_id)


class FlashQwen2Layer(FlashLlamaLayer):
    attention_class = FlashQwen2Attention


class FlashQwen2ForCausalLM(FlashLlamaForCausalLM):
    layer_class = FlashQwen2Layer
