"""Llama, the base of all architectures with its dataflow: `docs/adding-a-model.md` lists what they override."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from lorax_server.adapters.target import AdapterTarget
from lorax_server.distributed import Shard, shard_evenly, shard_kv_heads, shard_units
from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation, CosSin
from lorax_server.layers.activation import get_activation
from lorax_server.layers.adapt import LogitRule
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.layers.norm import RMSNorm as LlamaRMSNorm
from lorax_server.layers.rotary import count_turned, load_rotary
from lorax_server.models.custom_modeling.paged import (
    LEAD,
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


class Names(NamedTuple):
    """The modules of an architecture, as transformers calls them."""

    model: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    input_norm: str = "input_layernorm"
    norm: str = "norm"  # after the last layer
    second_norm: str = "post_attention_layernorm"


class LayerNorms(NamedTuple):
    """The layer norms of an architecture that has those instead of Llama's norms."""

    epsilon: str  # the config's field
    bias: bool = True
    offset: float = 0.0  # is added to the weights that are stored


class FlashLlamaAttention(nn.Module):
    output_name = "o_proj"
    targets: tuple[AdapterTarget, ...] = ()  # norms of heads, of queries and then of keys
    interleaved = False  # whether neighbours in a head turn together, instead of those that are half of it apart

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.head_dim = head_dim(config)
        num_heads, num_kv_heads = config.num_attention_heads, self.count_kv_heads(config)
        if num_heads % num_kv_heads != 0:
            raise ConfigError(f"{num_heads} attention heads cannot share num_key_value_heads = {num_kv_heads}")
        group = weights.process_group
        heads = shard_units(group, [(num_heads, self.head_dim)], "num_attention_heads")
        kv_heads = shard_kv_heads(group, num_kv_heads, self.head_dim)
        self.num_heads, self.num_kv_heads = heads.size // self.head_dim, kv_heads.size // self.head_dim
        self.qkv_proj = self.load_qkv(prefix, config, weights, (heads, kv_heads), biases.qkv)
        self.o_proj = TensorParallelAdapterRowLinear(
            weights, f"{prefix}.{self.output_name}", heads, config.hidden_size, bias=biases.output
        )
        window = self.window(config, layer_id)
        spec = load_attention_spec(weights, config, prefix, self.scale(config), window)
        self.spec = replace(spec, soft_cap=self.soft_cap(config))

    def find_heads(self, config: Any, weights: Weights) -> tuple[range, range]:
        """Return the heads of queries, and of keys and values, that this rank holds."""
        group = weights.process_group
        shards = (
            shard_units(group, [(config.num_attention_heads, 1)], "num_attention_heads"),
            shard_kv_heads(group, self.count_kv_heads(config), 1),
        )
        heads, kv_heads = (range(*shard.ranges[0]) for shard in shards)
        return heads, kv_heads

    @staticmethod
    def count_kv_heads(config: Any) -> int:
        """Return the number of key and value heads, all ranks together."""
        return int(config.num_key_value_heads)

    def load_qkv(
        self, prefix: str, config: Any, weights: Weights, shards: tuple[Shard, Shard], bias: bool
    ) -> TensorParallelMultiAdapterLinear:
        """Load the matrix onto queries, keys and values; `shards` are those of queries, and of keys or values."""
        heads, kv_heads = shards
        names, turned = [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"], [heads, kv_heads]
        if self.interleaved:
            pairs = self.head_dim, count_turned(config, self.turned_dims(config))
            turned = [replace(shard, pairs=pairs) for shard in turned]
        return TensorParallelMultiAdapterLinear(weights, names, config.hidden_size, [*turned, kv_heads], bias=bias)

    @staticmethod
    def turned_dims(config: Any) -> int:
        """Return the number of a head's dimensions that are rotated, unless the config's rope settings say less."""
        return head_dim(config)

    def scale(self, config: Any) -> float:  # noqa: ARG002 - for subclasses
        """Return the factor of scores."""
        return float(self.head_dim**-0.5)

    def soft_cap(self, config: Any) -> float | None:  # noqa: ARG002 - for subclasses
        """Return the range that scores are squeezed into; None for no limit."""
        return None

    def window(self, config: Any, layer_id: int) -> int | None:  # noqa: ARG002 - for subclasses
        """Return the number of tokens that a layer looks back over, itself included; None for all."""
        return None

    def normalize_heads(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalise queries and keys, side by side as `[tokens, heads, head_dim]`, before they are rotated."""
        return qk

    def forward(self, x: torch.Tensor, rope: CosSin | None, ctx: PagedContext) -> torch.Tensor:
        heads = self.qkv_proj(x, ctx.adapter_data).view(x.shape[0], -1, self.head_dim)
        qk = self.normalize_heads(heads[:, : self.num_heads + self.num_kv_heads])
        if self.targets and ctx.adapter_data is not None:
            self.o_proj.ops.scale_and_shift(qk.flatten(1), ctx.adapter_data.lora, ctx.adapter_data.find(self.targets))
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, -self.num_kv_heads :]
        out: torch.Tensor = self.o_proj(ctx.attend(self.layer_id, q, k, v, self.spec, rope), ctx.adapter_data)
        return out


class LlamaMLP(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, bias: bool) -> None:
        super().__init__()
        shard = shard_evenly(weights.process_group, config.intermediate_size, "intermediate_size")
        self.gate_up_proj = self.load_gate(prefix, config, weights, shard, bias)
        up = self.gate_up_proj.targets[-1]  # what gates let through, or gates and then that
        self.down_proj = TensorParallelAdapterRowLinear(
            weights,
            f"{prefix}.down_proj",
            shard,
            config.hidden_size,
            bias=bias,
            scaled_at=(up.name, up.outputs.full - shard.full),
        )
        self.activation = self.load_activation(config)

    def load_gate(
        self, prefix: str, config: Any, weights: Weights, shard: Shard, bias: bool
    ) -> TensorParallelMultiAdapterLinear:
        """Load the matrix onto gates and what they let through; each is cut by `shard`."""
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        return TensorParallelMultiAdapterLinear(weights, names, config.hidden_size, [shard, shard], bias=bias)

    def load_activation(self, config: Any) -> Activation:
        return get_activation(config.hidden_act, "hidden_act")

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        gated = self.gate_up_proj.gated(x, self.activation, ctx.adapter_data)
        out: torch.Tensor = self.down_proj(gated, ctx.adapter_data)
        return out


class PlainMLP(nn.Module):
    """A feed-forward of two matrices, without a gate."""

    first, second = "fc1", "fc2"

    def __init__(self, prefix: str, config: Any, weights: Weights, bias: bool) -> None:
        super().__init__()
        size, inner = config.hidden_size, self.inner_size(config)
        shard = shard_evenly(weights.process_group, inner, "intermediate_size")
        self.up = TensorParallelMultiAdapterLinear(weights, [f"{prefix}.{self.first}"], size, [shard], bias=bias)
        self.down = TensorParallelAdapterRowLinear(
            weights, f"{prefix}.{self.second}", shard, size, bias=bias, scales_input=True
        )
        self.activation = self.load_activation(config)

    def inner_size(self, config: Any) -> int:
        return int(config.intermediate_size)

    def load_activation(self, config: Any) -> Activation:
        return get_activation(config.hidden_act, "hidden_act")

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activation(self.up(x, ctx.adapter_data)), ctx.adapter_data)
        return out


class FlashLlamaLayer(nn.Module):
    names = Names()
    attention_class: type[FlashLlamaAttention] = FlashLlamaAttention
    mlp_class: type[LlamaMLP] | type[PlainMLP] = LlamaMLP
    partial_rotary = False  # whether a config may rotate a part of each head
    rotates = True
    is_parallel = False  # whether attention and feed-forward read the same norm, side by side
    layer_norms: LayerNorms | None = None

    def __init__(self, layer_id: int, prefix: str, config: Any, weights: Weights) -> None:
        super().__init__()
        biases, self.is_parallel = self.biases(config), self.runs_parallel(config)
        attention = f"{prefix}.{self.names.attention}"
        self.self_attn = self.attention_class(attention, config, weights, layer_id, biases)
        self.mlp = self.mlp_class(f"{prefix}.{self.names.mlp}", config, weights, biases.mlp)
        self.load_norms(prefix, config, weights)

    def load_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        self.input_layernorm = self.make_norm(f"{prefix}.{self.names.input_norm}", config, weights)
        if not self.is_parallel:
            self.post_attention_layernorm = self.make_norm(f"{prefix}.{self.names.second_norm}", config, weights)

    def runs_parallel(self, config: Any) -> bool:  # noqa: ARG002 - for subclasses
        """Tell whether the layers of this config are parallel."""
        return self.is_parallel

    @classmethod
    def make_norm(cls, name: str, config: Any, weights: Weights) -> nn.Module:
        """Load a norm over the hidden size, of the layers or after them."""
        if cls.layer_norms is None:
            return LlamaRMSNorm(name, weights, config.hidden_size, config.rms_norm_eps)
        field, bias, offset = cls.layer_norms
        eps = getattr(config, field)
        return ResidualLayerNorm(name, weights, config.hidden_size, eps, bias=bias, offset=offset)

    @staticmethod
    def rope_kind(config: Any, layer_id: int) -> str | None:  # noqa: ARG004 - for subclasses
        """Return the key of a layer's settings in the config's rope settings; None for a layer that rotates nothing.

        A config with one set for all layers has no such keys. Not called where no layer rotates.
        """
        return "all"

    def biases(self, config: Any) -> Biases:
        attention, mlp = (bool(getattr(config, field, False)) for field in ("attention_bias", "mlp_bias"))
        return Biases(attention, attention, mlp)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        if self.is_parallel:
            return self.self_attn(x, rope, ctx) + self.mlp(x, ctx), residual
        x = self.self_attn(x, rope, ctx)
        x, residual = self.post_attention_layernorm(x, residual, ctx.adapter_data)
        return self.mlp(x, ctx), residual


class FlashLlamaModel(nn.Module):
    def __init__(
        self,
        prefix: str,
        config: Any,
        weights: Weights,
        create_layer_fn: Callable[..., nn.Module],
        layer_class: type[FlashLlamaLayer] = FlashLlamaLayer,
    ) -> None:
        """`layer_class` names modules, makes norms and chooses rotations; `create_layer_fn` makes layers."""
        super().__init__()
        names, layers = layer_class.names, range(config.num_hidden_layers)
        self.embedding_multiplier: float | None = None
        self.rope_kinds = [layer_class.rope_kind(config, i) if layer_class.rotates else None for i in layers]
        size, partial = layer_class.attention_class.turned_dims(config), layer_class.partial_rotary
        kinds = [kind for kind in dict.fromkeys(self.rope_kinds) if kind is not None]
        self.rotaries = nn.ModuleDict(
            {kind: load_rotary(config, size, weights.device, partial=partial, kind=kind) for kind in kinds}
        )
        head_name, embedding = f"{prefix.removesuffix(names.model)}lm_head", f"{prefix}.{names.embedding}"
        self.embed_tokens = load_embedding(weights, config, embedding, head_name, config.hidden_size)
        self.layers = nn.ModuleList(
            create_layer_fn(layer_id, prefix=f"{prefix}.{names.layers}.{layer_id}", config=config, weights=weights)
            for layer_id in layers
        )
        self.norm = layer_class.make_norm(f"{prefix}.{names.norm}", config, weights)
        self.lead = _find_lead(self.rope_kinds, self.layers)

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(input_ids, ctx.adapter_data)
        return x if self.embedding_multiplier is None else x * self.embedding_multiplier

    def run_layers(self, x: torch.Tensor, ctx: PagedContext, count: int | None = None) -> torch.Tensor:
        residual, ropes = None, {kind: rotary(ctx) for kind, rotary in self.rotaries.items()}
        for kind, layer in islice(zip(self.rope_kinds, self.layers, strict=True), count):
            x, residual = layer(x, residual, None if kind is None else ropes[kind], ctx)
        normed: torch.Tensor = self.norm(x, residual, ctx.adapter_data)[0]
        return normed


def _find_lead(rope_kinds: list[str | None], layers: Iterable[nn.Module]) -> int:
    """Return how many of the first layers it takes to have one of each kind; of layers by others, all."""
    kinds: list[Any] = []
    for rope, layer in zip(rope_kinds, layers, strict=True):
        spec = layer.self_attn.spec if isinstance(layer, FlashLlamaLayer) else None
        kinds.append((rope, spec.window, spec.soft_cap) if spec is not None else layer)
    return max([LEAD, *(kinds.index(kind) + 1 for kind in kinds)])


class FlashLlamaForCausalLM(PagedCausalLM):
    layer_class: type[FlashLlamaLayer] = FlashLlamaLayer
    model_class: type[FlashLlamaModel] = FlashLlamaModel
    head_bias = False

    def __init__(
        self, prefix: str, config: Any, weights: Weights, create_layer_fn: Callable[..., nn.Module] | None = None
    ) -> None:
        """`create_layer_fn(layer_id, prefix=, config=, weights=)` makes each layer; None for this class's own."""
        kv_heads = shard_kv_heads(weights.process_group, self.layer_class.attention_class.count_kv_heads(config), 1)
        super().__init__(config, weights, (kv_heads.size, head_dim(config)))
        self.check(config)
        prefix = f"{prefix}." if prefix else ""
        name = f"{prefix}{self.layer_class.names.model}"
        self.model = self.model_class(name, config, weights, create_layer_fn or self.layer_class, self.layer_class)
        self.model.embedding_multiplier = self.embedding_multiplier(config)
        self.lm_head = load_head(weights, config, f"{prefix}lm_head", self.model.embed_tokens, bias=self.head_bias)
        self.lm_head.rule = self.logit_rule(config)

    def check(self, config: Any) -> None:
        """Refuse values of the config that change the numbers in a way that this class lacks."""

    def embedding_multiplier(self, config: Any) -> float | None:  # noqa: ARG002 - for subclasses
        """Return the factor of embeddings, as the model's dtype rounds it; None for none."""
        return None

    def logit_rule(self, config: Any) -> LogitRule | None:  # noqa: ARG002 - for subclasses
        """Return the change of all logits after the head; None for none."""
        return None
