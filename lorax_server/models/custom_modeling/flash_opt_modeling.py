"""OPT and Galactica: learned positions with an offset of 2, norms before or after attention and MLP."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.distributed import make_full_shard
from lorax_server.kernels import CosSin
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.linear import TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, BiasFlags, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    FlashLlamaModel,
)
from lorax_server.models.custom_modeling.paged import check_positions
from lorax_server.weights import Weights

POSITION_OFFSET = 2


class OPTLearnedPositionalEmbedding(nn.Module):
    """Learned position embeddings. Positions are computed from the attention mask; padding has position -1."""

    def __init__(self, weights: Weights, prefix: str, num_positions: int, size: int) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.weight = weights.get_tensor(f"{prefix}.weight", (num_positions + POSITION_OFFSET, size))

    def forward(self, attention_mask: torch.Tensor, past_key_values_length: int = 0) -> torch.Tensor:
        return self.embed(positions_from_mask(attention_mask, past_key_values_length))

    def embed(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + POSITION_OFFSET, self.weight)


def positions_from_mask(attention_mask: torch.Tensor, num_cached: int) -> torch.Tensor:
    mask = attention_mask.long()
    return (mask.cumsum(1) * mask - 1)[:, num_cached:]


class OPTDecoderLayer(FlashLlamaLayer):
    """A layer with norms before attention and MLP, or after each residual connection."""

    def __init__(self, layer_id: int, prefix: str, config: Any, weights: Weights, arch: Architecture) -> None:
        super().__init__(layer_id, prefix, config, weights, arch)
        self.do_layer_norm_before = config.do_layer_norm_before

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.do_layer_norm_before:
            return super().forward(x, residual, rope, ctx)
        x, _ = self.input_layernorm(self.self_attn(x, rope, ctx), x, ctx.adapter_data)
        x, _ = self.post_attention_layernorm(self.mlp(x, ctx), x, ctx.adapter_data)
        return x, None


class OPTDecoder(FlashLlamaModel):
    def __init__(self, prefix: str, config: Any, weights: Weights, *args: Any) -> None:
        super().__init__(prefix, config, weights, *args)
        size, outer = config.hidden_size, config.word_embed_proj_dim
        self.embed_positions = OPTLearnedPositionalEmbedding(
            weights, f"{prefix}.embed_positions", config.max_position_embeddings, size
        )
        self.project_in = self.project_out = None
        if outer != size:
            self.project_in = _load_projection(weights, f"{prefix}.project_in", outer, size)
            self.project_out = _load_projection(weights, f"{prefix}.project_out", size, outer)

    def transform_embeddings(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        check_positions(ctx, self.embed_positions.num_positions)
        if self.project_in is not None:
            x = self.project_in(x, ctx.adapter_data)
        return x + self.embed_positions.embed(ctx.position_ids)

    def run_layers(self, x: torch.Tensor, ctx: PagedContext, count: int | None = None) -> torch.Tensor:
        x = super().run_layers(x, ctx, count)
        return x if self.project_out is None else self.project_out(x, ctx.adapter_data)


class FlashOPTForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        has_final_norm = config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False)
        names = ModuleNames(
            model="model.decoder",
            input_norm="self_attn_layer_norm",
            second_norm="final_layer_norm",
            final_norm="final_layer_norm" if has_final_norm else None,
            output="out_proj",
            mlp=("fc1", "fc2"),
        )
        bias = config.enable_bias
        return Architecture(
            names=names,
            biases=BiasFlags(qkv=bias, output=bias, mlp=bias),
            mlp_class=PlainMLP,
            layer_class=OPTDecoderLayer,
            model_class=OPTDecoder,
            norm=partial(ResidualLayerNorm, affine=config.layer_norm_elementwise_affine),
            num_kv_heads=config.num_attention_heads,
            uses_rope=False,
            inner_size=config.ffn_dim,
            activation=get_activation(config.activation_function, "activation_function"),
            embedding_size=config.word_embed_proj_dim,
        )


def _load_projection(
    weights: Weights, name: str, in_features: int, out_features: int
) -> TensorParallelMultiAdapterLinear:
    """Load a linear projection that is replicated on every rank."""
    return TensorParallelMultiAdapterLinear(weights, [name], in_features, [make_full_shard(out_features)], bias=False)
