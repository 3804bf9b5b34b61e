"""GPT-2: learned positions, one fused matrix for query, key and value, matrices stored input-major."""

from itertools import islice
from typing import Any

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import shard_evenly, shard_units
from lorax_server.errors import ConfigError
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import KVCache, PagedContext, Seqlen
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import LayerNorm
from lorax_server.models.custom_modeling.paged import (
    LEAD,
    PagedCausalLM,
    PagedOutput,
    check_positions,
    head_size,
    load_attention_spec,
    load_embedding,
    load_head,
    local_heads,
)
from lorax_server.weights import Weights


class FlashGPT2PreTrainedModel(PagedCausalLM):
    """A name of the contract, which stands for no class of transformers here."""


class FlashGPT2Attention(nn.Module):
    """Scores are float32 in every attention op, which is all that `reorder_and_upcast_attn` asks for."""

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int) -> None:
        super().__init__()
        if config.add_cross_attention:
            raise ConfigError("config field add_cross_attention = true is not supported: there is no encoder")
        self.layer_id = layer_id
        self.head_dim = head_size(config.hidden_size, config.num_attention_heads)
        heads = (config.num_attention_heads, self.head_dim)
        self.c_attn = TensorParallelMultiAdapterLinear(
            weights,
            [f"{prefix}.c_attn"],
            config.hidden_size,
            [shard_units(weights.process_group, [heads] * 3, "num_attention_heads")],
            bias=True,
            fan_in_fan_out=True,
        )
        self.c_proj = TensorParallelAdapterRowLinear(
            weights,
            f"{prefix}.c_proj",
            shard_units(weights.process_group, [heads], "num_attention_heads"),
            config.hidden_size,
            bias=True,
            fan_in_fan_out=True,
        )
        scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer_id + 1
        self.spec = load_attention_spec(weights, config, prefix, scale)

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        q, k, v = self.c_attn(x, ctx.adapter_data).unflatten(1, (3, -1, self.head_dim)).unbind(1)
        out: torch.Tensor = self.c_proj(ctx.attend(self.layer_id, q, k, v, self.spec), ctx.adapter_data)
        return out


class GPT2MLP(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.hidden_size
        shard = shard_evenly(weights.process_group, inner, "n_inner")
        self.c_fc = TensorParallelMultiAdapterLinear(
            weights, [f"{prefix}.c_fc"], config.hidden_size, [shard], bias=True, fan_in_fan_out=True
        )
        self.c_proj = TensorParallelAdapterRowLinear(
            weights,
            f"{prefix}.c_proj",
            shard,
            config.hidden_size,
            bias=True,
            fan_in_fan_out=True,
            scales_input=True,
        )
        self.activation = get_activation(config.activation_function, "activation_function")

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        inner = self.activation(self.c_fc(x, ctx.adapter_data))
        out: torch.Tensor = self.c_proj(inner, ctx.adapter_data)
        return out


class GPT2Block(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(f"{prefix}.ln_1", weights, size, eps)
        self.attn = FlashGPT2Attention(f"{prefix}.attn", config, weights, layer_id)
        self.ln_2 = LayerNorm(f"{prefix}.ln_2", weights, size, eps)
        self.mlp = GPT2MLP(f"{prefix}.mlp", config, weights)

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x, ctx.adapter_data), ctx)
        out: torch.Tensor = x + self.mlp(self.ln_2(x, ctx.adapter_data), ctx)
        return out


class FlashGPT2Model(nn.Module):
    lead = LEAD

    def __init__(self, prefix: str, config: Any, weights: Weights) -> None:
        super().__init__()
        size = config.hidden_size
        head_name = f"{prefix.removesuffix('transformer')}lm_head"
        self.wte = load_embedding(weights, config, f"{prefix}.wte", head_name, size)
        self.wpe = weights.get_tensor(f"{prefix}.wpe.weight", (config.n_positions, size))
        self.h = nn.ModuleList(
            GPT2Block(f"{prefix}.h.{layer_id}", config, weights, layer_id)
            for layer_id in range(config.num_hidden_layers)
        )
        self.ln_f = LayerNorm(f"{prefix}.ln_f", weights, size, config.layer_norm_epsilon)

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        check_positions(ctx, len(self.wpe))
        x: torch.Tensor = self.wte(input_ids, ctx.adapter_data) + self.wpe[ctx.position_ids]
        return x

    def run_layers(self, x: torch.Tensor, ctx: PagedContext, count: int | None = None) -> torch.Tensor:
        for block in islice(self.h, count):
            x = block(x, ctx)
        x = self.ln_f(x, ctx.adapter_data)
        return x


class FlashGPT2ForCausalLM(FlashGPT2PreTrainedModel):
    def __init__(self, prefix: str, config: Any, weights: Weights) -> None:
        num_heads = config.num_attention_heads
        kv_shape = (local_heads(weights, num_heads).size, head_size(config.hidden_size, num_heads))
        super().__init__(config, weights, kv_shape)
        prefix = f"{prefix}." if prefix else ""
        self.model = FlashGPT2Model(f"{prefix}transformer", config, weights)
        self.lm_head = load_head(weights, config, f"{prefix}lm_head", self.model.wte)

    def forward(  # type: ignore[override]  # the contract of GPT-2 has no cross_attention_states
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlen_prefill: torch.Tensor | None,
        kv_cache: KVCache,
        block_tables: torch.Tensor,
        slots: torch.Tensor,
        seqlen: Seqlen,
        max_s: int,
        adapter_data: AdapterBatchData | None,
        prefill_cache_indices: torch.Tensor | None = None,
        lm_head_indices: torch.Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> PagedOutput:
        return super().forward(
            input_ids,
            position_ids,
            cu_seqlen_prefill,
            kv_cache,
            block_tables,
            slots,
            seqlen,
            max_s,
            adapter_data,
            prefill_cache_indices,
            lm_head_indices,
            skip_lm_head=skip_lm_head,
        )
