"""Reference ops against naive loops."""

import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lorax_server.kernels import (
    Activation,
    AttentionSpec,
    Field,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    PagedBatch,
    reference,
)

FP8 = torch.float8_e4m3fn
HALF = [torch.bfloat16, torch.float16]
NUM_BLOCKS = 64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def as_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def random_cache(
    kv_heads: int, block_size: int, head_dim: int, seed: int, *, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> torch.Tensor:
    """Make a cache filled with random tokens, so wrong reads change the result."""
    values = normal(NUM_BLOCKS, kv_heads, block_size, head_dim, seed=seed)
    return as_fp8(values, scale) if dtype == FP8 else values.to(dtype)


def token(cache: torch.Tensor, table: Sequence[int], position: int, scale: float = 1.0) -> torch.Tensor:
    block_size = cache.shape[2]
    return cache[table[position // block_size], :, position % block_size].double() * scale


def attend_one(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention for one query `[heads, head_dim]` at the last position of its keys."""
    num_heads, num_kv_heads = len(q), len(keys[0])
    first = 0 if window is None else max(0, len(keys) - window)
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(num_heads):
        shared_prefix = head * num_kv_heads // num_heads
        scores = [float(q[head].double() @ key[shared_prefix]) * scale for key in keys[first:]]
        if soft_cap is not None:
            scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
        if slopes is not None:
            scores = [score - float(slopes[head]) * (len(scores) - 1 - at) for at, score in enumerate(scores)]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[head])))
        for weight, value in zip(weights, values[first:], strict=True):
            out[head] += weight / total * value[shared_prefix]
    return out


def table_tensor(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    width = max(len(table) for table in tables)
    return torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)


Shapes = Sequence[tuple[int, int]]  # new and cached tokens per sequence


def new_tokens(shapes: Shapes) -> list[tuple[int, int]]:
    """Return the sequence and the position of each new token."""
    return [(row, position) for row, (new, cached) in enumerate(shapes) for position in range(cached, cached + new)]


def paged_batch(tables: Sequence[Sequence[int]], shapes: Shapes, block_size: int) -> PagedBatch:
    slots = [
        tables[row][position // block_size] * block_size + position % block_size for row, position in new_tokens(shapes)
    ]
    new, cached = torch.tensor(shapes).unbind(1)
    return PagedBatch(table_tensor(tables), new, cached, torch.tensor(slots))


def decode_batch(tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int) -> PagedBatch:
    """Make a batch with one new token per sequence; `lengths` include it."""
    return paged_batch(tables, [(1, length - 1) for length in lengths], block_size)


# --- block layouts


def assign_blocks(blocks: Sequence[int], lengths: Sequence[int], block_size: int) -> list[list[int]]:
    remaining = iter(blocks)
    return [[next(remaining) for _ in range(-(-length // block_size))] for length in lengths]


def contiguous(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    return assign_blocks(range(3, NUM_BLOCKS), lengths, block_size)


def descending(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    return assign_blocks(range(NUM_BLOCKS - 1, 0, -1), lengths, block_size)


def shuffled(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    count = sum(-(-length // block_size) for length in lengths)
    return assign_blocks((torch.randperm(count, generator=generator()) + 2).tolist(), lengths, block_size)


def with_gaps(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Assign blocks, skipping every third block."""
    return assign_blocks([block for block in range(1, NUM_BLOCKS) if block % 3 != 0], lengths, block_size)


def scattered(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    count = sum(-(-length // block_size) for length in lengths)
    step = (NUM_BLOCKS - 1) // count
    return assign_blocks(range(0, NUM_BLOCKS, step), lengths, block_size)


def shared_prefix(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Share the first block among all sequences, and all but the last block between the last two."""
    tables = contiguous(lengths, block_size)
    for table in tables[1:]:
        table[0] = tables[0][0]
    both = min(len(tables[-1]), len(tables[-2])) - 1
    tables[-1][:both] = tables[-2][:both]
    return tables


Layout = Callable[[Sequence[int], int], list[list[int]]]
LAYOUTS: list[Layout] = [contiguous, descending, shuffled, with_gaps, scattered, shared_prefix]


MIXED = [(5, 0), (1, 7), (3, 6), (5, 0), (1, 1), (2, 9), (3, 6), (1, 0), (4, 4)]


# --- write_kv


def written_cache(
    cache: torch.Tensor,
    new: torch.Tensor,
    tables: Sequence[Sequence[int]],
    shapes: Shapes,
    kept: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the expected cache after storing the new tokens (or only the tokens in `kept`)."""
    cache, block_size = cache.clone(), cache.shape[2]
    tokens = new_tokens(shapes)
    kept = range(len(tokens)) if kept is None else kept
    stored = as_fp8(new, 1.0) if cache.dtype == FP8 else new.to(cache.dtype)
    for index in kept:
        row, position = tokens[index]
        cache[tables[row][position // block_size], :, position % block_size] = stored[index]
    return cache


def check_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits, so NaN equals NaN."""
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def used_caches(block_size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Make used caches that contain NaN."""
    caches = [random_cache(2, block_size, 8, seed + index, dtype=dtype) for index in range(2)]
    for cache in caches:
        cache[::3, :, ::2] = math.nan
    return caches


@pytest.mark.parametrize("layout", [contiguous, scattered])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_write_kv_stores_only_new_tokens(layout: Layout, block_size: int, dtype: torch.dtype) -> None:
    tables = layout([new + cached for new, cached in MIXED], block_size)
    batch = paged_batch(tables, MIXED, block_size)
    for layer in range(2):
        k, v = (normal(len(batch.slots), 2, 8, seed=10 * layer + seed) for seed in (1, 2))
        k_cache, v_cache = used_caches(block_size, dtype, 10 * layer + 3)
        expected = [written_cache(*of_one, tables, MIXED) for of_one in ((k_cache, k), (v_cache, v))]
        reference.write_kv(k, v, (k_cache, v_cache), batch, AttentionSpec(1.0))
        check_bits(k_cache, expected[0])
        check_bits(v_cache, expected[1])


@pytest.mark.parametrize("cached", [0, 3, 4])
@pytest.mark.parametrize("kept", [[0, 2, 4], [3, 4, 6], [5, 7], [1], [], list(range(8))])
@pytest.mark.parametrize("by", ["slots", "indices", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_write_kv_skips_tokens_without_slot(cached: int, kept: list[int], by: str, dtype: torch.dtype) -> None:
    shapes, tables = [(5, cached), (3, 0)], [[7, 2, 12], [5]]
    whole = paged_batch(tables, shapes, 4)
    named = kept if by == "indices" else list(range(8)) if by == "slots" else sorted({*kept, 0, 6})
    slots = torch.tensor([int(whole.slots[index]) if index in kept else -1 for index in named], dtype=torch.long)
    written = None if by == "slots" else torch.tensor(named, dtype=torch.long)
    batch = PagedBatch(whole.block_tables, whole.input_lengths, whole.cache_lengths, slots, written)
    k, v = normal(8, 2, 8, seed=1), normal(8, 2, 8, seed=2)
    k_cache, v_cache = used_caches(4, dtype, 3)
    expected = [written_cache(*of_one, tables, shapes, kept) for of_one in ((k_cache, k), (v_cache, v))]
    reference.write_kv(k, v, (k_cache, v_cache), batch, AttentionSpec(1.0))
    check_bits(k_cache, expected[0])
    check_bits(v_cache, expected[1])


def test_write_kv_scales_and_saturates_float8() -> None:
    k, v = torch.tensor([3.0, 1e6, -1e6, 0.25]).view(1, 1, 4), torch.tensor([1.0, 2.0, 4.0, -300.0]).view(1, 1, 4)
    k_cache, v_cache = torch.zeros(1, 1, 1, 4, dtype=FP8), torch.zeros(1, 1, 1, 4, dtype=FP8)
    batch = paged_batch([[0]], [(1, 0)], 1)
    reference.write_kv(k, v, (k_cache, v_cache), batch, AttentionSpec(1.0, None, 0.5, 4.0))
    assert k_cache.float().flatten().tolist() == [6.0, 448.0, -448.0, 0.5]
    # 75 is between 72 and 80, the nearest values with three mantissa bits.
    assert v_cache.float().flatten().tolist() == [0.25, 0.5, 1.0, -72.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_float32_weight_matches_gemma(dtype: torch.dtype) -> None:
    theirs = GemmaRMSNorm(48, eps=1e-6).to(dtype)
    theirs.weight.data = normal(48, seed=3, dtype=dtype)
    x = normal(40, 48, seed=4, dtype=dtype)
    actual, _ = reference.rms_norm(x, None, theirs.weight.data.float() + 1, torch.tensor(1e-6))
    expected = theirs(x).detach()
    torch.testing.assert_close(actual, expected, rtol=8 * torch.finfo(dtype).eps, atol=0)
    assert dtype == torch.float32 or (actual != expected).float().mean() < 0.01


# --- decode_attention


def check_decode(
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    block_size: int,
    *,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tolerance: float = 1e-5,
) -> None:
    num_heads, num_kv_heads = heads
    cache_dtype = cache_dtype or dtype
    q = normal(len(lengths), num_heads, 16, seed=5, dtype=dtype)
    k_cache = random_cache(num_kv_heads, block_size, 16, 6, dtype=cache_dtype, scale=scales[0])
    v_cache = random_cache(num_kv_heads, block_size, 16, 7, dtype=cache_dtype, scale=scales[1])
    spec = AttentionSpec(0.3, window, *scales, soft_cap, slopes, sinks)
    out = reference.decode_attention(q, (k_cache, v_cache), decode_batch(tables, lengths, block_size), spec)
    expected = []
    for row, length in enumerate(lengths):
        keys = [token(k_cache, tables[row], position, scales[0]) for position in range(length)]
        values = [token(v_cache, tables[row], position, scales[1]) for position in range(length)]
        expected.append(attend_one(q[row], keys, values, 0.3, window, soft_cap, slopes, sinks))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_decode_with_any_block_layout_matches_loop(layout: Layout, block_size: int, window: int | None) -> None:
    lengths = [7, 1, 10, 4, 9]
    check_decode(layout(lengths, block_size), lengths, block_size, window=window)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (8, 2), (1, 1)])
@pytest.mark.parametrize("layout", [with_gaps, scattered])
def test_decode_with_grouped_query_heads_matches_loop(heads: tuple[int, int], layout: Layout) -> None:
    lengths = [5, 12, 3]
    check_decode(layout(lengths, 4), lengths, 4, heads=heads)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 33])
@pytest.mark.parametrize("layout", [contiguous, with_gaps, scattered])
@pytest.mark.parametrize("window", [None, 4])
def test_decode_of_single_sequence_matches_loop(length: int, layout: Layout, window: int | None) -> None:
    check_decode(layout([length], 4), [length], 4, window=window)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 5])
def test_decode_with_float8_cache_matches_loop(scales: tuple[float, float], layout: Layout, window: int | None) -> None:
    lengths = [7, 1, 10, 4]
    check_decode(layout(lengths, 4), lengths, 4, cache_dtype=FP8, scales=scales, window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 3.0])
@pytest.mark.parametrize("layout", [contiguous, with_gaps, scattered])
@pytest.mark.parametrize("window", [None, 5])
def test_decode_with_soft_cap_matches_loop(soft_cap: float, layout: Layout, window: int | None) -> None:
    lengths = [7, 1, 10, 4]
    check_decode(layout(lengths, 4), lengths, 4, soft_cap=soft_cap, window=window)
    check_decode(layout([9], 4), [9], 4, soft_cap=soft_cap, window=window, cache_dtype=FP8, scales=(0.05, 0.02))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 5])
def test_decode_in_half_precision_matches_loop(dtype: torch.dtype, layout: Layout, window: int | None) -> None:
    lengths = [7, 1, 10, 4]
    check_decode(layout(lengths, 4), lengths, 4, dtype=dtype, window=window, tolerance=2e-2)


def test_decode_plan_depends_on_window() -> None:
    lengths = [9, 6]
    tables = contiguous(lengths, 4)
    batch = decode_batch(tables, lengths, 4)
    q, k_cache, v_cache = normal(2, 2, 8, seed=1), random_cache(2, 4, 8, 2), random_cache(2, 4, 8, 3)
    for window in (None, 3, None, 5):
        out = reference.decode_attention(q, (k_cache, v_cache), batch, AttentionSpec(1.0, window))
        for row, length in enumerate(lengths):
            keys = [token(k_cache, tables[row], position) for position in range(length)]
            values = [token(v_cache, tables[row], position) for position in range(length)]
            expected = attend_one(q[row], keys, values, 1.0, window)
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("layout", [contiguous, with_gaps, scattered])
def test_decode_ignores_nan_in_other_sequences(bad: float, layout: Layout) -> None:
    lengths = [8, 12]
    tables = layout(lengths, 4)
    k_cache, v_cache = random_cache(2, 4, 8, 1), random_cache(2, 4, 8, 2)
    others = [block for block in range(NUM_BLOCKS) if not any(block in table for table in tables)]
    k_cache[others] = bad
    v_cache[others] = bad
    batch = decode_batch(tables, lengths, 4)
    assert reference.decode_attention(normal(2, 2, 8), (k_cache, v_cache), batch, AttentionSpec(1.0)).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("layout", [contiguous, with_gaps, scattered])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "chunks",
    [[(6, 4), (1, 1)], [(2, 3), (4, 1), (1, 1)], [(4, 1), (1, 2), (1, 1), (1, 1)], [(1, 1)] * 5],
    ids=["a prompt", "chunks that continue a block", "chunks that end with one", "token by token"],
)
def test_decode_ignores_stale_block_contents(
    bad: float, layout: Layout, window: int | None, chunks: list[tuple[int, int]]
) -> None:
    """Decode two sequences in blocks with stale contents."""
    lengths = [sum(new) for new in zip(*chunks, strict=True)]
    tables = layout(lengths, 4)
    keys, values = ([normal(length, 2, 8, seed=seed + length) for length in lengths] for seed in (10, 20))
    k_cache, v_cache = torch.full((NUM_BLOCKS, 2, 4, 8), bad), torch.full((NUM_BLOCKS, 2, 4, 8), bad)
    spec = AttentionSpec(1.0, window)
    cached = [0, 0]
    for chunk in chunks:
        shapes = list(zip(chunk, cached, strict=True))
        batch = paged_batch(tables, shapes, 4)
        k, v = (
            torch.cat([of_one[start : start + new] for of_one, (new, start) in zip(all_of, shapes, strict=True)])
            for all_of in (keys, values)
        )
        reference.write_kv(k, v, (k_cache, v_cache), batch, spec)
        cached = [new + start for new, start in shapes]
    q = normal(2, 2, 8, seed=1)
    out = reference.decode_attention(q, (k_cache, v_cache), batch, spec)
    for row in range(2):
        expected = attend_one(q[row], list(keys[row].double()), list(values[row].double()), 1.0, window)
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)


# --- prefill_attention

SHAPES = {
    "prompts": [(5, 0), (5, 0), (2, 0)],
    "one prompt": [(9, 0)],
    "equal prompts, not next to each other": [(3, 0), (2, 0), (3, 0)],
    "chunks": [(4, 3), (4, 3), (2, 8)],
    "singles": [(1, 4), (1, 9), (1, 0), (2, 0)],
    "a sequence with nothing new": [(3, 0), (0, 5), (3, 0)],
    "all": MIXED,
}


def check_prefill(
    shapes: Shapes,
    *,
    layout: Layout = scattered,
    block_size: int = 4,
    window: int | None = None,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tolerance: float = 1e-5,
) -> None:
    num_heads, num_kv_heads = heads
    cache_dtype = cache_dtype or dtype
    total = [new + cached for new, cached in shapes]
    tables = layout(total, block_size)
    tokens = new_tokens(shapes)
    batch = paged_batch(tables, shapes, block_size)
    q = normal(len(tokens), num_heads, 16, seed=5, dtype=dtype)
    k = normal(len(tokens), num_kv_heads, 16, seed=6, dtype=dtype)
    v = normal(len(tokens), num_kv_heads, 16, seed=7, dtype=dtype)
    k_cache = random_cache(num_kv_heads, block_size, 16, 8, dtype=cache_dtype, scale=scales[0])
    v_cache = random_cache(num_kv_heads, block_size, 16, 9, dtype=cache_dtype, scale=scales[1])
    spec = AttentionSpec(0.3, window, *scales, soft_cap, slopes, sinks)
    reference.write_kv(k, v, (k_cache, v_cache), batch, spec)
    out = reference.prefill_attention(q, k, v, (k_cache, v_cache), batch, spec)
    expected = []
    for index, (row, position) in enumerate(tokens):
        keys = [token(k_cache, tables[row], earlier, scales[0]) for earlier in range(position + 1)]
        values = [token(v_cache, tables[row], earlier, scales[1]) for earlier in range(position + 1)]
        expected.append(attend_one(q[index], keys, values, 0.3, window, soft_cap, slopes, sinks))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_mixed_prompt_lengths_match_loop(shapes: list[tuple[int, int]], window: int | None) -> None:
    check_prefill(shapes, window=window)


@pytest.mark.parametrize("layout", [contiguous, descending, shuffled, with_gaps, scattered])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefill_with_any_block_layout_matches_loop(layout: Layout, block_size: int) -> None:
    check_prefill([(5, 0), (1, 7), (3, 6), (1, 1), (3, 6)], layout=layout, block_size=block_size)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_with_grouped_query_heads_matches_loop(heads: tuple[int, int], window: int | None) -> None:
    check_prefill(MIXED, heads=heads, window=window)


@pytest.mark.parametrize("max_scores", [1, 200, 2**27])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_prefill_with_soft_cap_matches_loop(
    heads: tuple[int, int], window: int | None, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "MAX_SCORE_ELEMENTS", max_scores)
    check_prefill(MIXED, heads=heads, window=window, soft_cap=1.5)
    check_prefill(MIXED, heads=heads, window=window, soft_cap=1.5, dtype=torch.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 4])
def test_alibi_slopes_match_loop(window: int | None, soft_cap: float | None) -> None:
    slopes, lengths = torch.tensor([0.7, 0.1, -0.2, 0.0]), [7, 1, 10, 4]
    for layout in (contiguous, with_gaps, scattered):
        check_decode(layout(lengths, 4), lengths, 4, window=window, soft_cap=soft_cap, slopes=slopes)
    check_decode(scattered([9], 4), [9], 4, window=window, cache_dtype=FP8, scales=(0.05, 0.02), slopes=slopes)
    check_prefill(MIXED, window=window, soft_cap=soft_cap, slopes=slopes)
    check_prefill(MIXED, window=window, soft_cap=soft_cap, slopes=slopes, dtype=torch.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_sinks_match_loop(window: int | None) -> None:
    sinks, lengths = torch.tensor([0.7, 3.0, -0.2, -50.0]), [7, 1, 10, 4]
    check_decode(scattered(lengths, 4), lengths, 4, window=window, sinks=sinks)
    check_prefill(MIXED, window=window, sinks=sinks)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)])
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_rounds_new_tokens_to_float8_cache(scales: tuple[float, float], window: int | None) -> None:
    check_prefill(MIXED, cache_dtype=FP8, scales=scales, window=window)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_in_half_precision_matches_loop(dtype: torch.dtype, window: int | None) -> None:
    check_prefill(MIXED, dtype=dtype, window=window, tolerance=2e-2)


