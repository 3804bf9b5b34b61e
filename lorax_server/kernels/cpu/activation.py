"""Gated activation of the native kernels, for gates that come from no single linear."""

from enum import IntEnum

import torch

from lorax_server.kernels.cpu.library import DTYPES, Library


class Gate(IntEnum):
    """Activations that the kernels know; `native/linear.h` has the same numbers."""

    SILU = 1
    GELU_TANH = 2


def open_gate(library: Library, x: torch.Tensor, kind: Gate) -> torch.Tensor:
    """Return `activation(left) * right` of the two halves of each row of `[rows, 2 * width]`."""
    rows, both = x.shape
    if both % 2:
        raise ValueError(f"{both} numbers have no two halves")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, both // 2, dtype=x.dtype)
    library.gate(DTYPES[x.dtype], kind, x.data_ptr(), x.stride(0), out.data_ptr(), rows, both // 2)
    return out
