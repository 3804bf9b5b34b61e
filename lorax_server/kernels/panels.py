"""Matrices as the CPU's kernels read them: panels of outputs, each from front to back, in the narrowest exact dtype."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

TILE_INPUTS = 32  # inputs that one instruction multiplies, where they lie in pairs


@dataclass(frozen=True, eq=False)
class PanelMatrix:
    """Some rows of a matrix `[outputs, inputs]` that lies in panels `[panels, inputs, width]`, the last filled up.

    Or in panels of pairs of inputs, `[panels, inputs / 2, width, 2]`, which are filled up to a multiple of 32 inputs.
    """

    panels: torch.Tensor
    dtype: torch.dtype  # of what it is multiplied with; the panels may have a narrower one
    inputs: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @cached_property
    def shape(self) -> tuple[int, int]:
        return len(self), self.inputs

    @property
    def is_paired(self) -> bool:
        return self.panels.dim() == 4

    @property
    def device(self) -> torch.device:
        return self.panels.device

    def __getitem__(self, rows: slice) -> "PanelMatrix":
        first, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError("rows of panels are taken one after the other")
        return replace(self, start=self.start + first, stop=self.start + max(first, stop))

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some of these rows, by their numbers."""
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(f"a matrix of {len(self)} rows has no row {int(rows.min())} or {int(rows.max())}")
        rows, width = rows + self.start, self.panels.shape[2]
        found: torch.Tensor = self.panels[rows // width, :, rows % width]
        return found.flatten(rows.dim())[..., : self.inputs].to(self.dtype)

    def read(self) -> torch.Tensor:
        """Return these rows as a plain matrix."""
        width = self.panels.shape[2]
        first, last = self.start // width, -(-self.stop // width)
        rows = self.panels[first:last].transpose(1, 2).flatten(0, 1).flatten(1)
        return rows[self.start - first * width : self.stop - first * width, : self.inputs].to(self.dtype)


def cut_panels(weight: torch.Tensor, width: int, narrow_dtypes: Sequence[torch.dtype] = ()) -> PanelMatrix:
    """Return a copy of a matrix in panels. A float32 one that a narrow dtype holds exactly is stored so."""
    outputs, inputs = weight.shape
    filled = F.pad(narrow_exactly(weight, narrow_dtypes), (0, 0, 0, -outputs % width))
    panels = filled.view(-1, width, inputs).transpose(1, 2).contiguous()
    return PanelMatrix(panels, weight.dtype, inputs, 0, outputs)


def cut_pairs(weight: torch.Tensor, width: int) -> PanelMatrix:
    """Return a copy of a matrix in panels of pairs of inputs."""
    outputs, inputs = weight.shape
    filled = F.pad(weight, (0, -inputs % TILE_INPUTS, 0, -outputs % width))
    panels = filled.view(-1, width, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return PanelMatrix(panels, weight.dtype, inputs, 0, outputs)


def narrow_exactly(weight: torch.Tensor, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """Return the same float32 numbers in the first of some dtypes that holds them: a row takes as long as they are
    read."""
    for dtype in dtypes if weight.dtype == torch.float32 else ():
        narrow = weight.to(dtype)
        if torch.equal(narrow.float(), weight):
            return narrow
    return weight
