"""Decode attention over the paged KV cache (flash-decoding).

KV splits depend only on the sequence length, so results are bitwise batch-invariant. One kernel lists the
splits, persistent programs compute them for each KV head, and a last kernel merges the results.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch

SPLIT_TOKENS = 256  # minimum split size; long sequences use multiples of this size
MAX_SPLITS = 32  # maximum per sequence
PROGRAMS_PER_SM = 8
NUM_STAGES = 6
TILE_BYTES = 8 << 10  # size of a key tile and of a value tile
MAX_TILE = 128
MIN_DOT_SIZE = 16  # smallest dimension that `tl.dot` supports
SEQS_PER_COUNT = tl.constexpr(1024)  # sequences per loop iteration when counting splits
SPLITS_PER_MERGE = tl.constexpr(4)  # splits per loop iteration when merging


def decode_attention(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    num_seqs, num_heads, head_dim = q.shape
    check_layout(q, cache, batch)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    block_size = cache[0].shape[2]
    work = batch.cached(("splits", block_size, spec.window), _list_splits, batch, block_size, spec)
    partial = lse = out  # unused if no sequence can have several splits
    if work.max_splits > 1:
        partial = torch.empty(num_seqs, num_heads, work.max_splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    _launch(q, cache, batch, spec, work, (out, partial, lse))
    if work.max_splits > 1:
        _merge_splits_kernel[(num_heads, num_seqs)](
            *(partial, lse, batch.input_lengths, batch.cache_lengths, out, spec.window_or_max, work.max_splits),
            q if spec.sinks is None else spec.sinks,
            HAS_SINKS=spec.sinks is not None,
            HEAD_DIM=head_dim,
            DIM=padded_head_dim(head_dim),
            SPLIT_TOKENS=SPLIT_TOKENS,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=1,
        )
    return out


def check_layout(q: torch.Tensor, cache: LayerCache, batch: PagedBatch) -> None:
    plain = *cache, batch.input_lengths, batch.cache_lengths
    if not all(x.is_contiguous() for x in plain) or q.stride(2) != 1 or batch.block_tables.stride(1) != 1:
        raise ValueError("attention needs contiguous caches and lengths, and unit strides in heads and block tables")


def padded_head_dim(head_dim: int) -> int:
    """Return the head size rounded up to a power of two that is at least 16."""
    return max(MIN_DOT_SIZE, int(triton.next_power_of_2(head_dim)))


def dot_dtype(q: torch.Tensor, cache: torch.Tensor) -> tl.dtype:
    """Return the dtype of the operands in matrix products. Accumulators are float32."""
    # Triton's interpreter (on a CPU) does not support bfloat16 products.
    if q.is_cpu or (cache.dtype != q.dtype and cache.dtype.itemsize > 1):
        return tl.float32
    if is_query_rescaled(q, cache):
        return tl.float16
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def is_query_rescaled(q: torch.Tensor, cache: torch.Tensor) -> bool:
    """Return True if queries are rescaled and converted to float16.

    This applies to bfloat16 queries with a float8 KV cache, because float8 converts to float16 in one instruction.
    """
    return q.dtype == torch.bfloat16 and cache.dtype.itemsize == 1


class ScoreScales(NamedTuple):
    """Scale factors for query-key products and for value sums, chosen so that softmax weights are `2 ** score`."""

    inner: float  # applied before the soft cap `1 - 2 / (1 + 2 ** x)`, which equals `tanh(log(2) * x / 2)`
    score: float
    value: float

    @classmethod
    def from_spec(cls, cache: torch.Tensor, spec: AttentionSpec) -> "ScoreScales":
        k_scale, v_scale = (spec.k_scale, spec.v_scale) if cache.dtype.itemsize == 1 else (1.0, 1.0)
        score = spec.scale * k_scale * math.log2(math.e)
        if spec.soft_cap is None:
            return cls(1.0, score, v_scale)
        return cls(2 * score / spec.soft_cap, spec.soft_cap * math.log2(math.e), v_scale)


class _SplitList(NamedTuple):
    """All KV splits. `items` contains the number of splits, and `sequence * MAX_SPLITS + split` for each split."""

    items: torch.Tensor
    max_splits: int  # number of splits of the longest sequence that fits into the block tables
    programs: int


def _list_splits(batch: PagedBatch, block_size: int, spec: AttentionSpec) -> _SplitList:
    """Launch the kernel that lists the KV splits, and return the list.

    A graph captures this launch with the first layer.
    """
    num_seqs, width = batch.block_tables.shape
    max_splits = max(1, min(MAX_SPLITS, triton.cdiv(min(width * block_size, spec.window_or_max), SPLIT_TOKENS)))
    device = batch.block_tables.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    items = torch.empty(1 + num_seqs * max_splits, dtype=torch.int32, device=device)
    _list_splits_kernel[(num_seqs,)](
        *(batch.input_lengths, batch.cache_lengths, items, spec.window_or_max),
        SPLIT_TOKENS=SPLIT_TOKENS,
        MAX_SPLITS=MAX_SPLITS,
    )
    return _SplitList(items, max_splits, PROGRAMS_PER_SM * processors)


def _launch(
    q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
    work: _SplitList,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    _, num_kv_heads, block_size, head_dim = cache[0].shape
    heads_per_kv = q.shape[1] // num_kv_heads
    compute, dim = dot_dtype(q, cache[0]), padded_head_dim(head_dim)
    tile = TILE_BYTES // (dim * (4 if compute == tl.float32 else cache[0].itemsize))
    _decode_kernel[(min(work.programs, len(q) * work.max_splits * num_kv_heads),)](
        *(q, *cache, batch.block_tables, batch.input_lengths, batch.cache_lengths, work.items, *results),
        *(spec.window_or_max, q.stride(0), q.stride(1), batch.block_tables.stride(0), work.max_splits),
        *ScoreScales.from_spec(cache[0], spec),
        q if spec.slopes is None else spec.slopes,
        q if spec.sinks is None else spec.sinks,
        HAS_CAP=spec.soft_cap is not None,
        HAS_SLOPES=spec.slopes is not None,
        HAS_SINKS=spec.sinks is not None,
        IS_RESCALED=is_query_rescaled(q, cache[0]),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEADS_PER_KV=heads_per_kv,
        QUERIES=max(MIN_DOT_SIZE, triton.next_power_of_2(heads_per_kv)),
        COMPUTE=compute,
        HEAD_DIM=head_dim,
        DIM=dim,
        TILE=min(MAX_TILE, max(MIN_DOT_SIZE, tile)),
        SPLIT_TOKENS=SPLIT_TOKENS,
        MAX_SPLITS=MAX_SPLITS,
        num_warps=2 if cache[0].itemsize == 1 and compute != tl.float32 else 4,
        num_stages=NUM_STAGES,
    )


@triton.jit
def _find_splits(
    input_lengths, cache_lengths, seqs, mask, window, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return a sequence's first visible position, length, split size and number of splits.

    An empty sequence has one empty split.
    """
    cached = tl.load(cache_lengths + seqs, mask=mask, other=0)
    length = (tl.load(input_lengths + seqs, mask=mask, other=0) + cached).to(tl.int32)
    first = tl.maximum(length - window, 0)
    split_size = tl.maximum(tl.cdiv(length - first, SPLIT_TOKENS * MAX_SPLITS), 1) * SPLIT_TOKENS
    return first, length, split_size, tl.maximum(tl.cdiv(length - first, split_size), 1)


