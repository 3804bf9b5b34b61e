"""Llama, the base class for all other architectures (`docs/adding-a-model.md`)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from lorax_server.adapters.target import AdapterTarget
from lorax_server.distributed import (
    Shard,
    join_shards,
    make_full_shard,
    shard_evenly,
    shard_grouped_qkv,
    shard_kv_heads,
    shard_units,
)
from lorax_server.errors import ConfigError
from lorax_server.kernels import SIGMOID, CosSin
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.moe import ExpertCounter, Experts
from lorax_server.layers.norm import RMSNorm as LlamaRMSNorm  # noqa: F401 - a name of the seed contract
from lorax_server.layers.rotary import load_rotary, partial_rotary_dim
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames, head_dim, read_biases
from lorax_server.models.custom_modeling.paged import (
    MIN_WARMUP_LAYERS,
    PagedCausalLM,
    find_head,
    load_attention_spec,
    load_embedding,
    load_head,
)
from lorax_server.weights import Weights


def __getattr__(name: str) -> Any:
    """Import `LlamaConfig` lazily, because importing transformers takes seconds."""
    if name != "LlamaConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import LlamaConfig  # noqa: PLC0415

    return LlamaConfig


MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
LayerFactory = Callable[..., nn.Module]  # (layer_id, prefix=, config=, weights=)


class FlashLlamaAttention(nn.Module):
    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, arch: Architecture) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.head_dim = head_dim(config)
        num_heads, num_kv_heads = config.num_attention_heads, arch.get_num_kv_heads(config)
        if num_heads % num_kv_heads != 0:
            raise ConfigError(f"{num_heads} attention heads cannot share num_key_value_heads = {num_kv_heads}")
        group = weights.process_group
        heads = shard_units(group, [(num_heads, self.head_dim)], "num_attention_heads")
        kv_heads = shard_kv_heads(group, num_kv_heads, self.head_dim)
        # Indices of the heads on this rank.
        self.heads, self.kv_heads = (
            range(shard.ranges[0][0] // self.head_dim, shard.ranges[0][1] // self.head_dim)
            for shard in (heads, kv_heads)
        )
        self.num_heads, self.num_kv_heads = len(self.heads), len(self.kv_heads)
        self.qkv_proj = TensorParallelMultiAdapterLinear(
            weights,
            [f"{prefix}.{name}" for name in arch.names.qkv],
            config.hidden_size,
            self._shard_qkv(config, arch, heads, kv_heads),
            bias=arch.biases.qkv,
            fan_in_fan_out=arch.fan_in_fan_out,
        )
        self.o_proj = TensorParallelAdapterRowLinear(
            weights,
            f"{prefix}.{arch.names.output}",
            heads,
            config.hidden_size,
            bias=arch.biases.output,
            fan_in_fan_out=arch.fan_in_fan_out,
        )
        scale = self.head_dim**-0.5 if arch.scale is None else arch.scale
        window = arch.windows[layer_id] if arch.windows else None
        slopes = None if arch.slopes is None else arch.slopes[self.heads.start : self.heads.stop].to(weights.device)
        spec = load_attention_spec(weights, config, prefix, scale, window)
        self.spec = replace(spec, soft_cap=arch.soft_cap, slopes=slopes)
        self.q_norm: nn.Module | None = None  # query and key norms, applied before RoPE
        self.k_norm: nn.Module | None = None
        self.targets: tuple[AdapterTarget, ...] = ()  # adapter targets for these norms
        self.load_head_norms(prefix, config, weights)

    def load_head_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        """Set `q_norm`, `k_norm` and `targets` in subclasses. Llama has no head norms."""

    def _shard_qkv(self, config: Any, arch: Architecture, heads: Shard, kv_heads: Shard) -> list[Shard]:
        """Return this rank's output shard of each matrix in `arch.names.qkv`."""
        if arch.grouped_qkv:
            counts = config.num_attention_heads, arch.get_num_kv_heads(config)
            return [shard_grouped_qkv(self.heads, self.kv_heads, counts, self.head_dim)]
        if len(arch.names.qkv) == 1:
            return [join_shards([heads, kv_heads, kv_heads])]
        if not arch.interleaved:
            return [heads, kv_heads, kv_heads]
        interleaved = self.head_dim, partial_rotary_dim(config, arch.get_rotary_dim(config))
        return [replace(heads, interleaved=interleaved), replace(kv_heads, interleaved=interleaved), kv_heads]

    def find_query_targets(self) -> set[str]:
        """Return the names of targets that change queries, but no keys and values."""
        return {self.qkv_proj.targets[0].name} if len(self.qkv_proj.targets) == 3 else set()

    def forward(self, x: torch.Tensor, rope: CosSin | None, ctx: PagedContext) -> torch.Tensor:
        heads = self.qkv_proj(x, ctx.adapter_data).view(x.shape[0], -1, self.head_dim)
        qk = heads[:, : self.num_heads + self.num_kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        if self.targets and ctx.adapter_data is not None:
            self.o_proj.ops.scale_and_shift(
                qk.flatten(1), ctx.adapter_data.lora, ctx.adapter_data.find_targets(self.targets)
            )
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, -self.num_kv_heads :]
        out: torch.Tensor = self.o_proj(ctx.attend(self.layer_id, q, k, v, self.spec, rope), ctx.adapter_data)
        return out