def test_prefill_uses_given_keys_without_slots() -> None:
    """A prompt longer than its window stores only its last tokens."""
    q, k, v = normal(6, 2, 8, seed=1), normal(6, 2, 8, seed=2), normal(6, 2, 8, seed=3)
    k_cache, v_cache = random_cache(2, 4, 8, 4), random_cache(2, 4, 8, 5)
    batch = PagedBatch(
        torch.tensor([[3, 9]]), torch.tensor([6]), torch.tensor([0]), torch.tensor([36, 37]), torch.tensor([4, 5])
    )
    spec = AttentionSpec(1.0, 3)
    reference.write_kv(k, v, (k_cache, v_cache), batch, spec)
    out = reference.prefill_attention(q, k, v, (k_cache, v_cache), batch, spec)
    for position in range(6):
        expected = attend_one(q[position], list(k[: position + 1].double()), list(v[: position + 1].double()), 1.0, 3)
        torch.testing.assert_close(out[position].double(), expected, rtol=0, atol=1e-5)


def test_prefill_single_token_uses_given_key_without_slot() -> None:
    q, k, v = normal(1, 2, 8, seed=1), normal(1, 2, 8, seed=2), normal(1, 2, 8, seed=3)
    k_cache, v_cache = random_cache(2, 4, 8, 4), random_cache(2, 4, 8, 5)
    batch = PagedBatch(torch.tensor([[7]]), torch.tensor([1]), torch.tensor([2]), torch.tensor([-1]))
    spec = AttentionSpec(1.0)
    reference.write_kv(k, v, (k_cache, v_cache), batch, spec)
    out = reference.prefill_attention(q, k, v, (k_cache, v_cache), batch, spec)
    keys = [token(k_cache, [7], 0), token(k_cache, [7], 1), k[0].double()]
    values = [token(v_cache, [7], 0), token(v_cache, [7], 1), v[0].double()]
    torch.testing.assert_close(out[0].double(), attend_one(q[0], keys, values, 1.0, None), rtol=0, atol=1e-5)