@triton.jit(do_not_specialize=["input_lengths", "cache_lengths", "items", "window"])
def _list_splits_kernel(
    input_lengths, cache_lengths, items, window, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """List the splits of one sequence. They follow the splits of all previous sequences."""
    seq = tl.program_id(0)
    before = 0
    for at in range(0, seq, SEQS_PER_COUNT):
        others = at + tl.arange(0, SEQS_PER_COUNT)
        mask = others < seq
        _, _, _, counts = _find_splits(input_lengths, cache_lengths, others, mask, window, SPLIT_TOKENS, MAX_SPLITS)
        before += tl.sum(tl.where(mask, counts, 0), axis=0)
    _, _, _, number = _find_splits(input_lengths, cache_lengths, seq, True, window, SPLIT_TOKENS, MAX_SPLITS)
    splits = tl.arange(0, MAX_SPLITS)
    tl.store(items + 1 + before + splits, seq * MAX_SPLITS + splits, mask=splits < number)
    if seq == tl.num_programs(0) - 1:
        tl.store(items, before + number)


@triton.jit
def load_query(pointers: tl.tensor, mask: tl.tensor, COMPUTE: tl.constexpr, IS_RESCALED: tl.constexpr) -> tl.tensor:
    """Return query rows, and the power of two that each row was divided by to fit into float16."""
    query = tl.load(pointers, mask=mask, other=0.0)
    query_scale = tl.full([query.shape[0]], 1.0, tl.float32)
    if IS_RESCALED:
        query = query.to(tl.float32)
        query_scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(query), axis=1), 1e-30))))
        query = query / query_scale[:, None]
    return query.to(COMPUTE), query_scale


