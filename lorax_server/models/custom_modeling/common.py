"""Building blocks that several architectures share: MLPs, head norms, layers, ALiBi slopes and learned positions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lorax_server.distributed import shard_evenly
from lorax_server.errors import ConfigError
from lorax_server.kernels import CosSin
from lorax_server.layers.attention import PagedContext
from lorax_server.layers.linear import TensorParallelAdapterRowLinear, TensorParallelMultiAdapterLinear
from lorax_server.layers.norm import LayerNorm, RMSNorm, concat_head_norm_targets, make_head_norm_target
from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaAttention,
    FlashLlamaLayer,
    FlashLlamaModel,
)
from lorax_server.models.custom_modeling.paged import check_positions
from lorax_server.weights import Weights


def layer_windows(config: Any) -> list[int | None]:
    """Return each layer's sliding window from the config's `layer_types`, or None for full attention."""
    kinds, window = config.layer_types[: config.num_hidden_layers], config.sliding_window
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention" and window is None):
            raise ConfigError(f"config field layer_types: {kind!r} with sliding_window = {window} is not supported")
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def find_sparse_layers(config: Any) -> list[bool]:
    """Return a list that contains True for each layer that has experts instead of an MLP, according to the config
    fields of Qwen models.
    """
    return [
        layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    ]


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return the ALiBi slopes for all heads, a geometric sequence.

    If the number of heads is not a power of 2, the slopes for the next lower power come first. The remaining slopes
    lie between them.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes + between)


class PlainMLP(nn.Module):
    """An MLP with two matrices and no gate."""

    def __init__(self, prefix: str, config: Any, weights: Weights, arch: Architecture) -> None:
        super().__init__()
        size, bias, transposed = config.hidden_size, arch.biases.mlp, arch.fan_in_fan_out
        first, second = (f"{prefix}.{name}" for name in arch.names.mlp)
        shard = shard_evenly(weights.process_group, arch.get_inner_size(config), "intermediate_size")
        self.up = TensorParallelMultiAdapterLinear(
            weights, [first], size, [shard], bias=bias, fan_in_fan_out=transposed
        )
        self.down = TensorParallelAdapterRowLinear(
            weights, second, shard, size, bias=bias, fan_in_fan_out=transposed, scales_input=True
        )
        self.ops, self.activation = weights.ops, arch.find_activation(config)

    def forward(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        inner = self.ops.activate(self.up(x, ctx.adapter_data), self.activation)
        out: torch.Tensor = self.down(inner, ctx.adapter_data)
        return out


class SharedHeadNormAttention(FlashLlamaAttention):
    """Attention with query and key norms whose weights are shared by all heads."""

    norm_names = "q_norm", "k_norm"
    norm_offset = 0.0  # added to the stored weights

    def load_head_norms(self, prefix: str, config: Any, weights: Weights) -> None:
        names = [f"{prefix}.{name}" for name in self.norm_names]
        norms = [self.load_head_norm(name, config, weights) for name in names]
        self.q_norm, self.k_norm = norms
        self.targets = concat_head_norm_targets(
            [
                make_head_norm_target(name, norm, count, self.head_dim, self.norm_offset)
                for name, norm, count in zip(names, norms, (self.num_heads, self.num_kv_heads), strict=True)
            ]
        )

    def load_head_norm(self, name: str, config: Any, weights: Weights) -> RMSNorm | LayerNorm:
        return HeadRMSNorm(name, weights, self.head_dim, config.rms_norm_eps, is_adaptable=False)


class HeadRMSNorm(RMSNorm):
    """RMSNorm over each head, without a residual."""

    def forward(self, heads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(heads)[0]


class SandwichNormLayer(FlashLlamaLayer):
    """A layer with norms before and after attention and MLP."""

    def load_norms(self, names: ModuleNames, load: Callable[[str], nn.Module]) -> None:
        super().load_norms(names, load)
        assert names.added_norms is not None
        self.attention_norm, self.mlp_norm = map(load, names.added_norms)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, residual = self.input_layernorm(x, residual, ctx.adapter_data)
        x = self.attention_norm(self.self_attn(x, rope, ctx), None, ctx.adapter_data)[0]
        x, residual = self.post_attention_layernorm(x, residual, ctx.adapter_data)
        return self.mlp_norm(self.mlp(x, ctx), None, ctx.adapter_data)[0], residual


class PostNormLayer(FlashLlamaLayer):
    """A layer with norms only after attention and MLP."""

    def load_norms(self, names: ModuleNames, load: Callable[[str], nn.Module]) -> None:  # noqa: ARG002
        self.attention_norm, self.mlp_norm = load("post_attention_layernorm"), load("post_feedforward_layernorm")

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin | None, ctx: PagedContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        residual = x if residual is None else x + residual
        residual = residual + self.attention_norm(self.self_attn(residual, rope, ctx), None, ctx.adapter_data)[0]
        return self.mlp_norm(self.mlp(residual, ctx), None, ctx.adapter_data)[0], residual


class LearnedPositionsModel(FlashLlamaModel):
    """A decoder with learned position embeddings, `wpe`."""

    def __init__(self, prefix: str, config: Any, weights: Weights, *args: Any) -> None:
        super().__init__(prefix, config, weights, *args)
        self.wpe = weights.get_tensor(f"{prefix}.wpe.weight", (config.n_positions, config.hidden_size))

    def transform_embeddings(self, x: torch.Tensor, ctx: PagedContext) -> torch.Tensor:
        check_positions(ctx, len(self.wpe))
        return x + self.wpe[ctx.position_ids]
