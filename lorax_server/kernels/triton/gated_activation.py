"""Gated activation `activation(gate) * up`, fused with the LoRA expand for prompts."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lorax_server.kernels.ops import Activation, LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.triton import prompt_lora
from lorax_server.kernels.triton.lora_math import (
    ALIGNMENT,
    NUM_FIELDS,
    RANK,
    RANKS,
    B,
    find_fields,
    is_interpreted,
    load_b,
    load_tile,
    load_v,
    multiply,
    scale_and_shift_tile,
)
from lorax_server.kernels.triton.lora_tiles import prompt_tiles

FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
CLAMPED_SWIGLU = "clamped_swiglu"  # has two parameters, and is only fused without adapters
BASE_HEIGHT, BASE_BLOCK_N = 4, 512
BLOCK_N = 64
BLOCKS = 8  # column blocks per program, so that the loaded V is reused


def apply_gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up`, where gate and up are the halves of `gate_up`, without adapters."""
    if activation.name not in (*FUSED_ACTIVATIONS, CLAMPED_SWIGLU):
        first, second = gate_up.chunk(2, dim=-1)
        return activation.apply_gate(first, second)
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    grid = (triton.cdiv(width, BASE_BLOCK_N), triton.cdiv(tokens, BASE_HEIGHT))
    if tokens:
        _gate[grid](
            out, gate_up, tokens, *(activation.parameters or (0.0, 0.0)), WIDTH=width, ACTIVATION=activation.name,
            HEIGHT=BASE_HEIGHT, BLOCK_N=BASE_BLOCK_N,
        )  # fmt: skip
    return out


def can_fuse_gate(weights: LinearWeights, activation: Activation, targets: Sequence[LoraTarget]) -> bool:
    """Return True if gate and up are separate target modules and the kernel supports the activation."""
    if weights.rounds_inputs:
        return False
    half = weights.shape[0] // 2
    columns = [target.columns for target in targets]
    return activation.name in FUSED_ACTIVATIONS and columns == [slice(0, half), slice(half, 2 * half)]


def gated_linear(
    x: torch.Tensor,
    weights: LinearWeights,
    activation: Activation,
    lora: LoraBatch,
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    """Return `activation(gate) * up` for a prompt, where gate and up are linear layers with adapters."""
    low_rank = prompt_lora.shrink(x, lora, targets)
    gate_up = F.linear(x, weights.plain, weights.bias)
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    tile_sizes = prompt_lora.choose_tile_sizes(tokens)
    tiles = prompt_tiles(lora, tile_sizes.gate_height)
    _gate_with_lora[(triton.cdiv(width, BLOCK_N * BLOCKS), len(tiles))](
        out, gate_up, low_rank.v, tiles, lora.buffer, lora.table, lora.scales, *low_rank.sizes,
        WIDTH=width, ACTIVATION=activation.name, HEIGHT=tile_sizes.gate_height, BLOCK_N=BLOCK_N, BLOCKS=BLOCKS,
        PARTS=tile_sizes.max_parts, INTERPRETED=is_interpreted(), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.where(x < 0, 0.0, x)  # keeps NaN


@triton.jit(do_not_specialize=["num_rows", "alpha", "limit"])
def _gate(
    out, gate_up, num_rows, alpha, limit, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    pointers = gate_up + rows * (2 * WIDTH) + columns
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + WIDTH, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        first = tl.where(first > limit, limit, first)  # keeps NaN
        second = tl.where(second > limit, limit, tl.where(second < -limit, -limit, second))
        value = first * tl.sigmoid(first * alpha) * (second + 1.0)
    else:
        value = _activate(first, ACTIVATION) * second
    tl.store(out + rows * WIDTH + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_targets", "first_target", "num_rows", "num_parts", "padded_rank"],
    do_not_specialize_on_alignment=["tiles", "table", "scales"],
)
def _gate_with_lora(
    out, gate_up, v, tiles, buffer, table, scales, num_targets, first_target, num_rows, num_parts, padded_rank,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    first, count, adapter = load_tile(tiles, tl.program_id(1))
    fields = find_fields(table, adapter, num_targets, first_target)
    scales += adapter * num_targets + first_target
    row_offsets = tl.arange(0, HEIGHT)
    is_row, rows = row_offsets < count, (first + row_offsets).to(tl.int64)[:, None]
    padded_rank = tl.multiple_of(padded_rank, RANKS)
    row_stride, part_stride = 2 * padded_rank, num_rows.to(tl.int64) * 2 * padded_rank
    v += first.to(tl.int64) * row_stride
    rank, up_rank = tl.load(fields + RANK).to(tl.int32), tl.load(fields + NUM_FIELDS + RANK).to(tl.int32)
    scale, up_scale = tl.load(scales), tl.load(scales + 1)
    b = buffer + tl.multiple_of(tl.load(fields + B), ALIGNMENT)
    up_b = buffer + tl.multiple_of(tl.load(fields + NUM_FIELDS + B), ALIGNMENT)
    dtype: tl.constexpr = out.dtype.element_ty
    low_rank = load_v(v, row_stride, part_stride, num_parts, is_row, 0, rank, scale, PARTS).to(dtype)
    up_low_rank = load_v(v + padded_rank, row_stride, part_stride, num_parts, is_row, 0, up_rank, up_scale, PARTS).to(
        dtype
    )
    for block in range(BLOCKS):
        columns = (tl.program_id(0) * BLOCKS + block) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = is_row[:, None] & (columns < WIDTH)[None, :]
        pointers = gate_up + rows * (2 * WIDTH) + columns[None, :]
        apply_gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(pointers + WIDTH, mask=mask, other=0.0).to(tl.float32)
        apply_gate = multiply(low_rank, load_b(b, 0, rank, columns, WIDTH), apply_gate, INTERPRETED)
        up = multiply(up_low_rank, load_b(up_b, 0, up_rank, columns, WIDTH), up, INTERPRETED)
        for more in range(RANKS, rank, RANKS):
            part = load_v(v, row_stride, part_stride, num_parts, is_row, more, rank, scale, PARTS).to(dtype)
            apply_gate = multiply(part, load_b(b, more, rank, columns, WIDTH), apply_gate, INTERPRETED)
        for more in range(RANKS, up_rank, RANKS):
            part = load_v(v + padded_rank, row_stride, part_stride, num_parts, is_row, more, up_rank, up_scale, PARTS)
            up = multiply(part.to(dtype), load_b(up_b, more, up_rank, columns, WIDTH), up, INTERPRETED)
        apply_gate = scale_and_shift_tile(apply_gate, buffer, fields, columns, WIDTH)
        up = scale_and_shift_tile(up, buffer, fields + NUM_FIELDS, columns, WIDTH)
        value = _activate(apply_gate, ACTIVATION) * up
        tl.store(out + rows * WIDTH + columns[None, :], value.to(dtype), mask=mask)
