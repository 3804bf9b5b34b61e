"""LoRA for decode steps. For all targets in a linear layer, one launch computes the product with A (shrink) and one the
product with B (expand).

The kernels read only device tensors, so one graph supports every mix of adapters and ranks. The split of the inputs
into parts depends only on the shapes, and parts are added in a fixed order, so results are bitwise batch-invariant.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import MAX_RANK, LoraBatch, LoraTarget
from lorax_server.kernels.triton.lora_math import (
    ALIGNMENT,
    OUTPUT_BIAS,
    OUTPUT_SCALE,
    RANK,
    RANKS,
    A,
    elements_in,
    find_fields,
    find_slice,
    is_interpreted,
    load_tile,
    multiply_a,
    multiply_b,
    scale_and_shift_tile,
)
from lorax_server.kernels.triton.lora_tiles import DECODE_HEIGHT, DECODE_ROWS, decode_tiles

MAX_PROGRAMS = 1024  # limit for the number of programs, unless rows x slices is larger
MAX_PARTS = 16
SHRINK_BYTES = 512  # bytes of an input row that one iteration reads
NARROW_OUTPUTS, NARROW_BLOCK, WIDE_BLOCK = (
    8192,
    256,
    512,
)  # narrow outputs use smaller blocks to occupy all SMs


def make_scratch(device: torch.device, slices: int) -> torch.Tensor:
    """Return scratch memory for `V = x @ A.T`, sized for the largest decode step with `slices` targets."""
    rows = max(MAX_PROGRAMS, DECODE_ROWS * slices)
    return torch.empty(rows * MAX_RANK, dtype=torch.float32, device=device)


def count_parts(rows: int, slices: int, inputs: int, block: int) -> int:
    """Return the number of parts that the inputs are split into. Small batches use more parts to occupy all SMs."""
    max_parts = min(MAX_PARTS, -(-inputs // block), max(1, MAX_PROGRAMS // (rows * slices)))
    return 1 << (max_parts.bit_length() - 1)


def apply_adapters(
    out: torch.Tensor,
    x: torch.Tensor,
    lora: LoraBatch,
    targets: Sequence[LoraTarget],
    scratch: torch.Tensor,
    *,
    with_vectors: bool,
) -> None:
    """Add LoRA to `out`. With `with_vectors`, also apply output scales and output biases before rounding."""
    rows, inputs = x.shape
    slices, first = len(targets), targets[0].index
    block_k = elements_in(x, SHRINK_BYTES)
    parts = count_parts(rows, slices, inputs, block_k)
    tiles, num_tiles = decode_tiles(lora)
    num_targets = lora.table.shape[1]
    sizes = (num_targets, first, rows, parts)
    constants = {"SLICES": slices, "V_STRIDE": MAX_RANK, "HEIGHT": DECODE_HEIGHT, "INTERPRETED": is_interpreted()}
    _shrink[(parts, slices, rows)](
        x, scratch, tiles, lora.buffer, lora.table, *sizes, x.stride(0),
        INPUTS=inputs, BLOCK_K=block_k, **constants, num_warps=2, num_stages=4,
    )  # fmt: skip
    widths = tuple(target.columns.stop - target.columns.start for target in targets)
    block_n = NARROW_BLOCK if sum(widths) <= NARROW_OUTPUTS else WIDE_BLOCK
    blocks = sum(-(-width // block_n) for width in widths)
    row_programs = min(rows, max(8, MAX_PROGRAMS // blocks))
    _expand[(blocks, row_programs)](
        out[:, targets[0].columns.start :], scratch, tiles, num_tiles, lora.buffer, lora.table, lora.scales, *sizes,
        out.stride(0), WIDTHS=widths, BLOCK_N=block_n, PARTS=MAX_PARTS, VECTORS=with_vectors, **constants,
        num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_targets", "first_target", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["tiles", "table"],
)
def _shrink(
    x, v, tiles, buffer, table, num_targets, first_target, num_rows, num_parts, stride,
    INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, V_STRIDE: tl.constexpr, HEIGHT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store one part (a range of inputs) of `V = x @ A.T` for one tile and one target, 16 ranks per iteration."""
    part, index = tl.program_id(0), tl.program_id(1)
    first, count, adapter = load_tile(tiles, tl.program_id(2))
    if adapter == 0:
        return
    fields = find_fields(table, adapter, num_targets, first_target + index)
    rank = tl.load(fields + RANK).to(tl.int32)
    a = buffer + tl.multiple_of(tl.load(fields + A), ALIGNMENT)
    row_offsets = tl.arange(0, HEIGHT)
    rows, is_row = (first + row_offsets).to(tl.int64), row_offsets < count
    v += ((part.to(tl.int64) * num_rows + rows) * SLICES + index) * V_STRIDE
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        is_rank = ranks < rank
        low_rank = multiply_a(
            x + rows * stride, is_row, a + ranks.to(tl.int64) * INPUTS, is_rank, part, num_parts, INPUTS, BLOCK_K,
            INTERPRETED,
        )  # fmt: skip
        tl.store(v[:, None] + ranks[None, :], low_rank, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(
    do_not_specialize=["num_targets", "first_target", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["tiles", "num_tiles", "table", "scales"],
)
def _expand(
    out, v, tiles, num_tiles, buffer, table, scales, num_targets, first_target, num_rows, num_parts, stride,
    WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr, VECTORS: tl.constexpr, SLICES: tl.constexpr, V_STRIDE: tl.constexpr,
    HEIGHT: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add `V @ B` to one block of columns for every n-th tile, where n is the second grid dimension."""
    index, width, slice_start, start = find_slice(tl.program_id(0), WIDTHS, SLICES, BLOCK_N)
    columns = start + tl.arange(0, BLOCK_N)
    row_offsets = tl.arange(0, HEIGHT)
    for tile in range(tl.program_id(1), tl.load(num_tiles), tl.num_programs(1)):
        first, count, adapter = load_tile(tiles, tile)
        fields = find_fields(table, adapter, num_targets, first_target + index)
        is_changed = tl.load(fields + RANK) > 0
        if VECTORS:
            is_changed = is_changed | (tl.load(fields + OUTPUT_SCALE) >= 0) | (tl.load(fields + OUTPUT_BIAS) >= 0)
        if is_changed:
            scale = tl.load(scales + adapter * num_targets + first_target + index)
            is_row = row_offsets < count
            v_tile = v + (first.to(tl.int64) * SLICES + index) * V_STRIDE
            pointers = out + (first + row_offsets).to(tl.int64)[:, None] * stride + (slice_start + columns)[None, :]
            mask = is_row[:, None] & (columns < width)[None, :]
            total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            total += multiply_b(
                v_tile, SLICES * V_STRIDE, num_rows.to(tl.int64) * SLICES * V_STRIDE, num_parts, is_row, buffer, fields,
                scale, columns, width, PARTS, INTERPRETED,
            )  # fmt: skip
            if VECTORS:
                total = scale_and_shift_tile(total, buffer, fields, columns, width)
            tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)
