"""Prefill attention over the paged KV cache, which already contains the new keys and values.

One program handles a tile of query tokens and several heads of one KV head. Key tiles start at multiples of the tile
size, so results are bitwise independent of the batch and of prefill chunk boundaries.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lorax_server.kernels import reference
from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch
from lorax_server.kernels.triton.decode_attention import (
    ScoreScales,
    check_layout,
    decode_attention,
    dot_dtype,
    is_query_rescaled,
    load_query,
    load_slopes,
    multiply_keys,
    padded_head_dim,
    sink_weights,
)

MAX_PACKED_HEADS = 8  # maximum number of query heads per program
HOPPER_SHARED_BYTES = 200 << 10  # shared memory per SM; older GPUs have less


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> torch.Tensor:
    """Return prefill attention outputs. Sequences with one new token use `decode_attention`."""
    if not batch.stores_all:
        return reference.prefill_attention(q, k, v, cache, batch, spec)
    # In a graph, sequences with several tokens write their unused decode result to an extra last row.
    padded_out = torch.empty(len(q) + batch.in_graph, *q.shape[1:], dtype=q.dtype, device=q.device)
    out = padded_out[: len(q)]
    attend_prefill(out, q, cache, batch, spec)
    decode_rows = batch.cached("decode_rows", _mark_decode_rows if batch.in_graph else _find_decode_rows, batch)
    if decode_rows is not None:
        padded_out[decode_rows.results] = decode_attention(q[decode_rows.tokens], cache, decode_rows.batch, spec)
    return out


def attend_prefill(
    out: torch.Tensor, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> None:
    """Write the rows of `out` for sequences with several new tokens."""
    check_layout(q, cache, batch)
    heads_per_kv = q.shape[1] // cache[0].shape[1]
    packed = max(count for count in range(1, MAX_PACKED_HEADS + 1) if heads_per_kv % count == 0)
    tiling = choose_tile_shape(q, cache[0])
    height = tiling.rows // packed
    tiles = batch.cached(("tiles", height), plan_tiles_on_device if batch.in_graph else _list_tiles, batch, height)
    if len(tiles):
        _launch(q, cache, batch.block_tables, tiles, out, spec, tiling, packed)


class TileShape(NamedTuple):
    """The size of an attention tile. It depends only on dtypes, head size and GPU, for batch invariance."""

    rows: int  # query rows: tokens x heads
    keys: int
    num_warps: int
    num_stages: int


def choose_tile_shape(q: torch.Tensor, cache: torch.Tensor) -> TileShape:
    if q.is_cpu:
        return TileShape(32, 16, 4, 1)
    dim = padded_head_dim(q.shape[2])
    if dot_dtype(q, cache) == tl.float32:
        if dim > 256:
            return TileShape(16, 16, 8, 1)
        return TileShape(64, 16, 8, 2) if dim <= 128 else TileShape(32, 16, 8, 2)
    if dim <= 128:
        return TileShape(64, 64, 4, 2)
    if dim > 256:  # the larger tiles below would need 384 KiB (Hopper) or 132 KiB of shared memory
        return TileShape(32, 16, 8, 2)
    shared = torch.cuda.get_device_properties(q.device).shared_memory_per_multiprocessor
    return TileShape(128, 64, 8, 2) if shared >= HOPPER_SHARED_BYTES else TileShape(64, 32, 4, 2)


class _DecodeRows(NamedTuple):
    """The sequences with one new token, which use decode attention."""

    batch: PagedBatch
    tokens: torch.Tensor
    results: torch.Tensor  # indices of the output rows


def _list_tiles(batch: PagedBatch, height: int) -> torch.Tensor:
    """Return tiles of new tokens, in descending order of work for load balancing.

    The result is [num_tiles, 4]: sequence, first token in the batch, its position, and number of tokens.
    """
    new, cached = batch.read_lengths()
    starts = [0, *accumulate(new)]
    tiles = [
        (row, starts[row] + offset, cached[row] + offset, min(height, count - offset))
        for row, count in enumerate(new)
        if count > 1
        for offset in range(0, count, height)
    ]
    tiles.sort(key=lambda tile: -tile[2] - tile[3])
    return _copy_to_device(torch.tensor(tiles, dtype=torch.int32).view(-1, 4), batch.block_tables.device)


def plan_tiles_on_device(batch: PagedBatch, height: int) -> torch.Tensor:
    """Return tiles like `_list_tiles`, but computed on the device, for a batch in a graph.

    The result has the maximum number of tiles, in sequence order; unused tiles have no tokens. The last column is the
    number of tokens up to the end of the sequence. A graph captures this launch with the first layer.
    """
    num_tokens, num_seqs = len(batch.slots), len(batch.block_tables)
    if batch.cu_seqlens is None:
        raise ValueError("a batch in a graph needs cu_seqlens")
    # Only the last tile of each sequence can be partial.
    max_tiles = num_tokens // height + min(num_seqs, num_tokens // 2)
    tiles = torch.empty(max_tiles, 4, dtype=torch.int32, device=batch.block_tables.device)
    lengths = batch.input_lengths, batch.cache_lengths, batch.cu_seqlens
    _plan_kernel[(1,)](
        *lengths, tiles, num_seqs, max_tiles, height, MAX_SEQS_POW2=triton.next_power_of_2(num_seqs), num_warps=8
    )
    return tiles


@triton.jit(do_not_specialize=["input_lengths", "cache_lengths", "bounds", "num_seqs", "max_tiles", "height"])
def _plan_kernel(input_lengths, cache_lengths, bounds, tiles, num_seqs, max_tiles, height, MAX_SEQS_POW2: tl.constexpr):
    seqs = tl.arange(0, MAX_SEQS_POW2)
    new = tl.load(input_lengths + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    cached = tl.load(cache_lengths + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    token = tl.load(bounds + seqs, mask=seqs < num_seqs, other=0)
    counts = tl.where(new > 1, tl.cdiv(new, height), 0)  # tiles per sequence
    first, total = tl.cumsum(counts, 0) - counts, tl.sum(counts, 0)
    for number in range(tl.max(counts, 0)):
        tile, offset, is_tile = tiles + (first + number) * 4, number * height, number < counts
        tl.store(tile, seqs, mask=is_tile)
        tl.store(tile + 1, token + offset, mask=is_tile)
        tl.store(tile + 2, cached + offset, mask=is_tile)
        tl.store(tile + 3, new - offset, mask=is_tile)
    for start in range(0, max_tiles, MAX_SEQS_POW2):
        is_empty = (start + seqs >= total) & (start + seqs < max_tiles)
        for field in tl.static_range(4):
            tl.store(tiles + (start + seqs) * 4 + field, 0, mask=is_empty)


def _mark_decode_rows(batch: PagedBatch) -> _DecodeRows:
    """Return all sequences in a graph's batch. The length is 0 for sequences that do not have exactly one new token."""
    assert batch.cu_seqlens is not None
    is_single, first, last = batch.input_lengths == 1, batch.cu_seqlens[:-1].long(), len(batch.slots)
    cached = torch.where(is_single, batch.cache_lengths, 0)
    own = PagedBatch(batch.block_tables, is_single.to(batch.input_lengths.dtype), cached, batch.slots)
    return _DecodeRows(own, first.clamp(max=last - 1), torch.where(is_single, first, last))


