"""The cache's writes in Triton against the reference, which runs on a CPU."""

import math

import pytest
import torch

from lorax_server.kernels import AttentionSpec, PagedBatch, reference
from lorax_server.kernels.triton.cache import write_kv
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
    """Return values that survive float8, whose rounding in Triton's interpreter is not the hardware's."""
    return normal(*shape, seed=seed).mul(4).to(FP8).to(dtype)


def check_write(
    batch: PagedBatch,
    num_blocks: int,
    kv: torch.Tensor,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Write in poisoned caches; all that the reference does not store must stay poison. It clears fresh blocks."""
    num_kv_heads, head_dim = heads
    spec = AttentionSpec(1.0, None, 0.5, 0.25)
    shape = (num_blocks, num_kv_heads, 8, head_dim)
    written = torch.zeros(num_blocks, 1, 8, 1, dtype=torch.bool)
    for slot in batch.slots[batch.slots >= 0].tolist():
        written[slot // 8, :, slot % 8] = True
    k, v = kv[:, 2 : 2 + num_kv_heads], kv[:, 2 + num_kv_heads :]
    expected, found = (tuple(torch.full(shape, 7.0).to(dtype) for _ in range(2)) for _ in range(2))
    reference.write_kv(k, v, (expected[0], expected[1]), batch, spec)
    placed = move_cache((found[0], found[1]), device)
    on_device = kv.to(device)
    k, v = on_device[:, 2 : 2 + num_kv_heads], on_device[:, 2 + num_kv_heads :]
    write_kv(k, v, placed, move(batch, device), spec)
    for ours, theirs in zip(placed, expected, strict=True):
        check_bits(ours, torch.where(written, theirs.float(), 7.0).to(dtype))


@pytest.mark.parametrize(("dtype", "cache_dtype", "heads"), CASES)
def test_tokens_are_stored(
    dtype: torch.dtype, cache_dtype: torch.dtype, heads: tuple[int, int], device: torch.device
) -> None:
    batch, num_blocks = make_batch(SHAPES, 8)
    batch = PagedBatch(batch.block_tables, batch.input_lengths, batch.cache_lengths, batch.slots[batch.slots >= 0])
    kv = in_float8(len(batch.slots), 2 + 2 * heads[0], heads[1], seed=1, dtype=dtype)
    check_write(batch, num_blocks, kv, heads, cache_dtype, device)


@pytest.mark.parametrize("by", ["slots", "indices", "both"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_only_tokens_with_a_slot_are_stored(by: str, index_dtype: torch.dtype, device: torch.device) -> None:
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


def test_nothing_to_store(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.long)
    batch = PagedBatch(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1]), torch.tensor([0]), none, none)
    check_write(batch, 1, normal(1, 6, 16, seed=1), (2, 16), torch.float32, device)


def write_four(values: list[float], scale: float, device: torch.device) -> list[float]:
    """Store a value head of four in float8, and return it as it lies in the cache."""
    new = torch.tensor(values, device=device).view(1, 1, 4)
    keys, stored = (torch.zeros(1, 1, 1, 4, dtype=FP8, device=device) for _ in range(2))
    one = torch.tensor([1], device=device)
    batch = PagedBatch(one[:, None].int(), one, one - 1, one - 1)
    write_kv(new, new, (keys, stored), batch, AttentionSpec(1.0, None, 1.0, scale))
    return stored.float().flatten().tolist()


def test_large_values_stay_finite_in_float8(device: torch.device) -> None:
    assert write_four([3.0, 1e6, -1e6, 0.25], 0.5, device) == [6.0, 448.0, -448.0, 0.5]
    assert write_four([1.0, 2.0, -320.0, 0.0], 4.0, device) == [0.25, 0.5, -80.0, 0.0]


@pytest.mark.gpu
def test_float8_keeps_a_nan_and_rounds_to_even() -> None:
    """The interpreter does neither."""
    stored = write_four([math.nan, 76.0, -68.0, 75.0], 1.0, torch.device("cuda"))
    assert math.isnan(stored[0])
    assert stored[1:] == [80.0, -64.0, 72.0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((8, 128), torch.float16), ((32, 64), torch.bfloat16), ((71, 64), torch.float32), ((4, 256), torch.bfloat16)],
)
def test_float8_is_rounded_as_torch_does(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    batch, num_blocks = make_batch([(100, 0), (1, 30)], 8)
    kv = normal(101, 2 + 2 * heads[0], heads[1], seed=1).mul(100).to(dtype)
    check_write(batch, num_blocks, kv, heads, FP8, torch.device("cuda"))
