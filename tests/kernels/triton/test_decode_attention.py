"""Triton decode attention against the reference and a float64 implementation on a CPU."""

from dataclasses import replace

import pytest
import torch

from lorax_server.kernels import AttentionSpec, LayerCache, PagedBatch, reference
from lorax_server.kernels.triton import decode_attention as decode_attention_module
from lorax_server.kernels.triton import kv_cache
from lorax_server.kernels.triton.decode_attention import decode_attention
from tests.kernels.triton.cases import BF16, DTYPES, FP16, FP32, choose_cases, pairwise_cases
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

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SPEC = AttentionSpec(0.3)
HEADS = [(3, 3, 20), (20, 1, 16), *(pytest.param(heads, marks=pytest.mark.slow) for heads in [(6, 2, 8), (4, 1, 40)])]
MODEL_HEADS = [(32, 8, 128), (8, 8, 64), (12, 2, 96), (8, 1, 256), (14, 2, 80), (32, 8, 128)]
LENGTHS = [5, 1, 70, 33, 64]


def check_decode(
    device: torch.device,
    lengths: list[int],
    *,
    heads: tuple[int, int, int] = (4, 2, 16),
    block_size: int = 8,
    spec: AttentionSpec = SPEC,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    width: int = 0,
) -> torch.Tensor:
    """Compare with float64. Unused cache slots are NaN."""
    num_heads, num_kv_heads, head_dim = heads
    batch, num_blocks = make_batch(
        [(1, length - 1) if length else (0, 0) for length in lengths], block_size, width=width
    )
    kv = fill_cache(
        batch, (num_blocks, num_kv_heads, block_size, head_dim), cache_dtype or dtype, stale=STALE_VALUE, seed=1
    )
    fused = normal(len(lengths), num_heads + 2 * num_kv_heads, head_dim, seed=2, dtype=dtype)
    out = decode_attention(fused.to(device)[:, :num_heads], move_cache(kv, device), move(batch, device), spec).cpu()
    assert out.dtype == dtype
    rows = [row for row, length in enumerate(lengths) if length]
    assert not out[[row for row, length in enumerate(lengths) if not length]].any()
    if not rows:
        return out
    expected = attend_in_float64(fused[rows, :num_heads], kv, select_sequences(batch, rows), spec)
    torch.testing.assert_close(out[rows].double(), expected, rtol=0, atol=TOLERANCE[dtype])
    return out


def select_sequences(batch: PagedBatch, rows: list[int]) -> PagedBatch:
    """Return a batch with the given sequences, without derived values."""
    return PagedBatch(batch.block_tables[rows], batch.input_lengths[rows], batch.cache_lengths[rows], batch.slots)


@pytest.mark.parametrize(
    ("dtype", "window"),
    choose_cases([(BF16, 20), (FP32, None), (FP16, 1)], pairwise_cases(DTYPES, [None, 1, 20]), fast=1),
    ids=str,
)
def test_decode_matches_float64(dtype: torch.dtype, window: int | None, device: torch.device) -> None:
    check_decode(device, LENGTHS, dtype=dtype, spec=AttentionSpec(0.3, window))


@pytest.mark.parametrize("heads", HEADS)
def test_decode_with_odd_head_shapes_matches_reference(heads: tuple[int, int, int], device: torch.device) -> None:
    check_decode(device, [7, 40], heads=heads)


@pytest.mark.parametrize("block_size", choose_cases([24, 1, 16, 256], [24, 1, 16, 256], fast=1))
def test_decode_with_any_block_size_matches_reference(block_size: int, device: torch.device) -> None:
    check_decode(device, [7, 40, 24], block_size=block_size)


