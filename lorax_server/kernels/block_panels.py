"""The layout of quantized weights in the CPU kernels. Weights are stored in panels of outputs, with integers in groups
of four inputs.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.quantized import PACKED_INPUTS, BlockMatrix

SIGN_BITS = -0x7F7F7F80  # 0x80808080 as int32: adds 128 to four bytes


@dataclass(frozen=True)
class BlockFormat:
    """The storage format of `BlockPanels`: the layout of each block of 32 inputs in a panel."""

    bits: int
    block: int  # inputs per scale
    has_offsets: bool
    scale_dtype: torch.dtype  # float16 or float32, also for offsets
    width: int  # outputs per panel
    bias: int  # 0 or 128, added to stored 8-bit values

    @property
    def value_bytes(self) -> int:
        return self.width * PACKED_INPUTS * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        return self.width * (PACKED_INPUTS // self.block) * self.scale_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes * (1 + self.has_offsets)


@dataclass(frozen=True, eq=False)
class BlockPanels(StoredMatrix):
    """Rows `start` to `stop` of a `BlockMatrix`, stored as panels `[panels, inputs / 32, bytes]`.

    For each panel and 32 inputs, the bytes are the integers `[groups, width, 4]`, then the scales `[32 / block,
    width]`, then the offsets if the format has offsets. Values and input order are the same as in `BlockMatrix`: 4-bit
    values remain packed. The last panel is padded with zeros.
    """

    panels: torch.Tensor
    format: BlockFormat
    dtype: torch.dtype
    start: int
    stop: int

    @cached_property
    def shape(self) -> tuple[int, int]:  # cached, because layers read it in every step
        return self.stop - self.start, self.panels.shape[1] * PACKED_INPUTS

    @property
    def device(self) -> torch.device:
        return self.panels.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.panels,)

    def __getitem__(self, rows: slice) -> "BlockPanels":
        start, stop = self.find_range(rows)
        return replace(self, start=self.start + start, stop=self.start + stop)

    def look_up_rows(self, rows: torch.Tensor) -> torch.Tensor:
        self.check_rows(rows)
        numbers = rows.flatten() + self.start
        first, width = torch.div(numbers, self.format.width, rounding_mode="floor"), self.format.width
        wide = replace(self, panels=self.panels[first], start=0, stop=len(numbers) * width).to_blocks()
        selected = wide.select_rows(torch.arange(len(numbers)) * width + numbers % width)
        return selected.read().view(*rows.shape, self.shape[1])

    def read(self) -> torch.Tensor:
        return self.to_blocks().read()

    def to_blocks(self) -> BlockMatrix:
        """Return a copy as a `BlockMatrix` with the same integers, scales and offsets."""
        width = self.format.width
        first, last = self.start // width, -(-self.stop // width)
        rows = slice(self.start - first * width, self.stop - first * width)
        values, scales, offsets = _split_panels(self.panels[first:last], self.format)
        integers = _gather_rows(values, rows)
        if self.format.bits == 8:
            plain = (integers ^ SIGN_BITS if self.format.bias else integers).contiguous().view(torch.int8)
        else:
            plain = integers.contiguous().view(torch.uint8)
        scales = _gather_rows(scales, rows)
        offsets = None if offsets is None else _gather_rows(offsets, rows)
        return BlockMatrix(plain, scales, offsets, self.format.bits, self.dtype)


def to_block_panels(matrix: BlockMatrix, width: int, bias: int) -> BlockPanels:
    """Pack a quantized matrix without levels into panels of `width` outputs. `bias` (0 or 128) is added to 8-bit
    values.
    """
    outputs, inputs = matrix.shape
    matrix = matrix.convert(matrix.bits, min(matrix.block, PACKED_INPUTS))
    dtypes = {part.dtype for part in matrix.tensors[1:]}
    scale_dtype = torch.float16 if dtypes == {torch.float16} else torch.float32
    layout = BlockFormat(matrix.bits, matrix.block, matrix.offsets is not None, scale_dtype, width, bias)
    shape = (-(-outputs // width), inputs // PACKED_INPUTS, layout.num_bytes)
    panels = torch.zeros(shape, dtype=torch.uint8) if outputs % width else torch.empty(shape, dtype=torch.uint8)
    values, scales, offsets = _split_panels(panels, layout)
    _scatter_rows(matrix.values.view(torch.int32), values)
    _scatter_rows(matrix.scales, scales)
    if offsets is not None and matrix.offsets is not None:
        _scatter_rows(matrix.offsets, offsets)
    if bias and matrix.bits == 8:
        values.bitwise_xor_(SIGN_BITS)
    return BlockPanels(panels, layout, matrix.dtype, 0, outputs)


def _split_panels(
    panels: torch.Tensor, block_format: BlockFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return views of the integers (int32 groups), the scales and the offsets: `[panels, blocks, parts, width]`."""
    ends = (block_format.value_bytes, block_format.value_bytes + block_format.scale_bytes)
    values = panels[..., : ends[0]].view(torch.int32).unflatten(-1, (-1, block_format.width))
    scales = panels[..., ends[0] : ends[1]].view(block_format.scale_dtype).unflatten(-1, (-1, block_format.width))
    if not block_format.has_offsets:
        return values, scales, None
    return values, scales, panels[..., ends[1] :].view(block_format.scale_dtype).unflatten(-1, (-1, block_format.width))


def _gather_rows(panels: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return rows of `[panels, blocks, parts, width]` as `[rows, blocks * parts]`."""
    return panels.permute(0, 3, 1, 2).flatten(0, 1)[rows].flatten(1)


def _scatter_rows(rows: torch.Tensor, panels: torch.Tensor) -> None:
    """Copy rows `[outputs, blocks * parts]` to panels `[panels, blocks, parts, width]`."""
    _, blocks, parts, width = panels.shape
    whole = len(rows) // width
    panels[:whole] = rows[: whole * width].view(whole, width, blocks, parts).permute(0, 2, 3, 1)
    if rest := len(rows) - whole * width:
        panels[whole, :, :, :rest] = rows[whole * width :].view(rest, blocks, parts).permute(1, 2, 0)