def _find_decode_rows(batch: PagedBatch) -> _DecodeRows | None:
    new, _ = batch.read_lengths()
    starts, device = [0, *accumulate(new)], batch.block_tables.device
    single = [row for row, count in enumerate(new) if count == 1]
    if not single:
        return None
    rows = _copy_to_device(torch.tensor(single), device)
    own = PagedBatch(batch.block_tables[rows], batch.input_lengths[rows], batch.cache_lengths[rows], batch.slots)
    tokens = _copy_to_device(torch.tensor([starts[row] for row in single]), device)
    return _DecodeRows(own, tokens, tokens)


def _copy_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _launch(
    q: torch.Tensor,
    cache: LayerCache,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    spec: AttentionSpec,
    tiling: TileShape,
    packed: int,
) -> None:
    _, num_kv_heads, block_size, head_dim = cache[0].shape
    compute = dot_dtype(q, cache[0])
    _prefill_kernel[(q.shape[1] // packed, len(tiles))](
        *(q, *cache, tables, tiles, out, spec.window_or_max, q.stride(0), q.stride(1), tables.stride(0)),
        *ScoreScales.from_spec(cache[0], spec),
        q if spec.slopes is None else spec.slopes,
        q if spec.sinks is None else spec.sinks,
        # Tensor cores sum in a fixed order. In float32, the compiler could choose another order without masks.
        HAS_UNMASKED=compute != tl.float32 or q.is_cpu,
        HAS_WINDOW=spec.window is not None,
        HAS_CAP=spec.soft_cap is not None,
        HAS_SLOPES=spec.slopes is not None,
        HAS_SINKS=spec.sinks is not None,
        IS_RESCALED=is_query_rescaled(q, cache[0]),
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        PACKED_HEADS=packed,
        BLOCK_SIZE=block_size,
        COMPUTE=compute,
        HEAD_DIM=head_dim,
        DIM=padded_head_dim(head_dim),
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit
def _load(cache, cache_offsets, mask, IS_MASKED: tl.constexpr):
    # Masked loads are 0, so stale values past the end of the sequence (even NaN) do not affect the sums.
    return tl.load(cache + cache_offsets, mask=mask, other=0.0) if IS_MASKED else tl.load(cache + cache_offsets)


@triton.jit
def _attend(
    query, query_scale, slope, acc, total, max_score, k_cache, v_cache, table, query_pos, start, stop, end, window,
    inner, scale, IS_EDGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    IS_RESCALED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Return the attention state after accumulating keys `start` to `stop`. Edge tiles apply a mask to each row.

    Edge and inner tiles perform the same operations in the same order, so both results are bitwise equal.
    """
    dims = tl.arange(0, query.shape[1])
    is_masked: tl.constexpr = IS_EDGE or query.shape[1] != HEAD_DIM
    for at in range(start, stop, KEYS):
        positions = at + tl.arange(0, KEYS)
        within = positions < end
        blocks = _load(table, positions // BLOCK_SIZE, within, IS_EDGE).to(tl.int64)
        rows = blocks * (NUM_KV_HEADS * BLOCK_SIZE) + positions % BLOCK_SIZE
        cache_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
        loaded = within[:, None] & (dims < HEAD_DIM)[None, :]
        keys = _load(k_cache, cache_offsets, loaded, is_masked).to(query.dtype)
        scores = multiply_keys(query, query_scale, keys, inner, IS_RESCALED, HAS_CAP)
        if HAS_SLOPES:  # scaled below
            scores += slope[:, None] * (positions[None, :] - query_pos[:, None]).to(tl.float32)
        if IS_EDGE:
            visible = positions[None, :] <= query_pos[:, None]
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > query_pos[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, axis=1) * scale)
        base = new_max
        if HAS_WINDOW:  # all keys so far can be masked
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        rescale = tl.exp2(max_score - base)
        total = tl.fma(total, rescale, tl.sum(weights, axis=1))
        values = _load(v_cache, cache_offsets, loaded, is_masked).to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), values, acc * rescale[:, None], input_precision="ieee")
        max_score = new_max
    return acc, total, max_score


@triton.jit(do_not_specialize=["tables", "tiles", "window", "table_row"])
def _prefill_kernel(
    q, k_cache, v_cache, tables, tiles, out, window, q_token, q_head, table_row, inner, scale, v_scale,
    slopes, sinks, HAS_UNMASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_RESCALED: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PACKED_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    group, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    seq, token = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
    position, count = tl.load(tile + 2), tl.minimum(tl.load(tile + 3), ROWS // PACKED_HEADS)
    if count == 0:
        return
    kv_head = (group * PACKED_HEADS // (NUM_HEADS // NUM_KV_HEADS)).to(tl.int64)
    lines, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    offsets, heads = lines // PACKED_HEADS, group * PACKED_HEADS + lines % PACKED_HEADS
    own = (offsets < count)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = q + (token + offsets)[:, None] * q_token + heads[:, None] * q_head + dims[None, :]
    query, query_scale = load_query(pointers, own, COMPUTE, IS_RESCALED)
    slope = load_slopes(slopes, heads, offsets < count, HAS_SLOPES) / scale
    query_pos, end = position + tl.minimum(offsets, count - 1), position + count
    acc, total = tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS], tl.float32)
    max_score = tl.full([ROWS], float("-inf"), tl.float32)
    keys, values = k_cache + kv_head * (BLOCK_SIZE * HEAD_DIM), v_cache + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = tables + seq * table_row
    edge = tl.maximum(position + 1 - window, 0) // KEYS * KEYS
    if HAS_UNMASKED:  # keys from `unmasked` to `edge` are visible to all rows
        first, edge = edge, (position + 1) // KEYS * KEYS
        unmasked = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, edge)
        if HAS_WINDOW:
            acc, total, max_score = _attend(
                query, query_scale, slope, acc, total, max_score, keys, values, table, query_pos, first, unmasked, end,
                window, inner, scale, True, HAS_WINDOW, HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE,
                HEAD_DIM, KEYS,
            )  # fmt: skip
        acc, total, max_score = _attend(
            query, query_scale, slope, acc, total, max_score, keys, values, table, query_pos, unmasked, edge, end,
            window, inner, scale, False, HAS_WINDOW, HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE,
            HEAD_DIM, KEYS,
        )  # fmt: skip
    acc, total, max_score = _attend(
        query, query_scale, slope, acc, total, max_score, keys, values, table, query_pos, edge, end, end, window, inner,
        scale, True, HAS_WINDOW, HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, KEYS,
    )  # fmt: skip
    if HAS_SINKS:
        total += sink_weights(sinks, heads, offsets < count, max_score)
    result = (acc / total[:, None] * v_scale).to(out.dtype.element_ty)
    rows = (token + offsets) * NUM_HEADS + heads
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result, mask=own)
