"""Triton prefill attention against a float64 implementation on a CPU."""

import copy
import warnings
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import AttentionSpec, HostLengths, LayerCache, PagedBatch, reference
from lorax_server.kernels.triton.decode_attention import decode_attention
from lorax_server.kernels.triton.prefill_attention import choose_tile_shape, plan_tiles_on_device, prefill_attention
from tests.grids import slow_except
from tests.kernels.triton.cases import BF16, FP16, FP32, choose_cases, pairwise_cases
from tests.kernels.triton.paging import (
    FP8,
    STALE_VALUE,
    attend_in_float64,
    fill_cache,
    make_batch,
    move,
    move_cache,
    nan_to_zero,
    normal,
)

Heads = tuple[int, int, int]  # query heads, KV heads, head_dim
Shapes = list[tuple[int, int]]  # new and cached tokens per sequence

TOLERANCE = {FP32: 2e-5, FP16: 2e-3, BF16: 2e-2}
MIXED: Shapes = [(5, 0), (1, 7), (3, 6), (5, 0), (1, 1), (2, 9), (3, 6), (1, 0), (4, 4)]


class Case:
    """Sequences with all tokens in a NaN-filled cache. The `k` and `v` arguments are NaN."""

    def __init__(
        self, shapes: Shapes, heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int = 8
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        batch, num_blocks = make_batch(shapes, block_size)
        new, cached = (list(lengths) for lengths in zip(*shapes, strict=True))
        self.batch = replace(batch, host_lengths=HostLengths(new, cached), stores_all=True)
        self.cache = fill_cache(
            batch, (num_blocks, num_kv_heads, block_size, head_dim), cache_dtype, stale=STALE_VALUE, seed=1
        )
        fused = normal(sum(new), num_heads + 2 * num_kv_heads, head_dim, seed=2, dtype=dtype)
        fused[:, num_heads:] = STALE_VALUE
        self.q, self.k, self.v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)

    def attend(self, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
        q, k, v = (x.to(device) for x in (self.q, self.k, self.v))
        return prefill_attention(q, k, v, move_cache(self.cache, device), move(self.batch, device), spec)

    def check(self, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
        out = self.attend(spec, device)
        assert out.dtype == self.q.dtype
        expected = attend_in_float64(self.q, self.cache, self.batch, spec)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[out.dtype])
        return out


@pytest.mark.parametrize(
    ("window", "cache_dtype", "soft_cap"), pairwise_cases([None, 4, 1], [FP32, FP8], [None, 2.0]), ids=str
)
def test_mixed_prompt_lengths_match_reference(
    window: int | None, cache_dtype: torch.dtype, soft_cap: float | None, device: torch.device
) -> None:
    Case(MIXED, (4, 2, 16), FP32, cache_dtype).check(AttentionSpec(0.3, window, 0.5, 0.25, soft_cap), device)


@pytest.mark.parametrize(("window", "cache_dtype", "soft_cap"), [(None, FP32, None), (4, FP8, 2.0)], ids=str)
def test_prefill_with_alibi_slopes_matches_reference(
    window: int | None, cache_dtype: torch.dtype, soft_cap: float | None, device: torch.device
) -> None:
    spec = AttentionSpec(0.3, window, 0.5, 0.25, soft_cap, torch.tensor([0.5, 0.02, -0.1, 0.0], device=device))
    Case(MIXED, (4, 2, 16), FP32, cache_dtype).check(spec, device)


@pytest.mark.parametrize("window", [None, 4])
def test_prefill_with_sinks_matches_reference(window: int | None, device: torch.device) -> None:
    spec = AttentionSpec(0.3, window, sinks=torch.tensor([0.5, -9.0, 3.0, 0.0], device=device))
    Case(MIXED, (4, 2, 16), FP32, FP32).check(spec, device)


@pytest.mark.parametrize(
    ("heads", "dtype", "window", "block_size"),
    choose_cases(
        [
            ((6, 2, 20), BF16, None, 5),
            ((5, 5, 8), FP16, 20, 16),
            ((22, 2, 40), FP32, 19, 1),
            ((9, 1, 16), FP32, None, 64),
        ],
        pairwise_cases([(6, 2, 20), (5, 5, 8), (22, 2, 40)], [BF16, FP16, FP32], [None, 20], [5, 16, 64]),
        fast=2,
    ),
)
def test_longer_prompts_match_reference(
    heads: Heads, dtype: torch.dtype, window: int | None, block_size: int, device: torch.device
) -> None:
    shapes = [(40, 30), (2, 33), (17, 0), (16, 16), (1, 40)]
    Case(shapes, heads, dtype, dtype, block_size).check(AttentionSpec(0.3, window), device)


@pytest.mark.slow
def test_lengths_are_read_from_device_without_host_copy(device: torch.device) -> None:
    case = Case(MIXED, (4, 2, 16), FP32, FP32)
    expected = case.attend(AttentionSpec(0.3), device)
    case.batch = replace(case.batch, host_lengths=None)
    assert torch.equal(case.attend(AttentionSpec(0.3), device), expected)


@pytest.mark.slow
def test_prefill_uses_only_host_lengths(device: torch.device) -> None:
    """Device slots and most device lengths are wrong, so reading them would fail."""
    case = Case(MIXED, (4, 2, 16), FP32, FP32)
    expected = case.attend(AttentionSpec(0.3), device)
    has_one = case.batch.input_lengths == 1
    new, cached = (torch.where(has_one, x, 10**6) for x in (case.batch.input_lengths, case.batch.cache_lengths))
    slots = torch.full_like(case.batch.slots, -1)
    case.batch = replace(case.batch, input_lengths=new, cache_lengths=cached, slots=slots)
    assert torch.equal(case.attend(AttentionSpec(0.3), device), expected)


@pytest.mark.gpu
def test_prefill_does_not_synchronize() -> None:
    case, device = Case(MIXED, (4, 2, 16), FP32, FP32), torch.device("cuda")
    kv, batch = move_cache(case.cache, device), move(case.batch, device)
    q, k, v = (x.to(device) for x in (case.q, case.k, case.v))
    expected = prefill_attention(q, k, v, kv, replace(batch, derived={}), AttentionSpec(0.3))  # compiles
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this torch mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        out = prefill_attention(q, k, v, kv, batch, AttentionSpec(0.3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_large_queries_with_float8_cache_do_not_overflow(size: float, device: torch.device) -> None:
    """The queries exceed the float16 range, in which products are computed."""
    case = Case([(5, 3), (3, 0)], (4, 2, 16), BF16, FP8)
    case.q = case.q * size
    case.check(AttentionSpec(0.3 / size), device)


def take_chunk(case: Case, row: int, first: int, stop: int) -> Case:
    """Return a chunk of one sequence, with all earlier tokens in the cache."""
    part = object.__new__(Case)
    starts = case.batch.input_lengths.cumsum(0) - case.batch.input_lengths
    cached, start = int(case.batch.cache_lengths[row]), int(starts[row])
    part.batch = PagedBatch(
        case.batch.block_tables[row : row + 1],
        torch.tensor([stop - first]),
        torch.tensor([cached + first]),
        case.batch.slots[start + first : start + stop],
        host_lengths=HostLengths([stop - first], [cached + first]),
        stores_all=True,
    )
    part.cache = case.cache
    part.q, part.k, part.v = (x[start + first : start + stop] for x in (case.q, case.k, case.v))
    return part


def check_chunks(case: Case, row: int, bounds: list[int], spec: AttentionSpec, device: torch.device) -> None:
    whole = case.attend(spec, device)
    start = int(case.batch.input_lengths[:row].sum())
    for first, stop in pairwise(bounds):
        part = take_chunk(case, row, first, stop).attend(spec, device)
        assert torch.equal(part, whole[start + first : start + stop]), (first, stop)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), pytest.param(9, 2.0, marks=pytest.mark.slow)])
