from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lorax_server.distributed import (
    FakeGroup,
    ProcessGroup,
    Shard,
    join_process_group,
    make_full_shard,
    shard_evenly,
    shard_kv_heads,
    shard_units,
    shard_vocab,
    vocab_shard_size,
)
from lorax_server.errors import ConfigError

Cut = Callable[[ProcessGroup], Shard]


def indices(shard: Shard) -> list[int]:
    return [place for start, stop in shard.ranges for place in range(start, stop)]


CUTS: dict[str, tuple[int, Cut]] = {
    "evenly": (24, lambda group: shard_evenly(group, 24, "x")),
    "heads": (96, lambda group: shard_units(group, [(12, 8)], "x")),
    "fused query, key and value": (108, lambda group: shard_units(group, [(12, 3)] * 3, "x")),
    "parts of different sizes": (60, lambda group: shard_units(group, [(12, 2), (12, 1), (24, 1)], "x")),
    "key and value heads": (60, lambda group: shard_kv_heads(group, 12, 5)),
    "vocabulary": (24, lambda group: shard_vocab(group, 24)),
    "vocabulary that does not divide": (23, lambda group: shard_vocab(group, 23)),
    "vocabulary smaller than the group": (2, lambda group: shard_vocab(group, 2)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("cut", CUTS)
def test_shards_cover_dimension_exactly_once(cut: str, ranks: int) -> None:
    full, make = CUTS[cut]
    shards = [make(FakeGroup(rank, ranks)) for rank in range(ranks)]
    held = [place for shard in shards for place in indices(shard)]
    assert sorted(held) == list(range(full))
    for shard in shards:
        assert shard.full == full
        assert shard.size == len(indices(shard))
        assert shard.is_whole == (ranks == 1)


def test_each_rank_has_its_range() -> None:
    assert [shard_evenly(FakeGroup(rank, 3), 12, "x").ranges for rank in range(3)] == [((0, 4),), ((4, 8),), ((8, 12),)]


def test_parts_are_sharded_separately() -> None:
    parts = [(4, 2), (4, 2), (2, 3)]  # [0, 8), [8, 16), [16, 22)
    assert shard_units(FakeGroup(0, 2), parts, "x").ranges == ((0, 4), (8, 12), (16, 19))
    assert shard_units(FakeGroup(1, 2), parts, "x").ranges == ((4, 8), (12, 16), (19, 22))


def test_units_are_not_split() -> None:
    for rank in range(4):
        for start, stop in shard_units(FakeGroup(rank, 4), [(8, 5), (4, 7)], "x").ranges:
            unit, offset = (5, 0) if stop <= 40 else (7, 40)
            assert (start - offset) % unit == 0
            assert (stop - offset) % unit == 0


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda group: shard_evenly(group, 10, "intermediate_size"), "intermediate_size = 10 is not divisible by 4 "),
        (lambda group: shard_units(group, [(6, 8)], "num_heads"), "num_heads = 6 is not divisible by 4 "),
        (lambda group: shard_units(group, [(4, 1), (7, 1)], "n_inner"), "n_inner = 7 is not divisible by 4 "),
        (lambda group: shard_kv_heads(group, 6, 8), "num_key_value_heads = 6 is not divisible by 4 "),
        (lambda group: shard_kv_heads(group, 3, 8), "num_key_value_heads = 3 is not divisible by 4 "),
    ],
)
def test_indivisible_dimension_error_names_value(cut: Cut, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut(FakeGroup(0, 4))


@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (1, 4), (2, 4), (2, 8), (3, 6), (4, 8)])
def test_adjacent_ranks_share_kv_head(heads: int, ranks: int) -> None:
    shards = [shard_kv_heads(FakeGroup(rank, ranks), heads, 5) for rank in range(ranks)]
    sharers = ranks // heads
    for rank, shard in enumerate(shards):
        # A rank's queries belong to its key head: rank r has the r-th part of all query heads.
        head = rank // sharers
        assert shard == Shard(heads * 5, ((head * 5, head * 5 + 5),))


def test_vocabulary_shards_are_equal_except_last() -> None:
    group = [FakeGroup(rank, 4) for rank in range(4)]
    assert [vocab_shard_size(member, 10) for member in group] == [3, 3, 3, 3]
    assert [shard_vocab(member, 10).ranges for member in group] == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]


def test_ranks_beyond_vocabulary_are_empty() -> None:
    shards = [shard_vocab(FakeGroup(rank, 4), 5) for rank in range(4)]
    assert [shard.size for shard in shards] == [2, 2, 1, 0]
    assert indices(shards[3]) == []
    assert shards[3].select(torch.ones(5, 2), dim=0).shape == (0, 2)


def test_select_returns_shard_along_dimension() -> None:
    x = torch.arange(24).view(4, 6)
    shard = Shard(6, ((0, 1), (3, 5)))
    assert torch.equal(shard.select(x, dim=1), x[:, [0, 3, 4]])
    assert torch.equal(Shard(4, ((2, 4),)).select(x, dim=0), x[2:])


def test_select_of_full_shard_does_not_copy() -> None:
    x = torch.arange(6)
    assert make_full_shard(6).is_whole
    assert make_full_shard(6).size == 6
    assert make_full_shard(6).select(x, dim=0) is x
    assert not Shard(6, ((0, 5),)).is_whole


def test_fake_group_defaults_to_one_process() -> None:
    group = FakeGroup()
    x = torch.ones(2, 3)
    assert (group.rank(), group.size()) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, dim=0) is x


def test_fake_group_shapes_match_real_group() -> None:
    group = FakeGroup(2, 3)
    x = torch.arange(6.0).view(2, 3)
    assert (group.rank(), group.size()) == (2, 3)
    assert torch.equal(group.all_reduce(x), x)
    assert torch.equal(group.all_gather(x, dim=-1), torch.cat([x, x, x], dim=1))
    assert group.all_gather(x, dim=0).shape == (6, 3)


def run_single_rank_group(meeting: Path) -> None:
    group = join_process_group(0, 1, f"file://{meeting}", torch.device("cuda"))
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert (group.rank(), group.size()) == (0, 1)
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert torch.equal(group.all_gather(x, dim=1), x)
    dist.destroy_process_group()


@pytest.mark.gpu
def test_nccl_group_with_one_rank(tmp_path: Path) -> None:
    """Use the real backend with one GPU, in a separate process because NCCL keeps its sockets."""
    process = get_context("spawn").Process(target=run_single_rank_group, args=(tmp_path / "meeting",))
    process.start()
    process.join()
    assert process.exitcode == 0
