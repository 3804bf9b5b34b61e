"""Small tensors that reach a device by one copy, for which the host need not wait."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from lorax_server.kernels.device import is_host

_ALIGNMENT = 8  # the size of the largest numbers


class Upload:
    """Tensors are added one by one, and have their contents once all are sent."""

    def __init__(self, num_numbers: int, device: torch.device) -> None:
        """`num_numbers` is the most that will be added."""
        self._is_direct = is_host(device)
        self._num_used = 0
        if not self._is_direct:
            self._host = torch.empty(num_numbers * _ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            self._sent = torch.empty_like(self._host, device=device)

    def add(self, values: Sequence[float] | npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=dtype)
        if self._is_direct:
            return tensor
        place = slice(self._num_used, self._num_used + tensor.nbytes)
        self._host[place] = tensor.view(torch.uint8)
        self._num_used = -(-place.stop // _ALIGNMENT) * _ALIGNMENT
        return self._sent[place].view(dtype)

    def send(self) -> None:
        if not self._is_direct:
            self._sent[: self._num_used].copy_(self._host[: self._num_used], non_blocking=True)
