"""`StoredMatrix`, a weight matrix that is not stored as a plain tensor.

Layers, models and adapters use only this class. Its subclasses are kernel layouts and quantized formats.
"""

from abc import ABC, abstractmethod
from typing import Self

import torch


class StoredMatrix(ABC):
    """A matrix `[outputs, inputs]` in a kernel's layout or in a quantized format."""

    dtype: torch.dtype  # dtype of the activations, and of the rows that `read` returns

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that store the matrix, for example to count its memory."""

    @abstractmethod
    def __getitem__(self, rows: slice) -> Self:
        """Return consecutive rows without a copy."""

    @abstractmethod
    def look_up_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the matrix rows with the given indices. Raise `IndexError` for indices outside the matrix."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the whole matrix as a contiguous tensor of `dtype`."""

    def __len__(self) -> int:
        return self.shape[0]

    def check_rows(self, rows: torch.Tensor) -> None:
        """Raise `IndexError` if an index is outside the matrix. On GPUs, `index_select` reports it asynchronously."""
        if not rows.is_cuda and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(f"row indices must be in [0, {len(self)}) (got {int(rows.min())} to {int(rows.max())})")

    def find_range(self, rows: slice) -> tuple[int, int]:
        """Return the start and stop of a slice with step 1."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError(f"a {type(self).__name__} slice must have step 1")
        return start, max(start, stop)
