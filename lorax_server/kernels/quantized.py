"""Quantized weight matrices. Each format has a class. Its `read` method returns the exact weights, for reference.

Layers treat these matrices like tensors: they slice, shard and concatenate them, and `Ops.make_linear` chooses the
layout for the kernels.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F

from lorax_server.kernels.matrix import StoredMatrix

PACKED_INPUTS = 32  # inputs per group of packed 4-bit values
MIN_BLOCK = 16  # inputs per scale
READ_CHUNK_ELEMENTS = 2**22  # matrix elements to decode at a time, to limit temporary memory
MIN_FLOAT8_SCALE = 1e-30  # smaller scales lose accuracy
MAX_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


class QuantizedMatrix(StoredMatrix):
    """A quantized matrix as loaded from a checkpoint, before `Ops.make_linear` converts it for the kernels."""

    rounds_inputs: bool = False  # if True, products round activations, too (see `round_rows`)

    @property
    @abstractmethod
    def has_levels(self) -> bool:
        """Return True if the values are indices into a table of numbers."""

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return a copy on a device, or this matrix if it is there already."""

    @abstractmethod
    def select_rows(self, rows: torch.Tensor) -> Self:
        """Return a copy that contains the given rows in this order."""

    @abstractmethod
    def select_inputs(self, start: int, stop: int) -> Self:
        """Return a copy that contains the inputs `start` to `stop`. Raise `ValueError` if this range splits a
        quantization block.
        """

    @abstractmethod
    def pad_rows(self, count: int) -> Self:
        """Return a copy with `count` additional rows of zeros."""

    @classmethod
    @abstractmethod
    def concat(cls, matrices: Sequence[Self]) -> Self:
        """Return one matrix with the rows of all matrices."""


