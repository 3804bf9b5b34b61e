"""Triton KV cache writes against the reference on a CPU."""

import math

import pytest
import torch

from lorax_server.kernels import AttentionSpec, PagedBatch, reference
from lorax_server.kernels.triton.kv_cache import rotate_and_write, write_kv
from lorax_server.kernels.triton.norm import rotary
from tests.kernels.triton.paging import FP8, check_bits, make_batch, move, move_cache, normal

SHAPES = [(5, 0), (1, 7), (3, 6), (0, 0), (1, 16), (9, 3)]
CASES = [
    (torch.float32, torch.float32, (3, 20)),
    (torch.float16, torch.float16, (1, 1)),
    (torch.bfloat16, torch.bfloat16, (2, 16)),
    (torch.float32, FP8, (2, 16)),
    (torch.float16, FP8, (3, 20)),
    (torch.bfloat16, FP8, (1, 1)),
]


def in_float8(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values that are exact in float8, because the interpreter rounds float8 differently."""
    return normal(*shape, seed=seed).mul(4).to(FP8).to(dtype)


def check_write(
    batch: PagedBatch,
    num_blocks: int,
    kv: torch.Tensor,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Write into NaN-filled caches and compare with the reference. Other slots must not change."""
    num_kv_heads, head_dim = heads
    spec = AttentionSpec(1.0, None, 0.5, 0.25)
    shape = (num_blocks, num_kv_heads, 8, head_dim)
    written = torch.zeros(num_blocks, 1, 8, 1, dtype=torch.bool)
    for slot in batch.slots[batch.slots >= 0].tolist():
        written[slot // 8, :, slot % 8] = True
    k, v = kv[:, 2 : 2 + num_kv_heads], kv[:, 2 + num_kv_heads :]
    expected, actual = (tuple(torch.full(shape, 7.0).to(dtype) for _ in range(2)) for _ in range(2))
    reference.write_kv(k, v, (expected[0], expected[1]), batch, spec)
    placed = move_cache((actual[0], actual[1]), device)
    on_device = kv.to(device)
    k, v = on_device[:, 2 : 2 + num_kv_heads], on_device[:, 2 + num_kv_heads :]
    write_kv(k, v, placed, move(batch, device), spec)
    for ours, theirs in zip(placed, expected, strict=True):
        check_bits(ours, torch.where(written, theirs.float(), 7.0).to(dtype))


@pytest.mark.parametrize(("dtype", "cache_dtype", "heads"), CASES)
def test_write_kv_matches_reference(
    dtype: torch.dtype, cache_dtype: torch.dtype, heads: tuple[int, int], device: torch.device
) -> None:
    batch, num_blocks = make_batch(SHAPES, 8)
    batch = PagedBatch(batch.block_tables, batch.input_lengths, batch.cache_lengths, batch.slots[batch.slots >= 0])
    kv = in_float8(len(batch.slots), 2 + 2 * heads[0], heads[1], seed=1, dtype=dtype)
    check_write(batch, num_blocks, kv, heads, cache_dtype, device)


@pytest.mark.parametrize("by", ["slots", "indices", "both"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_write_kv_skips_tokens_without_slot(by: str, index_dtype: torch.dtype, device: torch.device) -> None:
    whole, num_blocks = make_batch([(9, 3), (6, 0)], 8)
    kept = [0, 4, 5, 9, 14]
    named = kept if by == "indices" else list(range(15)) if by == "slots" else [0, 2, *kept[1:], 11]
    slots = torch.tensor([int(whole.slots[index]) if index in kept else -1 for index in named])
    stored = None if by == "slots" else torch.tensor(named)
    batch = PagedBatch(whole.block_tables, whole.input_lengths, whole.cache_lengths, slots, stored)
    kv = normal(15, 6, 16, seed=1)
    if index_dtype == torch.int32 and stored is not None:
        batch = PagedBatch(whole.block_tables, whole.input_lengths, whole.cache_lengths, slots, stored.int())
    check_write(batch, num_blocks, kv, (2, 16), torch.float32, device)


def test_write_kv_without_tokens_changes_nothing(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.long)
    batch = PagedBatch(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), torch.tensor([0]), none, none)
    check_write(batch, 1, normal(1, 6, 16, seed=1), (2, 16), torch.float32, device)


def write_four(values: list[float], scale: float, device: torch.device) -> list[float]:
    """Store a value head of size four in float8, and return the cached values."""
    new = torch.tensor(values, device=device).view(1, 1, 4)
    keys, stored = (torch.zeros(1, 1, 1, 4, dtype=FP8, device=device) for _ in range(2))
    one = torch.tensor([1], device=device)
    batch = PagedBatch(one[:, None].int(), one, one - 1, one - 1)
    write_kv(new, new, (keys, stored), batch, AttentionSpec(1.0, None, 1.0, scale))
    return stored.float().flatten().tolist()


def test_float8_saturates_large_values(device: torch.device) -> None:
    assert write_four([3.0, 1e6, -1e6, 0.25], 0.5, device) == [6.0, 448.0, -448.0, 0.5]
    assert write_four([1.0, 2.0, -320.0, 0.0], 4.0, device) == [0.25, 0.5, -80.0, 0.0]


# --- with RoPE


def check_rotation(
    batch: PagedBatch,
    num_blocks: int,
    heads: tuple[int, int, int],
    turning: int | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> None:
    """Compare with separate `rotary` and `write_kv`, bit for bit."""
    num_heads, num_kv_heads, head_dim = heads
    tokens = int(batch.input_lengths.sum()) + int((batch.input_lengths == 0).sum())
    spec, batch = AttentionSpec(1.0, None, 0.5, 0.25), move(batch, device)
    angles = None
    if turning is not None:
        wide = normal(tokens, turning // 2, seed=9).to(device)
        angles = wide.cos(), wide.sin()
    results = []
    for is_fused in (False, True):
        fused = normal(tokens, num_heads + 2 * num_kv_heads + 1, head_dim, seed=1, dtype=dtypes[0]).to(device)
        q, k, v, _ = fused.split([num_heads, num_kv_heads, num_kv_heads, 1], dim=1)
        keys, values = (torch.full((num_blocks, num_kv_heads, 8, head_dim), 7.0).to(device, dtypes[1]) for _ in "kv")
        if is_fused:
            rotate_and_write(q, k, v, angles, (keys, values), batch, spec)
        else:
            if angles is not None:
                rotary(q, *angles)
                rotary(k, *angles)
            write_kv(k, v, (keys, values), batch, spec)
        results.append([x.cpu() for x in (fused, keys, values)])
    for actual, expected in zip(*results, strict=True):
        check_bits(actual, expected)


@pytest.mark.parametrize(
    ("heads", "turning", "dtypes"),
    [
        ((4, 2, 16), 16, (torch.float32, torch.float32)),
        ((3, 3, 20), 12, (torch.float16, FP8)),
        ((5, 1, 6), 2, (torch.bfloat16, torch.bfloat16)),
        ((2, 2, 4), 0, (torch.float32, torch.float32)),
        ((2, 2, 4), None, (torch.float32, FP8)),
        pytest.param((40, 33, 128), 128, (torch.bfloat16, torch.bfloat16), marks=pytest.mark.slow),
    ],
)
def test_rotate_and_write_matches_separate_ops(
    heads: tuple[int, int, int],
    turning: int | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> None:
    batch, num_blocks = make_batch(SHAPES, 8)  # one sequence is padding, with slot -1
    check_rotation(batch, num_blocks, heads, turning, dtypes, device)


def test_rotate_and_write_stores_only_selected_tokens(device: torch.device) -> None:
    batch, num_blocks = make_batch([(9, 3), (6, 0)], 8)
    kept = torch.tensor([0, 4, 9, 14])
    batch = PagedBatch(batch.block_tables, batch.input_lengths, batch.cache_lengths, batch.slots[kept], kept)
    check_rotation(batch, num_blocks, (4, 2, 16), 16, (torch.float32, torch.float32), device)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(("heads", "turning"), [((32, 8, 128), 128), ((32, 32, 80), 32), ((8, 1, 256), 256)])
def test_rotate_and_write_with_real_model_shapes_matches_reference(
    heads: tuple[int, int, int], turning: int, cache_dtype: torch.dtype
) -> None:
    batch, num_blocks = make_batch([(100, 0), (1, 30), (0, 0)], 8)
    check_rotation(batch, num_blocks, heads, turning, (torch.bfloat16, cache_dtype), torch.device("cuda"))


@pytest.mark.gpu
def test_float8_keeps_nan_and_rounds_to_even() -> None:
    """The interpreter supports neither."""
    stored = write_four([math.nan, 76.0, -68.0, 75.0], 1.0, torch.device("cuda"))
    assert math.isnan(stored[0])
    assert stored[1:] == [80.0, -64.0, 72.0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((8, 128), torch.float16), ((32, 64), torch.bfloat16), ((71, 64), torch.float32), ((4, 256), torch.bfloat16)],
)
def test_float8_rounding_matches_torch(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    batch, num_blocks = make_batch([(100, 0), (1, 30)], 8)
    kv = normal(101, 2 + 2 * heads[0], heads[1], seed=1).mul(100).to(dtype)
    check_write(batch, num_blocks, kv, heads, FP8, torch.device("cuda"))
