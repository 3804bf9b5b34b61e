"""Norms, in front of which a residual may be added."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.distributed import Shard, whole
from lorax_server.weights import Weights


class RMSNorm(nn.Module):
    """Add the residual, if there is one, and normalise the sum; return both."""

    def __init__(
        self,
        prefix: str,
        weights: Weights,
        size: int,
        eps: float = 1e-6,
        adaptable: bool = True,
        *,
        offset: float = 0.0,
        wide: bool = False,
    ) -> None:
        """`offset` is added to the stored weight of a `wide` norm, which multiplies in float32, and then rounds."""
        super().__init__()
        weight = weights.get_tensor(f"{prefix}.weight", (size,))
        self.weight = weight.float() + offset if wide else weight
        self.eps = torch.tensor(eps, device=weights.device)  # torch would make a tensor of a number in every call
        self.ops = weights.ops
        self.targets = (_norm_target(prefix, size, self.weight, None, offset),) if adaptable else ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapter_data: AdapterBatchData | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if adapter_data is None or not self.targets:
            return self.ops.rms_norm(hidden_states, residual, self.weight, self.eps)
        lora, targets = adapter_data.lora, adapter_data.find(self.targets)
        return self.ops.rms_norm(hidden_states, residual, self.weight, self.eps, lora, targets)


class LayerNorm(nn.Module):
    """The usual layer norm, with or without weight and bias."""

    def __init__(
        self,
        prefix: str,
        weights: Weights,
        size: int,
        eps: float = 1e-5,
        affine: bool = True,
        adaptable: bool = True,
        *,
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        """`offset` is added to the weight that is stored."""
        super().__init__()
        self.weight = weights.get_tensor(f"{prefix}.weight", (size,)) + offset if affine else None
        self.bias = weights.get_tensor(f"{prefix}.bias", (size,)) if affine and bias else None
        self.eps = eps
        self.ops = weights.ops
        self.targets = (_norm_target(prefix, size, self.weight, self.bias, offset),) if adaptable else ()

    def forward(self, hidden_states: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        if adapter_data is None or not self.targets:
            return self.ops.layer_norm(hidden_states, self.weight, self.bias, self.eps)
        lora, targets = adapter_data.lora, adapter_data.find(self.targets)
        return self.ops.layer_norm(hidden_states, self.weight, self.bias, self.eps, lora, targets)


class ResidualLayerNorm(LayerNorm):
    """A layer norm that adds the residual first, if there is one, and returns both, as `RMSNorm` does."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapter_data: AdapterBatchData | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden_states if residual is None else hidden_states + residual
        return super().forward(total, adapter_data), total


class HeadNorm(nn.Module):
    """A layer norm of each head, without bias, in which every head has a weight of its own."""

    def __init__(self, weight: torch.Tensor, eps: float, weights: Weights) -> None:
        """`weight` is this rank's, `[heads, head_dim]`."""
        super().__init__()
        self.weight, self.eps, self.ops = weight, eps, weights.ops

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return self.ops.layer_norm(heads, None, None, self.eps) * self.weight


def place_head_norms(norms: Sequence[AdapterTarget]) -> tuple[AdapterTarget, ...]:
    """Return the targets of norms of heads, of queries and of keys, with their columns side by side."""
    stops = accumulate(target.outputs.size for target in norms)
    return tuple(
        replace(target, columns=slice(stop - target.outputs.size, stop))
        for target, stop in zip(norms, stops, strict=True)
    )


def head_norm_target(
    name: str, norm: "RMSNorm | LayerNorm", heads: int, head_dim: int, offset: float = 0.0
) -> AdapterTarget:
    """Return the target of a norm that so many heads of this rank share: its weight once for each of them."""
    outputs = Shard(head_dim, ((0, head_dim),) * heads)
    assert norm.weight is not None
    bias = getattr(norm, "bias", None)
    bias = None if bias is None else bias.repeat(heads)
    weight = norm.weight.repeat(heads)
    return AdapterTarget(name, Kind.NORM, whole(head_dim), outputs, slice(0), weight, bias, offset=offset)


def _norm_target(
    name: str, size: int, weight: torch.Tensor | None, bias: torch.Tensor | None, offset: float = 0.0
) -> AdapterTarget:
    return AdapterTarget(name, Kind.NORM, whole(size), whole(size), slice(0, size), weight, bias, offset=offset)
