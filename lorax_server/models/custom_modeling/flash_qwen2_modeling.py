"""Qwen2: Llama with a bias on query, key and value, and a window on some layers if asked for."""

from typing import Any

from lorax_server.errors import ConfigError
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)


def layer_window(config: Any, layer_id: int) -> int | None:
    """Return the window of a layer of the Qwen family, whose config lists the type of each."""
    kind, window = config.layer_types[layer_id], config.sliding_window
    if kind == "full_attention":
        return None
    if kind != "sliding_attention" or window is None:
        raise ConfigError(f"config field layer_types names {kind!r}, with sliding_window = {window}")
    return int(window)


class FlashQwen2Attention(FlashLlamaAttention):
    def window(self, config: Any, layer_id: int) -> int | None:
        return layer_window(config, layer_id)


class FlashQwen2Layer(FlashLlamaLayer):
    attention_class = FlashQwen2Attention

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases(qkv=True)


class FlashQwen2ForCausalLM(FlashLlamaForCausalLM):
    layer_class = FlashQwen2Layer
