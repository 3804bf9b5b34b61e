"""Prefill attention over the paged cache, which holds the keys and values of this forward too.

One program attends with a few query tokens of one sequence, and with several heads that share a key and value head, to
all keys before them. Keys are read in tiles that begin at multiples of a tile's size, and a row of a tile's product
depends on no other row: so a token's result is the same to the bit however its prompt was cut, and in any batch.

On an H200, prompts of 4,096 and 8,192 tokens (32 heads that share 8, of 128 numbers, bfloat16) ran at 374 and 384
TFLOP/s here, at 275 and 321 in torch's flash attention, and at 532 and 612 in cuDNN's. The last is not used for first
chunks all the same: a token would have other bits there than in a later chunk.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lorax_server.kernels import reference
from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch
from lorax_server.kernels.triton.attention import (
    Scales,
    check_layout,
    decode_attention,
    fill_up,
    is_rescaled,
    load_query,
    load_slopes,
    multiply_keys,
    product_dtype,
)

MOST_PACKED = 8  # heads of one program
LARGE_SHARED = 200 << 10  # bytes of memory of a processor, which GPUs before Hopper do not have


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> torch.Tensor:
    """Attend as the op table says; a sequence with one new token has the bits of a decode step."""
    if not batch.stores_all:
        return reference.prefill_attention(q, k, v, cache, batch, spec)
    # In a graph, sequences without a single token have theirs in a row after the last.
    room = torch.empty(len(q) + batch.in_graph, *q.shape[1:], dtype=q.dtype, device=q.device)
    out = room[: len(q)]
    attend_prompts(out, q, cache, batch, spec)
    singles = batch.once("singles", _mark_singles if batch.in_graph else _find_singles, batch)
    if singles is not None:
        room[singles.results] = decode_attention(q[singles.tokens], cache, singles.batch, spec)
    return out


def attend_prompts(
    out: torch.Tensor, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> None:
    """Write the rows of `out` that belong to sequences with several new tokens."""
    check_layout(q, cache, batch)
    sharing = q.shape[1] // cache[0].shape[1]
    packed = max(count for count in range(1, MOST_PACKED + 1) if sharing % count == 0)
    tiling = choose_tiling(q, cache[0])
    height = tiling.rows // packed
    tiles = batch.once(("tiles", height), plan_tiles if batch.in_graph else _cut_tiles, batch, height)
    if len(tiles):
        _launch(q, cache, batch.block_tables, tiles, out, spec, tiling, packed)


class Tiling(NamedTuple):
    """The shape of a program's work. It depends on dtypes, the size of a head and the GPU alone, so that bits do."""

    rows: int  # of queries: tokens times heads
    keys: int
    num_warps: int
    num_stages: int


def choose_tiling(q: torch.Tensor, cache: torch.Tensor) -> Tiling:
    if q.is_cpu:
        return Tiling(32, 16, 4, 1)
    dim = fill_up(q.shape[2])
    if product_dtype(q, cache) == tl.float32:
        if dim > 256:
            return Tiling(16, 16, 8, 1)
        return Tiling(64, 16, 8, 2) if dim <= 128 else Tiling(32, 16, 8, 2)
    if dim <= 128:
        return Tiling(64, 64, 4, 2)
    if dim > 256:  # the tiles below would need 384 KiB of shared memory on Hopper and 132 KiB elsewhere
        return Tiling(32, 16, 8, 2)
    shared = torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor
    return Tiling(128, 64, 8, 2) if shared >= LARGE_SHARED else Tiling(64, 32, 4, 2)


class _Singles(NamedTuple):
    """The sequences with one new token."""

    batch: PagedBatch
    tokens: torch.Tensor
    results: torch.Tensor  # the rows that they go to


def _cut_tiles(batch: PagedBatch, height: int) -> torch.Tensor:
    """Cut the new tokens into tiles, those with the most keys first, so that no long one is left for the end.

    Return [num_tiles, 4]: sequence, first token of the forward, its position, number of tokens.
    """
    new, cached = batch.read_lengths()
    starts = [0, *accumulate(new)]
    tiles = [
        (row, starts[row] + at, cached[row] + at, min(height, count - at))
        for row, count in enumerate(new)
        if count > 1
        for at in range(0, count, height)
    ]
    tiles.sort(key=lambda tile: -tile[2] - tile[3])
    return _send(torch.tensor(tiles, dtype=torch.int32).view(-1, 4), batch.block_tables.device)


