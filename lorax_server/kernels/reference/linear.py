"""Matrices, and what adapters change of their outputs."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import Activation, LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.panels import PanelMatrix
from lorax_server.kernels.reference.lora import add_lora, scale_and_shift


def linear(
    x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
) -> torch.Tensor:
    out = F.linear(x, weights.plain, weights.bias)
    if lora is not None:
        add_lora(out, x, lora, targets)
        scale_and_shift(out, lora, targets)
    return out


def gated_linear(
    x: torch.Tensor,
    weights: LinearWeights,
    activation: Activation,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    gate, up = linear(x, weights, lora, targets).chunk(2, dim=-1)
    return activation(gate) * up


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights:
    return LinearWeights(weight, bias)


def look_up(weight: torch.Tensor | PanelMatrix, ids: torch.Tensor) -> torch.Tensor:
    return weight.look_up(ids) if isinstance(weight, PanelMatrix) else F.embedding(ids, weight)


def prepare(linears: Sequence[LinearWeights], with_lora: bool) -> None:
    """Compile nothing: torch brings all."""
