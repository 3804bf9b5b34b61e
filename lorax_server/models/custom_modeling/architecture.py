"""Describe how an architecture differs from Llama."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lorax_server.kernels import Activation, RouterSpec
from lorax_server.layers.activation import get_activation
from lorax_server.layers.logits import LogitTransform
from lorax_server.layers.moe import ExpertLoader
from lorax_server.layers.norm import RMSNorm
from lorax_server.models.custom_modeling.paged import head_size
from lorax_server.weights import Weights


class BiasFlags(NamedTuple):
    """Flags for the linear layers that have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


class ModuleNames(NamedTuple):
    """A model's module names, which are the same in checkpoints and in transformers."""

    model: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    input_norm: str = "input_layernorm"
    second_norm: str | None = "post_attention_layernorm"  # norm before the MLP; None: `input_norm` is shared
    added_norms: tuple[str, str] | None = None  # norms on the outputs of attention and MLP
    final_norm: str | None = "norm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # inside `attention`; one name: a fused matrix
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # the last name is the output projection


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Describes the mixture-of-experts layers of an architecture."""

    num_experts: int
    top_k: int  # experts per token
    inner_size: int  # of each expert
    size_field: str = "moe_intermediate_size"  # the config field with the inner size
    router_spec: RouterSpec
    is_sparse: Sequence[bool] | None = None  # for each layer, whether it has experts instead of an MLP; None: all do
    module: str = "mlp"
    router: str = "gate"
    router_bias: str | None = None  # a tensor in the router that is added to the scores in float32
    has_router_bias: bool = False  # the router is a linear layer with a bias
    load: ExpertLoader | None = None  # see `Experts`
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # per-expert names of gate, up and down
    shared: str | None = None  # MLP that runs for every token
    shared_size: int = 0
    shared_gate: str | None = None  # a matrix whose sigmoid scales the output of the shared MLP


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Describes a model architecture by its differences from Llama. The defaults describe Llama without biases."""

    names: ModuleNames = field(default_factory=ModuleNames)
    biases: BiasFlags = field(default_factory=BiasFlags)
    # Submodule classes. None selects Llama's class.
    attention_class: Callable[..., Any] | None = None
    mlp_class: Callable[..., Any] | None = None
    layer_class: Callable[..., Any] | None = None
    model_class: Callable[..., Any] | None = None

    # A function `(name, weights, size)` that loads a norm. None selects RMSNorm with the config's `rms_norm_eps`.
    norm: Callable[[str, Weights, int], nn.Module] | None = None
    is_parallel: bool = False  # attention and MLP read the same residual, each with a separate norm
    fan_in_fan_out: bool = False  # matrices are stored as [in, out]

    # Attention
    num_kv_heads: int | None = None  # None: the config's `num_key_value_heads`
    kv_head_dim: int | None = None  # size of a cached vector; None: the head size
    shares_kv: bool = False  # the values are the keys, so the cache stores one vector per token and KV head
    grouped_qkv: bool = False  # the fused QKV matrix is stored group by group: queries, key, value
    scale: float | None = None  # multiplier for attention scores; None: head_dim**-0.5
    soft_cap: float | None = None  # soft cap on attention scores
    windows: Sequence[int | None] | None = None  # tokens including the current one, per layer; None: no limit
    slopes: torch.Tensor | None = None  # ALiBi slopes for all heads

    # RoPE
    uses_rope: bool = True
    interleaved: bool = False  # RoPE pairs are adjacent dimensions, instead of half a head apart
    partial_rotary: bool = False  # `partial_rotary_factor` is supported
    rotary_dim: int | None = None  # head dimensions that `partial_rotary_factor` applies to; None: the whole head
    # For each layer, the layer type that selects the RoPE settings in the config, or None for a layer without RoPE.
    rope_kinds: Sequence[str | None] | None = None

    # MLP
    inner_size: int | None = None  # None: the config's `intermediate_size`
    activation: Activation | None = None  # None: the config's `hidden_act`

    mixture: Mixture | None = None  # replaces the MLP in some or all layers

    # Embedding and head
    embedding_size: int | None = None  # None: the hidden size
    embedding_multiplier: float | None = None
    logit_transform: LogitTransform | None = None  # scale or soft cap on logits
    head_bias: bool = False

    def get_num_kv_heads(self, config: Any) -> int:
        """Return the total number of key and value heads over all ranks."""
        return int(self.num_kv_heads or config.num_key_value_heads)

    def get_kv_head_dim(self, config: Any) -> int:
        """Return the size of the vectors in the KV cache."""
        return self.kv_head_dim or head_dim(config)

    def get_rotary_dim(self, config: Any) -> int:
        return self.rotary_dim or head_dim(config)

    def get_inner_size(self, config: Any) -> int:
        return int(self.inner_size or config.intermediate_size)

    def find_activation(self, config: Any) -> Activation:
        return self.activation or get_activation(config.hidden_act, "hidden_act")

    def load_norm(self, prefix: str, name: str, config: Any, weights: Weights) -> nn.Module:
        load = self.norm or partial(RMSNorm, eps=config.rms_norm_eps)
        return load(f"{prefix}.{name}", weights, config.hidden_size)


def read_biases(config: Any) -> BiasFlags:
    attention, mlp = (bool(getattr(config, field, False)) for field in ("attention_bias", "mlp_bias"))
    return BiasFlags(attention, attention, mlp)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or head_size(config.hidden_size, config.num_attention_heads)