def test_prefill_bits_are_independent_of_chunks_and_batch(
    window: int | None, soft_cap: float | None, device: torch.device
) -> None:
    case = Case([(3, 6), (45, 5), (20, 0)], (4, 2, 16), FP32, FP32)
    check_chunks(case, 1, [0, 45], AttentionSpec(0.3, window, soft_cap=soft_cap), device)
    check_chunks(case, 1, [0, 2, 13, 29, 45], AttentionSpec(0.3, window, soft_cap=soft_cap), device)


def test_single_token_prefill_matches_decode_bits(device: torch.device) -> None:
    case = Case([(3, 6), (1, 40), (1, 0)], (4, 2, 16), FP32, FP32)
    out = case.attend(AttentionSpec(0.3), device)[3:]
    batch = case.batch
    rows = PagedBatch(batch.block_tables[1:], batch.input_lengths[1:], batch.cache_lengths[1:], batch.slots[3:])
    q, kv = case.q[3:].to(device), move_cache(case.cache, device)
    assert torch.equal(out, decode_attention(q, kv, move(rows, device), AttentionSpec(0.3)))


# --- in a graph (lengths only on the device)


def in_graph(case: Case, size: int) -> Case:
    """Return the case padded to `size` tokens and sequences, with wrong host lengths."""
    padded, batch = copy.copy(case), case.batch
    new, cached, slots = (
        F.pad(x, (0, size - len(x)), value=fill_cache)
        for x, fill_cache in ((batch.input_lengths, 0), (batch.cache_lengths, 0), (batch.slots, -1))
    )
    padded.batch = replace(
        batch,
        block_tables=F.pad(batch.block_tables, (0, 0, 0, size - len(batch.block_tables))),
        input_lengths=new,
        cache_lengths=cached,
        slots=slots,
        cu_seqlens=torch.cat([torch.zeros(1), new.cumsum(0)]).int(),
        host_lengths=HostLengths([10**6], [10**6]),
        in_graph=True,
        derived={},
    )
    padded.q, padded.k, padded.v = (
        torch.cat([x, torch.full((size - len(x), *x.shape[1:]), STALE_VALUE, dtype=x.dtype)])
        for x in (case.q, case.k, case.v)
    )
    return padded


