"""Activations on a CPU. An element's result never depends on its position in the batch.

torch's vectorized functions do not guarantee this, because they compute the last elements of a tensor, or of a thread's
part of it, with other instructions.
"""

from collections.abc import Callable

import torch

from lorax_server.kernels.cpu.abi import ActivationKind
from lorax_server.kernels.cpu.library import DTYPES, Library
from lorax_server.kernels.ops import Activation

KINDS = {
    "gelu": ActivationKind.GELU,
    "gelu_tanh": ActivationKind.GELU_TANH,
    "quick_gelu": ActivationKind.QUICK_GELU,
    "relu": ActivationKind.RELU,
    "sigmoid": ActivationKind.SIGMOID,
    "silu": ActivationKind.SILU,
    "swish": ActivationKind.SILU,
}
# Torch's result is the same for every position, because each of its operations is exact or correctly rounded.
EXACT_IN_TORCH = ("linear", "leaky_relu", "relu2", "relu6")


class CpuActivations:
    """Activations that are not fused with a linear layer."""

    _library: Library

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation.name in EXACT_IN_TORCH:
            return activation(x)
        kind = KINDS.get(activation.name)
        if kind is None or x.dtype not in DTYPES:
            return apply_to_rows(activation.function, x)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._library.activate(DTYPES[x.dtype], kind, x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def apply_gate(self, x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
        """Return `activation(left) * right`, where left and right are the halves of `[rows, 2 * width]`."""
        rows, both = x.shape
        if both % 2:
            raise ValueError(f"a gate needs an even number of columns (got {both})")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(rows, both // 2, dtype=x.dtype)
        self._library.gate(DTYPES[x.dtype], kind, x.data_ptr(), x.stride(0), out.data_ptr(), rows, both // 2)
        return out


def apply_to_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Call a torch function for one row at a time, so that no row's result depends on other rows."""
    return torch.cat([function(row) for row in x.split(1)])
