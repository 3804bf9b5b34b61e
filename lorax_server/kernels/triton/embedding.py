"""Adapters on embeddings. One launch applies all adapter weights to the base embedding rows."""

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import EmbeddingTarget, Field, LoraBatch
from lorax_server.kernels.triton.lora_math import (
    ALIGNMENT,
    RANK,
    RANKS,
    A,
    B,
    find_fields,
    is_interpreted,
    load_tile,
    multiply,
    scale_and_shift_tile,
)
from lorax_server.kernels.triton.lora_tiles import DECODE_HEIGHT, DECODE_ROWS, decode_tiles, prompt_tiles

BLOCK_N = 128
ROW_IDS = tl.constexpr(int(Field.ROW_IDS))
ROWS = tl.constexpr(int(Field.ROWS))
NEW_ROWS = tl.constexpr(int(Field.NEW_ROWS))
NUM_ROWS = tl.constexpr(int(Field.NUM_ROWS))
NUM_NEW_ROWS = tl.constexpr(int(Field.NUM_NEW_ROWS))


def adapt_embedding(out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
    """Implement `Ops.adapt_embedding`, with one program per tile of 16 rows.

    For decode steps the grid has the maximum size, because tiles are listed on the device.
    """
    (tokens, width), vocab = out.shape, target.vocab
    if not tokens:
        return
    tiles = decode_tiles(lora).tiles if tokens <= DECODE_ROWS else prompt_tiles(lora, DECODE_HEIGHT)
    _adapt_embedding[(triton.cdiv(width, BLOCK_N), len(tiles))](
        out, ids, tiles, lora.buffer, lora.table, lora.scales,
        lora.table.shape[1], target.index, vocab.start, len(vocab), target.vocab_size, out.stride(0),
        WIDTH=width, HAS_NEW=target.adds_new_rows, HEIGHT=DECODE_HEIGHT, BLOCK_N=BLOCK_N,
        INTERPRETED=is_interpreted(),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_targets", "target", "vocab_start", "num_held", "vocab_size"],
    do_not_specialize_on_alignment=["ids", "tiles", "table", "scales"],
)
def _adapt_embedding(
    out, ids, tiles, buffer, table, scales, num_targets, target, vocab_start, num_held, vocab_size, stride,
    WIDTH: tl.constexpr, HAS_NEW: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    first, count, adapter = load_tile(tiles, tl.program_id(1))
    if adapter == 0:
        return
    fields = find_fields(table, adapter, num_targets, target)
    columns, row_offsets = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, HEIGHT)
    is_row, is_column = row_offsets < count, columns < WIDTH
    mask = is_row[:, None] & is_column[None, :]
    token = tl.load(ids + first + row_offsets, mask=is_row, other=-1).to(tl.int64)
    local = token - vocab_start
    pointers = out + (first + row_offsets).to(tl.int64)[:, None] * stride + columns[None, :]
    value = tl.load(pointers, mask=mask, other=0.0)
    position, has_row = _find_row(buffer, fields, local)
    value = _replace_rows(value, buffer, tl.load(fields + ROWS), position, has_row & is_row, columns, WIDTH)
    is_held = (local >= 0) & (local < num_held) & is_row
    scale = tl.load(scales + adapter * num_targets + target)
    total = value.to(tl.float32) + _multiply_lora(buffer, fields, scale, local, is_held, columns, WIDTH, INTERPRETED)
    value = scale_and_shift_tile(total, buffer, fields, columns, WIDTH).to(value.dtype)
    if HAS_NEW:
        num_new = tl.load(fields + NUM_NEW_ROWS)
        new = tl.maximum(tl.minimum(token - vocab_size, num_new - 1), 0)
        is_new = (token >= vocab_size) & (num_new > 0) & is_row
        value = _replace_rows(value, buffer, tl.load(fields + NEW_ROWS), new, is_new, columns, WIDTH)
    tl.store(pointers, value, mask=mask)


@triton.jit
def _find_row(buffer, fields, local):
    """Binary-search tokens in the adapter's sorted row IDs. Return the positions, and whether each token was found.

    The IDs are int32 values stored in the adapter buffer.
    """
    remaining = tl.load(fields + NUM_ROWS).to(tl.int32)
    row_ids = (buffer + tl.load(fields + ROW_IDS)).to(tl.pointer_type(tl.int32), bitcast=True)
    has_any = remaining > 0
    position = tl.zeros(local.shape, tl.int32)
    while remaining > 1:
        half = remaining // 2
        position += tl.where(tl.load(row_ids + position + half) <= local, half, 0)
        remaining -= half
    found = tl.load(row_ids + position, mask=has_any & (position >= 0), other=-1)
    return position, (found == local) & has_any


@triton.jit
def _replace_rows(value, buffer, offset, position, is_replaced, columns, WIDTH: tl.constexpr):
    """Return `value`, with rows replaced by the adapter's rows where `is_replaced` is True."""
    pointers = buffer + tl.multiple_of(offset, ALIGNMENT) + position.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    row = tl.load(pointers, mask=is_replaced[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return tl.where(is_replaced[:, None], row, value)


@triton.jit
def _multiply_lora(buffer, fields, scale, local, is_held, columns, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the scaled `A[token] @ B`, or zeros for tokens on other ranks."""
    rank = tl.load(fields + RANK).to(tl.int32)
    a = buffer + tl.load(fields + A)
    b = buffer + tl.multiple_of(tl.load(fields + B), ALIGNMENT)
    total = tl.zeros((local.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        is_rank = ranks < rank
        at_a = a + local[:, None] * rank + ranks[None, :]
        low_rank = tl.load(at_a, mask=is_held[:, None] & is_rank[None, :], other=0.0)
        at_b = b + ranks.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        factor = tl.load(at_b, mask=is_rank[:, None] & (columns < WIDTH)[None, :], other=0.0)
        low_rank = (low_rank.to(tl.float32) * scale).to(factor.dtype)
        total = multiply(low_rank, factor, total, INTERPRETED)
    return tl.where(is_held[:, None], total, 0.0)
