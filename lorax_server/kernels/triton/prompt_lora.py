"""LoRA for prompts. The LoRA output is written first, and then the base product is added to it.

This halves the memory traffic of adding LoRA to a finished output. Grids are sized by the actual LoRA segments or, in a
graph, by the maximum, because the host does not know the segments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lorax_server.kernels.ops import LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.triton.lora_math import (
    ALIGNMENT,
    RANK,
    RANKS,
    A,
    B,
    elements_in,
    find_fields,
    find_slice,
    is_interpreted,
    load_b,
    load_tile,
    load_v,
    multiply,
    multiply_a,
)
from lorax_server.kernels.triton.lora_tiles import prompt_tiles

SHORT_PROMPT_TOKENS = 2048  # longer prompts use larger tiles
MAX_PROGRAMS = 512  # several per SM, to hide memory latency
SHRINK_BYTES = 256  # bytes of an input row that one iteration reads
BLOCK_N = 128
BLOCKS = 4  # column blocks per program, so that the loaded V is reused


class TileSizes(NamedTuple):
    """Tile heights and the maximum number of input parts. Kernels are compiled for each combination."""

    shrink_height: int
    expand_height: int
    gate_height: int
    max_parts: int


def choose_tile_sizes(tokens: int) -> TileSizes:
    return TileSizes(32, 32, 32, 8) if tokens <= SHORT_PROMPT_TOKENS else TileSizes(64, 64, 64, 4)


class LowRank(NamedTuple):
    """The product `V = x @ A.T` for all targets of a layer, and the targets' location in the adapter table."""

    v: torch.Tensor  # [parts, tokens, slices, padded_rank] float32
    num_targets: int
    first_target: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of targets, first target index, number of tokens, number of parts and padded rank."""
        parts, tokens, _, padded_rank = self.v.shape
        return self.num_targets, self.first_target, tokens, parts, padded_rank


def linear(x: torch.Tensor, weights: LinearWeights, lora: LoraBatch, targets: Sequence[LoraTarget]) -> torch.Tensor:
    """Return the linear layer's output plus LoRA. Output scales and output biases are not applied."""
    if not lora.has_low_rank(targets):
        return F.linear(x, weights.plain, weights.bias)
    width = weights.shape[0]
    if (targets[0].columns.start, targets[-1].columns.stop) != (0, width):  # an LM head with padding
        out = F.linear(x, weights.plain, weights.bias)
        expand(out, shrink(x, lora, targets), lora, targets, adds=True)
        return out
    out = x.new_empty(len(x), width)
    expand(out, shrink(x, lora, targets), lora, targets, weights.bias)
    return out.addmm_(x, weights.plain.t())


