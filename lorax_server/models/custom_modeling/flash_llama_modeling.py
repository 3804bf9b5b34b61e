"""Llama, the base of all architectures with its dataflow."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lorax_server.distributed import shard_evenly, shard_kv_heads, shard_units
from lorax_server.errors import ConfigError
from lorax_server.kernels import CosSin
from lorax_server.layers.activation import get_activation
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import RMSNorm as LlamaRMSNorm
from lorax_server.layers.rotary import load_rotary
from lorax_server.models.custom_modeling.paged import (
    PagedCausalLM,
    head_size,
    load_attention_spec,
    load_embedding,
    load_head,
)
from lorax_server.weights import Weights


def __getattr__(name: str) -> Any:
    """Return `LlamaConfig`, which this module promises, when someone asks for it: to import it takes seconds."""
    if name != "LlamaConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import LlamaConfig  # noqa: PLC0415

    return LlamaConfig


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or head_size(config.hidden_size, config.num_attention_heads)


class Biases(NamedTuple):
    """The matrices of a layer that have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


class FlashLlamaAttention(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.head_dim = head_dim(config)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        if num_heads % num_kv_heads != 0:
            raise ConfigError(f"{num_heads} attention heads cannot share num_key_value_heads = {num_kv_heads}")
        group = weights.process_group
        heads = shard_units(group, [(num_heads, self.head_dim)], "num_attention_heads")
        kv_heads = shard_kv_heads(group, num_kv_heads, self.head_dim)
        self.num_heads, self.num_kv_heads = heads.size // self.head_dim, kv_heads.size // self.head_dim
        self.qkv_proj = TensorParallelMultiAdapterLinear(
            weights,
            [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"],
            config.hidden_size,
            [heads, kv_heads, kv_heads],
            bias=biases.qkv,
        )
        self.o_proj = TensorParallelAdapterRowLinear(
            weights, f"{prefix}.o_proj", heads, config.hidden_size, bias=biases.output
        )
        window = self.window(config, layer_id)
        self.spec = load_attention_spec(weights, config, prefix, self.head_dim**-0.5, window)

    def window(self, config: Any, layer_id: int) -> int | None:  # noqa: ARG002 - for subclasses
        """Return the number of tokens that a layer looks back over, itself included; None for all."""
        return None

    def normalize_heads(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalise queries and keys, side by side as `[tokens, heads, head_dim]`, before they are rotated."""
        return qk

    def forward(self, x: torch.Tensor, rope: CosSin, ctx: PagedContext) -> torch.Tensor:
        heads = self.qkv_proj(x, ctx.adapter_data).view(x.shape[0], -1, self.head_dim)
        qk = self.normalize_heads(heads[:, : self.num_heads + self.num_kv_heads])
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, -self.num_kv_heads :]
        out: torch.Tensor = self.o_proj(ctx.attend(self.layer_id, q, k, v, self.spec, rope), ctx.adapter_data)
        return out


class LlamaMLP(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, bias: bool) -> None:
        super().__init__()
        shard = shard_evenly(weights.process_group, config.intermediate_size, "intermediate_size")
        self.gate_up_proj = TensorParallelMultiAdapterLinear(
            weights, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], config.hidden_size, [shard, shard], bias=bias
        )
        self.down_proj = TensorParallelAdapterRowLinear(
            weights, f"{prefix}.down_proj", shard, config.hidden_size, bias=bias
        )
        self.activation = get_activation(config.hidden_act, "hidden_act")

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        gated = self.gate_up_proj.gated(x, self.activation, ctx.adapter_data)
        out: torch.Tensor = self.down_proj(gated, ctx.adapter_data)
        return out


class FlashLlamaLayer(nn.Module):
    attention_class = FlashLlamaAttention

    def __init__(self, layer_id: int, prefix: str, config: Any, weights: Weights) -> None:
        super().__init__()
        biases = self.biases(config)
        self.self_attn = self.attention_class(f"{prefix}.self_attn", config, weights, layer_id, biases)
        self.mlp = LlamaMLP(f"{prefix}.mlp", config, weights, biases.mlp)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(f"{prefix}.input_layernorm", weights, size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(f"{prefix}.post_attention_layernorm", weights, size, eps)

    def biases(self, config: Any) -> Biases:
        attention, mlp = (bool(getattr(config, field, False)) for field in ("attention_bias", "mlp_bias"))
        return Biases(attention, attention, mlp)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        x = self.self_attn(x, rope, ctx)
        x, residual = self.post_attention_layernorm(x, residual, ctx.adapter_data)
        return self.mlp(x, ctx), residual


class FlashLlamaModel(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, create_layer_fn: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rotary = load_rotary(config, head_dim(config), weights.device)
        head_name = f"{prefix.removesuffix('model')}lm_head"
        self.embed_tokens = load_embedding(weights, config, f"{prefix}.embed_tokens", head_name, config.hidden_size)
        self.layers = nn.ModuleList(
            create_layer_fn(layer_id, prefix=f"{prefix}.layers.{layer_id}", config=config, weights=weights)
            for layer_id in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(f"{prefix}.norm", weights, config.hidden_size, config.rms_norm_eps)

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(input_ids, ctx.adapter_data)
        return x

    def run_layers(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        residual, rope = None, self.rotary(ctx)
        for layer in self.layers:
            x, residual = layer(x, residual, rope, ctx)
        normed: torch.Tensor = self.norm(x, residual, ctx.adapter_data)[0]
        return normed


class FlashLlamaForCausalLM(PagedCausalLM):
    layer_class: type[FlashLlamaLayer] = FlashLlamaLayer

    def __init__(
        self, prefix: str, config: Any, weights: Weights, create_layer_fn: Callable[..., nn.Module] | None = None
    ) -> None:
        """`create_layer_fn(layer_id, prefix=, config=, weights=)` makes each layer; None for this class's own."""
        kv_heads = shard_kv_heads(weights.process_group, config.num_key_value_heads, 1)
        super().__init__(config, weights, (kv_heads.size, head_dim(config)))
        prefix = f"{prefix}." if prefix else ""
        self.model = FlashLlamaModel(f"{prefix}model", config, weights, create_layer_fn or self.layer_class)
        self.lm_head = load_head(weights, config, f"{prefix}lm_head", self.model.embed_tokens)
