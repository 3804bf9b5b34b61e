"""GLM and GLM-4: neighbours in a part of each head turn together, gate and up are one matrix; GLM-4 has norms on both
sides of attention and feed-forward."""

from typing import Any

from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)
from lorax_server.models.custom_modeling.relatives.gemma import BothNormsLayer
from lorax_server.models.custom_modeling.relatives.phi3 import Phi3MLP


class GLMAttention(FlashLlamaAttention):
    interleaved = True


class GLMLayer(FlashLlamaLayer):
    attention_class = GLMAttention
    mlp_class = Phi3MLP
    partial_rotary = True

    def biases(self, config: Any) -> Biases:
        return Biases(qkv=bool(config.attention_bias))


class GLMForCausalLM(FlashLlamaForCausalLM):
    layer_class: type[FlashLlamaLayer] = GLMLayer


class GLM4Layer(BothNormsLayer, GLMLayer):
    added_norms = "post_self_attn_layernorm", "post_mlp_layernorm"


class GLM4ForCausalLM(GLMForCausalLM):
    layer_class = GLM4Layer
