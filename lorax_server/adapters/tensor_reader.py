"""Reads adapter tensors from a file in large blocks instead of one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lorax_server.adapters.checkpoint import TensorInfo
from lorax_server.errors import AdapterError
from lorax_server.files.regular_file import FileChangedError, Stamp, open_regular_file

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
READ_BLOCK_BYTES = 8 * 2**20
_INFINITY_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}


class _ReadBlock:
    """Adjacent tensors with the same dtype, which are read together."""

    def __init__(self, dtype: str, start: int) -> None:
        self.dtype = DTYPES[dtype]
        self.start = self.stop = start
        self.keys: set[str] = set()  # tensors that were not returned yet
        self.elements: torch.Tensor | None = None  # None before the first tensor and after the last tensor is returned
        self.is_finite = False

    def read(self, path: Path, stamp: Stamp) -> torch.Tensor:
        """Return all elements in the block. The file is not memory-mapped, because truncating a mapped file would kill
        the process.
        """
        if self.elements is None:
            content = torch.empty(self.stop - self.start, dtype=torch.uint8)
            array: Any = content.numpy()
            with open_regular_file(path, stamp) as file:
                file.seek(self.start)
                if file.readinto(array) != len(array):
                    raise FileChangedError(0, "it was truncated")
            self.elements = content.view(self.dtype)
            self.is_finite = self.dtype is not torch.float64 and is_finite(self.elements)
        return self.elements


class TensorReader:
    """Reads tensors by name. A block stays in memory until each of its tensors has been read once."""

    def __init__(self, path: Path, stamp: Stamp, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self._stamp = stamp
        self._tensors = tensors
        self._blocks: dict[str, _ReadBlock] = {}
        current: _ReadBlock | None = None
        for key, info in sorted(tensors.items(), key=lambda item: item[1].start):
            size, dtype = info.stop - info.start, DTYPES[info.dtype]
            if current is None or current.dtype is not dtype or current.stop - current.start + size > READ_BLOCK_BYTES:
                current = _ReadBlock(info.dtype, info.start)
            current.stop = info.stop
            current.keys.add(key)
            self._blocks[key] = current

    def read(self, key: str) -> tuple[torch.Tensor, bool]:
        """Return a tensor in its stored dtype (float64 is converted to float32), and True if all elements are
        finite.
        """
        info, block = self._tensors[key], self._blocks[key]
        elements = block.read(self._path, self._stamp)
        first = (info.start - block.start) // elements.itemsize
        tensor = elements[first : first + (info.stop - info.start) // elements.itemsize].view(info.shape)
        if block.dtype is torch.float64:
            tensor = tensor.float()
        finite = block.is_finite or is_finite(tensor)
        block.keys.discard(key)
        if not block.keys:
            block.elements = None
        return tensor, finite


def describe_tensors(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, TensorInfo]:
    """Return the header that a file with these tensors would have. `name` is the adapter name."""
    infos, start = dict[str, TensorInfo](), 0
    for key, tensor in tensors.items():
        dtype = _DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise AdapterError(
                f"adapter {name!r}: tensor {key!r} is {tensor.dtype}; only float16 to float64 are supported"
            )
        infos[key] = TensorInfo(dtype, tuple(tensor.shape), start, start := start + tensor.nbytes)
    return infos


class MemoryReader:
    """Reads tensors that are already in memory, with the interface of `TensorReader`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, key: str) -> tuple[torch.Tensor, bool]:
        tensor = self._tensors[key]
        tensor = tensor.float() if tensor.dtype is torch.float64 else tensor
        return tensor, is_finite(tensor)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all elements are finite.

    The function compares bit patterns as integers, because they are ordered by magnitude. This is 20 times faster than
    `torch.isfinite` and uses one thread, so it does not compete with decode steps.
    """
    if not tensor.numel():
        return True
    bits, infinity = _INFINITY_BITS[tensor.dtype]
    elements: Any = tensor.view(bits).numpy()
    unsigned = elements.view(f"u{elements.itemsize}")
    sign = 1 << (8 * elements.itemsize - 1)  # negative floats are the largest unsigned integers
    return bool(elements.max() < infinity and unsigned.max() < sign + infinity)
