"""Nemotron and Arcee: Llama without a gate; Nemotron has layer norms less one, and rotates a part of each head."""

from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
    PlainMLP,
)


class NemotronMLP(PlainMLP):
    first, second = "up_proj", "down_proj"


class NemotronLayer(FlashLlamaLayer):
    mlp_class = NemotronMLP
    partial_rotary = True
    layer_norms = LayerNorms("norm_eps", offset=1.0)


class NemotronForCausalLM(FlashLlamaForCausalLM):
    layer_class = NemotronLayer


class ArceeLayer(FlashLlamaLayer):
    mlp_class = NemotronMLP


class ArceeForCausalLM(FlashLlamaForCausalLM):
    layer_class = ArceeLayer