@dataclass(frozen=True, eq=False)
class BlockMatrix(QuantizedMatrix):
    """A matrix of 8-bit or 4-bit values with a scale per block of consecutive inputs.

    Without `levels`, the values are integers. With 8 bits, a weight is `scale * value + offset`. With 4 bits, it is
    `scale * (value - 8)` without offsets and `scale * value + offset` with offsets, where values are 0 to 15. With
    `levels`, a weight is `scale * levels[value]`. This is how 8-bit floats, nf4 and fp4 are stored.

    In each group of 32 inputs, 4-bit byte `i` holds input `i` in its low bits and input `i + 16` in its high bits. All
    GGUF types can be stored exactly.
    """

    values: torch.Tensor  # 8 bits: int8, or uint8 with levels, [outputs, inputs]; 4 bits: uint8 [outputs, inputs / 2]
    scales: torch.Tensor  # [outputs, inputs / block], float16 or float32
    offsets: torch.Tensor | None  # like `scales`; None with levels
    bits: int  # 4 or 8
    dtype: torch.dtype
    levels: torch.Tensor | None = None  # [2 ** bits] float32
    rounds_inputs: bool = False

    def __post_init__(self) -> None:
        is_whole = self.block == MIN_BLOCK or self.block % PACKED_INPUTS == 0
        if self.bits not in (4, 8) or not is_whole or not self.block or self.inputs % PACKED_INPUTS:
            raise ValueError(
                f"blocks of {self.block} {self.bits}-bit values with {self.inputs} inputs are not supported"
            )

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * (8 // self.bits)

    @property
    def block(self) -> int:
        """Return the number of inputs per scale."""
        return self.inputs // self.scales.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.inputs

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values, self.scales) if self.offsets is None else (self.values, self.scales, self.offsets)

    @property
    def has_levels(self) -> bool:
        return self.levels is not None

    def to(self, device: torch.device) -> Self:
        parts = {name: getattr(self, name) for name in ("values", "scales", "offsets", "levels")}
        return replace(self, **{name: each.to(device) for name, each in parts.items() if each is not None})

    def __getitem__(self, rows: slice) -> Self:
        start, stop = self.find_range(rows)
        offsets = None if self.offsets is None else self.offsets[start:stop]
        return replace(self, values=self.values[start:stop], scales=self.scales[start:stop], offsets=offsets)

    def select_rows(self, rows: torch.Tensor) -> Self:
        self.check_rows(rows)
        rows = rows.to(self.device)
        values, scales = self.values.index_select(0, rows), self.scales.index_select(0, rows)
        offsets = None if self.offsets is None else self.offsets.index_select(0, rows)
        return replace(self, values=values, scales=scales, offsets=offsets)

    def select_inputs(self, start: int, stop: int) -> Self:
        if start % PACKED_INPUTS or stop % PACKED_INPUTS:
            raise ValueError(f"inputs {start} to {stop} split a block of {PACKED_INPUTS} quantized weights")
        matrix = self.convert(self.bits, math.gcd(self.block, start, stop))
        packed = slice(start * self.bits // 8, stop * self.bits // 8)
        blocks = slice(start // matrix.block, stop // matrix.block)
        offsets = None if matrix.offsets is None else matrix.offsets[:, blocks].contiguous()
        values, scales = self.values[:, packed].contiguous(), matrix.scales[:, blocks].contiguous()
        return replace(self, values=values, scales=scales, offsets=offsets)

    def pad_rows(self, count: int) -> Self:
        values, scales = (F.pad(each, (0, 0, 0, count)) for each in (self.values, self.scales))
        offsets = None if self.offsets is None else F.pad(self.offsets, (0, 0, 0, count))
        return replace(self, values=values, scales=scales, offsets=offsets)

    @classmethod
    def concat(cls, matrices: Sequence[Self]) -> Self:
        """Return one matrix with the rows of all matrices, which have the same levels. Different formats are converted
        to a common format without loss.
        """
        if len(matrices) == 1:
            return matrices[0]
        bits, block = max(each.bits for each in matrices), math.gcd(*(each.block for each in matrices))
        matrices = [each.convert(bits, block) for each in matrices]
        offsets = None
        if any(each.offsets is not None for each in matrices):
            offsets = torch.cat([each._get_offsets() for each in matrices])
            matrices = [each.convert(8, block) if each.offsets is None else each for each in matrices]
            matrices = [each.convert(max(each.bits for each in matrices), block) for each in matrices]
        scales = [each.scales for each in matrices]
        if len({each.dtype for each in scales}) > 1:
            scales = [each.float() for each in scales]
        values = torch.cat([each.values for each in matrices])
        return replace(matrices[0], values=values, scales=torch.cat(scales), offsets=offsets, bits=matrices[0].bits)

    def look_up_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.select_rows(rows.flatten()).read().view(*rows.shape, self.inputs)

    def read(self) -> torch.Tensor:
        count = _count_rows(self)
        if len(self) <= count:
            return self._decode().to(self.dtype)
        weights = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for start in range(0, len(self), count):
            weights[start : start + count] = self[start : start + count]._decode()
        return weights

    def _decode(self) -> torch.Tensor:
        """Return all weights in float32."""
        shape = (len(self), self.scales.shape[1], self.block)
        values = self.unpack()
        decoded = values.float() if self.levels is None else self.levels.index_select(0, values.flatten().int())
        weights = decoded.view(shape).mul_(self.scales.float()[..., None])
        if self.offsets is not None:
            weights += self.offsets.float()[..., None]
        return weights.view(self.shape)

    def unpack(self) -> torch.Tensor:
        """Return the integers as int8 `[outputs, inputs]`, or the indices of levels as uint8. Without offsets, 4-bit
        integers are -8 to 7.
        """
        if self.bits == 8:
            return self.values
        packed = self.values.view(len(self), self.inputs // PACKED_INPUTS, PACKED_INPUTS // 2)
        values = torch.stack([packed & 15, packed >> 4], dim=2).view(self.shape)
        if self.levels is not None:
            return values
        integers = values.view(torch.int8)
        return integers - 8 if self.offsets is None else integers

    def convert(self, bits: int, block: int) -> Self:
        """Convert integers to more bits, or to smaller blocks, without loss."""
        if (bits, block) == (self.bits, self.block):
            return self
        repeats = self.block // block
        values = self.unpack() if bits == 8 else self.values
        scales = self.scales.repeat_interleave(repeats, dim=1)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(repeats, dim=1)
        return replace(self, values=values, scales=scales, offsets=offsets, bits=bits)

    def _get_offsets(self) -> torch.Tensor:
        return torch.zeros_like(self.scales, dtype=torch.float32) if self.offsets is None else self.offsets.float()


@dataclass(frozen=True, eq=False)
class ReorderedMatrix(QuantizedMatrix):
    """A quantized matrix that is stored with its inputs in another order, in which each group is consecutive.

    `read` and `look_up_rows` return the original order of the inputs. A product is `x[:, order] @ matrix.T`.
    """

    matrix: StoredMatrix  # a `BlockMatrix` as loaded from a checkpoint, or the layout from `Ops.make_linear`
    order: torch.Tensor  # int64 [inputs]: the original index of each stored input

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.matrix.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.matrix.tensors, self.order)

    @property
    def has_levels(self) -> bool:
        return self.blocks.has_levels

    @property
    def blocks(self) -> BlockMatrix:
        assert isinstance(self.matrix, BlockMatrix)
        return self.matrix

    def to(self, device: torch.device) -> Self:
        return replace(self, matrix=self.blocks.to(device), order=self.order.to(device))

    def __getitem__(self, rows: slice) -> Self:
        return replace(self, matrix=self.matrix[rows])

    def select_rows(self, rows: torch.Tensor) -> Self:
        return replace(self, matrix=self.blocks.select_rows(rows))

    def select_inputs(self, start: int, stop: int) -> Self:
        raise ValueError(f"inputs {start} to {stop} are stored in another order")

    def pad_rows(self, count: int) -> Self:
        return replace(self, matrix=self.blocks.pad_rows(count))

    @classmethod
    def concat(cls, matrices: Sequence[Self]) -> Self:
        """Return one matrix with the rows of all matrices, which have the same order of inputs."""
        return replace(matrices[0], matrix=BlockMatrix.concat([each.blocks for each in matrices]))

    def look_up_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.matrix.look_up_rows(rows).index_select(-1, self.order.argsort())

    def read(self) -> torch.Tensor:
        weights, count = torch.empty(self.shape, dtype=self.dtype, device=self.device), _count_rows(self)
        for start in range(0, len(self), count):  # in chunks, to limit temporary memory
            weights[start : start + count].index_copy_(1, self.order, self.matrix[start : start + count].read())
        return weights


def _count_rows(matrix: QuantizedMatrix) -> int:
    """Return the number of rows to decode at a time."""
    return max(1, READ_CHUNK_ELEMENTS // matrix.shape[1])


def concat_matrices(matrices: Sequence[torch.Tensor | QuantizedMatrix]) -> torch.Tensor | QuantizedMatrix:
    """Return one matrix with the rows of all matrices. It is quantized if all matrices are quantized and have the same
    levels and the same order of inputs.
    """
    reordered = [each for each in matrices if isinstance(each, ReorderedMatrix)]
    if len(reordered) == len(matrices) and all(torch.equal(each.order, reordered[0].order) for each in reordered):
        return ReorderedMatrix.concat(reordered)
    quantized = [each for each in matrices if isinstance(each, BlockMatrix)]
    if len(quantized) == len(matrices) and all(is_same_table(each.levels, quantized[0].levels) for each in quantized):
        return BlockMatrix.concat(quantized)
    tensors = [each.read() if isinstance(each, QuantizedMatrix) else each for each in matrices]
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)


def float8_levels(device: torch.device, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Return the values of all bytes as 8-bit floats."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).float()


def is_same_table(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Return True if two tables of levels contain the same bits, or if both are None."""
    if first is None or second is None or first is second:
        return first is second
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def pack_4_bits(values: torch.Tensor) -> torch.Tensor:
    """Pack values from 0 to 15, uint8 `[outputs, inputs]`, in the order of `BlockMatrix`."""
    halves: torch.Tensor = values.unflatten(1, (-1, 2, PACKED_INPUTS // 2))
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def quantize_blocks(weight: torch.Tensor, bits: int, block: int = 32) -> BlockMatrix:
    """Quantize a matrix symmetrically in blocks, like the GGUF types Q8_0 and Q4_0. Scales are rounded to float16."""
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs, -1, block)
    if bits == 8:
        scales = blocks.abs().amax(-1) / 127
    else:  # the value with the largest magnitude becomes -8
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = largest / -8
    inverse = torch.where(scales == 0, 0, 1 / scales)
    values = (blocks * inverse[..., None]).view(outputs, inputs)
    if bits == 8:
        whole = values.trunc()
        packed = (whole + (2 * (values - whole)).trunc()).to(torch.int8)  # rounds halves away from zero, as GGUF does
    else:
        packed = pack_4_bits((values + 8.5).clamp(0, 15).to(torch.uint8))
    return BlockMatrix(packed, scales.to(torch.float16), None, bits, weight.dtype)


def quantize_float8(weight: torch.Tensor, block: int) -> BlockMatrix:
    """Round a matrix to 8-bit floats (e4m3fn) with a float32 scale per block."""
    blocks = weight.float().unflatten(1, (-1, block))
    scales = (blocks.abs().amax(-1) / MAX_FLOAT8).clamp(min=MIN_FLOAT8_SCALE)
    values = (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(weight.shape)
    return BlockMatrix(values.view(torch.uint8), scales, None, 8, weight.dtype, float8_levels(weight.device))


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round activations to 8-bit floats (e4m3fn). Return the values, and a float32 scale per row `[rows, 1]`."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=MAX_FLOAT8 * MIN_FLOAT8_SCALE)
    return (wide * (MAX_FLOAT8 / largest)).to(torch.float8_e4m3fn), largest / MAX_FLOAT8


def round_inputs(x: torch.Tensor) -> torch.Tensor:
    """Return activations that are rounded to 8-bit floats, in their original dtype."""
    values, scales = round_rows(x)
    return (values.float() * scales).to(x.dtype)