def shrink(x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> LowRank:
    """Return `V = x @ A.T` for all targets of a layer."""
    (tokens, inputs), slices = x.shape, len(targets)
    height, max_parts = choose_tile_sizes(tokens).shrink_height, choose_tile_sizes(tokens).max_parts
    chunks = -(-max(lora.largest_ranks[target.index] for target in targets) // RANKS.value)
    tiles = prompt_tiles(lora, height)
    parts = max(
        1, min(max_parts, MAX_PROGRAMS // -(-tokens // height))
    )  # independent of the number of tiles, for batch invariance
    v = x.new_empty(parts, tokens, slices, chunks * RANKS.value, dtype=torch.float32)
    low_rank = LowRank(v, lora.table.shape[1], targets[0].index)
    if chunks:
        _shrink[(chunks, len(tiles), parts)](
            x, v, tiles, lora.buffer, lora.table, *low_rank.sizes, x.stride(0),
            INPUTS=inputs, SLICES=slices, LANES=triton.next_power_of_2(slices * RANKS.value), HEIGHT=height,
            BLOCK_K=elements_in(x, SHRINK_BYTES), INTERPRETED=is_interpreted(), num_warps=4, num_stages=3,
        )  # fmt: skip
    return low_rank


def expand(
    out: torch.Tensor,
    low_rank: LowRank,
    lora: LoraBatch,
    targets: Sequence[LoraTarget],
    bias: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> None:
    """Write the LoRA output `V @ B` plus bias to `out`, or add it to `out` if `adds` is True."""
    tile_sizes = choose_tile_sizes(len(out))
    height = tile_sizes.expand_height
    tiles = prompt_tiles(lora, height)
    widths = tuple(target.columns.stop - target.columns.start for target in targets)
    blocks = sum(-(-width // (BLOCK_N * BLOCKS)) for width in widths)
    _expand[(blocks, len(tiles))](
        out[:, targets[0].columns.start :], out if bias is None else bias, low_rank.v, tiles, lora.buffer, lora.table,
        lora.scales, *low_rank.sizes, out.stride(0),
        WIDTHS=widths, SLICES=len(targets), HEIGHT=height, BLOCK_N=BLOCK_N, BLOCKS=BLOCKS, ADDS=adds,
        HAS_BIAS=bias is not None, PARTS=tile_sizes.max_parts, INTERPRETED=is_interpreted(),
        num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_targets", "first_target", "num_rows", "num_parts", "padded_rank"],
    do_not_specialize_on_alignment=["tiles", "table"],
)
def _shrink(
    x, v, tiles, buffer, table, num_targets, first_target, num_rows, num_parts, padded_rank, stride,
    INPUTS: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store one part of V for one tile and 16 ranks of every target. A lane is one rank of one target."""
    start, part = tl.program_id(0) * RANKS, tl.program_id(2)
    first, count, adapter = load_tile(tiles, tl.program_id(1))
    if adapter == 0:
        return
    lanes = tl.arange(0, LANES)
    index, ranks = tl.minimum(lanes // RANKS, SLICES - 1), start + lanes % RANKS
    fields = find_fields(table, adapter, num_targets, first_target + index)
    rank = tl.where(lanes < SLICES * RANKS, tl.load(fields + RANK), 0).to(tl.int32)
    if tl.max(rank, 0) <= start:
        return
    is_rank = ranks < rank
    row_offsets = tl.arange(0, HEIGHT)
    rows, is_row = (first + row_offsets).to(tl.int64), row_offsets < count
    a = buffer + (tl.multiple_of(tl.load(fields + A), ALIGNMENT) + ranks.to(tl.int64) * INPUTS)
    low_rank = multiply_a(x + rows * stride, is_row, a, is_rank, part, num_parts, INPUTS, BLOCK_K, INTERPRETED)
    pointers = (
        v
        + ((part.to(tl.int64) * num_rows + rows) * SLICES * padded_rank)[:, None]
        + (index * padded_rank + ranks)[None, :]
    )
    tl.store(pointers, low_rank, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(
    do_not_specialize=["num_targets", "first_target", "num_rows", "num_parts", "padded_rank"],
    do_not_specialize_on_alignment=["tiles", "table", "scales"],
)
def _expand(
    out, bias, v, tiles, buffer, table, scales, num_targets, first_target, num_rows, num_parts, padded_rank, stride,
    WIDTHS: tl.constexpr, SLICES: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    index, width, slice_start, start = find_slice(tl.program_id(0), WIDTHS, SLICES, BLOCK_N * BLOCKS)
    first, count, adapter = load_tile(tiles, tl.program_id(1))
    fields = find_fields(table, adapter, num_targets, first_target + index)
    rank = tl.load(fields + RANK).to(tl.int32)
    if ADDS and rank == 0:
        return
    row_offsets = tl.arange(0, HEIGHT)
    is_row = row_offsets < count
    padded_rank = tl.multiple_of(padded_rank, RANKS)
    row_stride, part_stride = SLICES * padded_rank, num_rows.to(tl.int64) * SLICES * padded_rank
    v += first.to(tl.int64) * row_stride + index * padded_rank
    scale = tl.load(scales + adapter * num_targets + first_target + index)
    b = buffer + tl.multiple_of(tl.load(fields + B), ALIGNMENT)
    low_rank = load_v(v, row_stride, part_stride, num_parts, is_row, 0, rank, scale, PARTS).to(out.dtype.element_ty)
    out += (first + row_offsets).to(tl.int64)[:, None] * stride + slice_start
    for block in range(BLOCKS):
        columns = start + block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < width
        total = tl.zeros((HEIGHT, BLOCK_N), tl.float32)
        total = multiply(low_rank, load_b(b, 0, rank, columns, width), total, INTERPRETED)
        for more in range(RANKS, rank, RANKS):
            part = load_v(v, row_stride, part_stride, num_parts, is_row, more, rank, scale, PARTS)
            total = multiply(part.to(low_rank.dtype), load_b(b, more, rank, columns, width), total, INTERPRETED)
        pointers, mask = out + columns[None, :], is_row[:, None] & is_column[None, :]
        if ADDS:
            total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + slice_start + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        tl.store(pointers, total.to(low_rank.dtype), mask=mask)