# --- rms_norm, rotary, gated_linear


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (2, 4, 16)])
def test_rms_norm_matches_loop(with_residual: bool, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, seed=1), normal(shape[-1], seed=2)
    residual = normal(*shape, seed=3) if with_residual else None
    before = x.clone()
    normed, summed = reference.rms_norm(x, residual, weight, torch.tensor(1e-3))
    total = x + residual if residual is not None else x
    assert torch.equal(x, before)
    assert torch.equal(summed, total)
    for row, out in zip(total.flatten(0, -2), normed.flatten(0, -2), strict=True):
        mean_square = sum(float(value) ** 2 for value in row) / len(row)
        expected = row.double() / math.sqrt(mean_square + 1e-3) * weight.double()
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_rms_norm_half_precision_matches_transformers(dtype: torch.dtype) -> None:
    x, residual = normal(16, 64, seed=1, dtype=dtype), normal(16, 64, seed=2, dtype=dtype)
    theirs = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    theirs.weight.data = normal(64, seed=3, dtype=dtype)
    normed, summed = reference.rms_norm(x, residual, theirs.weight.data, torch.tensor(1e-5))
    assert normed.dtype == dtype
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize("head_dim", [8, 12])
def test_rotary_rotates_only_leading_dimensions(head_dim: int) -> None:
    x = normal(3, 2, head_dim, seed=1)
    angles = normal(3, 4, seed=2)
    expected = x.clone()
    for at in range(3):
        for head in range(2):
            for pair in range(4):
                c, s = math.cos(angles[at, pair]), math.sin(angles[at, pair])
                first, second = float(x[at, head, pair]), float(x[at, head, pair + 4])
                expected[at, head, pair] = first * c - second * s
                expected[at, head, pair + 4] = second * c + first * s
    rotated = x.clone()
    reference.rotary(rotated, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated[..., :8], expected[..., :8], rtol=0, atol=1e-6)
    assert torch.equal(rotated[..., 8:], x[..., 8:])


