"""Attention over the paged cache.

Decode is flash-decoding: one program attends with all query heads that share a key and value head of one sequence, to
one stretch of it. A second kernel merges the stretches. Their number depends on the number of sequences only, and their
bounds on the sequence's own length, so a sequence's result is the same to the bit whatever its neighbours are.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch
from lorax_server.kernels.reference.prefill import prefill_with

PROGRAMS = 2048  # enough that long and short sequences even out over the processors of a GPU
MAX_SPLITS = 128
TILE_BYTES = 16 << 10  # of keys, and as many of values; a pipeline of three fits twice into a processor's memory
MAX_TILE = 128
MIN_DOT = 16  # the smallest side of a product
NO_WINDOW = 2**31 - 1


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> torch.Tensor:
    return prefill_with(decode_attention, q, k, v, cache, batch, spec)


def decode_attention(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    num_seqs, num_heads, head_dim = q.shape
    lengths = batch.input_lengths, batch.cache_lengths
    if not all(x.is_contiguous() for x in (*cache, *lengths)) or q.stride(2) != 1 or batch.block_tables.stride(1) != 1:
        raise ValueError("decode_attention needs caches, lengths, heads and block tables without gaps")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    num_splits = count_splits(num_seqs * cache[0].shape[1])
    shape = _Shape.of(q, cache[0], num_splits)
    if num_splits == 1:
        _launch(q, cache, batch, spec, shape, out, out)
        return out
    partial = torch.empty(num_seqs, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    mass = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    _launch(q, cache, batch, spec, shape, partial, mass)
    _merge_kernel[(num_heads, num_seqs)](
        partial, mass, *lengths, out, _window(spec), head_dim, shape.dim, shape.tile, num_splits
    )
    return out


class _Shape(NamedTuple):
    """The constants that choose a compiled kernel."""

    dim: int  # of a head, filled up to a power of two
    tile: int  # tokens that are loaded together
    num_splits: int
    compute: tl.dtype

    @classmethod
    def of(cls, q: torch.Tensor, cache: torch.Tensor, num_splits: int) -> "_Shape":
        dim = max(MIN_DOT, triton.next_power_of_2(q.shape[2]))
        compute = _product_dtype(q, cache)
        tile = TILE_BYTES // (dim * (4 if compute == tl.float32 else 2))
        return cls(dim, min(MAX_TILE, max(MIN_DOT, tile)), num_splits, compute)


def _launch(
    q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
    shape: _Shape,
    partial: torch.Tensor,
    mass: torch.Tensor,
) -> None:
    _, num_kv_heads, block_size, head_dim = cache[0].shape
    sharing = q.shape[1] // num_kv_heads
    k_scale, v_scale = (spec.k_scale, spec.v_scale) if cache[0].dtype.itemsize == 1 else (1.0, 1.0)
    _decode_kernel[(num_kv_heads, len(q), shape.num_splits)](
        *(q, *cache, batch.block_tables, batch.input_lengths, batch.cache_lengths, partial, mass),
        *(_window(spec), q.stride(0), q.stride(1), batch.block_tables.stride(0)),
        *(spec.scale * k_scale * math.log2(math.e), v_scale),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        SHARING=sharing,
        QUERIES=max(MIN_DOT, triton.next_power_of_2(sharing)),
        COMPUTE=shape.compute,
        HEAD_DIM=head_dim,
        DIM=shape.dim,
        TILE=shape.tile,
        NUM_SPLITS=shape.num_splits,
        num_warps=4,
        num_stages=3,
    )


def _window(spec: AttentionSpec) -> int:
    return NO_WINDOW if spec.window is None else spec.window


def count_splits(num_stretches: int) -> int:
    """Return the number of stretches that each sequence is cut into: a power of two, one where there are many."""
    wanted: int = triton.next_power_of_2(triton.cdiv(PROGRAMS, num_stretches))
    return min(MAX_SPLITS, wanted)


def _product_dtype(q: torch.Tensor, cache: torch.Tensor) -> tl.dtype:
    """Return the dtype that queries, keys, weights and values are multiplied in; the sums are float32."""
    # Triton's interpreter, which runs on a CPU, cannot multiply bfloat16.
    if q.is_cpu or (cache.dtype != q.dtype and cache.dtype.itemsize > 1):
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


@triton.jit
def _find_stretch(
    input_lengths: tl.tensor,
    cache_lengths: tl.tensor,
    seq: tl.tensor,
    window: tl.tensor,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> tl.tensor:
    """Return a sequence's first visible position, its end, and the number of tokens of a stretch, at least a tile."""
    length = (tl.load(input_lengths + seq) + tl.load(cache_lengths + seq)).to(tl.int32)
    first = tl.maximum(length - window, 0)
    tiles = tl.cdiv(length - first, TILE)
    return first, length, tl.maximum(tl.cdiv(tiles, NUM_SPLITS), 1) * TILE


