"""GPT-NeoX: rotary positions on part of each head, attention and feed-forward side by side."""

from itertools import islice
from typing import Any

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import shard_evenly, shard_units
from lorax_server.kernels import CosSin
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import Context
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import LayerNorm
from lorax_server.layers.rotary import RotaryEmbedding, load_rotary  # noqa: F401 - a name of the contract
from lorax_server.models.custom_modeling.padded import OutputOptions, PaddedCausalLM, PaddedInputs, PaddedOutput
from lorax_server.models.custom_modeling.paged import (
    LEAD,
    PagedCausalLM,
    head_size,
    load_attention_spec,
    load_embedding,
    load_head,
    local_heads,
)
from lorax_server.weights import Weights


class GPTNeoXPreTrainedModel(PaddedCausalLM):
    """A name of the contract, which stands for no class of transformers here."""


class GPTNeoXAttention(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        num_heads, size = config.num_attention_heads, config.hidden_size
        self.head_dim = head_size(size, num_heads)
        group, bias = weights.process_group, bool(getattr(config, "attention_bias", True))
        # Query, key and value of a head lie next to each other, so a cut between heads is one stretch.
        self.query_key_value = TensorParallelMultiAdapterLinear(
            weights,
            [f"{prefix}.query_key_value"],
            size,
            [shard_units(group, [(num_heads, 3 * self.head_dim)], "num_attention_heads")],
            bias=bias,
        )
        heads = shard_units(group, [(num_heads, self.head_dim)], "num_attention_heads")
        self.dense = TensorParallelAdapterRowLinear(weights, f"{prefix}.dense", heads, size, bias=bias)
        self.spec = load_attention_spec(weights, config, prefix, self.head_dim**-0.5)

    def forward(self, x: torch.Tensor, rope: CosSin, ctx: Context) -> torch.Tensor:
        q, k, v = self.query_key_value(x, ctx.adapter_data).unflatten(1, (-1, 3, self.head_dim)).unbind(2)
        out: torch.Tensor = self.dense(ctx.attend(self.layer_id, q, k, v, self.spec, rope), ctx.adapter_data)
        return out


class GPTNeoXMLP(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights) -> None:
        super().__init__()
        shard = shard_evenly(weights.process_group, config.intermediate_size, "intermediate_size")
        self.dense_h_to_4h = TensorParallelMultiAdapterLinear(
            weights, [f"{prefix}.dense_h_to_4h"], config.hidden_size, [shard], bias=True
        )
        self.dense_4h_to_h = TensorParallelAdapterRowLinear(
            weights, f"{prefix}.dense_4h_to_h", shard, config.hidden_size, bias=True, scales_input=True
        )
        self.activation = get_activation(config.hidden_act, "hidden_act")

    def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        inner = self.activation(self.dense_h_to_4h(x, ctx.adapter_data))
        out: torch.Tensor = self.dense_4h_to_h(inner, ctx.adapter_data)
        return out


class GPTNeoXLayer(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.use_parallel_residual = config.use_parallel_residual
        self.input_layernorm = LayerNorm(f"{prefix}.input_layernorm", weights, size, eps)
        self.post_attention_layernorm = LayerNorm(f"{prefix}.post_attention_layernorm", weights, size, eps)
        self.attention = GPTNeoXAttention(f"{prefix}.attention", config, weights, layer_id)
        self.mlp = GPTNeoXMLP(f"{prefix}.mlp", config, weights)

    def forward(self, x: torch.Tensor, rope: CosSin, ctx: Context) -> torch.Tensor:
        attended = x + self.attention(self.input_layernorm(x, ctx.adapter_data), rope, ctx)
        fed = x if self.use_parallel_residual else attended
        out: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(fed, ctx.adapter_data), ctx)
        return out


class GPTNeoXModel(nn.Module):
    lead = LEAD

    def __init__(self, config: Any, weights: Weights, prefix: str = "gpt_neox") -> None:
        super().__init__()
        size = config.hidden_size
        self.head_name = _find_head(weights, prefix.removesuffix("gpt_neox"))
        self.embed_in = load_embedding(weights, config, f"{prefix}.embed_in", self.head_name, size)
        self.layers = nn.ModuleList(
            GPTNeoXLayer(f"{prefix}.layers.{layer_id}", config, weights, layer_id)
            for layer_id in range(config.num_hidden_layers)
        )
        self.final_layer_norm = LayerNorm(f"{prefix}.final_layer_norm", weights, size, config.layer_norm_eps)
        self.rotary = load_rotary(config, head_size(size, config.num_attention_heads), weights.device, partial=True)

    def forward(
        self, input_ids: torch.Tensor | None, ctx: Context, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.run_layers(self.embed(input_ids, ctx, inputs_embeds), ctx)

    def embed(
        self, input_ids: torch.Tensor | None, ctx: Context, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        x: torch.Tensor = self.embed_in(input_ids, ctx.adapter_data) if inputs_embeds is None else inputs_embeds
        return x

    def run_layers(self, x: torch.Tensor, ctx: Context, count: int | None = None) -> torch.Tensor:
        rope = self.rotary(ctx)
        for layer in islice(self.layers, count):
            ctx.record(x)
            x = layer(x, rope, ctx)
        x = self.final_layer_norm(x, ctx.adapter_data)
        ctx.record(x)
        return x


class GPTNeoxForCausalLM(GPTNeoXPreTrainedModel):
    """GPT-NeoX in padded batches."""

    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__(config, weights)
        self.gpt_neox = GPTNeoXModel(config, weights)
        self.embed_out = load_head(weights, config, self.gpt_neox.head_name, self.gpt_neox.embed_in, "lm_head")

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        adapter_data: AdapterBatchData | None = None,
    ) -> PaddedOutput:
        inputs = PaddedInputs(
            input_ids, inputs_embeds, attention_mask, position_ids, head_mask, past_key_values, adapter_data
        )
        options = OutputOptions(labels, use_cache, output_attentions, output_hidden_states, return_dict)
        return self.run(self.gpt_neox, self.embed_out, inputs, options)


class FlashGPTNeoXForCausalLM(PagedCausalLM):
    """GPT-NeoX as it is served: the same layers, paged."""

    def __init__(self, prefix: str, config: Any, weights: Weights) -> None:
        num_heads = config.num_attention_heads
        kv_shape = (local_heads(weights, num_heads).size, head_size(config.hidden_size, num_heads))
        super().__init__(config, weights, kv_shape)
        prefix = f"{prefix}." if prefix else ""
        self.model = GPTNeoXModel(config, weights, f"{prefix}gpt_neox")
        self.lm_head = load_head(
            weights, config, self.model.head_name, self.model.embed_in, target_name=f"{prefix}lm_head"
        )


def _find_head(weights: Weights, prefix: str) -> str:
    """Find the head's name: `embed_out` in most checkpoints, `lm_head` in transformers and in others."""
    return f"{prefix}lm_head" if weights.has(f"{prefix}lm_head.weight") else f"{prefix}embed_out"