def test_rotary_modifies_view_in_place() -> None:
    whole = normal(3, 6, 8, seed=1)
    before = whole.clone()
    angles = normal(3, 4, seed=2)
    reference.rotary(whole[:, 1:4], angles.cos(), angles.sin())
    alone = before[:, 1:4].clone()
    reference.rotary(alone, angles.cos(), angles.sin())
    assert torch.equal(whole[:, 1:4], alone)
    assert torch.equal(whole[:, [0, 4, 5]], before[:, [0, 4, 5]])


def test_rotary_keeps_dtype() -> None:
    x, angles = normal(3, 2, 8, seed=1), normal(3, 4, seed=2)
    half = x.bfloat16()
    reference.rotary(half, angles.cos(), angles.sin())
    reference.rotary(x, angles.cos(), angles.sin())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), x, rtol=0, atol=3e-2)


def test_gated_linear_multiplies_activation_and_up() -> None:
    x, weights = normal(3, 6, seed=1), LinearWeights(normal(10, 6, seed=2), normal(10, seed=3))
    gate_up = reference.linear(x, weights, None, ())
    out = reference.gated_linear(x, weights, Activation("silu", torch.nn.functional.silu), None, ())
    for row in range(3):
        for column in range(5):
            gate, up = float(gate_up[row, column]), float(gate_up[row, column + 5])
            assert float(out[row, column]) == pytest.approx(gate / (1 + math.exp(-gate)) * up, abs=1e-6)


