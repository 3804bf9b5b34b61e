"""Granite 3: Llama with multipliers on embeddings, attention scores, residual branches and logits."""

from typing import Any

import torch

from lorax_server.kernels import CosSin
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.logits import LogitTransform
from lorax_server.models.custom_modeling.architecture import Architecture, read_biases
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM, FlashLlamaLayer
from lorax_server.weights import Weights


class GraniteLayer(FlashLlamaLayer):
    def __init__(self, layer_id: int, prefix: str, config: Any, weights: Weights, arch: Architecture) -> None:
        super().__init__(layer_id, prefix, config, weights, arch)
        self.residual_multiplier = float(config.residual_multiplier)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        x = self.self_attn(x, rope, ctx) * self.residual_multiplier
        x, residual = self.post_attention_layernorm(x, residual, ctx.adapter_data)
        return self.mlp(x, ctx) * self.residual_multiplier, residual


class FlashGraniteForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        return Architecture(
            biases=read_biases(config),
            layer_class=GraniteLayer,
            scale=float(config.attention_multiplier),
            embedding_multiplier=float(config.embedding_multiplier),
            logit_transform=LogitTransform(1 / config.logits_scaling),
        )
