"""Upload several small tensors to a device with one asynchronous copy."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from lorax_server.kernels.device import is_host

_ALIGNMENT = 8  # in bytes; the size of the largest element type


class BatchedUpload:
    """Collects tensors for one upload. `add` returns device tensors whose contents are valid after `send`."""

    def __init__(self, max_elements: int, device: torch.device) -> None:
        """Allocate memory for tensors with at most `max_elements` elements in total."""
        self._is_direct = is_host(device)
        self._num_used = 0
        if not self._is_direct:
            self._host = torch.empty(max_elements * _ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            self._sent = torch.empty_like(self._host, device=device)

    def add(self, values: Sequence[float] | npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=dtype)
        if self._is_direct:
            return tensor
        byte_range = slice(self._num_used, self._num_used + tensor.nbytes)
        self._host[byte_range] = tensor.view(torch.uint8)
        self._num_used = -(-byte_range.stop // _ALIGNMENT) * _ALIGNMENT
        return self._sent[byte_range].view(dtype)

    def send(self) -> None:
        if not self._is_direct:
            self._sent[: self._num_used].copy_(self._host[: self._num_used], non_blocking=True)
