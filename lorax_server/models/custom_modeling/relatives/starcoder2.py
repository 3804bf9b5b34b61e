"""StarCoder 2: Llama with layer norms, a bias on all matrices, a window, and no gate."""

from typing import Any

from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
    PlainMLP,
)
from lorax_server.models.custom_modeling.flash_mistral_modeling import FlashMistralAttention


class StarCoder2MLP(PlainMLP):
    first, second = "c_fc", "c_proj"


class StarCoder2Layer(FlashLlamaLayer):
    attention_class = FlashMistralAttention
    mlp_class = StarCoder2MLP
    layer_norms = LayerNorms("norm_epsilon")

    def biases(self, config: Any) -> Biases:
        return Biases(*[bool(config.use_bias)] * 3)


class StarCoder2ForCausalLM(FlashLlamaForCausalLM):
    layer_class = StarCoder2Layer
