"""Decode attention over the paged cache: flash-decoding.

A sequence is cut into stretches, whose bounds depend on its own length alone. One program attends with all query heads
that share a key and value head, to one stretch after another, as a list says that a first kernel writes once for a
batch. A last kernel merges the stretches. So a sequence's result is the same to the bit alone and in any batch.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch

STRETCH = 256  # tokens of a stretch, and a multiple of it in sequences that would have more stretches than this:
MAX_STRETCHES = 32
PROGRAMS_PER_PROCESSOR = 8
NUM_STAGES = 6
TILE_BYTES = 8 << 10  # of keys, and as many of values
MAX_TILE = 128
MIN_DOT = 16  # the smallest side of a product
COUNTED = tl.constexpr(1024)  # sequences whose stretches are counted at once
MERGED = tl.constexpr(4)  # stretches that are added at once


def decode_attention(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    num_seqs, num_heads, head_dim = q.shape
    check_layout(q, cache, batch)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_seqs:
        return out
    block_size = cache[0].shape[2]
    work = batch.once(("stretches", block_size, spec.window), _list_work, batch, block_size, spec)
    partial = mass = out  # not written where no sequence can be so long that it is cut
    if work.room > 1:
        partial = torch.empty(num_seqs, num_heads, work.room, head_dim, dtype=torch.float32, device=q.device)
        mass = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    _launch(q, cache, batch, spec, work, (out, partial, mass))
    if work.room > 1:
        _merge_kernel[(num_heads, num_seqs)](
            *(partial, mass, batch.input_lengths, batch.cache_lengths, out, spec.reach, work.room),
            HEAD_DIM=head_dim,
            DIM=fill_up(head_dim),
            STRETCH=STRETCH,
            MOST=MAX_STRETCHES,
            num_warps=1,
        )
    return out


def check_layout(q: torch.Tensor, cache: LayerCache, batch: PagedBatch) -> None:
    plain = *cache, batch.input_lengths, batch.cache_lengths
    if not all(x.is_contiguous() for x in plain) or q.stride(2) != 1 or batch.block_tables.stride(1) != 1:
        raise ValueError("attention needs caches, lengths, heads and block tables without gaps")


def fill_up(head_dim: int) -> int:
    """Return the power of two that a kernel computes with instead of the size of a head."""
    return max(MIN_DOT, int(triton.next_power_of_2(head_dim)))


def product_dtype(q: torch.Tensor, cache: torch.Tensor) -> tl.dtype:
    """Return the dtype that queries, keys, weights and values are multiplied in; the sums are float32."""
    # Triton's interpreter, which runs on a CPU, cannot multiply bfloat16.
    if q.is_cpu or (cache.dtype != q.dtype and cache.dtype.itemsize > 1):
        return tl.float32
    if is_rescaled(q, cache):
        return tl.float16
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def is_rescaled(q: torch.Tensor, cache: torch.Tensor) -> bool:
    """Return whether queries become float16, which one instruction makes of two numbers of a float8 cache."""
    return q.dtype == torch.bfloat16 and cache.dtype.itemsize == 1


class Scales(NamedTuple):
    """Multipliers of products of queries and keys, and of sums of values. A score's weight is `2 ** score`."""

    inner: float  # before the soft cap, which is `1 - 2 / (1 + 2 ** x)`: the same as `tanh` of half of `log(2) * x`
    score: float
    value: float

    @classmethod
    def of(cls, cache: torch.Tensor, spec: AttentionSpec) -> "Scales":
        k_scale, v_scale = (spec.k_scale, spec.v_scale) if cache.dtype.itemsize == 1 else (1.0, 1.0)
        score = spec.scale * k_scale * math.log2(math.e)
        if spec.soft_cap is None:
            return cls(1.0, score, v_scale)
        return cls(2 * score / spec.soft_cap, spec.soft_cap * math.log2(math.e), v_scale)


class _Work(NamedTuple):
    """The stretches of a batch: their number, then `sequence * MAX_STRETCHES + stretch` of each."""

    items: torch.Tensor
    room: int  # the most stretches of a sequence that fits into the block tables
    programs: int


