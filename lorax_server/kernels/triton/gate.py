"""`activation(gate) * up`, where a prompt's adapters add their part to both on the way: for no traffic of its own."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lorax_server.kernels.ops import Activation, LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.triton import prompt
from lorax_server.kernels.triton.products import (
    NUM_FIELDS,
    find_fields,
    is_interpreted,
    load_tile,
    scale_and_shift_tile,
)
from lorax_server.kernels.triton.prompt import expand_tile
from lorax_server.kernels.triton.tiles import prompt_tiles

BUILT_IN = ("silu", "gelu", "gelu_tanh", "relu")
PLAIN_HEIGHT, PLAIN_BLOCK = 4, 512
BLOCK_N = 128


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(gate) * up` of the two halves, without adapters."""
    if activation.name not in BUILT_IN:
        first, second = gate_up.chunk(2, dim=-1)
        return activation(first) * second
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    grid = (triton.cdiv(width, PLAIN_BLOCK), triton.cdiv(tokens, PLAIN_HEIGHT))
    if tokens:
        _gate[grid](
            out, gate_up, tokens, WIDTH=width, ACTIVATION=activation.name, HEIGHT=PLAIN_HEIGHT, BLOCK_N=PLAIN_BLOCK
        )
    return out


def can_fuse(weights: LinearWeights, activation: Activation, targets: Sequence[LoraTarget]) -> bool:
    """Tell whether gate and up are a target each, and the activation is one that the kernel has."""
    half = weights.weight.shape[0] // 2
    columns = [target.columns for target in targets]
    return activation.name in BUILT_IN and columns == [slice(0, half), slice(half, 2 * half)]


def gated_linear(
    x: torch.Tensor,
    weights: LinearWeights,
    activation: Activation,
    lora: LoraBatch,
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    """Do a prompt's linear, its adapters and its activation."""
    low_rank = prompt.shrink(x, lora, targets)
    gate_up = F.linear(x, weights.weight, weights.bias)
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    token_class = prompt.find_class(tokens)
    tiles = prompt_tiles(lora, token_class.gate_height)
    _adapted_gate[(triton.cdiv(width, BLOCK_N), len(tiles))](
        out, gate_up, low_rank.v, tiles, lora.buffer, lora.table, lora.scales, *low_rank.sizes,
        WIDTH=width, ACTIVATION=activation.name, HEIGHT=token_class.gate_height, BLOCK_N=BLOCK_N,
        PARTS=token_class.most_parts, INTERPRETED=is_interpreted(), num_warps=4, num_stages=2,
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
        return tl.where(x < 0, 0.0, x)  # so that a NaN stays one


@triton.jit(do_not_specialize=["num_rows"])
def _gate(
    out, gate_up, num_rows, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    at = gate_up + rows * (2 * WIDTH) + columns
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    value = _activate(first, ACTIVATION) * second
    tl.store(out + rows * WIDTH + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_targets", "first_target", "num_rows", "num_parts", "room"],
    do_not_specialize_on_alignment=["tiles", "table", "scales"],
)
def _adapted_gate(
    out, gate_up, v, tiles, buffer, table, scales, num_targets, first_target, num_rows, num_parts, room,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    first, count, adapter = load_tile(tiles, tl.program_id(1))
    fields = find_fields(table, adapter, num_targets, first_target)
    scales += adapter * num_targets + first_target
    columns, place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, HEIGHT)
    is_row = place < count
    rows = (first + place).to(tl.int64)[:, None]
    at = gate_up + rows * (2 * WIDTH) + columns[None, :]
    up = _adapt(
        at + WIDTH, v, buffer, fields + NUM_FIELDS, scales, first, is_row, 1, columns, num_rows, num_parts, room,
        WIDTH, PARTS, INTERPRETED,
    )  # fmt: skip
    gate = _adapt(
        at, v, buffer, fields, scales, first, is_row, 0, columns, num_rows, num_parts, room, WIDTH, PARTS, INTERPRETED
    )
    value = _activate(gate, ACTIVATION) * up
    mask = is_row[:, None] & (columns < WIDTH)[None, :]
    tl.store(out + rows * WIDTH + columns[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _adapt(
    at, v, buffer, fields, scales, first, is_row, index, columns, num_rows, num_parts, room,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load one half of the base model's output and let the adapter change it."""
    base = tl.load(at, mask=is_row[:, None] & (columns < WIDTH)[None, :], other=0.0).to(tl.float32)
    total = base + expand_tile(
        v, buffer, fields, scales, first, is_row, index, columns, WIDTH, num_rows, num_parts, room, 2, PARTS,
        INTERPRETED,
    )  # fmt: skip
    return scale_and_shift_tile(total, buffer, fields, columns, WIDTH)
