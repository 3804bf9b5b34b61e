"""Native RoPE, KV cache writes and attention against the reference."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lorax_server.kernels import AttentionSpec, HostLengths, LayerCache, PagedBatch, reference
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps
from tests.kernels.triton.cases import BF16, DTYPES, FP16, FP32, pairwise_cases
from tests.kernels.triton.paging import (
    FP8,
    STALE_VALUE,
    attend_in_float64,
    check_bits,
    fill_cache,
    make_batch,
    nan_to_zero,
    normal,
)

Heads = tuple[int, int, int]  # query heads, KV heads, head_dim
Shapes = list[tuple[int, int]]  # new and cached tokens per sequence

TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 2e-2}
HEADS: list[Heads] = [(3, 3, 5), (4, 1, 16), (9, 3, 64), (10, 2, 80), (5, 1, 96), (7, 7, 128), (20, 1, 24)]
WINDOWS = [None, 1, 20, 130]
BLOCK_SIZES = [1, 7, 16, 64]
LENGTHS = [5, 1, 700, 128, 129, 64, 257]
PROMPTS: Shapes = [(5, 0), (1, 7), (64, 65), (1, 0), (0, 3), (200, 0), (2, 300), (33, 31), (1, 300)]
MIX: Shapes = [(70, 0), (3, 130), (1, 12), (40, 64)]


class Case:
    """Sequences with a NaN-filled cache, and strided views for queries, keys and values."""

    def __init__(
        self,
        shapes: Shapes,
        heads: Heads = (6, 2, 20),
        *,
        block_size: int = 16,
        dtype: torch.dtype = FP32,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.shapes = shapes
        self.spec = AttentionSpec(head_dim**-0.5, window)
        self.batch, blocks = make_batch(shapes, block_size, seed=seed)
        self.cache = fill_cache(
            self.batch, (blocks, num_kv_heads, block_size, head_dim), dtype, stale=STALE_VALUE, seed=1
        )
        tokens = sum(max(new, not new + cached) for new, cached in shapes)
        fused = normal(tokens, num_heads + 2 * num_kv_heads, head_dim, seed=2, dtype=dtype)
        self.q, self.k, self.v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    def decode(self, library: Library) -> torch.Tensor:
        return CpuOps(library).decode_attention(self.q, self.cache, self.batch, self.spec)

    def prefill(self, library: Library) -> torch.Tensor:
        return CpuOps(library).prefill_attention(self.q, self.k, self.v, self.cache, self.batch, self.spec)


def select_sequences(case: Case, rows: Sequence[int]) -> Case:
    """Return a case with only the given sequences."""
    part = object.__new__(Case)
    starts = [sum(new for new, _ in case.shapes[:row]) for row in range(len(case.shapes))]
    tokens = [start + i for row in rows for start in [starts[row]] for i in range(case.shapes[row][0])]
    part.shapes, part.spec, part.cache = [case.shapes[row] for row in rows], case.spec, case.cache
    at = list(rows)
    batch = case.batch
    part.batch = PagedBatch(
        batch.block_tables[at], batch.input_lengths[at], batch.cache_lengths[at], batch.slots[tokens]
    )
    part.q, part.k, part.v = case.q[tokens], case.k[tokens], case.v[tokens]
    return part


def tokens_of(case: Case, row: int) -> slice:
    start = sum(new for new, _ in case.shapes[:row])
    return slice(start, start + case.shapes[row][0])


def widen_cache(cache: LayerCache) -> LayerCache:
    keys, values = nan_to_zero(cache)
    return keys.float(), values.float()


def check_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "dtype", "window", "block_size"), pairwise_cases(HEADS, DTYPES, WINDOWS, BLOCK_SIZES), ids=str
)
def test_decode_attention_matches_reference(
    library: Library, heads: Heads, dtype: torch.dtype, window: int | None, block_size: int
) -> None:
    case = Case([(1, n - 1) for n in LENGTHS], heads, block_size=block_size, dtype=dtype, window=window)
    expected = reference.decode_attention(
        case.q.float(), widen_cache(case.cache), replace(case.batch, derived={}), case.spec
    )
    check_close(case.decode(library), expected, dtype)


@pytest.mark.parametrize(
    ("heads", "dtype", "window", "block_size"), pairwise_cases(HEADS, DTYPES, WINDOWS, BLOCK_SIZES), ids=str
)
def test_prefill_attention_matches_reference(
    library: Library, heads: Heads, dtype: torch.dtype, window: int | None, block_size: int
) -> None:
    case = Case(PROMPTS, heads, block_size=block_size, dtype=dtype, window=window)
    CpuOps(library).write_kv(case.k, case.v, case.cache, case.batch, case.spec)
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    expected = reference.prefill_attention(q, k, v, widen_cache(case.cache), replace(case.batch, derived={}), case.spec)
    check_close(case.prefill(library), expected, dtype)


def test_decode_attention_with_many_lengths_matches_reference(library: Library) -> None:
    lengths = [*range(1, 40), *range(61, 68), *range(125, 132), *range(255, 258), 513]
    case = Case([(1, n - 1) for n in lengths], (2, 1, 8))
    expected = reference.decode_attention(case.q, widen_cache(case.cache), replace(case.batch, derived={}), case.spec)
    check_close(case.decode(library), expected, FP32)
    case = Case([(n % 97 + 1, n) for n in range(0, 200, 11)], (2, 1, 8))
    CpuOps(library).write_kv(case.k, case.v, case.cache, case.batch, case.spec)
    expected = reference.prefill_attention(
        case.q, case.k, case.v, widen_cache(case.cache), replace(case.batch, derived={}), case.spec
    )
    check_close(case.prefill(library), expected, FP32)


def test_prefill_attention_without_slots_is_bitwise_equal_to_cached_prefill(library: Library) -> None:
    case = Case(PROMPTS, window=40)
    cached = Case(PROMPTS, window=40)
    CpuOps(library).write_kv(cached.k, cached.v, cached.cache, cached.batch, cached.spec)
    check_bits(case.prefill(library), cached.prefill(library))


def test_padding_rows_are_zero(library: Library) -> None:
    out = Case([(0, 0), (1, 40), (0, 0)]).decode(library)
    assert not out[[0, 2]].any()
    check_bits(out[1:2], attend_padded_batch(library))


def attend_padded_batch(library: Library) -> torch.Tensor:
    case = Case([(0, 0), (1, 40), (0, 0)])
    batch = case.batch
    alone = PagedBatch(batch.block_tables[1:2], batch.input_lengths[1:2], batch.cache_lengths[1:2], batch.slots[1:2])
    return CpuOps(library).decode_attention(case.q[1:2], case.cache, alone, case.spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_sequence_does_not_affect_other_sequences(library: Library, dtype: torch.dtype) -> None:
    clean, broken = Case(MIX, dtype=dtype), Case(MIX, dtype=dtype)
    broken.k[tokens_of(broken, 1)], broken.v[tokens_of(broken, 1)] = math.nan, math.inf
    broken.q[tokens_of(broken, 2)] = math.nan
    actual, expected = broken.prefill(library), clean.prefill(library)
    for row in (0, 3):
        check_bits(actual[tokens_of(clean, row)], expected[tokens_of(clean, row)])
    for row in (1, 2):
        assert actual[tokens_of(clean, row)].isnan().all()
    shapes = [(1, n) for n in (130, 12, 300)]
    clean, broken = Case(shapes, dtype=dtype), Case(shapes, dtype=dtype)
    broken.cache[1][broken.batch.block_tables[2, 0].long()] = math.nan
    actual, expected = broken.decode(library), clean.decode(library)
    check_bits(actual[:2], expected[:2])
    assert actual[2].isnan().all()


@pytest.mark.parametrize(("dtype", "window"), [(FP32, None), (BF16, 50), (FP16, None)], ids=str)
def test_attention_bits_are_batch_invariant(library: Library, dtype: torch.dtype, window: int | None) -> None:
    case = Case(MIX, (9, 3, 64), dtype=dtype, window=window)
    CpuOps(library).write_kv(case.k, case.v, case.cache, case.batch, case.spec)
    together = case.prefill(library)
    for row in range(len(MIX)):
        check_bits(select_sequences(case, [row]).prefill(library), together[tokens_of(case, row)])
    check_bits(select_sequences(case, [2]).decode(library), together[tokens_of(case, 2)])
    case = Case([(1, n) for n in (3, 600, 127, 128)], (9, 3, 64), dtype=dtype, window=window)
    together = case.decode(library)
    for row in range(4):
        check_bits(select_sequences(case, [row]).decode(library), together[row : row + 1])


def test_attention_is_bitwise_equal_for_all_chunk_sizes(library: Library) -> None:
    whole = Case([(300, 0)], (9, 3, 64), window=150)
    expected, actual = whole.prefill(library), []
    CpuOps(library).write_kv(whole.k, whole.v, whole.cache, whole.batch, whole.spec)
    start = 0
    for count in (2, 61, 37, 200):
        batch = replace(
            whole.batch, input_lengths=torch.tensor([count]), cache_lengths=torch.tensor([start]), derived={}
        )
        q, k, v = (x[start : start + count] for x in (whole.q, whole.k, whole.v))
        actual.append(CpuOps(library).prefill_attention(q, k, v, whole.cache, batch, whole.spec))
        start += count
    check_bits(torch.cat(actual), expected)


@pytest.mark.usefixtures("restored_threads")
def test_attention_bits_are_independent_of_threads(library: Library) -> None:
    result = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        long = Case([(1, n) for n in (3, 600, 1300)], (9, 3, 64))
        prompts = Case([*MIX, (1, 600), (300, 0)], (9, 3, 64), block_size=8)
        turned, (cos, sin) = prompts.q.clone(), angles(len(prompts.q), 32)
        CpuOps(library).rotary(turned, cos, sin)
        CpuOps(library).write_kv(prompts.k, prompts.v, prompts.cache, prompts.batch, prompts.spec)
        result.append([long.decode(library), prompts.prefill(library), turned, *prompts.cache])
    for others in result[1:]:
        for one, other in zip(result[0], others, strict=True):
            check_bits(other, one)


def test_index_dtype_does_not_change_bits(library: Library) -> None:
    case = Case(PROMPTS)
    expected = case.prefill(library)
    batch = case.batch
    table = torch.full((len(PROMPTS), 2 * batch.block_tables.shape[1]), -1, dtype=torch.int64)
    table[:, ::2] = batch.block_tables
    new, cached = batch.input_lengths, batch.cache_lengths
    case.batch = PagedBatch(
        table[:, ::2],
        new.int(),
        cached.int(),
        batch.slots.int(),
        host_lengths=HostLengths(new.tolist(), cached.tolist()),
    )
    check_bits(case.prefill(library), expected)


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = normal(tokens, half, seed=7) * 3
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (5, 2), (80, 20), (24, 11), (128, 64)])
def test_rotary_matches_reference(library: Library, dtype: torch.dtype, head_dim: int, half: int) -> None:
    fused = normal(9, 7, head_dim, seed=3, dtype=dtype)
    expected, (cos, sin) = fused.clone(), angles(9, half)
    CpuOps(library).rotary(fused[:, 1:5], cos, sin)
    reference.rotary(expected[:, 1:5], cos, sin)
    torch.testing.assert_close(fused, expected, rtol=TOLERANCE[dtype] / 2, atol=TOLERANCE[dtype] / 2)
    check_bits(fused[:, [0, 5, 6]], expected[:, [0, 5, 6]])
    check_bits(fused[..., 2 * half :], expected[..., 2 * half :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [None, [1, 4, 6, 69]], ids=str)
def test_write_kv_matches_reference(library: Library, dtype: torch.dtype, stored: list[int] | None) -> None:
    case = Case(MIX, (3, 3, 5), dtype=dtype, block_size=7)
    slots = case.batch.slots.clone()
    slots[[2, 6]] = -1
    tokens = None if stored is None else torch.tensor(stored)
    batch = replace(case.batch, slots=slots if tokens is None else slots[tokens], stored=tokens)
    expected = tuple(x.clone() for x in case.cache)
    for token in range(len(slots)) if stored is None else stored:
        slot = int(slots[token])
        if slot >= 0:
            expected[0][slot // 7, :, slot % 7], expected[1][slot // 7, :, slot % 7] = case.k[token], case.v[token]
    CpuOps(library).write_kv(case.k, case.v, case.cache, batch, case.spec)
    for actual, kept in zip(case.cache, expected, strict=True):
        check_bits(actual, kept)


def test_float8_cache_uses_reference_kernel(library: Library) -> None:
    case, same = Case(MIX), Case(MIX)
    for each in (case, same):
        keys, values = nan_to_zero(each.cache)
        each.cache, each.spec = (keys.to(FP8), values.to(FP8)), AttentionSpec(0.2, None, 0.5, 0.25)
    CpuOps(library).write_kv(case.k, case.v, case.cache, case.batch, case.spec)
    reference.write_kv(same.k, same.v, same.cache, same.batch, same.spec)
    check_bits(case.cache[0], same.cache[0])
    expected = reference.prefill_attention(same.q, same.k, same.v, same.cache, same.batch, same.spec)
    check_bits(case.prefill(library), expected)


@pytest.mark.parametrize(("has_slopes", "has_sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("soft_cap", [None, 1.5, 50.0])
@pytest.mark.parametrize("window", [None, 9])
def test_soft_cap_alibi_slopes_and_sinks_match_reference(
    library: Library, window: int | None, soft_cap: float | None, has_slopes: bool, has_sinks: bool
) -> None:
    """Unused cache slots are NaN: kernels must not read them."""
    case = Case([(20, 0), (3, 0), (1, 0), (133, 0)])
    slopes = torch.linspace(-0.1, 0.4, case.q.shape[1]) if has_slopes else None
    sinks = torch.linspace(-4, 400, case.q.shape[1]) if has_sinks else None  # the last heads attend to nothing else
    case.spec = AttentionSpec(0.9, window, soft_cap=soft_cap, slopes=slopes, sinks=sinks)
    for cache in case.cache:
        cache.fill_(STALE_VALUE)
    CpuOps(library).write_kv(case.k, case.v, case.cache, case.batch, case.spec)
    expected = attend_in_float64(case.q, case.cache, case.batch, case.spec)
    check_close(case.prefill(library), expected.float(), FP32)
    ends = case.batch.input_lengths.cumsum(0) - 1
    one = torch.ones_like(ends)
    step = PagedBatch(case.batch.block_tables, one, case.batch.input_lengths - 1, case.batch.slots[ends])
    actual = CpuOps(library).decode_attention(case.q[ends], case.cache, step, case.spec)
    check_close(actual, expected[ends].float(), FP32)


def test_strided_heads_are_rejected(library: Library) -> None:
    case = Case(MIX)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="must have stride 1"):
        case.decode(library)