def _list_work(batch: PagedBatch, block_size: int, spec: AttentionSpec) -> _Work:
    """Launch the kernel that writes the list. In a graph it is captured with the batch's first layer."""
    num_seqs, width = batch.block_tables.shape
    room = max(1, min(MAX_STRETCHES, triton.cdiv(min(width * block_size, spec.reach), STRETCH)))
    device = batch.block_tables.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    items = torch.empty(1 + num_seqs * room, dtype=torch.int32, device=device)
    _list_kernel[(num_seqs,)](
        *(batch.input_lengths, batch.cache_lengths, items, spec.reach), STRETCH=STRETCH, MOST=MAX_STRETCHES
    )
    return _Work(items, room, PROGRAMS_PER_PROCESSOR * processors)


def _launch(
    q: torch.Tensor,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
    work: _Work,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    _, num_kv_heads, block_size, head_dim = cache[0].shape
    sharing = q.shape[1] // num_kv_heads
    compute, dim = product_dtype(q, cache[0]), fill_up(head_dim)
    tile = TILE_BYTES // (dim * (4 if compute == tl.float32 else cache[0].itemsize))
    _decode_kernel[(min(work.programs, len(q) * work.room * num_kv_heads),)](
        *(q, *cache, batch.block_tables, batch.input_lengths, batch.cache_lengths, work.items, *results),
        *(spec.reach, q.stride(0), q.stride(1), batch.block_tables.stride(0), work.room),
        *Scales.of(cache[0], spec),
        q if spec.slopes is None else spec.slopes,
        HAS_CAP=spec.soft_cap is not None,
        HAS_SLOPES=spec.slopes is not None,
        IS_RESCALED=is_rescaled(q, cache[0]),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        SHARING=sharing,
        QUERIES=max(MIN_DOT, triton.next_power_of_2(sharing)),
        COMPUTE=compute,
        HEAD_DIM=head_dim,
        DIM=dim,
        TILE=min(MAX_TILE, max(MIN_DOT, tile)),
        STRETCH=STRETCH,
        MOST=MAX_STRETCHES,
        num_warps=2 if cache[0].itemsize == 1 and compute != tl.float32 else 4,
        num_stages=NUM_STAGES,
    )


@triton.jit
def _find_stretches(
    input_lengths, cache_lengths, seqs, mask, window, STRETCH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Return a sequence's first visible position, its end, the tokens of a stretch, and the number of stretches.

    An empty sequence has one, in which there is nothing.
    """
    cached = tl.load(cache_lengths + seqs, mask=mask, other=0)
    length = (tl.load(input_lengths + seqs, mask=mask, other=0) + cached).to(tl.int32)
    first = tl.maximum(length - window, 0)
    stretch = tl.maximum(tl.cdiv(length - first, STRETCH * MOST), 1) * STRETCH
    return first, length, stretch, tl.maximum(tl.cdiv(length - first, stretch), 1)


@triton.jit(do_not_specialize=["input_lengths", "cache_lengths", "items", "window"])
def _list_kernel(
    input_lengths, cache_lengths, items, window, STRETCH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """List the stretches of one sequence. Their place is after those of all sequences before it."""
    seq = tl.program_id(0)
    before = 0
    for at in range(0, seq, COUNTED):
        others = at + tl.arange(0, COUNTED)
        mask = others < seq
        _, _, _, numbers = _find_stretches(input_lengths, cache_lengths, others, mask, window, STRETCH, MOST)
        before += tl.sum(tl.where(mask, numbers, 0), axis=0)
    _, _, _, number = _find_stretches(input_lengths, cache_lengths, seq, True, window, STRETCH, MOST)
    splits = tl.arange(0, MOST)
    tl.store(items + 1 + before + splits, seq * MOST + splits, mask=splits < number)
    if seq == tl.num_programs(0) - 1:
        tl.store(items, before + number)


@triton.jit
def load_query(places: tl.tensor, mask: tl.tensor, COMPUTE: tl.constexpr, IS_RESCALED: tl.constexpr) -> tl.tensor:
    """Return rows of queries, and a power of two that each was divided by so that float16 holds it."""
    query = tl.load(places, mask=mask, other=0.0)
    power = tl.full([query.shape[0]], 1.0, tl.float32)
    if IS_RESCALED:
        query = query.to(tl.float32)
        power = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(query), axis=1), 1e-30))))
        query = query / power[:, None]
    return query.to(COMPUTE), power


@triton.jit
def multiply_keys(
    query, power, keys, inner, IS_RESCALED: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Return products of queries and keys, after the soft cap if there is one; `Scales` says how."""
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if IS_RESCALED:
        products *= power[:, None]
    if HAS_CAP:
        return 1.0 - 2.0 / (1.0 + tl.exp2(products * inner))
    return products


@triton.jit
def load_slopes(slopes, heads, mask, HAS_SLOPES: tl.constexpr):
    """Return what a token of distance takes off the scores of each row, whose weights are powers of 2."""
    if HAS_SLOPES:
        return tl.load(slopes + heads, mask=mask, other=0.0) * 1.4426950408889634
    return tl.zeros(heads.shape, tl.float32)


@triton.jit
def _attend(
    query, power, slope, k_cache, v_cache, table, start, stop, last, head, inner, scale, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, IS_RESCALED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
        scores = multiply_keys(query, power, keys, inner, IS_RESCALED, HAS_CAP) * scale
        if HAS_SLOPES:
            scores += slope[:, None] * (positions - last).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fading = tl.exp2(highest - higher)
        total = total * fading + tl.sum(weights, axis=1)
        values = tl.load(v_cache + places, mask=loaded, other=0.0).to(query.dtype)
        summed = tl.dot(weights.to(query.dtype), values, summed * fading[:, None], input_precision="ieee")
        highest = higher
    return summed, total, highest


@triton.jit(do_not_specialize=["tables", "input_lengths", "cache_lengths", "items", "window", "table_row", "room"])
def _decode_kernel(
    q, k_cache, v_cache, tables, input_lengths, cache_lengths, items, out, partial, mass, window, q_token, q_head,
    table_row, room, inner, scale, v_scale, slopes, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    IS_RESCALED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHARING: tl.constexpr,
    QUERIES: tl.constexpr, COMPUTE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    STRETCH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    queries, dims = tl.arange(0, QUERIES), tl.arange(0, DIM)
    own = (queries < SHARING)[:, None] & (dims < HEAD_DIM)[None, :]
    for index in range(tl.program_id(0), tl.load(items) * NUM_KV_HEADS, tl.num_programs(0)):
        item, head = tl.load(items + 1 + index // NUM_KV_HEADS), index % NUM_KV_HEADS
        seq, split = (item // MOST).to(tl.int64), item % MOST
        first, length, stretch, number = _find_stretches(input_lengths, cache_lengths, seq, True, window, STRETCH, MOST)
        start = first + split * stretch
        stop = tl.minimum(start + stretch, length)
        heads = head * SHARING + queries
        places = q + seq * q_token + heads[:, None] * q_head + dims[None, :]
        query, power = load_query(places, own, COMPUTE, IS_RESCALED)
        slope = load_slopes(slopes, heads, queries < SHARING, HAS_SLOPES)
        table = tables + seq * table_row
        summed, total, highest = _attend(
            *(query, power, slope, k_cache, v_cache, table, start, stop, length - 1, head, inner, scale),
            *(HAS_CAP, HAS_SLOPES, IS_RESCALED, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE),
        )
        total = tl.where(stop > start, total, 1.0)
        result = summed / total[:, None] * v_scale
        rows = seq * NUM_KV_HEADS * SHARING + heads
        if number == 1:
            tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=own)
        else:
            rows = rows * room + split
            tl.store(partial + rows[:, None] * HEAD_DIM + dims[None, :], result, mask=own)
            tl.store(mass + rows, highest + tl.log2(total), mask=queries < SHARING)


@triton.jit(do_not_specialize=["input_lengths", "cache_lengths", "window", "room"])
def _merge_kernel(
    partial, mass, input_lengths, cache_lengths, out, window, room,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, STRETCH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Join the stretches of one head of one sequence. What has one stretch is written already."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, _, number = _find_stretches(input_lengths, cache_lengths, seq, True, window, STRETCH, MOST)
    if number == 1:
        return
    splits, dims = tl.arange(0, MOST), tl.arange(0, DIM)
    row = seq * tl.num_programs(0) + head
    partial += row * room * HEAD_DIM
    mass += row * room
    masses = tl.load(mass + splits, mask=splits < number, other=float("-inf"))
    highest = tl.max(masses, axis=0)
    summed = tl.zeros([DIM], tl.float32)
    for at in range(0, number, MERGED):
        some = at + tl.arange(0, MERGED)
        weights = tl.exp2(tl.load(mass + some, mask=some < number, other=float("-inf")) - highest)
        mask = (some < number)[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(partial + some[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        summed += tl.sum(parts * weights[:, None], axis=0)
    result = summed / tl.sum(tl.exp2(masses - highest), axis=0)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
