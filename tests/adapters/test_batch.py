import pytest
import torch

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata, find_segments
from tests.builders import adapter_batch


def small_arena() -> AdapterArena:
    """Adapter 1 has both targets, adapter 2 only `up`, adapter 3 none."""
    table = torch.zeros(4, 2, 3, dtype=torch.long)
    table[1, 0] = torch.tensor([10, 20, 4])
    table[1, 1] = torch.tensor([30, 40, 2])
    table[2, 1] = torch.tensor([50, 60, 8])
    scales = torch.tensor([[0.0, 0.0], [0.5, 0.25], [0.0, 2.0], [0.0, 0.0]])
    return AdapterArena(torch.zeros(100), table, scales, {"down": 0, "up": 1})


@pytest.mark.parametrize(
    ("indices", "bounds", "adapters"),
    [
        ([], [0], []),
        ([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 1, 1], [0, 3, 5, 10, 12], [0, 1, 2, 1]),
        ([7], [0, 1], [7]),
        ([3, 3, 3], [0, 3], [3]),
        ([1, 2, 1, 2], [0, 1, 2, 3, 4], [1, 2, 1, 2]),
    ],
)
def test_runs_of_one_adapter_are_found(indices: list[int], bounds: list[int], adapters: list[int]) -> None:
    tokens = torch.tensor(indices, dtype=torch.long)
    assert find_segments(tokens) == (bounds, adapters)
    meta = AdapterBatchMetadata.from_indices(tokens)
    assert meta.adapter_indices is tokens
    assert (meta.adapter_segments, meta.segment_indices) == (bounds, adapters)


def test_segments_say_where_each_runs_factors_lie() -> None:
    arena = small_arena()
    segments = adapter_batch([1, 1, 0, 2, 3, 1], arena).segments("up")
    assert segments is not None
    assert segments.buffer is arena.buffer
    assert segments.bounds == [0, 2, 3, 4, 5, 6]
    assert segments.a_offsets.tolist() == [30, 0, 50, 0, 30]
    assert segments.b_offsets.tolist() == [40, 0, 60, 0, 40]
    assert segments.ranks.tolist() == [2, 0, 8, 0, 2]
    assert segments.scales.tolist() == [0.25, 0.0, 2.0, 0.0, 0.25]


def test_an_adapter_without_a_target_has_rank_0_there() -> None:
    segments = adapter_batch([2, 1], small_arena()).segments("down")
    assert segments is not None
    assert segments.ranks.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("indices", "target"),
    [
        ([0, 0], "up"),  # the base alone
        ([1, 2], "gate"),  # a target that no adapter has
        ([2, 0, 2], "down"),  # a target that none of these adapters has
        ([3], "up"),
        ([], "up"),
    ],
)
def test_there_are_no_segments_where_nothing_applies(indices: list[int], target: str) -> None:
    assert adapter_batch(indices, small_arena()).segments(target) is None


def test_select_keeps_the_adapters_of_the_tokens_it_keeps() -> None:
    data = adapter_batch([1, 1, 0, 0, 2, 2, 2], small_arena())
    chosen = data.select(torch.tensor([1, 3, 6]))
    assert isinstance(chosen, AdapterBatchData)
    assert chosen.arena is data.arena
    assert chosen.meta.adapter_indices.tolist() == [1, 0, 2]
    assert (chosen.meta.adapter_segments, chosen.meta.segment_indices) == ([0, 1, 2, 3], [1, 0, 2])
    assert (data.meta.adapter_segments, data.meta.segment_indices) == ([0, 2, 4, 7], [1, 0, 2])


def test_select_joins_runs_that_come_to_touch() -> None:
    chosen = adapter_batch([1, 0, 1, 1], small_arena()).select(torch.tensor([0, 2, 3]))
    assert (chosen.meta.adapter_segments, chosen.meta.segment_indices) == ([0, 3], [1])
