"""Device-dependent copies, streams and allocations. CPU kernels use host memory; GPUs need pinned copies."""

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
    """Return an array as a tensor on `device`, copied through pinned memory for a GPU, or sharing memory on a CPU."""
    host = torch.from_numpy(column)
    return host if is_host(device) else host.pin_memory().to(device, non_blocking=True)


def columns_to_device(columns: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Sequence[torch.Tensor]:
    """Return several arrays of equal length as tensors on `device`, copied in one transfer."""
    return [torch.from_numpy(x) for x in columns] if is_host(device) else to_device(np.stack(columns), device).unbind()


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy host values into `target` without synchronizing."""
    target.copy_(values if target.is_cpu else values.pin_memory(), non_blocking=True)


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zero tensor. On a CPU, pages are allocated on first write (`torch.zeros` allocates all pages)."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if not is_host(device) or not num_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def make_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    """Return a new stream that starts after the work queued on the current stream, or None on a CPU."""
    if is_host(device):
        return None
    stream = torch.cuda.Stream(device, priority=priority)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def use_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Return a context manager that runs work on `stream`, or does nothing if `stream` is None."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
