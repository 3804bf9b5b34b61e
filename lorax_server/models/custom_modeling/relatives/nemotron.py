"""Nemotron: Llama with layer norms that are stored less one, a part of each head rotated, and no gate."""

from typing import Any

from torch import nn

from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM, FlashLlamaLayer, PlainMLP
from lorax_server.weights import Weights


class NemotronMLP(PlainMLP):
    first, second = "up_proj", "down_proj"


class NemotronLayer(FlashLlamaLayer):
    mlp_class = NemotronMLP
    partial_rotary = True

    @staticmethod
    def make_norm(name: str, config: Any, weights: Weights) -> nn.Module:
        return ResidualLayerNorm(name, weights, config.hidden_size, config.norm_eps, offset=1.0)


class NemotronForCausalLM(FlashLlamaForCausalLM):
    layer_class = NemotronLayer