@triton.jit
def multiply_keys(
    query, query_scale, keys, inner, IS_RESCALED: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Return query-key products with the soft cap applied. See `ScoreScales`."""
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if IS_RESCALED:
        products *= query_scale[:, None]
    if HAS_CAP:
        return 1.0 - 2.0 / (1.0 + tl.exp2(products * inner))
    return products


@triton.jit
def load_slopes(slopes, heads, mask, HAS_SLOPES: tl.constexpr):
    """Return the ALiBi slopes in log2 units, or zeros."""
    if HAS_SLOPES:
        return tl.load(slopes + heads, mask=mask, other=0.0) * 1.4426950408889634
    return tl.zeros(heads.shape, tl.float32)


@triton.jit
def sink_weights(sinks, heads, mask, highest):
    """Return the weights of the heads' attention sinks, relative to the maximum scores."""
    return tl.exp2(tl.load(sinks + heads, mask=mask, other=0.0) * 1.4426950408889634 - highest)


@triton.jit
def _attend(
    query, query_scale, slope, k_cache, v_cache, table, start, stop, query_position, head, inner, scale,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, IS_RESCALED: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the weighted value sum over positions `start` to `stop`, the sum of weights, and the maximum score."""
    dims = tl.arange(0, query.shape[1])
    highest = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros(query.shape, tl.float32)
    for at in range(start, stop, TILE):
        positions = at + tl.arange(0, TILE)
        seen = positions < stop
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        rows = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + positions % BLOCK_SIZE
        cache_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
        # Masked loads are 0, so stale values past the end of the sequence (even NaN) do not affect the sums.
        loaded = seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(k_cache + cache_offsets, mask=loaded, other=0.0).to(query.dtype)
        scores = multiply_keys(query, query_scale, keys, inner, IS_RESCALED, HAS_CAP) * scale
        if HAS_SLOPES:
            scores += slope[:, None] * (positions - query_position).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(weights, axis=1)
        values = tl.load(v_cache + cache_offsets, mask=loaded, other=0.0).to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), values, acc * rescale[:, None], input_precision="ieee")
        highest = higher
    return acc, total, highest


@triton.jit(
    do_not_specialize=["tables", "input_lengths", "cache_lengths", "items", "window", "table_row", "max_splits"]
)
def _decode_kernel(
    q, k_cache, v_cache, tables, input_lengths, cache_lengths, items, out, partial, lse, window, q_token, q_head,
    table_row, max_splits, inner, scale, v_scale, slopes, sinks, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_RESCALED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    QUERIES: tl.constexpr, COMPUTE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    queries, dims = tl.arange(0, QUERIES), tl.arange(0, DIM)
    own = (queries < HEADS_PER_KV)[:, None] & (dims < HEAD_DIM)[None, :]
    for index in range(tl.program_id(0), tl.load(items) * NUM_KV_HEADS, tl.num_programs(0)):
        item, head = tl.load(items + 1 + index // NUM_KV_HEADS), index % NUM_KV_HEADS
        seq, split = (item // MAX_SPLITS).to(tl.int64), item % MAX_SPLITS
        first, length, split_size, number = _find_splits(
            input_lengths, cache_lengths, seq, True, window, SPLIT_TOKENS, MAX_SPLITS
        )
        start = first + split * split_size
        stop = tl.minimum(start + split_size, length)
        heads = head * HEADS_PER_KV + queries
        pointers = q + seq * q_token + heads[:, None] * q_head + dims[None, :]
        query, query_scale = load_query(pointers, own, COMPUTE, IS_RESCALED)
        slope = load_slopes(slopes, heads, queries < HEADS_PER_KV, HAS_SLOPES)
        table = tables + seq * table_row
        acc, total, highest = _attend(
            *(query, query_scale, slope, k_cache, v_cache, table, start, stop, length - 1, head, inner, scale),
            *(HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE),
        )
        if HAS_SINKS and number == 1:
            total += sink_weights(sinks, heads, queries < HEADS_PER_KV, highest)
        total = tl.where(stop > start, total, 1.0)
        result = acc / total[:, None] * v_scale
        rows = seq * NUM_KV_HEADS * HEADS_PER_KV + heads
        if number == 1:
            tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=own)
        else:
            rows = rows * max_splits + split
            tl.store(partial + rows[:, None] * HEAD_DIM + dims[None, :], result, mask=own)
            tl.store(lse + rows, highest + tl.log2(total), mask=queries < HEADS_PER_KV)


@triton.jit(do_not_specialize=["input_lengths", "cache_lengths", "window", "max_splits"])
def _merge_splits_kernel(
    partial, lse, input_lengths, cache_lengths, out, window, max_splits, sinks, HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the results of the KV splits of one sequence and head. If a sequence has a single split, its result is
    already final.
    """
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, _, number = _find_splits(input_lengths, cache_lengths, seq, True, window, SPLIT_TOKENS, MAX_SPLITS)
    if number == 1:
        return
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, DIM)
    row = seq * tl.num_programs(0) + head
    partial += row * max_splits * HEAD_DIM
    lse += row * max_splits
    lses = tl.load(lse + splits, mask=splits < number, other=float("-inf"))
    highest = tl.max(lses, axis=0)
    acc = tl.zeros([DIM], tl.float32)
    for at in range(0, number, SPLITS_PER_MERGE):
        some = at + tl.arange(0, SPLITS_PER_MERGE)
        weights = tl.exp2(tl.load(lse + some, mask=some < number, other=float("-inf")) - highest)
        mask = (some < number)[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(partial + some[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        acc += tl.sum(parts * weights[:, None], axis=0)
    total = tl.sum(tl.exp2(lses - highest), axis=0)
    if HAS_SINKS:
        total += sink_weights(sinks, head, True, highest)
    result = acc / total
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
