"""Norms."""

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.weights import Weights


class RMSNorm(nn.Module):
    """Adds the residual, if there is one, and normalises the sum; returns both."""

    def __init__(self, prefix: str, weights: Weights, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = weights.get_tensor(f"{prefix}.weight", (size,))
        self.eps = torch.tensor(eps, device=weights.device)  # a number would be made a tensor in every call
        self.ops = weights.ops

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ops.rms_norm(hidden_states, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """The usual layer norm, with or without weight and bias."""

    def __init__(self, prefix: str, weights: Weights, size: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.size = (size,)
        self.weight = weights.get_tensor(f"{prefix}.weight", self.size) if affine else None
        self.bias = weights.get_tensor(f"{prefix}.bias", self.size) if affine else None
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(hidden_states, self.size, self.weight, self.bias, self.eps)
