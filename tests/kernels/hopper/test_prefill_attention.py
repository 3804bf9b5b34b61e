"""Hopper prefill attention against float32. Requires a Hopper GPU."""

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from lorax_server.kernels.ops import AttentionSpec, HostLengths, LayerCache, PagedBatch

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
from cuda.core import Program, ProgramOptions

from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.prefill_attention import (
    HEAD_DIMS,
    PrefillAttention,
    PrefillVariant,
    choose_packed_heads,
    list_prefill_tiles,
)

gpu = pytest.mark.gpu

Shapes = Sequence[tuple[int, int]]  # new and cached tokens per sequence

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, FP16: 1e-3}
MIXED = [(37, 0), (1, 50), (300, 0), (129, 200), (2, 1000), (1, 0), (64, 63), (513, 128)]
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Prompts:
    """Queries, and sequences in random blocks of a NaN-filled cache."""

    batch: PagedBatch
    cache: LayerCache
    q: torch.Tensor
    shapes: Shapes
    tokens: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values per sequence, [tokens, kv_heads, head_dim]


def make_cache(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), math.nan, dtype=dtype, device="cuda")


def make_prompts(
    shapes: Shapes,
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    seed: int = 0,
) -> Prompts:
    """Make sequences. Equal seeds give equal tokens for any split into cached and new tokens."""
    counts = [-(-(new + cached) // block_size) for new, cached in shapes]
    places = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int()
    tables = torch.full((len(shapes), max(counts) + 2), 10**9, dtype=torch.int32)  # no block past the end
    keys, values = (make_cache((len(places), heads[1], block_size, head_dim), dtype) for _ in range(2))
    queries, tokens = [], []
    for row, (new, cached) in enumerate(shapes):
        tables[row, : counts[row]], places = places[: counts[row]], places[counts[row] :]
        random = torch.Generator(device="cuda").manual_seed(seed * 1000 + row)
        total, width = new + cached, heads[0] + 2 * heads[1]
        qkv = torch.randn(total, width, head_dim, generator=random, device="cuda").to(dtype)
        k, v = qkv[:, heads[0] :].chunk(2, dim=1)
        positions = torch.arange(total)
        blocks, offsets = tables[row, positions // block_size].long().cuda(), (positions % block_size).cuda()
        keys[blocks, :, offsets], values[blocks, :, offsets] = k, v
        queries.append(qkv[cached:])
        tokens.append((k, v))
    fused = torch.cat(queries)
    lengths = HostLengths(*([shape[i] for shape in shapes] for i in range(2)))
    new_lengths, cached_lengths = (torch.tensor(column, device="cuda") for column in lengths)
    batch = PagedBatch(tables.cuda(), new_lengths, cached_lengths, torch.empty(0), host_lengths=lengths)
    return Prompts(batch, (keys, values), fused[:, : heads[0]], shapes, tokens)


def attend(prefill: PrefillAttention, prompts: Prompts, spec: AttentionSpec) -> torch.Tensor:
    out = torch.full(prompts.q.shape, UNTOUCHED, dtype=prompts.q.dtype, device="cuda")
    assert prefill.supports(prompts.q, prompts.cache, spec)
    prefill(out, prompts.q, prompts.cache, prompts.batch, spec)
    return out


def expected_rows(prompts: Prompts, spec: AttentionSpec) -> list[torch.Tensor]:
    """Return the expected output of each sequence in float32."""
    results = []
    bounds = itertools.pairwise(itertools.accumulate((new for new, _ in prompts.shapes), initial=0))
    for (start, end), (k, v), (new, cached) in zip(bounds, prompts.tokens, prompts.shapes, strict=True):
        at, keys = torch.arange(cached, cached + new, device="cuda")[:, None], torch.arange(len(k), device="cuda")
        hidden = (keys > at) | (keys <= at - (spec.window or len(k) + 1))
        group = prompts.q.shape[1] // k.shape[1]
        heads = []
        for head in range(prompts.q.shape[1]):
            scores = prompts.q[start:end, head].float() @ k[:, head // group].float().T * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            weights = scores.masked_fill(hidden, -math.inf).softmax(1)
            heads.append(weights @ v[:, head // group].float())
        results.append(torch.stack(heads, dim=1))
    return results


def check(prompts: Prompts, got: torch.Tensor, spec: AttentionSpec) -> None:
    """Compare all rows, and check that rows of single-token sequences are unchanged."""
    parts = got.split([new for new, _ in prompts.shapes])
    for part, expected, (new, _) in zip(parts, expected_rows(prompts, spec), prompts.shapes, strict=True):
        if new == 1:
            assert (part == UNTOUCHED).all()
        else:
            error = (part.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert error.max() < TOLERANCE[got.dtype]  # NaN fails


@pytest.fixture(scope="module")
def prefill() -> PrefillAttention:
    return PrefillAttention(Kernels(torch.device("cuda", 0)))


@gpu
@pytest.mark.parametrize("window", [None, 1, 50, 200])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_odd_prompt_lengths_match_reference(
    prefill: PrefillAttention,
    head_dim: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    soft_cap: float | None,
    window: int | None,
) -> None:
    prompts = make_prompts(MIXED, heads=heads, head_dim=head_dim, dtype=dtype)
    spec = AttentionSpec(2 * head_dim**-0.5, window, soft_cap=soft_cap)
    check(prompts, attend(prefill, prompts, spec), spec)


@gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128, 256])
def test_prefill_with_any_block_size_matches_reference(
    prefill: PrefillAttention, block_size: int, head_dim: int
) -> None:
    prompts = make_prompts(MIXED, head_dim=head_dim, block_size=block_size, seed=block_size)
    spec = AttentionSpec(head_dim**-0.5)
    check(prompts, attend(prefill, prompts, spec), spec)


@gpu
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("shapes", [[(8329, 0)], [(2048, 8000), (3000, 0), (700, 4001)]])
def test_long_prompts_match_reference(prefill: PrefillAttention, shapes: Shapes, window: int | None) -> None:
    prompts = make_prompts(shapes, heads=(4, 1))
    spec = AttentionSpec(128**-0.5, window)
    check(prompts, attend(prefill, prompts, spec), spec)


@gpu
def test_prefill_with_large_scores_matches_reference(prefill: PrefillAttention) -> None:
    """Scores far from zero: softmax depends only on differences."""
    for factor in (30.0, 1e-3):
        prompts = make_prompts([(700, 0), (200, 300)], dtype=FP16)
        spec = AttentionSpec(factor * 128**-0.5)
        check(prompts, attend(prefill, prompts, spec), spec)


@gpu
def test_lengths_are_read_from_device_without_host_lengths(prefill: PrefillAttention) -> None:
    prompts, spec = make_prompts(MIXED), AttentionSpec(128**-0.5)
    unknown = replace(prompts, batch=replace(prompts.batch, host_lengths=None, derived={}))
    assert torch.equal(attend(prefill, prompts, spec), attend(prefill, unknown, spec))


@gpu
@pytest.mark.parametrize("window", [None, 130, 700])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_bits_are_independent_of_chunks(prefill: PrefillAttention, head_dim: int, window: int | None) -> None:
    """Prefilling a prompt at once or in chunks with any boundaries gives equal bits."""
    total, spec = 1500, AttentionSpec(head_dim**-0.5, window)
    whole = attend(prefill, make_prompts([(total, 0)], head_dim=head_dim), spec)
    for cached in (1, 17, 128, 640, 1000, 1377, total - 2):
        piece = attend(prefill, make_prompts([(total - cached, cached)], head_dim=head_dim), spec)
        assert torch.equal(piece, whole[cached:])
    for end in (2, 128, 129, 1000):
        first = attend(prefill, truncate(make_prompts([(total, 0)], head_dim=head_dim), end), spec)
        assert torch.equal(first, whole[:end])


def truncate(prompts: Prompts, end: int) -> Prompts:
    """Return the sequence without the tokens from `end` on."""
    lengths = HostLengths([end], [0])
    batch = replace(prompts.batch, host_lengths=lengths, derived={})
    block_size = prompts.cache[0].shape[2]
    for cache in prompts.cache:
        last = int(batch.block_tables[0, end // block_size])
        cache[last, :, end % block_size :] = math.nan
    return replace(prompts, batch=batch, q=prompts.q[:end], shapes=[(end, 0)])


@gpu
@pytest.mark.parametrize(
    "shapes", [[(400, 77)], [(400, 77), (513, 0), (1, 9), (90, 3000)], [(400, 77)] + [(9, 9)] * 300]
)
def test_prefill_bits_are_batch_invariant(prefill: PrefillAttention, shapes: Shapes) -> None:
    spec = AttentionSpec(128**-0.5)
    alone = attend(prefill, make_prompts([(400, 77)]), spec)
    among = make_prompts(shapes)
    among.q[400:] = math.nan
    assert torch.equal(attend(prefill, among, spec)[:400], alone)


@gpu
def test_consecutive_launches_give_equal_bits(prefill: PrefillAttention) -> None:
    """Early launches overlap: each launch reads the output of the previous launch."""
    prompts, spec = make_prompts([(900, 100), (350, 0)], heads=(8, 8)), AttentionSpec(128**-0.5)

    def run(wait: bool) -> torch.Tensor:
        q = prompts.q
        for _ in range(12):
            out = torch.empty(q.shape, dtype=q.dtype, device="cuda")
            prefill(out, q, prompts.cache, prompts.batch, spec)
            q = out
            if wait:
                torch.cuda.synchronize()
        return q

    expected = run(wait=True)
    for _ in range(20):
        assert torch.equal(run(wait=False), expected)


def test_tiles_cover_tokens_once_longest_first() -> None:
    tiles = list_prefill_tiles([40, 1, 2, 0, 65], [0, 10, 5, 0, 100], 32)
    assert tiles.tolist() == [
        [4, 107, 164, 1],
        [4, 75, 132, 33],
        [4, 43, 100, 65],
        [0, 32, 32, 8],
        [2, 41, 5, 2],
        [0, 0, 0, 40],
    ]
    assert list_prefill_tiles([1, 1], [0, 3], 32).shape == (0, 4)


def test_head_packing_leaves_few_idle_rows() -> None:
    assert [choose_packed_heads(group, 128) for group in (1, 2, 4, 8, 16, 7, 6, 12, 71, 256)] == [
        1,
        2,
        4,
        8,
        16,
        7,
        6,
        12,
        1,
        128,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("soft_cap", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_kernel_has_no_spills(head_dim: int, soft_cap: bool) -> None:
    """ptxas reports register spills and serialized WGMMA instructions."""
    log = io.StringIO()
    options = ProgramOptions(std="c++17", arch="sm_90a", ptxas_options=["-v"])
    compiled = Program(PrefillVariant(BF16, head_dim, soft_cap).source, "c++", options).compile("cubin", logs=log)
    assert bytes(compiled.code)[:4] == b"\x7fELF"
    assert " 0 bytes spill stores" in log.getvalue()
    assert "serialized" not in log.getvalue()