@pytest.mark.slow
@pytest.mark.parametrize("shapes", slow_except([MIXED], [MIXED, [(1, 5)], [(30, 9), (1, 2)]]))
def test_padded_graph_batch_gives_equal_bits(shapes: Shapes, device: torch.device) -> None:
    case = Case(shapes, (4, 2, 16), FP32, FP32)
    spec, count = AttentionSpec(0.3, window=7), len(case.q)
    assert torch.equal(in_graph(case, count + 5).attend(spec, device)[:count], case.attend(spec, device))


@pytest.mark.parametrize("height", [2, 4, 16])
@pytest.mark.parametrize("shapes", [MIXED, [(2, 0)] * 20, [(200, 1000), (1, 5), (55, 2000)], [(1, 5), (1, 9)]])
def test_device_tiles_match_host_tiles(shapes: Shapes, height: int, device: torch.device) -> None:
    case = Case(shapes, (4, 2, 16), FP32, FP32)
    size = len(case.q) + 7
    tiles = plan_tiles_on_device(move(in_graph(case, size).batch, device), height).cpu()
    starts = accumulate((new for new, _ in shapes), initial=0)
    expected = [
        [row, start + at, cached + at, new - at]
        for row, (start, (new, cached)) in enumerate(zip(starts, shapes, strict=False))
        if new > 1
        for at in range(0, new, height)
    ]
    assert tiles[: len(expected)].tolist() == expected
    assert not tiles[len(expected) :].any()


# --- tokens outside the cache


def make_given_case(
    shapes: Shapes, cache_dtype: torch.dtype
) -> tuple[PagedBatch, LayerCache, tuple[torch.Tensor, ...]]:
    batch, num_blocks = make_batch(shapes, 8)
    kv = nan_to_zero(fill_cache(batch, (num_blocks, 2, 8, 16), cache_dtype, stale=STALE_VALUE, seed=1))
    fused = normal(sum(new for new, _ in shapes), 8, 16, seed=5)
    return batch, kv, fused.split([4, 2, 2], dim=1)


@pytest.mark.parametrize(
    ("window", "cache_dtype", "has_host_lengths"), pairwise_cases([None, 4], [FP32, FP8], [False, True]), ids=str
)
def test_prefill_uses_given_keys_and_values(
    window: int | None, cache_dtype: torch.dtype, has_host_lengths: bool, device: torch.device
) -> None:
    batch, kv, (q, k, v) = make_given_case(MIXED, cache_dtype)
    spec = AttentionSpec(0.3, window, 0.5, 0.25, 2.0 if window else None)
    reference.write_kv(k, v, kv, batch, spec)
    expected = reference.prefill_attention(q, k, v, kv, batch, spec)
    lengths = HostLengths(*map(list, zip(*MIXED, strict=True))) if has_host_lengths else None
    on_device = move(replace(batch, host_lengths=lengths), device)
    out = prefill_attention(q.to(device), k.to(device), v.to(device), move_cache(kv, device), on_device, spec)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-4)


