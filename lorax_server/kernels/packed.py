"""A matrix packed for oneDNN, which multiplies a batch by it up to twice as fast as by a plain one on a CPU.

A single row is faster with the plain matrix, so both are kept.

oneDNN builds a kernel for every number of rows that it meets, which takes longer than to run it, and keeps a thousand
kernels: hundreds of megabytes where they are machine code. Steps have any number of tokens, so rows are filled up to
one of a few numbers. The result of a row does not depend on the rows below it.
"""

import torch
import torch.nn.functional as F

STRETCH = 256
# (most rows, multiple to fill up to). 46 numbers are left, and no batch becomes a fifth longer.
STEPS = ((16, 1), (48, 4), (96, 8), (192, 16), (2 * STRETCH, 32))


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this build of torch can pack, and packing pays there."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a packed copy of `[out, in]`, of use only to `packed_linear`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # Many rows go through in stretches that stay in the cache: 3 to 8 % faster, the copy at the end included.
    if len(x) > 2 * STRETCH:
        return torch.cat([_multiply(rows, packed, bias) for rows in x.split(STRETCH)])
    return _multiply(x, packed, bias)


def filled_up(rows: int) -> int:
    """Return the number of rows, `2 * STRETCH` at most, that `rows` are filled up to."""
    step = next(step for most, step in STEPS if rows <= most)
    return -(-rows // step) * step


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = len(x)
    missing = filled_up(rows) - rows
    filled = F.pad(x, (0, 0, 0, missing)) if missing else x
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled, packed, bias, "none", [], "")
    return result[:rows] if missing else result