# --- LoRA

# Inputs and outputs of each target: one layer with one target, one with three.
LORA_WIDTHS = ((12, 9), (10, 7), (10, 4), (10, 5))
LORA_LAYERS = {
    "one target": [LoraTarget(0, slice(0, 9))],
    "three targets": [LoraTarget(1, slice(0, 7)), LoraTarget(2, slice(7, 11)), LoraTarget(3, slice(11, 16))],
}
LONG_SEGMENT_TOKENS = 8  # tokens
Runs = Sequence[tuple[int, int]]  # adapter, number of tokens


class NanBuffer:
    """A buffer with tensors at odd offsets and NaN between them."""

    def __init__(self) -> None:
        self.parts = [torch.full((3,), math.nan)]

    def add(self, piece: torch.Tensor) -> int:
        at = sum(map(len, self.parts))
        self.parts += [piece.flatten(), torch.full((at % 5 + 2,), math.nan)]
        return at


def lora_batch(
    runs: Runs,
    ranks: Sequence[Sequence[int]],
    *,
    output_scales: Sequence[int] = (),
    output_biases: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> LoraBatch:
    """Make a batch in which adapter `i + 1` has rank `ranks[i][target]`.

    `output_scales` and `output_biases` list the adapters with these vectors.
    """
    buffer, seed = NanBuffer(), 100
    table = torch.zeros(1 + len(ranks), len(LORA_WIDTHS), len(Field), dtype=torch.long)
    table[:, :, : Field.RANK] = -1
    for adapter, of_targets in enumerate(ranks, start=1):
        for target, (rank, (inputs, outputs)) in enumerate(zip(of_targets, LORA_WIDTHS, strict=True)):
            fields, seed = table[adapter, target], seed + 4
            fields[Field.RANK] = rank
            if rank:
                fields[Field.A] = buffer.add(normal(rank, inputs, seed=seed) / math.sqrt(inputs))
                fields[Field.B] = buffer.add(normal(rank, outputs, seed=seed + 1) / math.sqrt(rank))
            for having, field in ((output_scales, Field.OUTPUT_SCALE), (output_biases, Field.OUTPUT_BIAS)):
                if adapter in having:
                    fields[field] = buffer.add(normal(outputs, seed=seed + field))
    return LoraBatch(
        buffer=torch.cat(buffer.parts).to(dtype),
        table=table,
        scales=torch.arange(table[..., 0].numel()).view(table.shape[:2]) % 5 * 0.25 + 0.25,
        features=torch.tensor(LORA_WIDTHS),
        adapter_indices=torch.tensor([adapter for adapter, length in runs for _ in range(length)], dtype=torch.int32),
        host_table=table,
        bounds=[sum(length for _, length in runs[:count]) for count in range(len(runs) + 1)],
        adapters=[adapter for adapter, _ in runs],
    )


def token_fields(batch: LoraBatch, targets: Sequence[LoraTarget]) -> Iterator[tuple[int, LoraTarget, list[int], float]]:
    """Yield each token and target with the adapter's table fields and scale."""
    for adapter, start, stop in zip(batch.adapters, batch.bounds, batch.bounds[1:], strict=False):
        for token in range(start, stop):
            for target in targets:
                fields = batch.table[adapter, target.index].tolist()
                yield token, target, fields, float(batch.scales[adapter, target.index])


def naive_lora(out: torch.Tensor, x: torch.Tensor, batch: LoraBatch, targets: Sequence[LoraTarget]) -> torch.Tensor:
    expected, buffer = out.double(), batch.buffer.double()
    for token, target, fields, scale in token_fields(batch, targets):
        inputs, outputs = LORA_WIDTHS[target.index]
        for row in range(fields[Field.RANK]):
            a, b = fields[Field.A] + row * inputs, fields[Field.B] + row * outputs
            low_rank = scale * (x[token].double() @ buffer[a : a + inputs])
            expected[token, target.columns] += low_rank * buffer[b : b + outputs]
    return expected


def check_lora(batch: LoraBatch, targets: Sequence[LoraTarget], tolerance: float = 5e-6) -> None:
    """Check some columns of `out`. Other columns must not change."""
    x = normal(batch.bounds[-1], LORA_WIDTHS[targets[0].index][0], seed=1, dtype=batch.buffer.dtype)
    wide = normal(len(x), targets[-1].columns.stop + 5, seed=2, dtype=x.dtype)
    before, columns = wide.clone(), slice(3, 3 + targets[-1].columns.stop)
    reference.add_lora(wide[:, columns], x, batch, targets)
    expected = naive_lora(before[:, columns], x, batch, targets)
    torch.testing.assert_close(wide[:, columns].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(wide[:, :3], before[:, :3])
    assert torch.equal(wide[:, columns.stop :], before[:, columns.stop :])
    for adapter, start, stop in zip(batch.adapters, batch.bounds, batch.bounds[1:], strict=False):
        nothing = all(batch.table[adapter, target.index, Field.RANK] == 0 for target in targets)
        assert torch.equal(wide[start:stop], before[start:stop]) == nothing


def random_mix(seed: int, ranks: Sequence[int]) -> tuple[Runs, list[list[int]]]:
    draw = random.Random(seed)
    of_adapters = [[draw.choice(ranks) for _ in LORA_WIDTHS] for _ in range(6)]
    lengths = (1, 1, 1, 2, 3, LONG_SEGMENT_TOKENS - 1, LONG_SEGMENT_TOKENS, LONG_SEGMENT_TOKENS + 1, 20)
    return [(draw.randrange(7), draw.choice(lengths)) for _ in range(9)], of_adapters


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("layer", LORA_LAYERS)
def test_lora_applies_adapter_of_each_token(seed: int, layer: str) -> None:
    check_lora(lora_batch(*random_mix(seed, (0, 1, 3, 8, 16, 17, 64))), LORA_LAYERS[layer])


ALL_HAVE_3 = [[3] * 4] * 4
SOME_LACK_17 = [[17, 0, 17, 0], [0, 0, 0, 17], [17] * 4, [0] * 4]
MIXED_RANKS = [[1, 3, 64, 8], [16, 17, 0, 1], [9, 7, 0, 0], [0] * 4]
SINGLE_TOKENS = [(1, 1), (3, 1), (2, 1), (4, 1), (1, 1)]


@pytest.mark.parametrize("layer", LORA_LAYERS)
@pytest.mark.parametrize("ranks", [ALL_HAVE_3, SOME_LACK_17, MIXED_RANKS], ids=["equal", "lacking", "mixed"])
@pytest.mark.parametrize(
    "runs",
    [
        SINGLE_TOKENS,
        [(0, 1), *SINGLE_TOKENS, (0, 2)],
        [(1, LONG_SEGMENT_TOKENS * 3)],
        [
            (1, LONG_SEGMENT_TOKENS - 1),
            (2, LONG_SEGMENT_TOKENS),
            (3, LONG_SEGMENT_TOKENS + 1),
            (1, LONG_SEGMENT_TOKENS - 1),
        ],
        [(4, 1), (2, LONG_SEGMENT_TOKENS + 4), (0, 2), (1, LONG_SEGMENT_TOKENS), (3, 1), (1, 2)],
        [(0, 4), (3, 2), (4, LONG_SEGMENT_TOKENS), (0, 9)],
        [(1, 3), (2, 3), (3, 3)],  # segments of equal length, in order
        [(1, 1), (2, 3), (0, 2)],  # as many tokens as two segments of three
    ],
    ids=["tokens", "and base", "one long", "around the limit", "long and short", "base around", "even", "uneven"],
)
def test_lora_with_any_segments_and_ranks_matches_loop(layer: str, ranks: list[list[int]], runs: Runs) -> None:
    check_lora(lora_batch(runs, ranks), LORA_LAYERS[layer])


@pytest.mark.parametrize(
    "runs", [[], [(0, 5)], [(0, LONG_SEGMENT_TOKENS + 5)], [(4, 3), (0, 1), (4, LONG_SEGMENT_TOKENS)]]
)
def test_lora_without_weights_keeps_output(runs: Runs) -> None:
    batch = lora_batch(runs, MIXED_RANKS, output_scales=[1], output_biases=[2])
    out = normal(batch.bounds[-1], 16, seed=2)
    before = out.clone()
    reference.add_lora(out, normal(len(out), 10, seed=1), batch, LORA_LAYERS["three targets"])
    reference.scale_and_shift(out, batch, LORA_LAYERS["three targets"])
    assert torch.equal(out, before)


@pytest.mark.parametrize("seed", range(4))
def test_lora_is_batch_invariant(seed: int) -> None:
    """Compare with each segment alone."""
    runs, ranks = random_mix(seed, (0, 3, 16, 17))
    batch, targets = lora_batch(runs, ranks), LORA_LAYERS["three targets"]
    x, together = normal(batch.bounds[-1], 10, seed=1), torch.zeros(batch.bounds[-1], 16)
    reference.add_lora(together, x, batch, targets)
    for run, start, stop in zip(runs, batch.bounds, batch.bounds[1:], strict=False):
        alone = torch.zeros(stop - start, 16)
        reference.add_lora(alone, x[start:stop], lora_batch([run], ranks), targets)
        torch.testing.assert_close(together[start:stop], alone, rtol=1e-6, atol=1e-6)


def test_nan_segment_does_not_affect_other_segments() -> None:
    batch, targets = (
        lora_batch([(1, 2), (0, 1), (2, 3), (3, LONG_SEGMENT_TOKENS)], MIXED_RANKS),
        LORA_LAYERS["three targets"],
    )
    x, out, clean = (
        normal(6 + LONG_SEGMENT_TOKENS, 10, seed=1),
        torch.zeros(6 + LONG_SEGMENT_TOKENS, 16),
        torch.zeros(6 + LONG_SEGMENT_TOKENS, 16),
    )
    reference.add_lora(clean, x, batch, targets)
    x[[0, 2, 4]] = math.nan
    reference.add_lora(out, x, batch, targets)
    others = [token for token in range(len(x)) if token not in (0, 4)]
    assert out[[0, 4], :7].isnan().all()
    torch.testing.assert_close(out[others], clean[others], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layer", LORA_LAYERS)
def test_lora_in_half_precision_matches_loop(layer: str, dtype: torch.dtype) -> None:
    runs = [(1, 1), (2, LONG_SEGMENT_TOKENS), (0, 2), (1, 3), (3, 2)]
    check_lora(lora_batch(runs, MIXED_RANKS, dtype=dtype), LORA_LAYERS[layer], tolerance=4e-2)


@pytest.mark.parametrize("layer", LORA_LAYERS)
@pytest.mark.parametrize(("output_scales", "output_biases"), [([1, 3], []), ([], [1, 3]), ([1, 2], [2, 3])])
@pytest.mark.parametrize("length", [1, 3, LONG_SEGMENT_TOKENS - 1, LONG_SEGMENT_TOKENS, LONG_SEGMENT_TOKENS + 9])
def test_output_scale_is_applied_before_output_bias(
    layer: str, output_scales: list[int], output_biases: list[int], length: int
) -> None:
    runs = [(1, length), (0, 2), (3, 1), (2, length), (4, 2), (3, length), (0, LONG_SEGMENT_TOKENS)]
    batch, targets = (
        lora_batch(runs, [[0] * 4] * 4, output_scales=output_scales, output_biases=output_biases),
        LORA_LAYERS[layer],
    )
    wide = normal(batch.bounds[-1], 24, seed=1)
    expected, local = wide.clone(), wide[:, 3 : 3 + targets[-1].columns.stop]
    for token, target, fields, _ in token_fields(batch, targets):
        width = LORA_WIDTHS[target.index][1]
        for column in range(width):
            at = 3 + target.columns.start + column
            if fields[Field.OUTPUT_SCALE] >= 0:
                expected[token, at] *= batch.buffer[fields[Field.OUTPUT_SCALE] + column]
            if fields[Field.OUTPUT_BIAS] >= 0:
                expected[token, at] += batch.buffer[fields[Field.OUTPUT_BIAS] + column]
    reference.scale_and_shift(local, batch, targets)
    assert torch.equal(wide, expected)  # unchanged tokens and columns must be bitwise equal


# --- linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_linear_without_adapters_matches_torch(bias: bool, rows: int) -> None:
    weight, added, x = normal(10, 6, seed=1), normal(10, seed=2) if bias else None, normal(rows, 6, seed=3)
    out = reference.linear(x, LinearWeights(weight, added), None, ())
    torch.testing.assert_close(out, F.linear(x, weight, added), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_rank", [False, True])
@pytest.mark.parametrize("with_vectors", [False, True])
def test_linear_adds_lora_before_output_scale_and_bias(with_rank: bool, with_vectors: bool) -> None:
    having = [1] if with_vectors else []
    batch = lora_batch([(0, 2), (1, 3)], [[4 * with_rank] * 4], output_scales=having, output_biases=having)
    weights, x = LinearWeights(normal(9, 12, seed=1)), normal(5, 12, seed=2)
    targets = LORA_LAYERS["one target"]
    expected = F.linear(x, weights.plain)
    reference.add_lora(expected, x, batch, targets)
    reference.scale_and_shift(expected, batch, targets)
    assert torch.equal(reference.linear(x, weights, batch, targets), expected)
