"""Differences between a CPU, whose kernels use the host's memory, and a GPU, which the host sends copies to."""

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def is_host(device: torch.device) -> bool:
    """Return True if the kernels of a device use the host's memory, and a call returns when its work is done."""
    return device.type == "cpu"


def host_view(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """Return a tensor in the host's memory as an array; None on other devices."""
    return tensor.numpy() if tensor.is_cpu else None


def to_device(column: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy to a device. To a GPU this takes pinned memory, or the host would wait; a CPU has the memory already."""
    host = torch.from_numpy(column)
    return host if is_host(device) else host.pin_memory().to(device, non_blocking=True)


def columns_to_device(columns: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Sequence[torch.Tensor]:
    """Copy several columns of one length at once."""
    return [torch.from_numpy(x) for x in columns] if is_host(device) else to_device(np.stack(columns), device).unbind()


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write values of the host to a device without waiting for it."""
    target.copy_(values if target.is_cpu else values.pin_memory(), non_blocking=True)


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU the system gives a page when it is first written: `torch.zeros` writes all of them."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if not is_host(device) or not num_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def make_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """Return a stream for work beside the current stream, after the current stream's work so far; None on a CPU."""
    if is_host(device):
        return None
    stream = torch.cuda.Stream(device, priority=priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Run what follows on a stream, if there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