def test_contiguous_prompts_use_only_host_lengths(device: torch.device) -> None:
    """Device lengths are wrong, so reading them would fail."""
    batch, kv, (q, k, v) = make_given_case([(5, 0), (3, 0)], FP32)
    expected = reference.prefill_attention(q, k, v, kv, batch, AttentionSpec(0.3))
    wrong = torch.full((2,), 10**6)
    batch = PagedBatch(batch.block_tables, wrong, wrong, wrong, host_lengths=HostLengths([5, 3], [0, 0]))
    q, k, v = q.to(device), k.to(device), v.to(device)
    out = prefill_attention(q, k, v, move_cache(kv, device), move(batch, device), AttentionSpec(0.3))
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-4)


# --- on a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype", "cache_dtype", "window", "soft_cap"),
    [
        ((32, 8, 128), BF16, BF16, None, None),
        ((32, 8, 128), BF16, FP8, 300, None),
        ((16, 4, 128), FP16, FP16, 100, 3.0),
        ((8, 8, 64), FP16, FP16, None, 3.0),
        ((12, 2, 96), BF16, BF16, None, None),
        ((8, 1, 256), BF16, BF16, 300, 3.0),
        ((8, 2, 256), FP16, FP8, None, None),
        ((14, 2, 80), FP16, FP8, 100, None),
        ((71, 1, 64), BF16, BF16, 100, None),
        ((4, 1, 128), FP32, FP32, None, 3.0),
        ((4, 2, 256), FP32, FP8, 100, None),
    ],
)
def test_prefill_with_real_model_shapes_matches_reference(
    heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    device = torch.device("cuda")
    case = Case([(700, 0), (1, 600), (130, 333), (64, 64), (2, 1000), (129, 0)], heads, dtype, cache_dtype, 16)
    spec = AttentionSpec(heads[2] ** -0.5, window, 0.1, 0.2, soft_cap)
    case.check(spec, device)
    check_chunks(case, 0, [0, 5, 64, 66, 200, 333, 640, 700], spec, device)  # one token would use the decode kernel
    check_chunks(case, 2, [0, 130], spec, device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype", "cache_dtype"),
    [((32, 32, 128), BF16, BF16), ((16, 16, 64), FP16, FP16), ((12, 12, 112), BF16, BF16), ((8, 8, 80), BF16, FP8)],
)
def test_prefill_with_real_model_shapes_and_alibi_matches_reference(
    heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads[0]) for head in range(heads[0])], device=device)
    case = Case([(700, 0), (1, 600), (130, 333), (2, 1000)], heads, dtype, cache_dtype, 16)
    spec = AttentionSpec(heads[2] ** -0.5, None, 0.1, 0.2, slopes=slopes)
    case.check(spec, device)
    check_chunks(case, 0, [0, 5, 64, 66, 200, 640, 700], spec, device)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256, 320, 512])
@pytest.mark.parametrize(("per_processor", "per_program"), [(228, 227), (164, 163), (100, 99)])
def test_prefill_tiles_fit_in_shared_memory(
    per_processor: int, per_program: int, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory in KiB: Hopper, A100, and smaller GPUs. Keys and values are stored per stage, queries once."""
    properties = SimpleNamespace(shared_memory_per_multiprocessor=per_processor << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)  # noqa: ARG005
    q, cache = (torch.empty(4, 2, head_dim, dtype=dtype, device="meta") for _ in range(2))
    tiling = choose_tile_shape(q, cache)
    width = 2 ** (head_dim - 1).bit_length() * dtype.itemsize
    assert (tiling.rows + 2 * tiling.num_stages * tiling.keys) * width <= per_program << 10
    assert min(tiling.rows, tiling.keys) >= 16  # smallest dimension of `tl.dot`
    assert tiling.rows % 8 == 0
