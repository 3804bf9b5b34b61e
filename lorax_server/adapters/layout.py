"""The tensors of an adapter, one after the other in one buffer, as they lie on the device."""

from collections.abc import Callable

import torch

COPIED_NUMBERS = 16384  # of a transposed matrix at a time: they fit into the nearest cache


class BufferLayout:
    """Tensors one after the other, each from the beginning of a unit."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.end = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Append a tensor. Return its offset, -1 if it is empty."""
        if tensor.numel() == 0:
            return -1
        offset = self.end
        self.tensors.append((offset, tensor))
        self.end += -(-tensor.numel() // self.unit) * self.unit
        return offset

    def fill(self, dtype: torch.dtype, pause: Callable[[], object]) -> torch.Tensor:
        buffer, stop = torch.empty(max(self.end, self.unit), dtype=dtype), max(self.end, self.unit)
        while self.tensors:  # each is freed once it is copied
            pause()
            offset, tensor = self.tensors.pop()
            end = offset + tensor.numel()
            _copy(tensor, buffer[offset:end].view(tensor.shape))
            if end < stop:
                buffer[end:stop] = 0
            stop = offset
        buffer[:stop] = 0
        return buffer


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor of the same dtype on this thread alone: others have steps to run. Transposed ones, half of an
    adapter, go a few rows at a time: several times faster than all at once."""
    bits = torch.int16 if source.itemsize == torch.int16.itemsize else torch.int32
    old, new = source.view(bits).numpy(), target.view(bits).numpy()
    count = source.numel()
    if source.dim() == 2 and not source.is_contiguous():
        count = max(1, COPIED_NUMBERS // len(source))
    for start in range(0, source.shape[-1], count):
        new[..., start : start + count] = old[..., start : start + count]
