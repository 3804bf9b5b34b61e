"""A matrix packed for oneDNN, which multiplies a batch by it up to twice as fast as by a plain one on a CPU.

A single row is faster with the plain matrix (`benchmarks/cpu_linear.py` has the figures), so both are kept.
"""

import torch


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch can pack, and packing pays there."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A packed copy of `[out, in]`, of use only to `packed_linear`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result