@pytest.mark.parametrize("dtype", choose_cases([BF16, FP16], DTYPES, fast=1))
def test_decode_with_float8_cache_matches_reference(dtype: torch.dtype, device: torch.device) -> None:
    check_decode(device, [7, 40], dtype=dtype, cache_dtype=FP8, spec=AttentionSpec(0.3, None, 0.5, 0.3))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_large_queries_with_float8_cache_do_not_overflow(size: float, device: torch.device) -> None:
    """The queries exceed the float16 range, in which products are computed."""
    batch, num_blocks = make_batch([(1, 8), (1, 20)], 8)
    kv = fill_cache(batch, (num_blocks, 2, 8, 16), FP8, stale=STALE_VALUE, seed=1)
    q, spec = normal(2, 4, 16, seed=3).mul(size).to(BF16), AttentionSpec(0.3 / size)
    expected = attend_in_float64(q, kv, batch, spec)
    out = decode_attention(q.to(device), move_cache(kv, device), move(batch, device), spec)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[BF16])


@pytest.mark.parametrize("lengths", [[0], [0, 9, 0], pytest.param([3, 50, *[0] * 28], marks=pytest.mark.slow)])
def test_padding_rows_are_zero(lengths: list[int], device: torch.device) -> None:
    check_decode(device, lengths, width=100)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, 2.0), pytest.param(20, 0.5, marks=pytest.mark.slow)])
def test_decode_with_soft_cap_matches_reference(window: int | None, soft_cap: float, device: torch.device) -> None:
    spec = AttentionSpec(0.9, window, 0.5, 0.3, soft_cap)
    check_decode(device, [7, 40], spec=spec)
    check_decode(device, [7, 40], spec=spec, cache_dtype=FP8)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), pytest.param(20, 2.0, marks=pytest.mark.slow)])
def test_decode_with_alibi_slopes_matches_reference(
    window: int | None, soft_cap: float | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention_module, "SPLIT_TOKENS", 16)
    slopes = torch.tensor([0.5, 0.02, -0.1, 0.0], device=device)
    spec = AttentionSpec(0.9, window, 0.5, 0.3, soft_cap, slopes)
    check_decode(device, [7, 40], heads=(4, 2, 16), spec=spec)
    check_decode(device, [7, 40], heads=(4, 2, 16), spec=spec, cache_dtype=FP8)


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=pytest.mark.slow)])
def test_decode_with_sinks_matches_reference(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention_module, "SPLIT_TOKENS", 16)
    spec = AttentionSpec(0.9, window, sinks=torch.tensor([0.5, -9.0, 3.0, 0.0], device=device))
    check_decode(device, [7, 40, 0], heads=(4, 2, 16), spec=spec)