def plan_tiles(batch: PagedBatch, height: int) -> torch.Tensor:
    """Cut the new tokens of a batch in a graph into tiles, as `_cut_tiles` does, but on the device.

    There are as many tiles as there can be, in the order of their sequences; those past the last have no tokens. The
    last number of a tile counts the tokens to the end of its sequence. In a graph this is captured with the batch's
    first layer.
    """
    num_tokens, num_seqs = len(batch.slots), len(batch.block_tables)
    if batch.cu_seqlens is None:
        raise ValueError("a batch in a graph has bounds")
    most = num_tokens // height + min(num_seqs, num_tokens // 2)  # all but the last tile of a sequence are full
    tiles = torch.empty(most, 4, dtype=torch.int32, device=batch.block_tables.device)
    lengths = batch.input_lengths, batch.cache_lengths, batch.cu_seqlens
    _plan_kernel[(1,)](*lengths, tiles, num_seqs, most, height, ROOM=triton.next_power_of_2(num_seqs), num_warps=8)
    return tiles


@triton.jit(do_not_specialize=["input_lengths", "cache_lengths", "bounds", "num_seqs", "most", "height"])
def _plan_kernel(input_lengths, cache_lengths, bounds, tiles, num_seqs, most, height, ROOM: tl.constexpr):
    seqs = tl.arange(0, ROOM)
    new = tl.load(input_lengths + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    cached = tl.load(cache_lengths + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    token = tl.load(bounds + seqs, mask=seqs < num_seqs, other=0)
    counts = tl.where(new > 1, tl.cdiv(new, height), 0)  # of each sequence
    first, total = tl.cumsum(counts, 0) - counts, tl.sum(counts, 0)
    for number in range(tl.max(counts, 0)):
        at, offset, is_tile = tiles + (first + number) * 4, number * height, number < counts
        tl.store(at, seqs, mask=is_tile)
        tl.store(at + 1, token + offset, mask=is_tile)
        tl.store(at + 2, cached + offset, mask=is_tile)
        tl.store(at + 3, new - offset, mask=is_tile)
    for start in range(0, most, ROOM):
        is_empty = (start + seqs >= total) & (start + seqs < most)
        for field in tl.static_range(4):
            tl.store(tiles + (start + seqs) * 4 + field, 0, mask=is_empty)


def _mark_singles(batch: PagedBatch) -> _Singles:
    """Return all sequences of a batch in a graph; those without a single token have no tokens there."""
    assert batch.cu_seqlens is not None
    is_single, first, last = batch.input_lengths == 1, batch.cu_seqlens[:-1].long(), len(batch.slots)
    cached = torch.where(is_single, batch.cache_lengths, 0)
    own = PagedBatch(batch.block_tables, is_single.to(batch.input_lengths.dtype), cached, batch.slots)
    return _Singles(own, first.clamp(max=last - 1), torch.where(is_single, first, last))


def _find_singles(batch: PagedBatch) -> _Singles | None:
    new, _ = batch.read_lengths()
    starts, device = [0, *accumulate(new)], batch.block_tables.device
    single = [row for row, count in enumerate(new) if count == 1]
    if not single:
        return None
    at = _send(torch.tensor(single), device)
    own = PagedBatch(batch.block_tables[at], batch.input_lengths[at], batch.cache_lengths[at], batch.slots)
    tokens = _send(torch.tensor([starts[row] for row in single]), device)
    return _Singles(own, tokens, tokens)


def _send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _launch(
    q: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    spec: AttentionSpec,
    tiling: Tiling,
    packed: int,
) -> None:
    _, num_kv_heads, block_size, head_dim = cache[0].shape
    compute = product_dtype(q, cache[0])
    _prefill_kernel[(q.shape[1] // packed, len(tiles))](
        *(q, *cache, tables, tiles, out, spec.reach, q.stride(0), q.stride(1), tables.stride(0)),
        *Scales.of(cache[0], spec),
        q if spec.slopes is None else spec.slopes,
        # Tensor cores fix the order of sums. In float32 the compiler does, and may choose another without masks.
        HAS_WHOLE=compute != tl.float32 or q.is_cpu,
        HAS_WINDOW=spec.window is not None,
        HAS_CAP=spec.soft_cap is not None,
        HAS_SLOPES=spec.slopes is not None,
        IS_RESCALED=is_rescaled(q, cache[0]),
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        PACKED=packed,
        BLOCK_SIZE=block_size,
        COMPUTE=compute,
        HEAD_DIM=head_dim,
        DIM=fill_up(head_dim),
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit
def _load(cache, places, mask, IS_MASKED: tl.constexpr):
    # What is not loaded is 0, so nothing past the sequence's end can reach the sums, not even a NaN.
    return tl.load(cache + places, mask=mask, other=0.0) if IS_MASKED else tl.load(cache + places)


@triton.jit
def _attend(
    query, power, slope, summed, total, highest, k_cache, v_cache, table, at_row, start, stop, end, window, inner,
    scale, IS_EDGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    IS_RESCALED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `start` to `stop`. At an edge, each row has its own view of them.

    All sums are the same operations in the same order with and without an edge, so that their bits are too.
    """
    dims = tl.arange(0, query.shape[1])
    is_masked: tl.constexpr = IS_EDGE or query.shape[1] != HEAD_DIM
    for at in range(start, stop, KEYS):
        positions = at + tl.arange(0, KEYS)
        within = positions < end
        blocks = _load(table, positions // BLOCK_SIZE, within, IS_EDGE).to(tl.int64)
        rows = blocks * (NUM_KV_HEADS * BLOCK_SIZE) + positions % BLOCK_SIZE
        places = rows[:, None] * HEAD_DIM + dims[None, :]
        loaded = within[:, None] & (dims < HEAD_DIM)[None, :]
        keys = _load(k_cache, places, loaded, is_masked).to(query.dtype)
        scores = multiply_keys(query, power, keys, inner, IS_RESCALED, HAS_CAP)
        if HAS_SLOPES:  # they are scaled below
            scores += slope[:, None] * (positions[None, :] - at_row[:, None]).to(tl.float32)
        if IS_EDGE:
            visible = positions[None, :] <= at_row[:, None]
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > at_row[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        base = higher
        if HAS_WINDOW:  # a row may have seen nothing so far
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        fading = tl.exp2(highest - base)
        total = tl.fma(total, fading, tl.sum(weights, axis=1))
        values = _load(v_cache, places, loaded, is_masked).to(query.dtype)
        summed = tl.dot(weights.to(query.dtype), values, summed * fading[:, None], input_precision="ieee")
        highest = higher
    return summed, total, highest


@triton.jit(do_not_specialize=["tables", "tiles", "window", "table_row"])
def _prefill_kernel(
    q, k_cache, v_cache, tables, tiles, out, window, q_token, q_head, table_row, inner, scale, v_scale,
    slopes, HAS_WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    IS_RESCALED: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    group, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    seq, token = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
    position, count = tl.load(tile + 2), tl.minimum(tl.load(tile + 3), ROWS // PACKED)
    if count == 0:
        return
    kv_head = (group * PACKED // (NUM_HEADS // NUM_KV_HEADS)).to(tl.int64)
    lines, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    offsets, heads = lines // PACKED, group * PACKED + lines % PACKED
    own = (offsets < count)[:, None] & (dims < HEAD_DIM)[None, :]
    places = q + (token + offsets)[:, None] * q_token + heads[:, None] * q_head + dims[None, :]
    query, power = load_query(places, own, COMPUTE, IS_RESCALED)
    slope = load_slopes(slopes, heads, offsets < count, HAS_SLOPES) / scale
    at_row, end = position + tl.minimum(offsets, count - 1), position + count
    summed, total = tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    keys, values = k_cache + kv_head * (BLOCK_SIZE * HEAD_DIM), v_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = tables + seq * table_row
    edge = tl.maximum(position + 1 - window, 0) // KEYS * KEYS
    if HAS_WHOLE:  # all rows see all keys from `whole` to `edge`
        first, edge = edge, (position + 1) // KEYS * KEYS
        whole = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, edge)
        if HAS_WINDOW:
            summed, total, highest = _attend(
                query, power, slope, summed, total, highest, keys, values, table, at_row, first, whole, end, window,
                inner, scale, True, HAS_WINDOW, HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM,
                KEYS,
            )  # fmt: skip
        summed, total, highest = _attend(
            query, power, slope, summed, total, highest, keys, values, table, at_row, whole, edge, end, window, inner,
            scale, False, HAS_WINDOW, HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, KEYS,
        )  # fmt: skip
    summed, total, highest = _attend(
        query, power, slope, summed, total, highest, keys, values, table, at_row, edge, end, end, window, inner,
        scale, True, HAS_WINDOW, HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, KEYS,
    )  # fmt: skip
    result = (summed / total[:, None] * v_scale).to(out.dtype.element_ty)
    rows = (token + offsets) * NUM_HEADS + heads
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result, mask=own)