class LlamaMLP(nn.Module):
    """A gated MLP with separate or fused gate and up projections."""

    def __init__(self, prefix: str, config: Any, weights: Weights, arch: Architecture) -> None:
        super().__init__()
        size, bias = config.hidden_size, arch.biases.mlp
        *inputs, output = (f"{prefix}.{name}" for name in arch.names.mlp)
        shard = shard_evenly(weights.process_group, arch.get_inner_size(config), "intermediate_size")
        shards = [shard, shard] if len(inputs) == 2 else [join_shards([shard, shard])]
        self.gate_up_proj = TensorParallelMultiAdapterLinear(weights, inputs, size, shards, bias=bias)
        up = self.gate_up_proj.targets[-1]  # in a fused matrix, the up projection is last
        input_scale_target = (up.name, up.outputs.full - shard.full)
        self.down_proj = TensorParallelAdapterRowLinear(
            weights, output, shard, size, bias=bias, input_scale_target=input_scale_target
        )
        self.activation = arch.find_activation(config)

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        gated = self.gate_up_proj.forward_gated(x, self.activation, ctx.adapter_data)
        out: torch.Tensor = self.down_proj(gated, ctx.adapter_data)
        return out


class SparseMLP(nn.Module):
    """A mixture of experts, optionally with an MLP that runs for every token (a shared expert)."""

    def __init__(self, prefix: str, config: Any, weights: Weights, arch: Architecture) -> None:
        super().__init__()
        mixture, size, self.ops = arch.mixture, config.hidden_size, weights.ops
        assert mixture is not None
        if not 1 <= mixture.top_k <= mixture.num_experts:
            raise ConfigError(
                f"config field num_experts_per_tok must be between 1 and the number of experts, {mixture.num_experts} "
                f"(got {mixture.top_k})"
            )
        module = f"{prefix}.{mixture.module}"
        self.top_k, self.router_spec = mixture.top_k, mixture.router_spec
        self.router_bias: torch.Tensor | None = None
        if mixture.router_bias is not None:
            name = f"{module}.{mixture.router}.{mixture.router_bias}"
            self.router_bias = weights.get_tensor(name, (mixture.num_experts,), torch.float32)
        self.router = TensorParallelMultiAdapterLinear(
            weights,
            [f"{module}.{mixture.router}"],
            size,
            [make_full_shard(mixture.num_experts)],
            bias=mixture.has_router_bias,
            min_bits=8,
        )
        inner = shard_evenly(weights.process_group, mixture.inner_size, mixture.size_field)
        activation = arch.find_activation(config)
        counts = mixture.num_experts, mixture.top_k
        self.experts = Experts(
            weights, f"{module}.experts", counts, size, inner, activation, mixture.matrices, mixture.load
        )
        self.counter = ExpertCounter(mixture.num_experts, weights.device)
        self.shared: LlamaMLP | None = None
        self.shared_gate: TensorParallelMultiAdapterLinear | None = None
        if mixture.shared is not None and mixture.shared_size:
            inside = replace(arch, names=ModuleNames(mlp=MLP_NAMES), inner_size=mixture.shared_size)
            self.shared = LlamaMLP(f"{module}.{mixture.shared}", config, weights, inside)
            if mixture.shared_gate is not None:
                name = f"{module}.{mixture.shared_gate}"
                self.shared_gate = TensorParallelMultiAdapterLinear(
                    weights, [name], size, [make_full_shard(1)], bias=False
                )

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        logits = self.router(x, ctx.adapter_data)
        routing = self.ops.route(logits, self.top_k, self.router_spec, self.router_bias)
        if not ctx.in_graph:  # graphs have padding tokens, and CPU graphs cannot update tensors
            self.counter.add(routing)
        out: torch.Tensor = self.experts(x, routing, ctx.adapter_data)
        if self.shared is None:
            return out
        shared: torch.Tensor = self.shared(x, ctx)
        if self.shared_gate is not None:
            shared = shared * self.ops.activate(self.shared_gate(x, ctx.adapter_data), SIGMOID)
        return out + shared