@pytest.mark.parametrize("window", [None, pytest.param(7, marks=pytest.mark.slow)])
def test_split_size_grows_with_sequence_length(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths near split boundaries, with at most four splits."""
    monkeypatch.setattr(decode_attention_module, "SPLIT_TOKENS", 4)
    monkeypatch.setattr(decode_attention_module, "MAX_SPLITS", 4)
    check_decode(
        device, [4, 5, 0, 16, 17, 1, 32, 33, 40, 8], heads=(2, 1, 16), spec=AttentionSpec(0.3, window), width=9
    )


@pytest.mark.slow
def test_decode_bits_are_batch_invariant(device: torch.device) -> None:
    lengths = (
        [40, 0, 9, 16, 1, 33] if device.type == "cpu" else [3000, 0, 9, 256, 1, 513, 9000, 8193, *range(1, 900, 14)]
    )
    batch, num_blocks = make_batch([(1, length - 1) if length else (0, 0) for length in lengths], 8, width=8)
    kv = move_cache(fill_cache(batch, (num_blocks, 2, 8, 16), torch.float32, stale=STALE_VALUE, seed=1), device)
    q, held = normal(len(lengths), 4, 16, seed=2).to(device), move(batch, device)
    together = decode_attention(q, kv, held, SPEC)
    for rows in ([0], [3, 0], [5, 4, 1, 0], *([[row] for row in range(6, len(lengths))])):
        assert torch.equal(decode_attention(q[rows], kv, select_sequences(held, rows), SPEC), together[rows])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_int32_and_int64_lengths_give_equal_results(dtype: torch.dtype, device: torch.device) -> None:
    batch, num_blocks = make_batch([(1, 8), (1, 20)], 8)
    kv = fill_cache(batch, (num_blocks, 2, 8, 16), torch.float32, stale=STALE_VALUE, seed=1)
    narrow = PagedBatch(batch.block_tables, batch.input_lengths.to(dtype), batch.cache_lengths.to(dtype), batch.slots)
    q = normal(2, 4, 16, seed=3)
    out = decode_attention(q.to(device), move_cache(kv, device), move(narrow, device), AttentionSpec(0.3))
    expected = reference.decode_attention(q, nan_to_zero(kv), batch, AttentionSpec(0.3))
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=2e-5)


# --- on a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype", "block_size"), list(zip(MODEL_HEADS, DTYPES * 2, [16, 32] * 3, strict=True))
)
def test_decode_with_real_model_shapes_matches_reference(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int
) -> None:
    device = torch.device("cuda")
    for lengths in (
        [20000 if heads[2] > 128 else 32768],
        [8193, 1, 8192, 256, 257],
        [1 + 97 * row % 700 for row in range(70)],
    ):
        for window in (None, 128):
            spec = AttentionSpec(heads[2] ** -0.5, window, soft_cap=None if window else 3.0)
            check_decode(device, lengths, heads=heads, block_size=block_size, dtype=dtype, spec=spec, width=200)
            fp8 = AttentionSpec(heads[2] ** -0.5, window, 0.1, 0.2)
            check_decode(device, lengths, heads=heads, block_size=block_size, dtype=dtype, spec=fp8, cache_dtype=FP8)


def decode_step(q: torch.Tensor, kv: LayerCache, batch: PagedBatch, new: torch.Tensor) -> torch.Tensor:
    """Store one token per sequence and compute attention, without derived values (as during capture)."""
    spec, batch = AttentionSpec(0.3), replace(batch, derived={})
    kv_cache.write_kv(new[:, :2], new[:, 2:], kv, batch, spec)
    return decode_attention(q, kv, batch, spec)


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [4, 1100])
def test_graph_can_be_replayed_with_different_lengths_and_blocks(num_seqs: int) -> None:
    device = torch.device("cuda")
    batches = [
        make_batch(
            [(1, (step * 370 + row * 11) % 900) if (row + step) % 3 else (0, 0) for row in range(num_seqs)],
            16,
            width=60,
            seed=step,
        )
        for step in range(3)
    ]
    num_blocks = max(count for _, count in batches)
    held, q, new = (
        move(batches[0][0], device),
        normal(num_seqs, 4, 32, seed=1).to(device),
        normal(num_seqs, 4, 32, seed=2).to(device),
    )
    kv = move_cache(
        fill_cache(batches[0][0], (num_blocks, 2, 16, 32), torch.float32, stale=STALE_VALUE, seed=3), device
    )
    decode_step(q, kv, held, new)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode_step(q, kv, held, new)
    for batch, _ in batches[1:]:
        for static, fresh in zip(
            (held.block_tables, held.input_lengths, held.cache_lengths, held.slots, *kv),
            (
                batch.block_tables,
                batch.input_lengths,
                batch.cache_lengths,
                batch.slots,
                *fill_cache(batch, kv[0].shape, torch.float32, stale=STALE_VALUE, seed=4),
            ),
            strict=True,
        ):
            static.copy_(fresh)
        captured.fill_(STALE_VALUE)
        graph.replay()
        result = captured.clone()
        assert result.isfinite().all()
        assert torch.equal(result, decode_step(q, kv, held, new))
        assert not result[held.input_lengths == 0].any()
        assert result[held.input_lengths > 0].any(-1).all()
