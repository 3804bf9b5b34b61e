"""One number in [0, 1) for each (seed, position), the same on every device and in every batch."""

import torch

# The multipliers of splitmix64, as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return [rows] float64 from int64 seeds and positions. 32 bits, so that no product with a sum rounds up to it."""
    bits = _mix(_mix(seeds + _STEP) + (positions + 1) * _STEP)
    return _shift(bits, 32).double() / 2**32


def as_signed(seed: int) -> int:
    """Return the int64 with the bits of a seed below 2**64."""
    return seed - 2**64 if seed >= 2**63 else seed


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right; `>>` alone would repeat the sign."""
    return (x >> bits).bitwise_and(2 ** (64 - bits) - 1)
