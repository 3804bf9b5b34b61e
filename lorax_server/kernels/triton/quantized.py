"""Products with quantized matrices.

For few rows, one kernel reads the quantized values and dequantizes them in registers. For more rows, the matrix is
dequantized to temporary memory first, instead of once for each tile of rows. Both paths round the dequantized weights
to the dtype of the activations, so their products differ only in the order of additions.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.ops import LinearWeights
from lorax_server.kernels.quantized import (
    MIN_BLOCK,
    PACKED_INPUTS,
    BlockMatrix,
    float8_levels,
    is_same_table,
    round_inputs,
)
from lorax_server.kernels.triton.lora_math import is_interpreted, multiply

PIPELINE_BYTES = 8  # number of pipeline stages times the bytes of an activation, to limit shared memory
MAX_ROWS = 64  # rows of the kernel that dequantizes in registers
MIN_HEIGHT = 16  # rows per program
STEP_INPUTS = 128  # inputs that one iteration reads
MAX_PART_INPUTS = 128  # inputs that are dequantized at a time; they share a scale
DEQUANTIZE_BLOCK_N = 64
NARROW_OUTPUTS, NARROW_BLOCK_N, WIDE_BLOCK_N = 8192, 16, 32  # narrow matrices use smaller blocks to occupy all SMs


@dataclass(frozen=True, eq=False)
class TritonMatrix(StoredMatrix):
    """A quantized matrix for these kernels, in the layout of `BlockMatrix`, with float32 scales."""

    blocks: BlockMatrix
    is_float8: bool  # True for 8-bit floats (e4m3), which are converted without a table of levels

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.blocks.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.blocks.tensors

    def __getitem__(self, rows: slice) -> "TritonMatrix":
        return replace(self, blocks=self.blocks[rows])

    def look_up_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks.look_up_rows(rows)

    def read(self) -> torch.Tensor:
        outputs, inputs = self.shape
        out = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
        part = self._find_part()
        _dequantize[(triton.cdiv(outputs, DEQUANTIZE_BLOCK_N), triton.cdiv(inputs, part))](
            out, *self.arguments, outputs, **self.find_constants(), BLOCK_N=DEQUANTIZE_BLOCK_N, num_warps=4
        )
        return out

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `x @ weight.T + bias` for at most `MAX_ROWS` rows."""
        rows, (outputs, inputs) = len(x), self.shape
        out, part = x.new_empty(rows, outputs), self._find_part()
        block_n = NARROW_BLOCK_N if outputs <= NARROW_OUTPUTS else WIDE_BLOCK_N
        parts = STEP_INPUTS // part if inputs % STEP_INPUTS == 0 else 1
        _multiply[(triton.cdiv(outputs, block_n),)](
            out, x, x if bias is None else bias, *self.arguments, rows, x.stride(0), **self.find_constants(),
            OUTPUTS=outputs, HAS_BIAS=bias is not None, HEIGHT=max(MIN_HEIGHT, triton.next_power_of_2(rows)),
            BLOCK_N=block_n, PARTS=parts, INTERPRETED=is_interpreted(), num_warps=2,
            num_stages=PIPELINE_BYTES // x.element_size(),
        )  # fmt: skip
        return out

    def _find_part(self, limit: int = MAX_PART_INPUTS) -> int:
        """Return how many inputs are dequantized at a time: a power of 2 that divides the block, or 32 for 4 bits."""
        block = self.blocks.block
        if block == MIN_BLOCK:
            return PACKED_INPUTS if self.blocks.bits == 4 else MIN_BLOCK
        return min(limit, block & -block)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        values, scales = self.blocks.values, self.blocks.scales
        offsets = scales if self.blocks.offsets is None else self.blocks.offsets
        return values, scales, offsets, scales if self.blocks.levels is None else self.blocks.levels

    def find_constants(self, limit: int = MAX_PART_INPUTS) -> dict[str, int]:
        """Return the kernel constants. `limit` limits the inputs that are dequantized at a time."""
        return {
            "INPUTS": self.shape[1], "BITS": self.blocks.bits, "BLOCK": self.blocks.block,
            "PART": self._find_part(limit), "HAS_OFFSETS": self.blocks.offsets is not None,
            "HAS_LEVELS": self.blocks.levels is not None,
            "IS_FLOAT8": self.is_float8,
        }  # fmt: skip


def make_matrix(blocks: BlockMatrix) -> TritonMatrix:
    """Prepare a quantized matrix for the kernels. Scales become float32, because Triton does not load 2-byte values
    ahead of time.
    """
    offsets = None if blocks.offsets is None else blocks.offsets.float()
    blocks = replace(blocks, scales=blocks.scales.float(), offsets=offsets)
    return TritonMatrix(blocks, is_same_table(blocks.levels, float8_levels(blocks.device)))


def compile_products(weights: LinearWeights) -> None:
    """Run the kernels of a quantized matrix for all tile heights, so that requests do not wait for the compiler."""
    if isinstance(weights.weight, TritonMatrix):
        weights.weight.read()
        height = MIN_HEIGHT
        while height <= MAX_ROWS:
            x = torch.zeros(height, weights.shape[1], dtype=weights.weight.dtype, device=weights.weight.device)
            weights.weight.multiply(x, weights.bias)
            height *= 2


