"""Device functions for LoRA kernels: adapter table lookups, and products with A and B.

V is the product `x @ A.T`, stored as float32 partial sums `[parts, rows, slices, padded_rank]`. A part covers some of
the inputs, and a slice is one target module.
"""

import os

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import Field

RANKS = tl.constexpr(16)  # LoRA ranks per matrix product
# In elements. The adapter buffer aligns every tensor to 256 bytes.
ALIGNMENT = tl.constexpr(16)
NUM_FIELDS = tl.constexpr(len(Field))
A = tl.constexpr(int(Field.A))
B = tl.constexpr(int(Field.B))
OUTPUT_SCALE = tl.constexpr(int(Field.OUTPUT_SCALE))
OUTPUT_BIAS = tl.constexpr(int(Field.OUTPUT_BIAS))
RANK = tl.constexpr(int(Field.RANK))


def is_interpreted() -> bool:
    """Return True if kernels run on a CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def elements_in(x: torch.Tensor, size: int) -> int:
    """Return how many elements of `x` fit into `size` bytes, so that shared memory size is independent of the dtype."""
    return size // x.element_size()


@triton.jit
def load_tile(tiles, tile):
    """Return the tile's first row, number of rows and adapter index."""
    pointers = tiles + tile * 4
    return tl.load(pointers), tl.load(pointers + 1), tl.load(pointers + 2)


@triton.jit
def find_fields(table, adapter, num_targets, target):
    """Return a pointer to the adapter table fields of an adapter and target."""
    return table + (adapter.to(tl.int64) * num_targets + target) * NUM_FIELDS


@triton.jit
def find_slice(block, WIDTHS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    """Return a column block's slice index, the slice's width and first column, and the block's first column in it."""
    index, width, start = 0, WIDTHS[0], 0
    first_block: tl.constexpr = 0
    first_column: tl.constexpr = 0
    block_start = 0
    for s in tl.static_range(1, SLICES):
        first_block += (WIDTHS[s - 1] + BLOCK - 1) // BLOCK
        first_column += WIDTHS[s - 1]
        is_in_slice = block >= first_block
        index = tl.where(is_in_slice, s, index)
        width = tl.where(is_in_slice, WIDTHS[s], width)
        start = tl.where(is_in_slice, first_column, start)
        block_start = tl.where(is_in_slice, first_block, block_start)
    return index, width, start, (block - block_start) * BLOCK


@triton.jit
def multiply(left, right, total, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter does not support bfloat16 products
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def multiply_a(
    x, is_row, a, is_rank, part, num_parts, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Return one part of `x @ A.T` in float32. `x` and `a` are pointers to rows."""
    size = tl.cdiv(tl.cdiv(INPUTS, BLOCK_K), num_parts) * BLOCK_K
    total = tl.zeros((is_row.shape[0], is_rank.shape[0]), tl.float32)
    for start in range(part * size, tl.minimum(part * size + size, INPUTS), BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = (inputs < INPUTS)[None, :]
        values = tl.load(x[:, None] + inputs[None, :], mask=is_row[:, None] & is_input, other=0.0)
        factor = tl.load(a[:, None] + inputs[None, :], mask=is_rank[:, None] & is_input, other=0.0)
        total = multiply(values, tl.trans(factor), total, INTERPRETED)
    return total


@triton.jit
def load_v(v, row_stride, part_stride, num_parts, is_row, first, rank, scale, PARTS: tl.constexpr):
    """Return 16 ranks of V for a tile, starting at rank `first`, as the scaled float32 sum of up to `PARTS` parts.

    Ranks beyond the adapter's rank are masked, since stale memory can contain NaN.
    """
    ranks = first + tl.arange(0, RANKS)
    pointers = v + tl.arange(0, is_row.shape[0])[:, None] * row_stride + ranks[None, :]
    mask = is_row[:, None] & (ranks < rank)[None, :]
    low_rank = tl.load(pointers, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):  # unrolled, so the loads overlap
        low_rank += tl.load(pointers + part * part_stride, mask=mask & (part < num_parts), other=0.0)
    return low_rank * scale


@triton.jit
def load_b(b, first, rank, columns, width):
    """Return 16 ranks of B, starting at rank `first`, for the given columns."""
    ranks = first + tl.arange(0, RANKS)
    pointers = b + ranks[:, None].to(tl.int64) * width + columns[None, :]
    return tl.load(pointers, mask=(ranks < rank)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def multiply_b(
    v, row_stride, part_stride, num_parts, is_row, buffer, fields, scale, columns, width,
    PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return `scale * (V @ B)` in float32 for one tile and the given columns.

    `v` points to the target's slice of V in the tile's first row. V is the sum of `num_parts` parts, at most `PARTS`.
    """
    rank = tl.load(fields + RANK).to(tl.int32)
    b = buffer + tl.multiple_of(tl.load(fields + B), ALIGNMENT)
    total = tl.zeros((is_row.shape[0], columns.shape[0]), tl.float32)
    for first in range(0, rank, RANKS):
        low_rank = load_v(v, row_stride, part_stride, num_parts, is_row, first, rank, scale, PARTS)
        factor = load_b(b, first, rank, columns, width)
        total = multiply(low_rank.to(factor.dtype), factor, total, INTERPRETED)
    return total


@triton.jit
def scale_and_shift_tile(value, buffer, fields, columns, width):
    """Return the tile's values after multiplying by the adapter's output scale and adding its output bias."""
    scale, bias = tl.load(fields + OUTPUT_SCALE), tl.load(fields + OUTPUT_BIAS)
    is_column = columns < width
    if scale >= 0:
        pointers = buffer + tl.multiple_of(scale, ALIGNMENT) + columns
        value *= tl.load(pointers, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if bias >= 0:
        pointers = buffer + tl.multiple_of(bias, ALIGNMENT) + columns
        value += tl.load(pointers, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return value
