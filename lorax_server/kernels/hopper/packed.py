"""Quantized matrices in the layout of `quantized_product.cu`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lorax_server.kernels.hopper.arguments import (
    COMPUTE_THREADS,
    LEVEL_WORDS,
    DequantizeArgs,
    QuantizedWeights,
    UnpackArgs,
)
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.sources import CUDA_TYPES, DequantizeVariant, PackedFormat, UnpackVariant
from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.quantized import BlockMatrix, float8_levels, is_same_table

TILE, STEP, PART = 128, 128, 32  # columns and inputs per record, inputs per part
PACK_ROWS = 4096  # rows that are packed at a time
MIN_ROWS = 8  # the number of rows must be a multiple of this number
SLAB = 64  # inputs per slab of activations
NAN_BITS = 0x7F  # of 8-bit floats
MAX_ZERO = 128  # larger zero points are not exact in bfloat16
RESCALE = {torch.bfloat16: 64.0, torch.float16: 512.0}  # integers are scaled by the inverse (see CUDA)
FLOAT8_ROWS = PackedFormat("float8", 1, has_float_scales=True, shift="none")
LEVEL_FACTORS = 512  # factors that are tried when levels are rounded to 16 bits


class Levels(NamedTuple):
    """16 levels, rounded to 16-bit floats, and the factor by which they were multiplied to reduce rounding errors."""

    words: tuple[int, ...]
    factor: float


@dataclass(frozen=True, eq=False)
class PackedMatrix(StoredMatrix):
    """Rows `start` to `stop` of a packed matrix."""

    records: torch.Tensor  # uint8 [padded rows / 128, padded inputs / 128, bytes]
    format: PackedFormat
    words: tuple[int, ...]  # levels, two per word
    start: int
    stop: int
    inputs: int
    dtype: torch.dtype
    kernels: Kernels | None  # None on a CPU, in tests

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.inputs

    @property
    def device(self) -> torch.device:
        return self.records.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.records,)

    @property
    def argument(self) -> QuantizedWeights:
        """Return the kernel argument. The kernels read columns from `start`, which must be a multiple of 128."""
        assert self.start % TILE == 0
        return QuantizedWeights(self.records[self.start // TILE].data_ptr(), LEVEL_WORDS(*self.words))

    def __getitem__(self, rows: slice) -> "PackedMatrix":
        start, stop = self.find_range(rows)
        return replace(self, start=self.start + start, stop=self.start + stop)

    def read(self) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if not out.numel():
            return out
        assert self.kernels is not None
        weights = QuantizedWeights(self.records.data_ptr(), LEVEL_WORDS(*self.words))
        args = DequantizeArgs(weights, out.data_ptr(), self.start, *self.shape)
        num_tiles = -(-self.stop // TILE) - self.start // TILE
        kernel = self.kernels.get(DequantizeVariant(self.dtype, self.format))
        kernel.launch(num_tiles * self.records.shape[1], COMPUTE_THREADS, [args], early=False)
        return out

    def unpack_float8(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of a matrix with one float32 scale per row, as 8-bit floats, and these scales."""
        assert self.format == FLOAT8_ROWS
        assert self.kernels is not None
        values = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=self.device)
        scales = torch.empty(len(self), dtype=torch.float32, device=self.device)
        args = UnpackArgs(self.argument.records, values.data_ptr(), scales.data_ptr(), *self.shape)
        blocks = -(-len(self) // TILE) * self.records.shape[1]
        self.kernels.get(UnpackVariant()).launch(blocks, COMPUTE_THREADS, [args], early=False)
        return values, scales

    def look_up_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Dequantize rows with torch. The result equals these rows of `read`."""
        self.check_rows(rows)
        held = torch.arange(self.start, self.stop, device=self.device)
        indices = held.index_select(0, rows.flatten().to(self.device))  # reports indices outside the matrix
        tile, within = indices // TILE, indices % TILE
        half = within // 8 % 2  # columns `c` and `c + 8` of a tile of 16 are stored together
        packed, num_bytes = self.format, self.format.weight_bytes
        lanes = self.records[..., :num_bytes].unflatten(2, (8, 4, 8, 4, -1))
        lanes = lanes[tile, :, within // 16, :, within % 8]  # [rows, step, part, lane, byte]
        half_of_lane = half.view(-1, 1, 1, 1, 1, 1, 1)
        if packed.kind == "int4":
            lanes = lanes.unflatten(-1, (2, 2, 2)).transpose(-1, -2)  # [..., 16 inputs, upper half, element]
            codes = lanes >> (4 * half_of_lane) & 15
        elif packed.kind == "levels4":
            lanes = lanes.unflatten(-1, (2, 2, 2))
            lanes = lanes.gather(-1, half_of_lane.expand(*lanes.shape[:-1], 1))
            codes = torch.cat([lanes & 15, lanes >> 4], dim=-1)
        else:
            lanes = lanes.unflatten(-1, (2, 2, 2, 2))
            codes = lanes.gather(-1, half_of_lane[..., None].expand(*lanes.shape[:-1], 1)).squeeze(-1)
        # [rows, step, part, lane, 16 inputs, upper half, element] to the order of the inputs
        codes = codes.permute(0, 1, 2, 4, 5, 3, 6).flatten(1)
        values = self._decode(codes).unflatten(1, (self.records.shape[1], packed.groups, -1))
        scales, *shifts = self._read_scales(tile, within, half)
        weights: torch.Tensor
        if packed.shift == "zeros":
            weights = (values + shifts[0] * RESCALE[self.dtype]) * scales
        else:
            weights = values * scales
            if shifts:
                weights += shifts[0]
        return weights.flatten(1)[:, : self.inputs].to(self.dtype).view((*rows.shape, self.inputs))

    def _read_scales(self, tile: torch.Tensor, within: torch.Tensor, half: torch.Tensor) -> list[torch.Tensor]:
        """Return the scales of rows, and their zero points or offsets, as float32 `[rows, step, group, 1]`."""
        packed = self.format
        scale_dtype = torch.float32 if packed.has_float_scales else torch.float16
        dtypes = {"none": [scale_dtype], "zeros": [scale_dtype, self.dtype], "offsets": [scale_dtype, scale_dtype]}
        start, found = packed.weight_bytes, []
        for dtype in dtypes[packed.shift]:
            stop = start + TILE * packed.groups * dtype.itemsize
            pairs = self.records[..., start:stop].unflatten(2, (8, 8, packed.groups, 2 * dtype.itemsize))
            pairs = pairs[tile, :, within // 16, within % 8].contiguous().view(dtype)
            found.append(pairs.gather(-1, half.view(-1, 1, 1, 1).expand(*pairs.shape[:-1], 1)).float())
            start = stop
        return found

    def _decode(self, codes: torch.Tensor) -> torch.Tensor:
        if self.format.shift == "zeros":
            return codes.float()
        if self.format.kind == "int4":
            return codes.float() - (8 if self.format.shift == "none" else 0)
        if self.format.kind == "int8":
            return codes.float() - 128
        if self.format.kind == "float8":
            return codes.view(torch.float8_e4m3fn).float()
        words = torch.tensor(self.words, dtype=torch.int64, device=self.device)
        bits = torch.stack([words & 0xFFFF, words >> 16], dim=1).flatten().to(torch.int16)
        levels: torch.Tensor = bits.view(self.dtype).float()
        return levels.index_select(0, codes.flatten().int()).view(codes.shape)


def pack(matrix: BlockMatrix, kernels: Kernels | None) -> PackedMatrix | None:
    """Return a matrix in the layout of the kernels, or None if they do not support it."""
    packed = find_format(matrix)
    if packed is None or matrix.dtype not in CUDA_TYPES:
        return None
    levels = Levels((0,) * 8, 1.0)
    if packed.kind == "levels4" and matrix.levels is not None:
        levels = round_levels(matrix.levels, matrix.dtype)
    rows, inputs = matrix.shape
    shape = (-(-rows // TILE), -(-inputs // STEP), packed.record_bytes)
    records = torch.empty(shape, dtype=torch.uint8, device=matrix.device)
    for start in range(0, rows, PACK_ROWS):  # in chunks, to limit temporary memory
        chunk = _pack_rows(matrix[start : start + PACK_ROWS], packed, levels.factor)
        records[start // TILE : start // TILE + len(chunk)] = chunk
    return PackedMatrix(records, packed, levels.words, 0, rows, inputs, matrix.dtype, kernels)


def _pack_rows(matrix: BlockMatrix, packed: PackedFormat, factor: float) -> torch.Tensor:
    scale_dtype = torch.float32 if packed.has_float_scales else torch.float16
    parts = [_pack_values(matrix, packed), _pack_scales((matrix.scales / factor).to(scale_dtype), matrix, packed)]
    if packed.shift == "zeros":
        zeros = find_zeros(matrix)
        assert zeros is not None
        shifts = (zeros + (128 if packed.kind == "int8" else 0)) / -RESCALE[matrix.dtype]
        parts.append(_pack_scales(shifts.to(matrix.dtype), matrix, packed))
    elif matrix.offsets is not None:
        parts.append(_pack_scales(matrix.offsets.to(scale_dtype), matrix, packed))
    return torch.cat(parts, dim=2)


def find_format(matrix: BlockMatrix) -> PackedFormat | None:
    """Return the format for a matrix, or None if the kernels do not support it."""
    (rows, _), block = matrix.shape, matrix.block
    if not rows or rows % MIN_ROWS:
        return None
    if (block not in (PART, 2 * PART, matrix.inputs) and block % STEP) or matrix.inputs % SLAB:
        return None
    if matrix.levels is None:
        kind = f"int{matrix.bits}"
    elif matrix.bits == 4:
        kind = "levels4"
    elif is_same_table(matrix.levels, float8_levels(matrix.device)) and not _has_nan(matrix.values):
        kind = "float8"
    else:
        return None
    shift = "none" if matrix.offsets is None else "offsets" if find_zeros(matrix) is None else "zeros"
    scales = [matrix.scales] if matrix.offsets is None or shift == "zeros" else [matrix.scales, matrix.offsets]
    has_float_scales = kind == "levels4" or any(each.dtype != torch.float16 for each in scales)
    groups = 1 if block == matrix.inputs else max(STEP // block, 1)
    return PackedFormat(kind, groups, has_float_scales, shift)


def find_zeros(matrix: BlockMatrix) -> torch.Tensor | None:
    """Return the zero points of a matrix with offsets `-zero * scale`, or None if the offsets have another form or the
    kernels cannot represent the differences.
    """
    if matrix.offsets is None:
        return None
    scales, offsets = matrix.scales.float(), matrix.offsets.float()
    zeros = torch.where(scales == 0, 0, (-offsets / scales).round())
    if not torch.equal(-zeros * scales, offsets) or zeros.abs().max() > MAX_ZERO:
        return None
    return zeros


def _has_nan(values: torch.Tensor) -> bool:
    return bool((values & NAN_BITS == NAN_BITS).any())


def round_levels(levels: torch.Tensor, dtype: torch.dtype) -> Levels:
    """Round levels to a 16-bit dtype, after multiplying them with the factor that causes the smallest error."""
    levels = levels.cpu()
    factors = 1 + torch.arange(LEVEL_FACTORS) / LEVEL_FACTORS
    products = factors[:, None] * levels
    errors = (products.to(dtype).float() / factors[:, None] - levels).square().sum(1)
    best = int(errors.argmin())
    bits: Sequence[int] = (products[best].to(dtype).view(torch.int16).int() & 0xFFFF).tolist()
    return Levels(
        tuple(low | high << 16 for low, high in zip(bits[::2], bits[1::2], strict=True)), float(factors[best])
    )


def _pack_values(matrix: BlockMatrix, packed: PackedFormat) -> torch.Tensor:
    """Return the values as `[tiles, steps, bytes]`."""
    codes, kind = matrix.unpack(), packed.kind
    if kind == "int4":
        codes = (codes if matrix.offsets is not None else codes + 8).view(torch.uint8)
    elif kind == "int8":
        codes = codes.view(torch.uint8) ^ 128
    rows, inputs = matrix.shape
    codes = F.pad(codes, (0, -inputs % STEP, 0, -rows % TILE))
    # [tile, 16 columns, half of 8, column, step, part, 16 inputs, upper half, pair, element]
    codes = codes.view(len(codes) // TILE, 8, 2, 8, codes.shape[1] // STEP, 4, 2, 2, 4, 2)
    if kind == "levels4":
        codes = codes.permute(0, 4, 1, 5, 3, 8, 6, 7, 2, 9)
    else:
        codes = codes.permute(0, 4, 1, 5, 3, 8, 6, *((9, 7) if kind == "int4" else (7, 9)), 2)
    codes = codes.flatten(2)
    return codes[..., ::2] | codes[..., 1::2] << 4 if kind.endswith("4") else codes


def _pack_scales(scales: torch.Tensor, matrix: BlockMatrix, packed: PackedFormat) -> torch.Tensor:
    """Return scales, zero points or offsets `[rows, blocks]` as `[tiles, steps, bytes]`."""
    rows, inputs = matrix.shape
    steps = -(-inputs // STEP)
    groups = torch.arange(steps * packed.groups, device=scales.device) * (STEP // packed.groups) // matrix.block
    scales = scales[:, groups.clamp(max=scales.shape[1] - 1)] * (groups < scales.shape[1])
    scales = F.pad(scales, (0, 0, 0, -rows % TILE))
    scales = scales.view(len(scales) // TILE, 8, 2, 8, steps, packed.groups).permute(0, 4, 1, 3, 5, 2)
    return scales.flatten(2).contiguous().view(torch.uint8)