def multiply_base(x: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
    """Return `x @ weight.T + bias` without adapters."""
    if weights.rounds_inputs:
        x = round_inputs(x)
    if isinstance(weights.weight, TritonMatrix) and 0 < len(x) <= MAX_ROWS and x.stride(1) == 1:
        return weights.weight.multiply(x, weights.bias)
    return F.linear(x, weights.plain, weights.bias)


@triton.jit
def _dequantize_values(
    indices, scales, offsets, levels, HAS_OFFSETS: tl.constexpr, HAS_LEVELS: tl.constexpr, IS_FLOAT8: tl.constexpr
):
    """Return the weights in float32. `scales` and `offsets` have the shape of the values."""
    if IS_FLOAT8:  # exact for all values
        bits = indices.to(tl.int32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
        magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
        weights = tl.where((bits & 0x80) != 0, -magnitude, magnitude) * scales
    elif HAS_LEVELS:
        weights = tl.load(levels + indices.to(tl.int32)) * scales
    else:
        weights = indices.to(tl.float32) * scales
    if HAS_OFFSETS:
        weights += offsets
    return weights


@triton.jit
def load_weights(
    values, scales, offsets, levels, columns, is_column, start, HALF: tl.constexpr, INPUTS: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_LEVELS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    """Return the weights of one part in float32, `[inputs, columns]`. A part starts at input `start`.

    With 4 bits, these are the inputs in the low bits (`HALF` is 0) or in the high bits (`HALF` is 1).
    """
    if BITS == 4:
        offset = tl.arange(0, PART // 2)
        pointers = values + columns.to(tl.int64)[None, :] * (INPUTS // 2) + (start // 2 + offset)[:, None]
        packed = tl.load(pointers, mask=is_column[None, :], other=0).to(tl.int32)
        indices = (packed >> (4 * HALF)) & 15
        if not HAS_OFFSETS and not HAS_LEVELS:
            indices -= 8
        block = (start + 16 * HALF) // BLOCK
    else:
        offset = tl.arange(0, PART)
        pointers = values + columns.to(tl.int64)[None, :] * INPUTS + (start + offset)[:, None]
        indices = tl.load(pointers, mask=is_column[None, :], other=0)
        block = start // BLOCK
    places = columns.to(tl.int64) * (INPUTS // BLOCK) + block
    scale = tl.load(scales + places, mask=is_column, other=0.0).to(tl.float32)[None, :]
    shift = scale
    if HAS_OFFSETS:
        shift = tl.load(offsets + places, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return _dequantize_values(indices, scale, shift, levels, HAS_OFFSETS, HAS_LEVELS, IS_FLOAT8)


@triton.jit
def find_inputs(start, HALF: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr):
    """Return the inputs of the weights that `load_weights` returns."""
    if BITS == 4:
        offset = tl.arange(0, PART // 2)
        inputs = start + offset // 16 * 32 + 16 * HALF + offset % 16
    else:
        inputs = start + tl.arange(0, PART)
    return inputs


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    out, x, bias, values, scales, offsets, levels, num_rows, stride, OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr, INPUTS: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_LEVELS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, HEIGHT)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < OUTPUTS
    left = x + rows.to(tl.int64)[:, None] * stride
    total = tl.zeros((HEIGHT, BLOCK_N), tl.float32)
    for step in range(0, INPUTS, PARTS * PART):
        for part in tl.static_range(PARTS):
            for half in tl.static_range(8 // BITS):
                start = step + part * PART
                weights = load_weights(
                    values, scales, offsets, levels, columns, is_column, start, half, INPUTS, BITS, BLOCK, PART,
                    HAS_OFFSETS, HAS_LEVELS, IS_FLOAT8,
                )  # fmt: skip
                inputs = find_inputs(start, half, BITS, PART)
                activations = tl.load(left + inputs[None, :], mask=is_row[:, None], other=0.0)
                total = multiply(activations, weights.to(x.dtype.element_ty), total, INTERPRETED)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    pointers = out + rows.to(tl.int64)[:, None] * OUTPUTS + columns[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["outputs"], do_not_specialize_on_alignment=["scales", "offsets"])
def _dequantize(
    out, values, scales, offsets, levels, outputs, BLOCK_N: tl.constexpr, INPUTS: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_LEVELS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    """Write one tile of the weights to `out`, `[outputs, inputs]`."""
    columns, start = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * PART
    is_column = columns < outputs
    for half in tl.static_range(8 // BITS):
        weights = load_weights(
            values, scales, offsets, levels, columns, is_column, start, half, INPUTS, BITS, BLOCK, PART, HAS_OFFSETS,
            HAS_LEVELS, IS_FLOAT8,
        )  # fmt: skip
        inputs = find_inputs(start, half, BITS, PART)
        pointers = out + columns.to(tl.int64)[None, :] * INPUTS + inputs[:, None]
        tl.store(pointers, weights.to(out.dtype.element_ty), mask=is_column[None, :])
