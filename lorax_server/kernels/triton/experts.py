"""Mixtures of experts with LoRA, computed as grouped matrix products over (expert, tile) work items.

A pair is a token and one of its experts. Pairs are sorted by expert on the device; a tile is a limited number of sorted
pairs of one expert. All shapes are fixed and nothing is read on the host, so graphs can be replayed with other tokens
and adapters. Each row of a product is one sum over the inputs in order, so it does not depend on the batch.

LoRA uses different kernels for up to `DECODE_TOKENS` tokens, so its results are equal for batches within the same range
of sizes. LoRA for decode steps has one program for each group of pairs with the same expert and adapter, since most
pairs of such a step have different factors. Prompts have many pairs per adapter, so each program handles one tile.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import (
    MAX_RANK,
    Activation,
    ExpertMatrices,
    ExpertWeights,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    Routing,
    StackedMatrices,
)
from lorax_server.kernels.quantized import BlockMatrix, QuantizedMatrix, concat_matrices
from lorax_server.kernels.triton.gated_activation import apply_gate
from lorax_server.kernels.triton.lora_math import (
    ALIGNMENT,
    RANK,
    RANKS,
    A,
    B,
    elements_in,
    find_fields,
    is_interpreted,
    load_b,
    load_v,
    multiply,
    multiply_a,
)
from lorax_server.kernels.triton.quantized import TritonMatrix, find_inputs, load_weights, make_matrix

DECODE_TOKENS, SHORT_PROMPT_TOKENS = 256, 2048  # limits for smaller tiles
WIDE_TOKENS = 1024  # for more tokens, wide tiles are faster
SHRINK_BYTES = 256  # bytes of an input row that one iteration reads
DECODE_PART_INPUTS = 2048  # inputs per program of `_shrink_groups`
DECODE_BLOCK_N = 256  # columns per program of `_expand_groups`
COMBINE_BLOCK = 1024
PART_BYTES = 128  # bytes of an input row for which quantized weights are dequantized at a time
# Kernel constants for matrices that are not quantized.
PLAIN = {"BITS": 0, "BLOCK": 0, "PART": 0, "HAS_OFFSETS": False, "HAS_LEVELS": False, "IS_FLOAT8": False}


class Tiles(NamedTuple):
    """The tile sizes and launch settings for a range of token counts."""

    height: int  # pairs per tile
    block_n: int  # outputs per tile
    input_bytes: int  # bytes of an input row that one iteration reads
    num_warps: int
    num_stages: int
    sort_block: int  # pairs that one iteration of the sort reads


DECODE_TILES = Tiles(16, 64, 256, 4, 4, 2048)
SHORT_TILES = Tiles(64, 128, 128, 8, 3, 2048)
LONG_TILES = Tiles(128, 128, 128, 8, 3, 8192)
WIDE_TILES = Tiles(128, 256, 128, 8, 4, 8192)  # require 196 KB of shared memory
EXPAND_BLOCK_N = 128  # columns per program of `_expand`, for prompts


class Pairs(NamedTuple):
    """The pairs of a batch, sorted by expert."""

    chosen: torch.Tensor  # [pairs] int64: expert of each pair, not sorted
    order: torch.Tensor  # [pairs] int32: sorted position -> token * top_k + choice
    positions: torch.Tensor  # [pairs] int32: the inverse of `order`
    starts: torch.Tensor  # [experts + 1] int32: first sorted position of each expert
    top_k: int
    tiles: Tiles

    @property
    def max_tiles(self) -> int:
        pairs, experts = len(self.order), len(self.starts) - 1
        return pairs // self.tiles.height + min(experts, pairs)

    @property
    def num_tokens(self) -> int:
        return len(self.order) // self.top_k


def make_experts(count: int, matrices: Iterable[ExpertMatrices], activation: Activation) -> ExpertWeights:
    """Copy the matrices of all experts to two tensors `[experts, outputs, inputs]`, or to two quantized matrices."""
    stacks = [_Stack(count) for _ in ExpertMatrices._fields]
    for index, expert in enumerate(matrices):
        for stack, part in zip(stacks, expert, strict=True):
            stack.add(index, part)
    gate_up, down, gate_up_bias, down_bias = (stack.join() for stack in stacks)
    assert gate_up is not None
    assert down is not None
    assert not isinstance(gate_up_bias, TritonMatrix)
    assert not isinstance(down_bias, TritonMatrix)
    linears = [[LinearWeights(matrix) for matrix in _unbind(weight, count)] for weight in (gate_up, down)]
    stacked = StackedMatrices(gate_up, gate_up_bias), StackedMatrices(down, down_bias)
    return ExpertWeights(linears[0], linears[1], activation, stacked)


class _Stack:
    """One matrix or bias of all experts. Tensors are copied one at a time, to limit temporary memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._whole: torch.Tensor | None = None
        self._parts: list[torch.Tensor | QuantizedMatrix] = []

    def add(self, index: int, part: torch.Tensor | QuantizedMatrix | None) -> None:
        if self._parts or (isinstance(part, QuantizedMatrix) and self._whole is None):
            assert part is not None
            self._parts.append(part)
        elif part is not None:
            plain = LinearWeights(part).plain
            if self._whole is None:
                self._whole = plain.new_empty(self._count, *plain.shape)
            self._whole[index] = plain

    def join(self) -> torch.Tensor | TritonMatrix | None:
        if not self._parts:
            return self._whole
        joined = concat_matrices(self._parts)
        self._parts = []
        if isinstance(joined, BlockMatrix):
            return make_matrix(joined)
        assert isinstance(joined, torch.Tensor)
        return joined.view(self._count, -1, joined.shape[1])


