"""Read matrices in MXFP4, the format of gpt-oss: 4-bit floats in blocks of 32 inputs that share a power of two."""

import torch

BLOCK_SIZE = 32
# All 16 values of a 4-bit float with two exponent bits and one mantissa bit.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the matrix `[outputs, inputs]` in bfloat16, which represents all values exactly.

    `blocks` is uint8 `[outputs, inputs / 32, 16]` with two values per byte, the lower four bits first. `scales` is
    uint8 `[outputs, inputs / 32]`.
    """
    table = torch.tensor(FP4_VALUES, dtype=torch.float32, device=blocks.device)
    pairs = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], dim=-1)
    exponents = scales.int()[..., None] - EXPONENT_BIAS
    return torch.ldexp(pairs.flatten(-2), exponents).bfloat16().flatten(1)
