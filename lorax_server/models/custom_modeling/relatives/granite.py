"""Granite 3: Llama with a factor on embeddings, scores, branches and logits."""

from typing import Any

import torch

from lorax_server.kernels import CosSin
from lorax_server.layers.adapt import LogitRule
from lorax_server.layers.attention import PagedContext
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
)
from lorax_server.weights import Weights


class GraniteAttention(FlashLlamaAttention):
    def scale(self, config: Any) -> float:
        return float(config.attention_multiplier)


class GraniteLayer(FlashLlamaLayer):
    attention_class = GraniteAttention

    def __init__(self, layer_id: int, prefix: str, config: Any, weights: Weights) -> None:
        super().__init__(layer_id, prefix, config, weights)
        self.residual_multiplier = float(config.residual_multiplier)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        x = self.self_attn(x, rope, ctx) * self.residual_multiplier
        x, residual = self.post_attention_layernorm(x, residual, ctx.adapter_data)
        return self.mlp(x, ctx) * self.residual_multiplier, residual


class GraniteForCausalLM(FlashLlamaForCausalLM):
    layer_class = GraniteLayer

    def embedding_multiplier(self, config: Any) -> float | None:
        return float(config.embedding_multiplier)

    def logit_rule(self, config: Any) -> LogitRule | None:
        return LogitRule(1 / config.logits_scaling)
