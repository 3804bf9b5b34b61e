"""The reference ops against loops that are too simple to be wrong."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lorax_server.kernels import AttentionSpec, LoraSegments, PagedBatch, reference

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
    """A cache full of other sequences' tokens, so that one that is read by mistake shows."""
    values = normal(NUM_BLOCKS, kv_heads, block_size, head_dim, seed=seed)
    return as_fp8(values, scale) if dtype == FP8 else values.to(dtype)


def token(cache: torch.Tensor, table: Sequence[int], position: int, scale: float = 1.0) -> torch.Tensor:
    block_size = cache.shape[2]
    return cache[table[position // block_size], :, position % block_size].double() * scale


def attend_one(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float, window: int | None
) -> torch.Tensor:
    """One query `[heads, head_dim]` that comes last among its keys, each `[kv_heads, head_dim]`."""
    num_heads, num_kv_heads = len(q), len(keys[0])
    first = 0 if window is None else max(0, len(keys) - window)
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(num_heads):
        shared = head * num_kv_heads // num_heads
        scores = [math.exp(float(q[head].double() @ key[shared]) * scale) for key in keys[first:]]
        for score, value in zip(scores, values[first:], strict=True):
            out[head] += score / sum(scores) * value[shared]
    return out


def table_tensor(tables: Sequence[Sequence[int]]) -> torch.Tensor:
    width = max(len(table) for table in tables)
    return torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)


Shapes = Sequence[tuple[int, int]]  # of each sequence, how many tokens are new and how many are cached


def new_tokens(shapes: Shapes) -> list[tuple[int, int]]:
    """Each new token's sequence, and its position there."""
    return [(row, position) for row, (new, cached) in enumerate(shapes) for position in range(cached, cached + new)]


def paged_batch(tables: Sequence[Sequence[int]], shapes: Shapes, block_size: int) -> PagedBatch:
    slots = [
        tables[row][position // block_size] * block_size + position % block_size for row, position in new_tokens(shapes)
    ]
    new, cached = torch.tensor(shapes).unbind(1)
    return PagedBatch(table_tensor(tables), new, cached, torch.tensor(slots))


def decode_batch(tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int) -> PagedBatch:
    """One new token per sequence, the last of `lengths`."""
    return paged_batch(tables, [(1, length - 1) for length in lengths], block_size)


# --- where the blocks of a few sequences lie


def hand_out(blocks: Sequence[int], lengths: Sequence[int], block_size: int) -> list[list[int]]:
    remaining = iter(blocks)
    return [[next(remaining) for _ in range(-(-length // block_size))] for length in lengths]


def contiguous(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    return hand_out(range(3, NUM_BLOCKS), lengths, block_size)


def backwards(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    return hand_out(range(NUM_BLOCKS - 1, 0, -1), lengths, block_size)


def shuffled(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    count = sum(-(-length // block_size) for length in lengths)
    return hand_out((torch.randperm(count, generator=generator()) + 2).tolist(), lengths, block_size)


def with_gaps(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Every third block is another's."""
    return hand_out([block for block in range(1, NUM_BLOCKS) if block % 3 != 0], lengths, block_size)


def scattered(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    count = sum(-(-length // block_size) for length in lengths)
    step = (NUM_BLOCKS - 1) // count
    return hand_out(range(0, NUM_BLOCKS, step), lengths, block_size)


def shared(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """All sequences have their first block in common, and the last two all blocks but their last."""
    tables = contiguous(lengths, block_size)
    for table in tables[1:]:
        table[0] = tables[0][0]
    both = min(len(tables[-1]), len(tables[-2])) - 1
    tables[-1][:both] = tables[-2][:both]
    return tables


Layout = Callable[[Sequence[int], int], list[list[int]]]
LAYOUTS: list[Layout] = [contiguous, backwards, shuffled, with_gaps, scattered, shared]


MIXED = [(5, 0), (1, 7), (3, 6), (5, 0), (1, 1), (2, 9), (3, 6), (1, 0), (4, 4)]


# --- write_kv


def written_cache(
    cache: torch.Tensor,
    new: torch.Tensor,
    tables: Sequence[Sequence[int]],
    shapes: Shapes,
    kept: Sequence[int] | None = None,
) -> torch.Tensor:
    """What a cache is to be once the new tokens, or those `kept`, are stored."""
    cache, block_size = cache.clone(), cache.shape[2]
    tokens = new_tokens(shapes)
    kept = range(len(tokens)) if kept is None else kept
    for row, position in (tokens[index] for index in kept):
        if position // block_size * block_size >= shapes[row][1]:  # the sequence had nothing in this block before
            cache[tables[row][position // block_size]] = 0
    stored = as_fp8(new, 1.0) if cache.dtype == FP8 else new.to(cache.dtype)
    for index in kept:
        row, position = tokens[index]
        cache[tables[row][position // block_size], :, position % block_size] = stored[index]
    return cache


def check_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, and a NaN is equal to itself."""
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def used_caches(block_size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Keys and values that others left behind, not all of them numbers."""
    caches = [random_cache(2, block_size, 8, seed + index, dtype=dtype) for index in range(2)]
    for cache in caches:
        cache[::3, :, ::2] = math.nan
    return caches


@pytest.mark.parametrize("layout", [contiguous, scattered])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_write_kv_stores_each_token_clears_the_rest_of_a_new_block_and_leaves_all_others(
    layout: Layout, block_size: int, dtype: torch.dtype
) -> None:
    tables = layout([new + cached for new, cached in MIXED], block_size)
    batch = paged_batch(tables, MIXED, block_size)
    for layer in range(2):
        k, v = (normal(len(batch.slots), 2, 8, seed=10 * layer + seed) for seed in (1, 2))
        k_cache, v_cache = used_caches(block_size, dtype, 10 * layer + 3)
        expected = [written_cache(*of_one, tables, MIXED) for of_one in ((k_cache, k), (v_cache, v))]
        reference.write_kv(k, v, k_cache, v_cache, batch, AttentionSpec(1.0))
        check_bits(k_cache, expected[0])
        check_bits(v_cache, expected[1])


@pytest.mark.parametrize("cached", [0, 3, 4])
@pytest.mark.parametrize("kept", [[0, 2, 4], [3, 4, 6], [5, 7], [1], [], list(range(8))])
@pytest.mark.parametrize("by", ["slots", "indices", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_write_kv_touches_no_block_of_tokens_that_it_is_not_to_store(
    cached: int, kept: list[int], by: str, dtype: torch.dtype
) -> None:
    shapes, tables = [(5, cached), (3, 0)], [[7, 2, 12], [5]]
    whole = paged_batch(tables, shapes, 4)
    named = kept if by == "indices" else list(range(8)) if by == "slots" else sorted({*kept, 0, 6})
    slots = torch.tensor([int(whole.slots[index]) if index in kept else -1 for index in named], dtype=torch.long)
    written = None if by == "slots" else torch.tensor(named, dtype=torch.long)
    batch = PagedBatch(whole.block_tables, whole.input_lengths, whole.cache_lengths, slots, written)
    k, v = normal(8, 2, 8, seed=1), normal(8, 2, 8, seed=2)
    k_cache, v_cache = used_caches(4, dtype, 3)
    expected = [written_cache(*of_one, tables, shapes, kept) for of_one in ((k_cache, k), (v_cache, v))]
    reference.write_kv(k, v, k_cache, v_cache, batch, AttentionSpec(1.0))
    check_bits(k_cache, expected[0])
    check_bits(v_cache, expected[1])


def test_write_kv_divides_by_the_scales_and_stays_finite_in_float8() -> None:
    k, v = torch.tensor([3.0, 1e6, -1e6, 0.25]).view(1, 1, 4), torch.tensor([1.0, 2.0, 4.0, -300.0]).view(1, 1, 4)
    k_cache, v_cache = torch.zeros(1, 1, 1, 4, dtype=FP8), torch.zeros(1, 1, 1, 4, dtype=FP8)
    batch = paged_batch([[0]], [(1, 0)], 1)
    reference.write_kv(k, v, k_cache, v_cache, batch, AttentionSpec(1.0, None, 0.5, 4.0))
    assert k_cache.float().flatten().tolist() == [6.0, 448.0, -448.0, 0.5]
    # 75 lies between 72 and 80, the nearest values of three mantissa bits.
    assert v_cache.float().flatten().tolist() == [0.25, 0.5, 1.0, -72.0]


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
    tolerance: float = 1e-5,
) -> None:
    num_heads, num_kv_heads = heads
    cache_dtype = cache_dtype or dtype
    q = normal(len(lengths), num_heads, 16, seed=5, dtype=dtype)
    k_cache = random_cache(num_kv_heads, block_size, 16, 6, dtype=cache_dtype, scale=scales[0])
    v_cache = random_cache(num_kv_heads, block_size, 16, 7, dtype=cache_dtype, scale=scales[1])
    spec = AttentionSpec(0.3, window, *scales)
    out = reference.decode_attention(q, k_cache, v_cache, decode_batch(tables, lengths, block_size), spec)
    expected = []
    for row, length in enumerate(lengths):
        keys = [token(k_cache, tables[row], position, scales[0]) for position in range(length)]
        values = [token(v_cache, tables[row], position, scales[1]) for position in range(length)]
        expected.append(attend_one(q[row], keys, values, 0.3, window))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_decode_wherever_the_blocks_lie(layout: Layout, block_size: int, window: int | None) -> None:
    lengths = [7, 1, 10, 4, 9]
    check_decode(layout(lengths, block_size), lengths, block_size, window=window)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (8, 2), (1, 1)])
@pytest.mark.parametrize("layout", [with_gaps, scattered])
def test_decode_with_heads_that_share_keys(heads: tuple[int, int], layout: Layout) -> None:
    lengths = [5, 12, 3]
    check_decode(layout(lengths, 4), lengths, 4, heads=heads)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 33])
@pytest.mark.parametrize("layout", [contiguous, with_gaps, scattered])
@pytest.mark.parametrize("window", [None, 4])
def test_decode_of_one_sequence(length: int, layout: Layout, window: int | None) -> None:
    check_decode(layout([length], 4), [length], 4, window=window)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 5])
def test_decode_over_a_float8_cache(scales: tuple[float, float], layout: Layout, window: int | None) -> None:
    lengths = [7, 1, 10, 4]
    check_decode(layout(lengths, 4), lengths, 4, cache_dtype=FP8, scales=scales, window=window)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 5])
def test_decode_in_half_precision(dtype: torch.dtype, layout: Layout, window: int | None) -> None:
    lengths = [7, 1, 10, 4]
    check_decode(layout(lengths, 4), lengths, 4, dtype=dtype, window=window, tolerance=2e-2)


def test_decode_shares_its_plan_only_between_layers_of_one_window() -> None:
    lengths = [9, 6]
    tables = contiguous(lengths, 4)
    batch = decode_batch(tables, lengths, 4)
    q, k_cache, v_cache = normal(2, 2, 8, seed=1), random_cache(2, 4, 8, 2), random_cache(2, 4, 8, 3)
    for window in (None, 3, None, 5):
        out = reference.decode_attention(q, k_cache, v_cache, batch, AttentionSpec(1.0, window))
        for row, length in enumerate(lengths):
            keys = [token(k_cache, tables[row], position) for position in range(length)]
            values = [token(v_cache, tables[row], position) for position in range(length)]
            expected = attend_one(q[row], keys, values, 1.0, window)
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("layout", [contiguous, with_gaps, scattered])
def test_decode_does_not_see_another_sequences_broken_blocks(bad: float, layout: Layout) -> None:
    lengths = [8, 12]
    tables = layout(lengths, 4)
    k_cache, v_cache = random_cache(2, 4, 8, 1), random_cache(2, 4, 8, 2)
    others = [block for block in range(NUM_BLOCKS) if not any(block in table for table in tables)]
    k_cache[others] = bad
    v_cache[others] = bad
    batch = decode_batch(tables, lengths, 4)
    assert reference.decode_attention(normal(2, 2, 8), k_cache, v_cache, batch, AttentionSpec(1.0)).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("layout", [contiguous, with_gaps, scattered])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    "chunks",
    [[(6, 4), (1, 1)], [(2, 3), (4, 1), (1, 1)], [(4, 1), (1, 2), (1, 1), (1, 1)], [(1, 1)] * 5],
    ids=["a prompt", "chunks that continue a block", "chunks that end with one", "token by token"],
)
def test_decode_does_not_see_what_the_last_owner_of_its_block_left(
    bad: float, layout: Layout, window: int | None, chunks: list[tuple[int, int]]
) -> None:
    """Two sequences, whose every block was another's before."""
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
        reference.write_kv(k, v, k_cache, v_cache, batch, spec)
        cached = [new + start for new, start in shapes]
    q = normal(2, 2, 8, seed=1)
    out = reference.decode_attention(q, k_cache, v_cache, batch, spec)
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
    spec = AttentionSpec(0.3, window, *scales)
    reference.write_kv(k, v, k_cache, v_cache, batch, spec)
    out = reference.prefill_attention(q, k, v, k_cache, v_cache, batch, spec)
    expected = []
    for index, (row, position) in enumerate(tokens):
        keys = [token(k_cache, tables[row], earlier, scales[0]) for earlier in range(position + 1)]
        values = [token(v_cache, tables[row], earlier, scales[1]) for earlier in range(position + 1)]
        expected.append(attend_one(q[index], keys, values, 0.3, window))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_prefill_of_any_mixture(shapes: list[tuple[int, int]], window: int | None) -> None:
    check_prefill(shapes, window=window)


@pytest.mark.parametrize("layout", [contiguous, backwards, shuffled, with_gaps, scattered])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefill_wherever_the_blocks_lie(layout: Layout, block_size: int) -> None:
    check_prefill([(5, 0), (1, 7), (3, 6), (1, 1), (3, 6)], layout=layout, block_size=block_size)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_with_heads_that_share_keys(heads: tuple[int, int], window: int | None) -> None:
    check_prefill(MIXED, heads=heads, window=window)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)])
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_sees_its_own_tokens_as_a_float8_cache_stores_them(
    scales: tuple[float, float], window: int | None
) -> None:
    check_prefill(MIXED, cache_dtype=FP8, scales=scales, window=window)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_in_half_precision(dtype: torch.dtype, window: int | None) -> None:
    check_prefill(MIXED, dtype=dtype, window=window, tolerance=2e-2)


def test_prefill_reads_the_keys_it_is_given_where_they_are_not_stored() -> None:
    """A prompt longer than its window stores only the end of it."""
    q, k, v = normal(6, 2, 8, seed=1), normal(6, 2, 8, seed=2), normal(6, 2, 8, seed=3)
    k_cache, v_cache = random_cache(2, 4, 8, 4), random_cache(2, 4, 8, 5)
    batch = PagedBatch(
        torch.tensor([[3, 9]]), torch.tensor([6]), torch.tensor([0]), torch.tensor([36, 37]), torch.tensor([4, 5])
    )
    spec = AttentionSpec(1.0, 3)
    reference.write_kv(k, v, k_cache, v_cache, batch, spec)
    out = reference.prefill_attention(q, k, v, k_cache, v_cache, batch, spec)
    for position in range(6):
        expected = attend_one(q[position], list(k[: position + 1].double()), list(v[: position + 1].double()), 1.0, 3)
        torch.testing.assert_close(out[position].double(), expected, rtol=0, atol=1e-5)


def test_prefill_of_a_single_token_reads_the_key_it_is_given_where_it_is_not_stored() -> None:
    q, k, v = normal(1, 2, 8, seed=1), normal(1, 2, 8, seed=2), normal(1, 2, 8, seed=3)
    k_cache, v_cache = random_cache(2, 4, 8, 4), random_cache(2, 4, 8, 5)
    batch = PagedBatch(torch.tensor([[7]]), torch.tensor([1]), torch.tensor([2]), torch.tensor([-1]))
    spec = AttentionSpec(1.0)
    reference.write_kv(k, v, k_cache, v_cache, batch, spec)
    out = reference.prefill_attention(q, k, v, k_cache, v_cache, batch, spec)
    keys = [token(k_cache, [7], 0), token(k_cache, [7], 1), k[0].double()]
    values = [token(v_cache, [7], 0), token(v_cache, [7], 1), v[0].double()]
    torch.testing.assert_close(out[0].double(), attend_one(q[0], keys, values, 1.0, None), rtol=0, atol=1e-5)


# --- rms_norm, rotary, gated_activation


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (2, 4, 16)])
def test_rms_norm_row_by_row(with_residual: bool, shape: tuple[int, ...]) -> None:
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
def test_rms_norm_in_half_precision_is_that_of_transformers(dtype: torch.dtype) -> None:
    x, residual = normal(16, 64, seed=1, dtype=dtype), normal(16, 64, seed=2, dtype=dtype)
    theirs = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    theirs.weight.data = normal(64, seed=3, dtype=dtype)
    normed, summed = reference.rms_norm(x, residual, theirs.weight.data, torch.tensor(1e-5))
    assert normed.dtype == dtype
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize("head_dim", [8, 12])
def test_rotary_turns_pairs_and_leaves_the_rest(head_dim: int) -> None:
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


def test_rotary_writes_through_a_view() -> None:
    whole = normal(3, 6, 8, seed=1)
    before = whole.clone()
    angles = normal(3, 4, seed=2)
    reference.rotary(whole[:, 1:4], angles.cos(), angles.sin())
    alone = before[:, 1:4].clone()
    reference.rotary(alone, angles.cos(), angles.sin())
    assert torch.equal(whole[:, 1:4], alone)
    assert torch.equal(whole[:, [0, 4, 5]], before[:, [0, 4, 5]])


def test_rotary_keeps_the_dtype() -> None:
    x, angles = normal(3, 2, 8, seed=1), normal(3, 4, seed=2)
    half = x.bfloat16()
    reference.rotary(half, angles.cos(), angles.sin())
    reference.rotary(x, angles.cos(), angles.sin())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), x, rtol=0, atol=3e-2)


def test_gated_activation_gates_the_second_half_by_the_first() -> None:
    gate_up = normal(3, 10, seed=1)
    out = reference.gated_activation(gate_up, torch.nn.functional.silu)
    for row in range(3):
        for column in range(5):
            gate, up = float(gate_up[row, column]), float(gate_up[row, column + 5])
            assert float(out[row, column]) == pytest.approx(gate / (1 + math.exp(-gate)) * up, abs=1e-6)


# --- LoRA


def lora_segments(
    lengths: Sequence[int],
    ranks: Sequence[int],
    scales: Sequence[float],
    inputs: int,
    outputs: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> LoraSegments:
    """Factors at odd places of a buffer, with NaNs between them that nothing may read."""
    pieces, a_offsets, b_offsets, size = [], [], [], 0

    def place(rank: int, width: int, seed: int) -> int:
        nonlocal size
        gap = 3 if size % 2 == 0 else 2
        pieces.extend([torch.full((gap,), math.nan), normal(rank, width, seed=seed).flatten()])
        at = size + gap
        size = at + rank * width
        return at

    for index, rank in enumerate(ranks):
        a_offsets.append(place(rank, inputs, 100 + index))
        b_offsets.append(place(rank, outputs, 200 + index))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return LoraSegments(
        torch.cat([*pieces, torch.full((3,), math.nan)]).to(dtype),
        torch.tensor(a_offsets),
        torch.tensor(b_offsets),
        torch.tensor(ranks),
        torch.tensor(scales),
        bounds,
    )


def factor(segments: LoraSegments, at: int, rank: int, width: int) -> torch.Tensor:
    return segments.buffer[at : at + rank * width].view(rank, width).double()


def naive_shrink(x: torch.Tensor, segments: LoraSegments) -> torch.Tensor:
    out = torch.zeros(len(x), int(segments.ranks.max()), dtype=torch.float64)
    for index, rank in enumerate(segments.ranks.tolist()):
        a = factor(segments, int(segments.a_offsets[index]), rank, x.shape[1])
        for at in range(segments.bounds[index], segments.bounds[index + 1]):
            for row in range(rank):
                out[at, row] = x[at].double() @ a[row]
    return out


def naive_delta(low_rank: torch.Tensor, segments: LoraSegments, width: int) -> torch.Tensor:
    out = torch.zeros(len(low_rank), width, dtype=torch.float64)
    for index, rank in enumerate(segments.ranks.tolist()):
        b = factor(segments, int(segments.b_offsets[index]), rank, width)
        for at in range(segments.bounds[index], segments.bounds[index + 1]):
            for row in range(rank):
                out[at] += low_rank[at, row].double() * b[row] * float(segments.scales[index])
    return out


LONG = reference.LONG_SEGMENT
LORA_BATCHES = {
    "scattered tokens": ([1, 1, 1, 1, 1, 1], [1, 3, 16, 0, 3, 1]),
    "short runs": ([2, 5, 3, 4], [3, 0, 16, 1]),
    "one long run": ([LONG * 3], [16]),
    "long runs": ([LONG, LONG + 1, LONG * 2], [1, 3, 16]),
    "around the limit": ([LONG - 1, LONG, LONG + 1, LONG - 1, LONG], [3, 3, 16, 1, 0]),
    "long and short": ([1, LONG + 4, 2, LONG, 1, 1], [16, 3, 0, 1, 3, 1]),
    "base in front and at the end": ([4, 2, LONG, 9], [0, 16, 3, 0]),
    "an empty run": ([2, 0, LONG], [3, 16, 1]),
    "the base alone": ([2, LONG], [0, 0]),
}


@pytest.mark.parametrize(("lengths", "ranks"), LORA_BATCHES.values(), ids=LORA_BATCHES.keys())
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 7), (1, 1), (5, 24)])
def test_each_token_goes_through_its_own_adapter(
    lengths: list[int], ranks: list[int], inputs: int, outputs: int
) -> None:
    scales = [0.5 + index for index in range(len(ranks))]
    segments = lora_segments(lengths, ranks, scales, inputs, outputs)
    x = normal(sum(lengths), inputs, seed=1)
    low_rank = reference.lora_shrink(x, segments)
    assert low_rank.shape == (len(x), max(ranks))
    torch.testing.assert_close(low_rank.double(), naive_shrink(x, segments), rtol=1e-5, atol=1e-5)

    out = normal(len(x), outputs, seed=2)
    before = out.clone()
    reference.lora_expand(low_rank, segments, out)
    expected = before.double() + naive_delta(low_rank, segments, outputs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    for index, rank in enumerate(ranks):
        if rank == 0:
            base = slice(segments.bounds[index], segments.bounds[index + 1])
            assert torch.equal(out[base], before[base])


@pytest.mark.parametrize(("lengths", "ranks"), LORA_BATCHES.values(), ids=LORA_BATCHES.keys())
def test_a_delta_is_added_to_some_columns_of_a_wider_output(lengths: list[int], ranks: list[int]) -> None:
    segments = lora_segments(lengths, ranks, [2.0] * len(ranks), 6, 5)
    low_rank = reference.lora_shrink(normal(sum(lengths), 6, seed=1), segments)
    fused = normal(sum(lengths), 16, seed=2)
    before = fused.clone()
    reference.lora_expand(low_rank, segments, fused[:, 7:12])
    expected = before[:, 7:12].double() + naive_delta(low_rank, segments, 5)
    torch.testing.assert_close(fused[:, 7:12].double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(fused[:, :7], before[:, :7])
    assert torch.equal(fused[:, 12:], before[:, 12:])


@pytest.mark.parametrize("dtype", HALF)
def test_lora_in_half_precision(dtype: torch.dtype) -> None:
    segments = lora_segments([1, LONG, 3], [3, 16, 1], [0.5, 0.25, 1.0], 12, 7, dtype=dtype)
    x = normal(LONG + 4, 12, seed=1, dtype=dtype)
    low_rank = reference.lora_shrink(x, segments)
    assert low_rank.dtype == dtype
    torch.testing.assert_close(low_rank.double(), naive_shrink(x, segments), rtol=2e-2, atol=2e-2)
    out = torch.zeros(len(x), 7, dtype=dtype)
    reference.lora_expand(low_rank, segments, out)
    torch.testing.assert_close(out.double(), naive_delta(low_rank, segments, 7), rtol=2e-2, atol=5e-2)


def test_one_adapter_may_serve_several_runs() -> None:
    segments = lora_segments([2, 1, 3], [3, 1, 3], [1.0, 1.0, 1.0], 6, 5)
    segments.a_offsets[2], segments.b_offsets[2] = segments.a_offsets[0], segments.b_offsets[0]
    x = normal(1, 6, seed=1).expand(6, -1).contiguous()
    low_rank = reference.lora_shrink(x, segments)
    out = torch.zeros(6, 5)
    reference.lora_expand(low_rank, segments, out)
    for same in (1, 3, 4, 5):
        assert torch.equal(out[same], out[0])
    assert not torch.allclose(out[2], out[0])
