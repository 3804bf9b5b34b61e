"""SmolLM3: Llama in which some layers do not rotate, and may look back over a window."""

from typing import Any

from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)
from lorax_server.models.custom_modeling.flash_qwen2_modeling import layer_window


class SmolLM3Attention(FlashLlamaAttention):
    def window(self, config: Any, layer_id: int) -> int | None:
        return layer_window(config, layer_id)


class SmolLM3Layer(FlashLlamaLayer):
    attention_class = SmolLM3Attention

    @staticmethod
    def rope_kind(config: Any, layer_id: int) -> str | None:
        return "all" if config.no_rope_layers[layer_id] else None


class SmolLM3ForCausalLM(FlashLlamaForCausalLM):
    layer_class = SmolLM3Layer
