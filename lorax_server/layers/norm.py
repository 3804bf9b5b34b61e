"""RMSNorm and layer norm, optionally fused with a residual addition."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import Shard, make_full_shard
from lorax_server.weights import Weights


class RMSNorm(nn.Module):
    """RMSNorm over `hidden_states + residual`. `forward` returns the normalized tensor and the sum."""

    def __init__(
        self,
        prefix: str,
        weights: Weights,
        size: int,
        eps: float = 1e-6,
        is_adaptable: bool = True,
        *,
        offset: float = 0.0,
        upcast: bool = False,
    ) -> None:
        """Load the weight. With `upcast`, the norm multiplies by `weight + offset` in float32 before rounding."""
        super().__init__()
        weight = weights.get_tensor(f"{prefix}.weight", (size,))
        self.weight = weight.float() + offset if upcast else weight
        self.eps = torch.tensor(eps, device=weights.device)  # torch would convert a float in every call
        self.ops = weights.ops
        self.targets = (_make_norm_target(prefix, size, self.weight, None, offset),) if is_adaptable else ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapter_data: AdapterBatchData | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if adapter_data is None or not self.targets:
            return self.ops.rms_norm(hidden_states, residual, self.weight, self.eps)
        lora, targets = adapter_data.lora, adapter_data.find_targets(self.targets)
        return self.ops.rms_norm(hidden_states, residual, self.weight, self.eps, lora, targets)


class LayerNorm(nn.Module):
    """Layer norm, with or without weight and bias."""

    def __init__(
        self,
        prefix: str,
        weights: Weights,
        size: int,
        eps: float = 1e-5,
        affine: bool = True,
        is_adaptable: bool = True,
        *,
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        """Load the weight and the bias. `offset` is added to the stored weight."""
        super().__init__()
        self.weight = weights.get_tensor(f"{prefix}.weight", (size,)) + offset if affine else None
        self.bias = weights.get_tensor(f"{prefix}.bias", (size,)) if affine and bias else None
        self.eps = eps
        self.ops = weights.ops
        self.targets = (_make_norm_target(prefix, size, self.weight, self.bias, offset),) if is_adaptable else ()

    def forward(self, hidden_states: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        if adapter_data is None or not self.targets:
            return self.ops.layer_norm(hidden_states, self.weight, self.bias, self.eps)
        lora, targets = adapter_data.lora, adapter_data.find_targets(self.targets)
        return self.ops.layer_norm(hidden_states, self.weight, self.bias, self.eps, lora, targets)


class ResidualLayerNorm(LayerNorm):
    """Layer norm over `hidden_states + residual`. Like `RMSNorm`, `forward` returns the result and the sum."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapter_data: AdapterBatchData | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden_states if residual is None else hidden_states + residual
        return super().forward(total, adapter_data), total


class HeadNorm(nn.Module):
    """Layer norm over each attention head. Heads have separate weights, and there is no bias."""

    def __init__(self, weight: torch.Tensor, eps: float, weights: Weights) -> None:
        """Create the norm. `weight` is this rank's shard, `[heads, head_dim]`."""
        super().__init__()
        self.weight, self.eps, self.ops = weight, eps, weights.ops

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return self.ops.layer_norm(heads, None, None, self.eps) * self.weight


def concat_head_norm_targets(norms: Sequence[AdapterTarget]) -> tuple[AdapterTarget, ...]:
    """Return copies of the query and key norm targets with consecutive output columns."""
    stops = accumulate(target.outputs.size for target in norms)
    return tuple(
        replace(target, columns=slice(stop - target.outputs.size, stop))
        for target, stop in zip(norms, stops, strict=True)
    )


def make_head_norm_target(
    name: str, norm: "RMSNorm | LayerNorm", heads: int, head_dim: int, offset: float = 0.0
) -> AdapterTarget:
    """Return the adapter target for a norm that `heads` attention heads share. Its weight is repeated for each head."""
    outputs = Shard(head_dim, ((0, head_dim),) * heads)
    assert norm.weight is not None
    bias = getattr(norm, "bias", None)
    bias = None if bias is None else bias.repeat(heads)
    weight = norm.weight.repeat(heads)
    return AdapterTarget(
        name, TargetKind.NORM, make_full_shard(head_dim), outputs, slice(0), weight, bias, offset=offset
    )


def _make_norm_target(
    name: str, size: int, weight: torch.Tensor | None, bias: torch.Tensor | None, offset: float = 0.0
) -> AdapterTarget:
    return AdapterTarget(
        name, TargetKind.NORM, make_full_shard(size), make_full_shard(size), slice(0, size), weight, bias, offset=offset
    )