class FlashLlamaLayer(nn.Module):
    def __init__(
        self, layer_id: int, prefix: str, config: Any, weights: Weights, arch: Architecture | None = None
    ) -> None:
        super().__init__()
        arch = arch or FlashLlamaForCausalLM.describe(config)
        names = arch.names
        self.is_parallel = arch.is_parallel
        attention_class, mlp_class = arch.attention_class or FlashLlamaAttention, arch.mlp_class or LlamaMLP
        if arch.mixture is not None and (arch.mixture.is_sparse is None or arch.mixture.is_sparse[layer_id]):
            mlp_class = SparseMLP
        self.self_attn = attention_class(f"{prefix}.{names.attention}", config, weights, layer_id, arch)
        self.mlp = mlp_class(prefix, config, weights, arch)
        self.load_norms(names, partial(arch.load_norm, prefix, config=config, weights=weights))

    def load_norms(self, names: ModuleNames, load: Callable[[str], nn.Module]) -> None:
        self.input_layernorm = load(names.input_norm)
        self.post_attention_layernorm: Any = None if names.second_norm is None else load(names.second_norm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the MLP output and the residual. The next norm adds them."""
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        attended = self.self_attn(x, rope, ctx)
        if self.post_attention_layernorm is None:
            return attended + self.mlp(x, ctx), residual
        if self.is_parallel:
            x, _ = self.post_attention_layernorm(residual, None, ctx.adapter_data)
            return attended + self.mlp(x, ctx), residual
        x, residual = self.post_attention_layernorm(attended, residual, ctx.adapter_data)
        return self.mlp(x, ctx), residual


class FlashLlamaModel(nn.Module):
    def __init__(
        self,
        prefix: str,
        config: Any,
        weights: Weights,
        create_layer_fn: Callable[..., nn.Module],
        arch: Architecture,
    ) -> None:
        super().__init__()
        names, layer_ids = arch.names, range(config.num_hidden_layers)
        self.embedding_multiplier = arch.embedding_multiplier
        self.rope_kinds = list(arch.rope_kinds or ["all" if arch.uses_rope else None] * len(layer_ids))[
            : len(layer_ids)
        ]
        self.rotaries = nn.ModuleDict(
            {
                kind: load_rotary(
                    config, arch.get_rotary_dim(config), weights.device, partial=arch.partial_rotary, layer_type=kind
                )
                for kind in dict.fromkeys(self.rope_kinds)
                if kind is not None
            }
        )
        head_name = find_head(weights, prefix.removesuffix(names.model))
        size = arch.embedding_size or config.hidden_size
        self.embed_tokens = load_embedding(weights, config, f"{prefix}.{names.embedding}", head_name, size)
        self.layers = nn.ModuleList(
            create_layer_fn(layer_id, prefix=f"{prefix}.{names.layers}.{layer_id}", config=config, weights=weights)
            for layer_id in layer_ids
        )
        self.norm = None
        if names.final_norm is not None:
            self.norm = arch.load_norm(prefix, names.final_norm, config, weights)
        self.num_warmup_layers = _count_warmup_layers(self.rope_kinds, self.layers)

    def embed(self, input_ids: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        return self.transform_embeddings(self.embed_tokens(input_ids, ctx.adapter_data), ctx)

    def transform_embeddings(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:  # noqa: ARG002 - for subclasses
        """Return the first layer's input for the given token embeddings."""
        return x if self.embedding_multiplier is None else x * self.embedding_multiplier

    def run_layers(self, x: torch.Tensor, ctx: PagedContext, count: int | None = None) -> torch.Tensor:
        residual, ropes = None, {kind: rotary(ctx) for kind, rotary in self.rotaries.items()}
        for kind, layer in islice(zip(self.rope_kinds, self.layers, strict=True), count):
            x, residual = layer(x, residual, None if kind is None else ropes[kind], ctx)
        if self.norm is None:
            return x if residual is None else x + residual
        normed: torch.Tensor = self.norm(x, residual, ctx.adapter_data)[0]
        return normed


def _count_warmup_layers(rope_kinds: Sequence[str | None], layers: Iterable[nn.Module]) -> int:
    """Return the number of leading layers that include every layer type.

    Layers of other classes than `FlashLlamaLayer` may use different kernels, so all of them are included.
    """
    kinds: list[Any] = []
    for rope, layer in zip(rope_kinds, layers, strict=True):
        spec = layer.self_attn.spec if isinstance(layer, FlashLlamaLayer) else None
        kinds.append((rope, spec.window, spec.soft_cap) if spec is not None else layer)
    return max([MIN_WARMUP_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)])


