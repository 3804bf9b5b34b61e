"""Falcon, of 7b, 40b and 11b: attention beside the feed-forward, with one norm for both or one for each."""

from typing import Any

import torch
from torch import nn

from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation, CosSin
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import PagedContext
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
    Names,
    PlainMLP,
)
from lorax_server.models.custom_modeling.fused.attention import GroupedAttention
from lorax_server.weights import Weights


class FalconAttention(GroupedAttention):
    @staticmethod
    def count_kv_heads(config: Any) -> int:
        if config.multi_query and not config.new_decoder_architecture:
            return 1
        return int(config.num_kv_heads or config.num_attention_heads)


class FalconMLP(PlainMLP):
    first, second = "dense_h_to_4h", "dense_4h_to_h"

    def inner_size(self, config: Any) -> int:
        return int(config.ffn_hidden_size or 4 * config.hidden_size)

    def load_activation(self, config: Any) -> Activation:
        return get_activation(config.activation, "activation")


class FalconLayer(FlashLlamaLayer):
    names = Names("transformer", "word_embeddings", "h", "self_attention", "mlp", "input_layernorm", "ln_f")
    attention_class = FalconAttention
    mlp_class = FalconMLP
    layer_norms = LayerNorms("layer_norm_epsilon")

    def runs_parallel(self, config: Any) -> bool:
        return bool(config.parallel_attn)

    def load_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        self.mlp_norm: nn.Module | None = None
        if not config.new_decoder_architecture or config.num_ln_in_parallel_attn == 1:
            return super().load_norms(prefix, config, weights)
        self.input_layernorm = self.make_norm(f"{prefix}.ln_attn", config, weights)
        self.mlp_norm = self.make_norm(f"{prefix}.ln_mlp", config, weights)

    def biases(self, config: Any) -> Biases:
        return Biases(*[bool(config.bias)] * 3)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mlp_norm is None:
            return super().forward(x, residual, rope, ctx)
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        fed, _ = self.mlp_norm(residual, None, ctx.adapter_data)
        return self.self_attn(x, rope, ctx) + self.mlp(fed, ctx), residual


class FalconForCausalLM(FlashLlamaForCausalLM):
    layer_class = FalconLayer

    def check(self, config: Any) -> None:
        if config.alibi:
            raise ConfigError("config field alibi = true is not supported: transformers rounds Falcon's to bfloat16")
        if config.new_decoder_architecture and not config.parallel_attn:
            raise ConfigError("config field parallel_attn = false is not supported with new_decoder_architecture")
