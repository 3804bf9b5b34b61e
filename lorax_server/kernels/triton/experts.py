"""Mixtures of experts with LoRA, computed as grouped matrix products over (expert, tile) work items.

A pair is a token and one of its experts. Pairs are sorted by expert on the device; a tile is a limited number of sorted
pairs of one expert. All shapes are fixed and nothing is read on the host, so graphs can be replayed with other tokens
and adapters. Each row of a product is one sum over the inputs in order, so results do not depend on the batch.
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

PLAN_BLOCK = 2048  # pairs that one iteration of the sort reads
DECODE_TOKENS, SHORT_PROMPT_TOKENS = 256, 2048  # limits for smaller tiles
SHRINK_BYTES = 256  # bytes of an input row that one iteration reads
COMBINE_BLOCK = 1024
PART_BYTES = 128  # bytes of an input row for which quantized weights are dequantized at a time
# Kernel constants for matrices that are not quantized.
PLAIN = {"BITS": 0, "BLOCK": 0, "PART": 0, "HAS_OFFSETS": False, "HAS_LEVELS": False, "IS_FLOAT8": False}


class Pairs(NamedTuple):
    """The pairs of a batch, sorted by expert."""

    order: torch.Tensor  # [pairs] int32: sorted position -> token * top_k + choice
    positions: torch.Tensor  # [pairs] int32: the inverse of `order`
    starts: torch.Tensor  # [experts + 1] int32: first sorted position of each expert
    top_k: int
    height: int  # pairs per tile

    @property
    def max_tiles(self) -> int:
        pairs, experts = len(self.order), len(self.starts) - 1
        return pairs // self.height + min(experts, pairs)


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
    x: torch.Tensor, routing: Routing, experts: ExpertWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
) -> torch.Tensor:
    assert experts.stacked is not None
    gate_up, down = experts.stacked
    if not len(x):
        return torch.empty_like(x)
    pairs = sort_pairs(routing.experts, len(experts.gate_up))
    inner = apply_gate(_linear(x, gate_up, pairs, lora, targets[:2], gathers=True), experts.activation)
    outputs = _linear(inner, down, pairs, lora, targets[2:], gathers=False)
    out = torch.empty_like(x)
    size = x.shape[1]
    _combine[(len(x), triton.cdiv(size, COMBINE_BLOCK))](
        out, outputs, pairs.positions, routing.weights.float().contiguous(), SIZE=size, TOP_K=pairs.top_k,
        BLOCK=COMBINE_BLOCK,
    )  # fmt: skip
    return out


def sort_pairs(chosen: torch.Tensor, num_experts: int) -> Pairs:
    """Sort the pairs in `chosen`, `[tokens, top_k]`, by expert. Pairs with the same expert keep their order."""
    tokens, top_k = chosen.shape
    order = chosen.new_empty(tokens * top_k, dtype=torch.int32)
    positions, starts = torch.empty_like(order), order.new_empty(num_experts + 1)
    _sort_pairs[(num_experts + 1,)](
        chosen.contiguous(), order, positions, starts, len(order), EXPERTS=num_experts, BLOCK=PLAN_BLOCK
    )
    height = 16 if tokens <= DECODE_TOKENS else 64 if tokens <= SHORT_PROMPT_TOKENS else 128
    return Pairs(order, positions, starts, top_k, height)


def _linear(
    x: torch.Tensor,
    matrices: StackedMatrices,
    pairs: Pairs,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
    *,
    gathers: bool,
) -> torch.Tensor:
    """Return the product of each sorted pair's input with its expert's matrix, including LoRA.

    With `gathers`, the rows of `x` are tokens. Otherwise they are sorted pairs.
    """
    num_experts, (outputs, inputs) = len(pairs.starts) - 1, matrices.weight.shape[-2:]
    arguments: tuple[torch.Tensor, ...]
    if isinstance(matrices.weight, TritonMatrix):
        outputs //= num_experts
        arguments, encoding = matrices.weight.arguments, matrices.weight.find_constants(elements_in(x, PART_BYTES))
    else:
        assert isinstance(matrices.weight, torch.Tensor)
        arguments, encoding = (matrices.weight,) * 4, PLAIN | {"INPUTS": inputs}
    out, x = x.new_empty(len(pairs.order), outputs), x.contiguous()
    is_decode = pairs.height == 16
    constants = {
        "EXPERTS": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts), "HEIGHT": pairs.height,
        "TOP_K": pairs.top_k, "INTERPRETED": is_interpreted(),
    }  # fmt: skip
    block_n = 64 if is_decode else 128
    _product[(triton.cdiv(outputs, block_n), pairs.max_tiles)](
        out, x, *arguments, x if matrices.bias is None else matrices.bias, pairs.order, pairs.starts,
        HAS_BIAS=matrices.bias is not None, OUTPUTS=outputs, BLOCK_N=block_n,
        BLOCK_K=elements_in(x, 256 if is_decode else 128), GATHERS=gathers, **constants, **encoding,
        num_warps=4 if is_decode else 8, num_stages=4 if is_decode else 3,
    )  # fmt: skip
    if lora is None or not lora.has_low_rank(targets):
        return out
    rank = MAX_RANK if lora.in_graph else max(lora.largest_ranks[target.index] for target in targets)
    v = x.new_empty(len(out), len(targets), triton.cdiv(rank, RANKS.value) * RANKS.value, dtype=torch.float32)
    width = targets[0].columns.stop - targets[0].columns.start
    place = (
        lora.buffer,
        lora.table,
        lora.adapter_indices,
        pairs.order,
        pairs.starts,
        lora.table.shape[1],
        targets[0].index,
    )
    _shrink[(pairs.max_tiles, len(targets))](
        v, x, *place, v.shape[2], INPUTS=inputs, SLICES=len(targets), BLOCK_K=elements_in(x, SHRINK_BYTES),
        GATHERS=gathers, **constants,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _expand[(triton.cdiv(width, block_n), pairs.max_tiles, len(targets))](
        out, v, *place, lora.scales, v.shape[2], WIDTH=width, SLICES=len(targets), BLOCK_N=block_n, **constants,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


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
            is_input = inputs < INPUTS
            values = tl.load(left + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            right = matrices + weight_rows[None, :] * INPUTS + inputs[:, None]
            weights = tl.load(right, mask=is_input[:, None] & is_column[None, :], other=0.0)
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
        a = buffer + tl.load(fields + A) + expert.to(tl.int64) * rank * INPUTS
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
    out, v, buffer, table, adapters, order, starts, num_targets, first_target, scales, padded_rank,
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
        b = buffer + tl.load(fields + B) + expert.to(tl.int64) * rank * WIDTH
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
