"""The weight layout of the CPU kernels. Weights are stored in panels of outputs, in the narrowest dtype that
is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from lorax_server.kernels.matrix import StoredMatrix

TILE_INPUTS = 32  # inputs per AMX instruction in the paired layout
PACK_CHUNK_ELEMENTS = 2**20  # matrix elements to pack at a time, to limit temporary memory


@dataclass(frozen=True, eq=False)
class PanelMatrix(StoredMatrix):
    """Rows `start` to `stop` of the matrix `[outputs, inputs]`, stored as panels `[panels, inputs, width]`.

    The last panel is zero-padded. The paired layout for AMX is `[panels, inputs / 2, width, 2]`, where inputs are
    zero-padded to a multiple of 32.
    """

    panels: torch.Tensor
    dtype: torch.dtype  # dtype of the activations; the panels can have a narrower dtype
    inputs: int
    start: int
    stop: int

    @cached_property
    def shape(self) -> tuple[int, int]:  # cached, because layers read it in every step
        return self.stop - self.start, self.inputs

    @property
    def is_paired(self) -> bool:
        return self.panels.dim() == 4

    @property
    def device(self) -> torch.device:
        return self.panels.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.panels,)

    def __getitem__(self, rows: slice) -> "PanelMatrix":
        start, stop = self.find_range(rows)
        return replace(self, start=self.start + start, stop=self.start + stop)

    def look_up_rows(self, rows: torch.Tensor) -> torch.Tensor:
        self.check_rows(rows)
        rows, width = rows + self.start, self.panels.shape[2]
        selected: torch.Tensor = self.panels[rows // width, :, rows % width]
        return selected.flatten(rows.dim())[..., : self.inputs].to(self.dtype)

    def read(self) -> torch.Tensor:
        width = self.panels.shape[2]
        first, last = self.start // width, -(-self.stop // width)
        rows = self.panels[first:last].transpose(1, 2).flatten(0, 1).flatten(1)
        return rows[self.start - first * width : self.stop - first * width, : self.inputs].to(self.dtype)


def to_panels(weight: torch.Tensor, width: int, narrow_dtypes: Sequence[torch.dtype] = ()) -> PanelMatrix:
    """Pack a matrix into panels. A float32 matrix that a narrow dtype represents exactly is stored in that dtype,
    because narrow weights are read faster.
    """
    outputs, inputs = weight.shape
    for dtype in (*(narrow_dtypes if weight.dtype == torch.float32 else ()), weight.dtype):
        panels = torch.empty(-(-outputs // width), inputs, width, dtype=dtype)
        if all(_fill_panels(panels, weight, start) for start in range(0, len(panels), _panels_at_a_time(panels))):
            break
    return PanelMatrix(panels, weight.dtype, inputs, 0, outputs)


def _panels_at_a_time(panels: torch.Tensor) -> int:
    return max(1, PACK_CHUNK_ELEMENTS // max(1, panels[:1].numel()))


def _fill_panels(panels: torch.Tensor, weight: torch.Tensor, start: int) -> bool:
    """Fill some panels, starting at `start`. Return False if their dtype does not represent the weights exactly."""
    count, (_, inputs, width) = _panels_at_a_time(panels), panels.shape
    rows = weight[start * width : (start + count) * width]
    narrow = rows.to(panels.dtype)
    if narrow.dtype != rows.dtype and not torch.equal(narrow.to(rows.dtype), rows):
        return False
    filled = F.pad(narrow, (0, 0, 0, -len(rows) % width))
    panels[start : start + count] = filled.view(-1, width, inputs).transpose(1, 2)
    return True


def to_paired_panels(weight: torch.Tensor, width: int) -> PanelMatrix:
    """Pack a matrix into panels with paired inputs (the AMX layout)."""
    outputs, inputs = weight.shape
    padding = -inputs % TILE_INPUTS
    panels = torch.empty(-(-outputs // width), (inputs + padding) // 2, width, 2, dtype=weight.dtype)
    count = _panels_at_a_time(panels)
    for start in range(0, len(panels), count):
        rows = weight[start * width : (start + count) * width]
        filled = F.pad(rows, (0, padding, 0, -len(rows) % width))
        panels[start : start + count] = filled.view(-1, width, panels.shape[1], 2).transpose(1, 2)
    return PanelMatrix(panels, weight.dtype, inputs, 0, outputs)