@triton.jit
def _attend(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the weighted sum of the values from `start` to `stop`, the sum of the weights, and the highest score."""
    dims = tl.arange(0, query.shape[1])
    highest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    summed = tl.zeros(query.shape, tl.float32)
    for at in range(start, stop, TILE):
        positions = at + tl.arange(0, TILE)
        seen = positions < stop
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        rows = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + positions % BLOCK_SIZE
        places = rows[:, None] * HEAD_DIM + dims[None, :]
        # What is not loaded is 0, so nothing past the sequence's end can reach the sums, not even a NaN.
        loaded = seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(k_cache + places, mask=loaded, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fading = tl.exp2(highest - higher)
        total = total * fading + tl.sum(weights, axis=1)
        values = tl.load(v_cache + places, mask=loaded, other=0.0).to(query.dtype)
        summed = tl.dot(weights.to(query.dtype), values, summed * fading[:, None], input_precision="ieee")
        highest = higher
    return summed, total, highest


@triton.jit(do_not_specialize=["tables", "input_lengths", "cache_lengths", "window", "table_row"])
def _decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    tables: tl.tensor,
    input_lengths: tl.tensor,
    cache_lengths: tl.tensor,
    partial: tl.tensor,
    mass: tl.tensor,
    window: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    table_row: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHARING: tl.constexpr,
    QUERIES: tl.constexpr,
    COMPUTE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> None:
    head, seq, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, length, stretch = _find_stretch(input_lengths, cache_lengths, seq, window, TILE, NUM_SPLITS)
    start = first + split * stretch
    stop = tl.minimum(start + stretch, length)
    if NUM_SPLITS > 1 and start >= stop:
        return
    queries, dims = tl.arange(0, QUERIES), tl.arange(0, DIM)
    own = (queries < SHARING)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * SHARING + queries
    query = tl.load(q + seq * q_token + heads[:, None] * q_head + dims[None, :], mask=own, other=0.0).to(COMPUTE)
    table = tables + seq * table_row
    summed, total, highest = _attend(
        query, k_cache, v_cache, table, start, stop, head, scale, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE
    )
    total = tl.where(stop > start, total, 1.0)
    result = summed / total[:, None] * v_scale
    rows = (seq * NUM_KV_HEADS * SHARING + heads) * NUM_SPLITS + split
    tl.store(partial + rows[:, None] * HEAD_DIM + dims[None, :], result.to(partial.dtype.element_ty), mask=own)
    if NUM_SPLITS > 1:
        tl.store(mass + rows, highest + tl.log2(total), mask=queries < SHARING)


@triton.jit(do_not_specialize=["input_lengths", "cache_lengths", "window"])
def _merge_kernel(
    partial: tl.tensor,
    mass: tl.tensor,
    input_lengths: tl.tensor,
    cache_lengths: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> None:
    """Join the stretches of one head of one sequence. A short sequence has fewer than there is room for."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, length, stretch = _find_stretch(input_lengths, cache_lengths, seq, window, TILE, NUM_SPLITS)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, DIM)
    written = first + splits * stretch < length
    row = seq * tl.num_programs(0) + head
    masses = tl.load(mass + row * NUM_SPLITS + splits, mask=written, other=float("-inf"))
    highest = tl.where(length > 0, tl.max(masses, axis=0), 0.0)
    weights = tl.exp2(masses - highest)
    places = (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(partial + places, mask=written[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    total = tl.where(length > 0, tl.sum(weights, axis=0), 1.0)
    result = tl.sum(parts * weights[:, None], axis=0) / total
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
