"""Hopper decode attention against float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lorax_server.kernels import AttentionSpec, CosSin, HostLengths, LayerCache, PagedBatch, reference

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
pytest.importorskip("triton", reason="needs Triton")
from lorax_server.kernels.hopper.decode_attention import HEAD_DIMS
from lorax_server.kernels.hopper.ops import HopperOps

pytestmark = pytest.mark.gpu

FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, FP16: 1e-3}
DEVICE = torch.device("cuda", 0)
LENGTHS = [1, 2, 17, 64, 255, 256, 257, 300, 0, 1000, 513, 3, 4097]


@pytest.fixture(scope="module")
def ops() -> HopperOps:
    return HopperOps(DEVICE)


@dataclass
class Paged:
    """Sequences (lengths include the new token) in a NaN-filled paged cache."""

    lengths: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype | None = None
    block_size: int = 16
    rotated: int | None = None  # rotated dimensions; None: all, 0: none
    width: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE)

        counts = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = sum(counts) + 3
        places = torch.randperm(num_blocks, generator=generator, device=DEVICE).tolist()
        tables = torch.zeros(len(counts), max(self.width, *counts, 1), dtype=torch.int32)
        keys, values = (torch.full((num_blocks, self.kv_heads, self.block_size, self.head_dim), math.nan) for _ in "kv")
        keys, values = keys.to(DEVICE, self.dtype), values.to(DEVICE, self.dtype)
        slots = []
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            blocks = [places.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            at = torch.tensor(blocks, dtype=torch.int64, device=DEVICE).repeat_interleave(self.block_size)[
                : length - 1 if length else 0
            ]
            offsets = torch.arange(len(at), device=DEVICE) % self.block_size
            for cache in (keys, values):
                cache[at, :, offsets] = normal(len(at), self.kv_heads, self.head_dim).to(self.dtype)
            slots.append(blocks[-1] * self.block_size + (length - 1) % self.block_size if length else -1)
        self.cache: LayerCache = (keys.to(self.cache_dtype or self.dtype), values.to(self.cache_dtype or self.dtype))
        new = torch.tensor([min(length, 1) for length in self.lengths], device=DEVICE)
        cached = torch.tensor([max(length - 1, 0) for length in self.lengths], device=DEVICE)
        self.batch = PagedBatch(tables.to(DEVICE), new, cached, torch.tensor(slots, device=DEVICE))
        self.qkv = normal(len(self.lengths), self.heads + 2 * self.kv_heads, self.head_dim).to(self.dtype)
        half = (self.head_dim if self.rotated is None else self.rotated) // 2
        turns = normal(len(self.lengths), half) * 3
        self.angles: CosSin | None = (turns.cos(), turns.sin()) if half else None

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv.clone().split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def expect(self, spec: AttentionSpec) -> tuple[torch.Tensor, LayerCache]:
        """Return the expected output and cache, computed sequence by sequence in float32."""
        q, k, v = self.split()
        if self.angles is not None:
            reference.rotary(q, *self.angles)
            reference.rotary(k, *self.angles)
        cache = self.cache[0].clone(), self.cache[1].clone()
        rows = [row for row, length in enumerate(self.lengths) if length]
        batch = self.batch
        own = PagedBatch(
            batch.block_tables[rows], batch.input_lengths[rows], batch.cache_lengths[rows], batch.slots[rows]
        )
        _write_kv(k[rows], v[rows], cache, own, spec)
        scales = (spec.k_scale, spec.v_scale) if self.cache_dtype == FP8 else (1.0, 1.0)
        out = torch.zeros_like(q, dtype=torch.float32)
        for row, length in enumerate(self.lengths):
            if length:
                blocks = self.batch.block_tables[row, : -(-length // self.block_size)].long()
                first = 0 if spec.window is None else max(0, length - spec.window)
                k_row, v_row = (
                    (part.float()[blocks].transpose(0, 1).flatten(1, 2) * scale)[:, first:length]
                    for part, scale in zip(cache, scales, strict=True)
                )
                scores = q[row].float().view(self.kv_heads, -1, self.head_dim) @ k_row.mT * spec.scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
                if spec.slopes is not None:
                    distances = torch.arange(first + 1 - length, 1, device=DEVICE)
                    scores = scores + spec.slopes.view(self.kv_heads, -1, 1) * distances
                out[row] = (scores.softmax(-1) @ v_row).view(self.heads, self.head_dim)
        return out, cache

    def run(self, ops: HopperOps, spec: AttentionSpec) -> tuple[torch.Tensor, LayerCache]:
        cache = self.cache[0].clone(), self.cache[1].clone()
        return ops.attend(*self.split(), self.angles, cache, replace(self.batch, derived={}), spec), cache


def _write_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> None:
    """Store like the reference on a CPU. On a GPU, torch multiplies by the inverse scale."""
    host = cache[0].cpu(), cache[1].cpu()
    columns = (x.cpu() for x in (batch.block_tables, batch.input_lengths, batch.cache_lengths, batch.slots))
    tables, new, cached, slots = columns
    reference.write_kv(k.cpu(), v.cpu(), host, PagedBatch(tables, new, cached, slots), spec)
    for part, stored in zip(cache, host, strict=True):
        part.copy_(stored)


def check(ops: HopperOps, paged: Paged, spec: AttentionSpec) -> None:
    q, k, v = paged.split()
    assert ops._decode.supports(q, k, v, paged.cache, paged.batch)
    check_result(ops, paged, spec)


def check_result(ops: HopperOps, paged: Paged, spec: AttentionSpec) -> None:
    actual, cache = paged.run(ops, spec)
    expected, expected_cache = paged.expect(spec)
    assert actual.dtype == paged.dtype
    assert not actual[[row for row, length in enumerate(paged.lengths) if not length]].any()
    wrong = (
        (actual.float() - expected).abs() > TOLERANCE[paged.dtype] * max(1.0, float(expected.abs().max()))
    ) | actual.isnan()
    assert not wrong.any(), describe_difference(wrong, actual, expected)
    for part, expected_part in zip(cache, expected_cache, strict=True):
        # The reference clears new blocks; the kernel does not.
        written = expected_part.float().isfinite() & (expected_part.float() != 0)
        bits, expected_bits = (x.view(torch.uint8).view(*x.shape, -1) for x in (part, expected_part))
        assert torch.equal(bits[written], expected_bits[written])
        assert part.float().isnan()[~expected_part.float().isfinite()].all(), "where no token lies, nothing is written"


def describe_difference(wrong: torch.Tensor, found: torch.Tensor, expected: torch.Tensor) -> str:
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    rows, heads, dims = (sorted(set(column.tolist()))[:20] for column in places.unbind(1))
    example = f"at {first} {found[first]} for {expected[first]}"
    return f"{len(places)} of {wrong.numel()}: rows {rows} heads {heads} dims {dims}; {example}"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (28, 4), (16, 2), (12, 1)], ids=str)
def test_decode_step_matches_reference(ops: HopperOps, heads: tuple[int, int], head_dim: int) -> None:
    for dtype, window, cap in ((BF16, None, None), (FP16, 100, 5.0), (BF16, 300, 20.0)):
        paged = Paged(LENGTHS, *heads, head_dim, dtype)
        check(ops, paged, AttentionSpec(head_dim**-0.5, window, soft_cap=cap))


@pytest.mark.parametrize("heads", [(71, 1, 64), (48, 1, 128), (12, 12, 112), (4, 2, 72)], ids=str)
def test_unsupported_head_shapes_use_triton(ops: HopperOps, heads: tuple[int, int, int]) -> None:
    """Falcon-7B and StarCoder have too many query heads per KV head; other head sizes have no kernel."""
    for window, cap in ((None, None), (100, 5.0)):
        paged = Paged(LENGTHS, *heads)
        assert not ops._decode.supports(*paged.split(), paged.cache, paged.batch)
        check_result(ops, paged, AttentionSpec(heads[2] ** -0.5, window, soft_cap=cap))


@pytest.mark.parametrize("heads", [(32, 32, 128), (16, 16, 64), (8, 8, 80), (4, 4, 256)], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_alibi_slopes_use_triton(ops: HopperOps, cache_dtype: torch.dtype | None, heads: tuple[int, int, int]) -> None:
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads[0]) for head in range(heads[0])], device=DEVICE)
    for dtype in (BF16, FP16):
        paged = Paged(LENGTHS, *heads, dtype, cache_dtype, rotated=0)
        spec = AttentionSpec(heads[2] ** -0.5, k_scale=0.5, v_scale=0.3, slopes=slopes)
        check_result(ops, paged, spec)
        flat = paged.run(ops, replace(spec, slopes=None))[0]
        assert not torch.allclose(flat.float(), paged.expect(spec)[0], atol=0.1)  # slopes change the result


@pytest.mark.parametrize(("head_dim", "rotated"), [(80, 20), (80, 32), (256, 64), (64, 16), (128, 64), (96, 96)])
def test_decode_with_partial_rotary_matches_reference(ops: HopperOps, head_dim: int, rotated: int) -> None:
    check(ops, Paged(LENGTHS, 8, 4, head_dim, rotated=rotated), AttentionSpec(head_dim**-0.5))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [(32, 8), (4, 4), (24, 2)], ids=str)
def test_decode_with_float8_cache_matches_reference(ops: HopperOps, heads: tuple[int, int], head_dim: int) -> None:
    for dtype, window in ((BF16, None), (FP16, 200)):
        paged = Paged(LENGTHS, *heads, head_dim, dtype, FP8)
        check(ops, paged, AttentionSpec(head_dim**-0.5, window, 0.5, 0.3))


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 256])
@pytest.mark.parametrize("rotated", [0, 32, None])
def test_any_block_size_with_partial_rotary_matches_reference(
    ops: HopperOps, block_size: int, rotated: int | None
) -> None:
    check(ops, Paged(LENGTHS, block_size=block_size, rotated=rotated), AttentionSpec(0.1))


def test_decode_with_interleaved_qkv_heads_matches_reference(ops: HopperOps) -> None:
    """Query, key and value are interleaved per head, as in GPT-NeoX."""
    paged = Paged(LENGTHS, 8, 8, 64, rotated=16)
    spec = AttentionSpec(0.125)
    expected, _ = paged.run(ops, spec)
    q, k, v = torch.stack(paged.split(), dim=2).unbind(2)
    assert q.stride(1) == 3 * 64
    cache = paged.cache[0].clone(), paged.cache[1].clone()
    assert torch.equal(ops.attend(q, k, v, paged.angles, cache, replace(paged.batch, derived={}), spec), expected)


@pytest.mark.parametrize("lengths", [[32768], [32768, 5, 20000], [8192] * 3 + [8193, 8194], [1] * 300])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_long_contexts_and_large_batches_match_reference(
    ops: HopperOps, lengths: list[int], cache_dtype: torch.dtype | None
) -> None:
    check(ops, Paged(lengths, cache_dtype=cache_dtype), AttentionSpec(128**-0.5))


@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_decode_bits_are_batch_invariant(ops: HopperOps, cache_dtype: torch.dtype | None) -> None:
    """A row gives equal bits alone, in a batch, and with a wide block table."""
    many = Paged([40, 600, 9, 3000, *range(100, 3000, 40)], cache_dtype=cache_dtype)
    spec = AttentionSpec(0.1)
    together = many.run(ops, spec)[0]
    for row in (0, 1, 3, 20):
        for width in (many.batch.block_tables.shape[1], -(-many.lengths[row] // 16)):
            one = slice(row, row + 1)
            batch = PagedBatch(
                many.batch.block_tables[one, :width],
                many.batch.input_lengths[one],
                many.batch.cache_lengths[one],
                many.batch.slots[one],
            )
            q, k, v = (part[one] for part in many.split())
            assert many.angles is not None
            angles = many.angles[0][one], many.angles[1][one]
            alone = ops.attend(q, k, v, angles, (many.cache[0].clone(), many.cache[1].clone()), batch, spec)
            assert torch.equal(alone[0], together[row])


def test_graph_can_be_replayed_with_different_lengths(ops: HopperOps) -> None:
    """Replay a graph with several layers for other lengths, blocks and padding."""
    batches = [Paged([(37 * row + 411 * step) % 2000 for row in range(70)], width=130, seed=step) for step in range(3)]
    spec, held = AttentionSpec(0.1), batches[0]
    room = max(len(paged.cache[0]) for paged in batches)
    caches: list[Any] = [
        tuple(torch.zeros(room, *part.shape[1:], dtype=part.dtype, device=DEVICE) for part in held.cache)
        for _ in range(3)
    ]
    assert held.angles is not None
    qkv, angles = held.qkv.clone(), (held.angles[0].clone(), held.angles[1].clone())
    columns = held.batch.block_tables, held.batch.input_lengths, held.batch.cache_lengths, held.batch.slots

    def forward() -> list[torch.Tensor]:
        batch = PagedBatch(*columns)
        q, k, v = qkv.split([32, 8, 8], dim=1)
        return [ops.attend(q, k, v, angles, cache, batch, spec) for cache in caches]

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    for paged in (*batches[1:], batches[1]):
        fresh = paged.batch.block_tables, paged.batch.input_lengths, paged.batch.cache_lengths, paged.batch.slots
        for static, other in zip((*columns, qkv, *angles), (*fresh, paged.qkv, *(paged.angles or ())), strict=True):
            static.copy_(other)
        for cache in caches:
            for part, other in zip(cache, paged.cache, strict=True):
                part[: len(other)] = other
        graph.replay()
        expected = paged.run(ops, spec)[0]
        for actual in captured:
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_single_tokens_in_mixed_step_match_decode_bits(
    ops: HopperOps, head_dim: int, cache_dtype: torch.dtype | None
) -> None:
    """Run a step with prompts and single tokens, with one or more KV splits."""
    paged = Paged([300, 4001, 1, 329, 700, 2], head_dim=head_dim, cache_dtype=cache_dtype)
    new = [300, 1, 1, 129, 1, 1]
    spec = AttentionSpec(head_dim**-0.5, k_scale=0.5, v_scale=0.3)
    starts = torch.tensor([0, *new]).cumsum(0)
    generator = torch.Generator(DEVICE).manual_seed(1)
    qkv = torch.randn(int(starts[-1]), 48, head_dim, generator=generator, device=DEVICE).to(BF16)
    turns = torch.randn(len(qkv), head_dim // 2, generator=generator, device=DEVICE)
    lengths = HostLengths(new, [length - count for length, count in zip(paged.lengths, new, strict=True)])
    slots = [
        int(paged.batch.block_tables[row, position // 16]) * 16 + position % 16
        for row, (length, count) in enumerate(zip(paged.lengths, new, strict=True))
        for position in range(length - count, length)
    ]
    mixed = PagedBatch(
        paged.batch.block_tables,
        torch.tensor(lengths.inputs, device=DEVICE),
        torch.tensor(lengths.cached, device=DEVICE),
        torch.tensor(slots, device=DEVICE),
        cu_seqlens=starts.int().to(DEVICE),
        host_lengths=lengths,
        stores_all=True,
    )
    caches = [(paged.cache[0].clone(), paged.cache[1].clone()) for _ in range(2)]
    q, k, v = qkv.clone().split([32, 8, 8], dim=1)
    out = ops.attend(q, k, v, (turns.cos(), turns.sin()), caches[0], mixed, spec)
    assert out.isfinite().all()

    rows = [row for row, count in enumerate(new) if count == 1]
    at = starts[rows].to(DEVICE)
    alone = PagedBatch(mixed.block_tables[rows], mixed.input_lengths[rows], mixed.cache_lengths[rows], mixed.slots[at])
    q, k, v = qkv[at].split([32, 8, 8], dim=1)
    decoded = ops.attend(q, k, v, (turns[at].cos(), turns[at].sin()), caches[1], alone, spec)
    assert torch.equal(out[at], decoded)


def test_nan_row_does_not_affect_other_rows(ops: HopperOps) -> None:
    paged = Paged([50, 700, 90])
    paged.qkv[1] = math.nan
    result, _ = paged.run(ops, AttentionSpec(0.1))
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()
