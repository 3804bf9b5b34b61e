"""Counter-based random numbers in [0, 1). Each number depends only on seed and position, not on device or batch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

# splitmix64 constants as signed integers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def draw_uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return random numbers in [0, 1) for int64 seeds and positions, as float64 `[rows]`.

    The numbers have only 32 random bits, so that `uniform * total < total` in float64.
    """
    bits = _mix(_mix(seeds + _STEP) + (positions + 1) * _STEP)
    return _shift(bits, 32).double() / 2**32


class HostUniforms:
    """Computes `draw_uniforms` for fixed seeds in numpy, which is faster than torch for small batches."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._mixed = _mix_unsigned(np.array(seeds, np.uint64) + np.uint64(_STEP + 2**64))

    def draw_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        steps = (positions + 1).astype(np.uint64) * np.uint64(_STEP + 2**64)
        numbers: npt.NDArray[np.float64] = (_mix_unsigned(self._mixed + steps) >> np.uint64(32)) / 2.0**32
        return numbers


def as_signed(seed: int) -> int:
    """Return an unsigned 64-bit seed reinterpreted as int64."""
    return seed - 2**64 if seed >= 2**63 else seed


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _mix_unsigned(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1 + 2**64)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2 + 2**64)
    return x ^ (x >> np.uint64(31))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical right shift of `x`, because `>>` is an arithmetic shift."""
    return (x >> bits).bitwise_and(2 ** (64 - bits) - 1)
