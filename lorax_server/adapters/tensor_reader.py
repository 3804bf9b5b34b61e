"""Tensors of an adapter's file, read in long stretches: hundreds of tensors take a few calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lorax_server.adapters.checkpoint import TensorInfo
from lorax_server.files.plain_file import ChangedError, Stamp, open_plain

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STRETCH_BYTES = 8 * 2**20
_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}


class _Stretch:
    """Tensors that follow one another in a file, and are of one dtype."""

    def __init__(self, dtype: str, start: int) -> None:
        self.dtype = DTYPES[dtype]
        self.start = self.stop = start
        self.keys: set[str] = set()  # of those that were not read yet
        self.numbers: torch.Tensor | None = None  # while some were not
        self.is_finite = False

    def read(self, path: Path, stamp: Stamp) -> torch.Tensor:
        """Read all numbers. They are not mapped: a mapped file that becomes shorter kills the process."""
        if self.numbers is None:
            content = torch.empty(self.stop - self.start, dtype=torch.uint8)
            array: Any = content.numpy()
            with open_plain(path, stamp) as file:
                file.seek(self.start)
                if file.readinto(array) != len(array):
                    raise ChangedError(0, "it is cut short")
            self.numbers = content.view(self.dtype)
            self.is_finite = self.dtype is not torch.float64 and is_finite(self.numbers)
        return self.numbers


class TensorReader:
    """Reads tensors of a file by their names. A stretch is kept until each of its tensors was read once."""

    def __init__(self, path: Path, stamp: Stamp, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self._stamp = stamp
        self._tensors = tensors
        self._stretches: dict[str, _Stretch] = {}
        last: _Stretch | None = None
        for key, info in sorted(tensors.items(), key=lambda item: item[1].start):
            size, dtype = info.stop - info.start, DTYPES[info.dtype]
            if last is None or last.dtype is not dtype or last.stop - last.start + size > STRETCH_BYTES:
                last = _Stretch(info.dtype, info.start)
            last.stop = info.stop
            last.keys.add(key)
            self._stretches[key] = last

    def read(self, key: str) -> tuple[torch.Tensor, bool]:
        """Return a tensor as the file has it, float64 as float32, and whether all of its numbers are finite."""
        info, stretch = self._tensors[key], self._stretches[key]
        numbers = stretch.read(self._path, self._stamp)
        first = (info.start - stretch.start) // numbers.itemsize
        tensor = numbers[first : first + (info.stop - info.start) // numbers.itemsize].view(info.shape)
        if stretch.dtype is torch.float64:
            tensor = tensor.float()
        finite = stretch.is_finite or is_finite(tensor)
        stretch.keys.discard(key)
        if not stretch.keys:
            stretch.numbers = None
        return tensor, finite


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether all numbers are finite, by their bits: as whole numbers they have the order of their magnitudes.

    Twenty times faster than `isfinite`, and on this thread alone: others have steps to run.
    """
    if not tensor.numel():
        return True
    bits, infinity = _BITS[tensor.dtype]
    numbers: Any = tensor.view(bits).numpy()
    unsigned = numbers.view(f"u{numbers.itemsize}")
    sign = 1 << (8 * numbers.itemsize - 1)  # which all negative ones have, and so are above all others
    return bool(numbers.max() < infinity and unsigned.max() < sign + infinity)
