"""OPT and Galactica: learned positions two rows into their table, norms before or after each sub-block."""

from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import shard_evenly, shard_units, whole
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import Context
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import LayerNorm
from lorax_server.models.custom_modeling.padded import OutputOptions, PaddedCausalLM, PaddedInputs, PaddedOutput
from lorax_server.models.custom_modeling.paged import (
    LEAD,
    PagedCausalLM,
    check_positions,
    head_size,
    load_attention_spec,
    load_embedding,
    load_head,
    local_heads,
)
from lorax_server.weights import Weights

POSITION_OFFSET = 2


class OPTPreTrainedModel(PaddedCausalLM):
    """A name of the contract, which stands for no class of transformers here."""


class OPTLearnedPositionalEmbedding(nn.Module):
    """Positions count the tokens that are not padding; padding has position -1."""

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


class OPTAttention(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        size, bias = config.hidden_size, config.enable_bias
        self.head_dim = head_size(size, config.num_attention_heads)
        heads = shard_units(weights.process_group, [(config.num_attention_heads, self.head_dim)], "num_attention_heads")
        self.qkv_proj = TensorParallelMultiAdapterLinear(
            weights, [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"], size, [heads] * 3, bias=bias
        )
        self.out_proj = TensorParallelAdapterRowLinear(weights, f"{prefix}.out_proj", heads, size, bias=bias)
        self.spec = load_attention_spec(weights, config, prefix, self.head_dim**-0.5)

    def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        q, k, v = self.qkv_proj(x, ctx.adapter_data).unflatten(1, (3, -1, self.head_dim)).unbind(1)
        out: torch.Tensor = self.out_proj(ctx.attend(self.layer_id, q, k, v, self.spec), ctx.adapter_data)
        return out


class OPTDecoderLayer(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int) -> None:
        super().__init__()
        size, bias, affine = config.hidden_size, config.enable_bias, config.layer_norm_elementwise_affine
        self.do_layer_norm_before = config.do_layer_norm_before
        self.self_attn = OPTAttention(f"{prefix}.self_attn", config, weights, layer_id)
        self.self_attn_layer_norm = LayerNorm(f"{prefix}.self_attn_layer_norm", weights, size, affine=affine)
        self.final_layer_norm = LayerNorm(f"{prefix}.final_layer_norm", weights, size, affine=affine)
        shard = shard_evenly(weights.process_group, config.ffn_dim, "ffn_dim")
        self.fc1 = TensorParallelMultiAdapterLinear(weights, [f"{prefix}.fc1"], size, [shard], bias=bias)
        self.fc2 = TensorParallelAdapterRowLinear(weights, f"{prefix}.fc2", shard, size, bias=bias, scales_input=True)
        self.activation = get_activation(config.activation_function, "activation_function")

    def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        if self.do_layer_norm_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x, ctx.adapter_data), ctx)
            return x + self.feed_forward(self.final_layer_norm(x, ctx.adapter_data), ctx)
        x = self.self_attn_layer_norm(x + self.self_attn(x, ctx), ctx.adapter_data)
        out: torch.Tensor = self.final_layer_norm(x + self.feed_forward(x, ctx), ctx.adapter_data)
        return out

    def feed_forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        inner = self.activation(self.fc1(x, ctx.adapter_data))
        out: torch.Tensor = self.fc2(inner, ctx.adapter_data)
        return out


class OPTDecoder(nn.Module):
    lead = LEAD

    def __init__(self, config: Any, weights: Weights, prefix: str = "model.decoder") -> None:
        super().__init__()
        size, outer = config.hidden_size, config.word_embed_proj_dim
        head_name = f"{prefix.removesuffix('model.decoder')}lm_head"
        self.embed_tokens = load_embedding(weights, config, f"{prefix}.embed_tokens", head_name, outer)
        self.embed_positions = OPTLearnedPositionalEmbedding(
            weights, f"{prefix}.embed_positions", config.max_position_embeddings, size
        )
        self.project_in = self.project_out = None
        if outer != size:
            self.project_in = _load_projection(weights, f"{prefix}.project_in", outer, size)
            self.project_out = _load_projection(weights, f"{prefix}.project_out", size, outer)
        self.layers = nn.ModuleList(
            OPTDecoderLayer(f"{prefix}.layers.{layer_id}", config, weights, layer_id)
            for layer_id in range(config.num_hidden_layers)
        )
        self.final_layer_norm = None
        if config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False):
            affine = config.layer_norm_elementwise_affine
            self.final_layer_norm = LayerNorm(f"{prefix}.final_layer_norm", weights, size, affine=affine)

    def forward(
        self, input_ids: torch.Tensor | None, ctx: Context, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.run_layers(self.embed(input_ids, ctx, inputs_embeds), ctx)

    def embed(
        self, input_ids: torch.Tensor | None, ctx: Context, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_positions(ctx, self.embed_positions.num_positions)
        x: torch.Tensor = self.embed_tokens(input_ids, ctx.adapter_data) if inputs_embeds is None else inputs_embeds
        if self.project_in is not None:
            x = self.project_in(x, ctx.adapter_data)
        return x + self.embed_positions.embed(ctx.position_ids)

    def run_layers(self, x: torch.Tensor, ctx: Context, count: int | None = None) -> torch.Tensor:
        for layer in islice(self.layers, count):
            ctx.record(x)
            x = layer(x, ctx)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x, ctx.adapter_data)
        if self.project_out is not None:
            x = self.project_out(x, ctx.adapter_data)
        ctx.record(x)
        return x


class OPTModel(nn.Module):
    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, weights)

    def forward(
        self, input_ids: torch.Tensor | None, ctx: Context, inputs_embeds: torch.Tensor | None = None
    ) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.decoder(input_ids, ctx, inputs_embeds))


class OPTForCausalLM(OPTPreTrainedModel):
    """OPT in padded batches."""

    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__(config, weights)
        self.model = OPTModel(config, weights)
        self.lm_head = load_head(weights, config, "lm_head", self.model.decoder.embed_tokens)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        adapter_data: AdapterBatchData | None = None,
    ) -> PaddedOutput:
        inputs = PaddedInputs(input_ids, inputs_embeds, attention_mask, None, head_mask, past_key_values, adapter_data)
        if attention_mask is not None:
            inputs = inputs._replace(position_ids=positions_from_mask(attention_mask, inputs.num_cached))
        options = OutputOptions(labels, use_cache, output_attentions, output_hidden_states, return_dict)
        return self.run(self.model.decoder, self.lm_head, inputs, options)


class FlashOPTForCausalLM(PagedCausalLM):
    """OPT as it is served: the same layers, paged."""

    def __init__(self, prefix: str, config: Any, weights: Weights) -> None:
        num_heads = config.num_attention_heads
        kv_shape = (local_heads(weights, num_heads).size, head_size(config.hidden_size, num_heads))
        super().__init__(config, weights, kv_shape)
        prefix = f"{prefix}." if prefix else ""
        self.model = OPTDecoder(config, weights, f"{prefix}model.decoder")
        self.lm_head = load_head(weights, config, f"{prefix}lm_head", self.model.embed_tokens)


def _load_projection(
    weights: Weights, name: str, in_features: int, out_features: int
) -> TensorParallelMultiAdapterLinear:
    """Load a projection that is not cut: each rank has all of it."""
    return TensorParallelMultiAdapterLinear(weights, [name], in_features, [whole(out_features)], bias=False)
