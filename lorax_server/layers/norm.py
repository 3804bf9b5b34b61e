"""Norms, in front of which a residual may be added."""

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.distributed import whole
from lorax_server.weights import Weights


class RMSNorm(nn.Module):
    """Add the residual, if there is one, and normalise the sum; return both."""

    def __init__(self, prefix: str, weights: Weights, size: int, eps: float = 1e-6, adaptable: bool = True) -> None:
        super().__init__()
        self.weight = weights.get_tensor(f"{prefix}.weight", (size,))
        self.eps = torch.tensor(eps, device=weights.device)  # torch would make a tensor of a number in every call
        self.ops = weights.ops
        self.targets = (_norm_target(prefix, size, self.weight, None),) if adaptable else ()

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

    def __init__(self, prefix: str, weights: Weights, size: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.weight = weights.get_tensor(f"{prefix}.weight", (size,)) if affine else None
        self.bias = weights.get_tensor(f"{prefix}.bias", (size,)) if affine else None
        self.eps = eps
        self.ops = weights.ops
        self.targets = (_norm_target(prefix, size, self.weight, self.bias),)

    def forward(self, hidden_states: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        if adapter_data is None:
            return self.ops.layer_norm(hidden_states, self.weight, self.bias, self.eps)
        lora, targets = adapter_data.lora, adapter_data.find(self.targets)
        return self.ops.layer_norm(hidden_states, self.weight, self.bias, self.eps, lora, targets)


def _norm_target(name: str, size: int, weight: torch.Tensor | None, bias: torch.Tensor | None) -> AdapterTarget:
    return AdapterTarget(name, Kind.NORM, whole(size), whole(size), slice(0, size), weight, bias)