def _unbind(weight: torch.Tensor | TritonMatrix, count: int) -> Sequence[torch.Tensor | TritonMatrix]:
    if isinstance(weight, torch.Tensor):
        return weight.unbind()
    outputs = len(weight) // count
    return [weight[start : start + outputs] for start in range(0, len(weight), outputs)]


def run_experts(
    x: torch.Tensor,
    routing: Routing,
    experts: ExpertWeights,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
    *,
    can_use_wide_tiles: bool = False,
) -> torch.Tensor:
    """Implement `Ops.run_experts`. With `can_use_wide_tiles`, the device has enough shared memory for `WIDE_TILES`."""
    assert experts.stacked is not None
    gate_up, down = experts.stacked
    if not len(x):
        return torch.empty_like(x)
    is_plain = all(isinstance(stack.weight, torch.Tensor) for stack in experts.stacked)
    pairs = sort_pairs(routing.experts, len(experts.gate_up), can_use_wide_tiles=can_use_wide_tiles and is_plain)
    inner = _multiply(x, gate_up, pairs, gathers=True)
    _add_lora(inner, x, pairs, lora, targets[:2], gathers=True)
    inner = apply_gate(inner, experts.activation)
    outputs = _multiply(inner, down, pairs, gathers=False)
    _add_lora(outputs, inner, pairs, lora, targets[2:], gathers=False)
    out = torch.empty_like(x)
    size = x.shape[1]
    _combine[(len(x), triton.cdiv(size, COMBINE_BLOCK))](
        out, outputs, pairs.positions, routing.weights.float().contiguous(), SIZE=size, TOP_K=pairs.top_k,
        BLOCK=COMBINE_BLOCK,
    )  # fmt: skip
    return out