class FlashLlamaForCausalLM(PagedCausalLM):
    def __init__(self, prefix: str, config: Any, weights: Weights, create_layer_fn: LayerFactory | None = None) -> None:
        """Load the model. `create_layer_fn(layer_id, prefix=, config=, weights=)` builds custom layers."""
        arch = self.describe(config)
        # Check this first, because the next check mentions `num_key_value_heads`, which some configs lack.
        shard_evenly(weights.process_group, config.num_attention_heads, "num_attention_heads")
        kv_heads = shard_kv_heads(weights.process_group, arch.get_num_kv_heads(config), 1)
        super().__init__(config, weights, (kv_heads.size, arch.get_kv_head_dim(config)), shares_kv=arch.shares_kv)
        prefix = f"{prefix}." if prefix else ""
        layer_class, model_class = arch.layer_class or FlashLlamaLayer, arch.model_class or FlashLlamaModel
        create_layer_fn = create_layer_fn or partial(layer_class, arch=arch)
        self.model = model_class(f"{prefix}{arch.names.model}", config, weights, create_layer_fn, arch)
        self.lm_head = load_head(weights, config, prefix, self.model.embed_tokens, bias=arch.head_bias)
        self.lm_head.logit_transform = arch.logit_transform

    def find_targets_after_kv(self) -> frozenset[str]:
        """Return the targets that run after the last layer's keys and values: its queries, attention output and MLP,
        the final norm and the LM head.
        """
        assert isinstance(self.model, FlashLlamaModel)
        last = self.model.layers[-1]
        if not isinstance(last, FlashLlamaLayer):
            return frozenset()
        modules = last.self_attn.o_proj, last.mlp, self.model.norm, self.lm_head
        names = {name for module in modules if module is not None for name in collect_adapter_targets(module)}
        return frozenset(names | last.self_attn.find_query_targets())

    @staticmethod
    def describe(config: Any) -> Architecture:
        """Return the architecture that a model config describes. Reject unsupported values."""
        return Architecture(biases=read_biases(config))
