"""Copies, streams and allocations that depend on the device. CPU kernels use host memory, and copies to GPUs use pinned
memory.
"""

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def is_host(device: torch.device) -> bool:
    """Return True if kernels on `device` use host memory and run synchronously."""
    return device.type == "cpu"


def host_view(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """Return a host tensor as a NumPy array, or None for tensors on other devices."""
    return tensor.numpy() if tensor.is_cpu else None


def to_device(column: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on `device`. For a GPU, the array is copied through pinned memory. On a CPU, the
    tensor shares its memory.
    """
    host = torch.from_numpy(column)
    return host if is_host(device) else host.pin_memory().to(device, non_blocking=True)


def columns_to_device(columns: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Sequence[torch.Tensor]:
    """Return several arrays of equal length as tensors on `device`. For a GPU, one transfer copies all arrays."""
    return [torch.from_numpy(x) for x in columns] if is_host(device) else to_device(np.stack(columns), device).unbind()


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy host values into `target` without synchronizing."""
    target.copy_(values if target.is_cpu else values.pin_memory(), non_blocking=True)


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zero tensor. On a CPU, memory pages are allocated when they are first written, unlike with
    `torch.zeros`.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if not is_host(device) or not num_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def make_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """Return a new stream, which waits for the work that is queued on the current stream. Return None on a CPU."""
    if is_host(device):
        return None
    stream = torch.cuda.Stream(device, priority=priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Return a context manager that runs work on `stream`, or does nothing if `stream` is None."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