def sort_pairs(chosen: torch.Tensor, num_experts: int, *, can_use_wide_tiles: bool = False) -> Pairs:
    """Sort the pairs in `chosen`, `[tokens, top_k]`, by expert. Pairs with the same expert keep their order."""
    tokens, top_k = chosen.shape
    tiles = choose_tiles(tokens, can_use_wide_tiles=can_use_wide_tiles)
    chosen, order = chosen.flatten(), chosen.new_empty(tokens * top_k, dtype=torch.int32)
    positions, starts = torch.empty_like(order), order.new_empty(num_experts + 1)
    _sort_pairs[(num_experts + 1,)](
        chosen, order, positions, starts, len(order), EXPERTS=num_experts, BLOCK=tiles.sort_block,
        num_warps=max(4, tiles.sort_block // 512),
    )  # fmt: skip
    return Pairs(chosen, order, positions, starts, top_k, tiles)


def choose_tiles(num_tokens: int, *, can_use_wide_tiles: bool) -> Tiles:
    if num_tokens <= DECODE_TOKENS:
        return DECODE_TILES
    if can_use_wide_tiles and num_tokens > WIDE_TOKENS:
        return WIDE_TILES
    return SHORT_TILES if num_tokens <= SHORT_PROMPT_TOKENS else LONG_TILES


def _multiply(x: torch.Tensor, matrices: StackedMatrices, pairs: Pairs, *, gathers: bool) -> torch.Tensor:
    """Return the product of each sorted pair's input with its expert's matrix, `[pairs, outputs]`, without LoRA.

    With `gathers`, the rows of `x` are tokens. Otherwise they are sorted pairs.
    """
    (outputs, inputs), tiles = matrices.weight.shape[-2:], pairs.tiles
    arguments: tuple[torch.Tensor, ...]
    if isinstance(matrices.weight, TritonMatrix):
        outputs //= len(pairs.starts) - 1
        arguments, encoding = matrices.weight.arguments, matrices.weight.find_constants(elements_in(x, PART_BYTES))
    else:
        assert isinstance(matrices.weight, torch.Tensor)
        arguments, encoding = (matrices.weight,) * 4, PLAIN | {"INPUTS": inputs}
    out, x = x.new_empty(len(pairs.order), outputs), x.contiguous()
    _product[(triton.cdiv(outputs, tiles.block_n), pairs.max_tiles)](
        out, x, *arguments, x if matrices.bias is None else matrices.bias, pairs.order, pairs.starts,
        HAS_BIAS=matrices.bias is not None, OUTPUTS=outputs, BLOCK_N=tiles.block_n,
        BLOCK_K=elements_in(x, tiles.input_bytes), GATHERS=gathers, **_tile_constants(pairs), **encoding,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _tile_constants(pairs: Pairs) -> dict[str, int]:
    num_experts = len(pairs.starts) - 1
    return {
        "EXPERTS": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts), "HEIGHT": pairs.tiles.height,
        "TOP_K": pairs.top_k, "INTERPRETED": is_interpreted(),
    }  # fmt: skip


def _add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    pairs: Pairs,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
    *,
    gathers: bool,
) -> None:
    """Add LoRA to the output of each sorted pair. `x` is the input of the product, as in `_multiply`."""
    if lora is None or not lora.has_low_rank(targets):
        return
    x, inputs, slices = x.contiguous(), x.shape[1], len(targets)
    rank = MAX_RANK if lora.in_graph else max(lora.largest_ranks[target.index] for target in targets)
    padded_rank = triton.cdiv(rank, RANKS.value) * RANKS.value
    width = targets[0].columns.stop - targets[0].columns.start
    adapters = lora.buffer, lora.table, lora.adapter_indices
    sizes = lora.table.shape[1], targets[0].index, padded_rank
    if pairs.num_tokens <= DECODE_TOKENS:
        parts = triton.cdiv(inputs, DECODE_PART_INPUTS)
        v = x.new_empty(parts, len(out), slices, padded_rank, dtype=torch.float32)
        constants = {
            "EXPERTS": len(pairs.starts) - 1, "HEIGHT": pairs.tiles.height, "TOP_K": pairs.top_k, "SLICES": slices,
            "PARTS": parts, "INTERPRETED": is_interpreted(),
        }  # fmt: skip
        _shrink_groups[(parts, slices, len(out))](
            v, x, *adapters, pairs.order, pairs.chosen, len(out), *sizes,
            INPUTS=inputs, BLOCK_K=elements_in(x, SHRINK_BYTES), GATHERS=gathers, **constants,
            num_warps=2, num_stages=4,
        )  # fmt: skip
        _expand_groups[(triton.cdiv(width, DECODE_BLOCK_N), slices, len(out))](
            out, v, *adapters, pairs.order, pairs.chosen, len(out), *sizes, lora.scales,
            WIDTH=width, BLOCK_N=DECODE_BLOCK_N, **constants, num_warps=4, num_stages=2,
        )  # fmt: skip
        return
    v = x.new_empty(len(out), slices, padded_rank, dtype=torch.float32)
    _shrink[(pairs.max_tiles, slices)](
        v, x, *adapters, pairs.order, pairs.starts, *sizes, INPUTS=inputs, SLICES=slices,
        BLOCK_K=elements_in(x, SHRINK_BYTES), GATHERS=gathers, **_tile_constants(pairs), num_warps=4, num_stages=3,
    )  # fmt: skip
    _expand[(triton.cdiv(width, EXPAND_BLOCK_N), pairs.max_tiles, slices)](
        out, v, *adapters, pairs.order, pairs.starts, *sizes, lora.scales, WIDTH=width, SLICES=slices,
        BLOCK_N=EXPAND_BLOCK_N, **_tile_constants(pairs), num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(chosen, order, positions, starts, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the pairs of one expert and their start. The last program writes the number of pairs."""
    expert = tl.program_id(0)
    if expert == EXPERTS:
        tl.store(starts + expert, num_pairs)
    else:
        start = 0
        for first in range(0, num_pairs, BLOCK):
            pairs = first + tl.arange(0, BLOCK)
            start += tl.sum((tl.load(chosen + pairs, mask=pairs < num_pairs, other=EXPERTS) < expert).to(tl.int32), 0)
        tl.store(starts + expert, start)
        for first in range(0, num_pairs, BLOCK):
            pairs = first + tl.arange(0, BLOCK)
            is_mine = tl.load(chosen + pairs, mask=pairs < num_pairs, other=EXPERTS) == expert
            places = start + tl.cumsum(is_mine.to(tl.int32), 0) - 1
            tl.store(order + places, pairs, mask=is_mine)
            tl.store(positions + pairs, places, mask=is_mine)
            start += tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def _find_tile(starts, tile, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HEIGHT: tl.constexpr):
    """Return a tile's expert, its first sorted pair, and its number of pairs (at most 0 for unused tiles)."""
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < EXPERTS
    start = tl.load(starts + experts, mask=is_expert, other=0)
    stop = tl.load(starts + experts + 1, mask=is_expert, other=0)
    tiles = (stop - start + HEIGHT - 1) // HEIGHT
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum(((ends <= tile) & is_expert).to(tl.int32), 0)
    is_mine = experts == expert
    first = tl.sum(tl.where(is_mine, start - (ends - tiles) * HEIGHT, 0), 0) + tile * HEIGHT
    return expert, first, tl.minimum(tl.sum(tl.where(is_mine, stop, 0), 0) - first, HEIGHT)


@triton.jit
def _product(
    out, x, matrices, scales, offsets, levels, biases, order, starts, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HEIGHT: tl.constexpr,
    TOP_K: tl.constexpr, GATHERS: tl.constexpr, INTERPRETED: tl.constexpr, INPUTS: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_LEVELS: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):  # fmt: skip
    expert, first, count = _find_tile(starts, tl.program_id(1), EXPERTS, BLOCK_E, HEIGHT)
    if count <= 0:
        return
    row_offsets = tl.arange(0, HEIGHT)
    is_row, places = row_offsets < count, first + row_offsets
    rows = tl.load(order + places, mask=is_row, other=0) // TOP_K if GATHERS else places
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < OUTPUTS
    left = x + rows.to(tl.int64)[:, None] * INPUTS
    weight_rows = expert.to(tl.int64) * OUTPUTS + columns
    total = tl.zeros((HEIGHT, BLOCK_N), tl.float32)
    if BITS == 0:  # not quantized
        for start in range(0, INPUTS, BLOCK_K):
            inputs = start + tl.arange(0, BLOCK_K)
            left_mask, right_mask = is_row[:, None], is_column[None, :]
            if INPUTS % BLOCK_K != 0:  # at compile time: masks that depend on the iteration slow down the loop
                left_mask, right_mask = left_mask & (inputs < INPUTS)[None, :], right_mask & (inputs < INPUTS)[:, None]
            values = tl.load(left + inputs[None, :], mask=left_mask, other=0.0)
            right = matrices + weight_rows[None, :] * INPUTS + inputs[:, None]
            weights = tl.load(right, mask=right_mask, other=0.0)
            total = multiply(values, weights, total, INTERPRETED)
    else:
        for start in range(0, INPUTS, PART):
            for half in tl.static_range(8 // BITS):
                inputs = find_inputs(start, half, BITS, PART)
                values = tl.load(left + inputs[None, :], mask=is_row[:, None], other=0.0)
                weights = load_weights(
                    matrices, scales, offsets, levels, weight_rows, is_column, start, half, INPUTS, BITS, BLOCK, PART,
                    HAS_OFFSETS, HAS_LEVELS, IS_FLOAT8,
                )  # fmt: skip
                total = multiply(values, weights.to(x.dtype.element_ty), total, INTERPRETED)
    if HAS_BIAS:
        total += tl.load(biases + expert * OUTPUTS + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    pointers = out + places.to(tl.int64)[:, None] * OUTPUTS + columns[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _find_group(order, chosen, adapters, num_pairs, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HEIGHT: tl.constexpr):
    """Return the adapter and expert of one pair, and the group of pairs with both in a block of `HEIGHT` sorted pairs.

    The group is the sorted positions, the tokens, and a mask. For all pairs except the first in a group, and for pairs
    without an adapter, the returned adapter is 0.
    """
    place = tl.program_id(2)
    pair = tl.load(order + place)
    adapter, expert = tl.load(adapters + pair // TOP_K), tl.load(chosen + pair)
    places = place // HEIGHT * HEIGHT + tl.arange(0, HEIGHT)
    is_pair = places < num_pairs
    pairs = tl.load(order + places, mask=is_pair, other=0)
    tokens = pairs // TOP_K
    is_mine = is_pair & (tl.load(adapters + tokens, mask=is_pair, other=0) == adapter)
    is_mine = is_mine & (tl.load(chosen + pairs, mask=is_pair, other=EXPERTS) == expert)
    is_first = tl.min(tl.where(is_mine, places, num_pairs), 0) == place
    return tl.where(is_first, adapter, 0), expert, places.to(tl.int64), tokens, is_mine


@triton.jit(
    do_not_specialize=["num_pairs", "num_targets", "first_target", "padded_rank"],
    do_not_specialize_on_alignment=["adapters"],
)
def _shrink_groups(
    v, x, buffer, table, adapters, order, chosen, num_pairs, num_targets, first_target, padded_rank,
    INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, GATHERS: tl.constexpr, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr,
    TOP_K: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store one part (a range of inputs) of `V = x @ A.T` for one group of pairs and one target."""
    part, index = tl.program_id(0), tl.program_id(1)
    adapter, expert, places, tokens, is_mine = _find_group(order, chosen, adapters, num_pairs, EXPERTS, TOP_K, HEIGHT)
    if adapter == 0:
        return
    fields = find_fields(table, adapter, num_targets, first_target + index)
    rank = tl.load(fields + RANK).to(tl.int32)
    a = buffer + tl.multiple_of(tl.load(fields + A), ALIGNMENT) + expert.to(tl.int64) * rank * INPUTS
    rows = tokens.to(tl.int64) if GATHERS else places
    v += ((part.to(tl.int64) * num_pairs + places) * SLICES + index) * padded_rank
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        is_rank = ranks < rank
        low_rank = multiply_a(
            x + rows * INPUTS, is_mine, a + ranks.to(tl.int64) * INPUTS, is_rank, part, PARTS, INPUTS, BLOCK_K,
            INTERPRETED,
        )  # fmt: skip
        tl.store(v[:, None] + ranks[None, :], low_rank, mask=is_mine[:, None] & is_rank[None, :])


@triton.jit(
    do_not_specialize=["num_pairs", "num_targets", "first_target", "padded_rank"],
    do_not_specialize_on_alignment=["adapters", "scales"],
)
def _expand_groups(
    out, v, buffer, table, adapters, order, chosen, num_pairs, num_targets, first_target, padded_rank, scales,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr, TOP_K: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the scaled `V @ B` to one block of columns for one group of pairs and one target."""
    index, columns = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    adapter, expert, places, _, is_mine = _find_group(order, chosen, adapters, num_pairs, EXPERTS, TOP_K, HEIGHT)
    if adapter == 0:
        return
    fields = find_fields(table, adapter, num_targets, first_target + index)
    rank = tl.load(fields + RANK).to(tl.int32)
    if rank == 0:
        return
    scale = tl.load(scales + adapter * num_targets + first_target + index)
    b = buffer + tl.multiple_of(tl.load(fields + B), ALIGNMENT) + expert.to(tl.int64) * rank * WIDTH
    pointers = out + places[:, None] * (SLICES * WIDTH) + (index * WIDTH + columns)[None, :]
    mask = is_mine[:, None] & (columns < WIDTH)[None, :]
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    padded_rank = tl.multiple_of(padded_rank, RANKS)
    row_stride, first = SLICES * padded_rank, tl.min(places, 0)
    v += (first * SLICES + index) * padded_rank
    for start in range(0, rank, RANKS):
        low_rank = load_v(v, row_stride, num_pairs.to(tl.int64) * row_stride, PARTS, is_mine, start, rank, scale, PARTS)
        factor = load_b(b, start, rank, columns, WIDTH)
        total = multiply(low_rank.to(factor.dtype), factor, total, INTERPRETED)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_targets", "first_target", "padded_rank"])
def _shrink(
    v, x, buffer, table, adapters, order, starts, num_targets, first_target, padded_rank, INPUTS: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HEIGHT: tl.constexpr,
    TOP_K: tl.constexpr, GATHERS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store `V = x @ A.T` for one tile and one target, one adapter after the other."""
    expert, first, count = _find_tile(starts, tl.program_id(0), EXPERTS, BLOCK_E, HEIGHT)
    if count <= 0:
        return
    index, offsets = tl.program_id(1), tl.arange(0, HEIGHT)
    is_row, places = offsets < count, first + offsets
    tokens = tl.load(order + places, mask=is_row, other=0) // TOP_K
    rows = tokens if GATHERS else places
    adapter = tl.load(adapters + tokens, mask=is_row, other=0)
    current = tl.max(adapter, 0)
    while current > 0:
        is_mine = adapter == current
        fields = find_fields(table, current, num_targets, first_target + index)
        rank = tl.load(fields + RANK).to(tl.int32)
        a = buffer + tl.multiple_of(tl.load(fields + A), ALIGNMENT) + expert.to(tl.int64) * rank * INPUTS
        for start in range(0, rank, RANKS):
            ranks = start + tl.arange(0, RANKS)
            is_rank = ranks < rank
            low_rank = multiply_a(
                x + rows.to(tl.int64) * INPUTS, is_mine, a + ranks.to(tl.int64) * INPUTS, is_rank, 0, 1, INPUTS,
                BLOCK_K, INTERPRETED,
            )  # fmt: skip
            pointers = v + (places.to(tl.int64) * SLICES + index)[:, None] * padded_rank + ranks[None, :]
            tl.store(pointers, low_rank, mask=is_mine[:, None] & is_rank[None, :])
        current = tl.max(tl.where(adapter < current, adapter, 0), 0)


@triton.jit(do_not_specialize=["num_targets", "first_target", "padded_rank"])
def _expand(
    out, v, buffer, table, adapters, order, starts, num_targets, first_target, padded_rank, scales,
    WIDTH: tl.constexpr, SLICES: tl.constexpr, BLOCK_N: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    HEIGHT: tl.constexpr, TOP_K: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the scaled `V @ B` to one block of columns of one tile and target."""
    expert, first, count = _find_tile(starts, tl.program_id(1), EXPERTS, BLOCK_E, HEIGHT)
    if count <= 0:
        return
    index, offsets = tl.program_id(2), tl.arange(0, HEIGHT)
    is_row, places = offsets < count, (first + offsets).to(tl.int64)
    adapter = tl.load(adapters + tl.load(order + places, mask=is_row, other=0) // TOP_K, mask=is_row, other=0)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    v += ((first.to(tl.int64)) * SLICES + index) * padded_rank
    total = tl.zeros((HEIGHT, BLOCK_N), tl.float32)
    current = tl.max(adapter, 0)
    while current > 0:
        is_mine = adapter == current
        fields = find_fields(table, current, num_targets, first_target + index)
        rank = tl.load(fields + RANK).to(tl.int32)
        scale = tl.load(scales + current * num_targets + first_target + index)
        b = buffer + tl.multiple_of(tl.load(fields + B), ALIGNMENT) + expert.to(tl.int64) * rank * WIDTH
        for start in range(0, rank, RANKS):
            low_rank = load_v(v, SLICES * padded_rank, 0, 1, is_mine, start, rank, scale, 1)
            factor = load_b(b, start, rank, columns, WIDTH)
            total = multiply(low_rank.to(factor.dtype), factor, total, INTERPRETED)
        current = tl.max(tl.where(adapter < current, adapter, 0), 0)
    pointers = out + places[:, None] * (SLICES * WIDTH) + (index * WIDTH + columns)[None, :]
    mask = (is_row & (adapter > 0))[:, None] & (columns < WIDTH)[None, :]
    total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine(out, outputs, positions, weights, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Write the weighted sum of one token's expert outputs."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(positions + token * TOP_K + choice).to(tl.int64)
        value = tl.load(outputs + place * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
        total += value * tl.load(weights + token * TOP_K + choice)
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=is_column)
