import pytest
import torch

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata, find_segments
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.adapters.weights import ModuleWeights
from lorax_server.distributed import FakeGroup, Shard, make_full_shard
from lorax_server.kernels import Field, LoraTarget
from tests.builders import CPU, adapter_batch
from tests.lora import GivenAdapter, fill_arena

VOCAB = 7


def make_target(name: str, kind: TargetKind, inputs: int, outputs: int, start: int = 0) -> AdapterTarget:
    shape = {TargetKind.EMBEDDING: (inputs, outputs), TargetKind.NORM: (outputs,)}.get(kind, (outputs, inputs))
    columns = slice(start, start + outputs)
    return AdapterTarget(
        name, kind, make_full_shard(inputs), make_full_shard(outputs), columns, torch.ones(shape), None
    )


TARGETS = {
    target.name: target
    for target in (
        make_target("embed", TargetKind.EMBEDDING, VOCAB, 4),
        make_target("norm", TargetKind.NORM, 4, 4),
        make_target("gate", TargetKind.LINEAR, 4, 6),
        make_target("up", TargetKind.LINEAR, 4, 8, start=6),
        make_target("head", TargetKind.HEAD, 4, VOCAB),
    )
}
EMBED_A, EMBED_B = torch.arange(14.0).view(2, VOCAB), torch.arange(8.0).view(4, 2)
HEAD_ROWS = torch.arange(36.0).view(VOCAB + 2, 4)
ADAPTERS = [
    {
        "gate": ModuleWeights(torch.ones(3, 4), torch.ones(6, 3), 0.5),
        "norm": ModuleWeights(weight=torch.full((4,), 2.0)),
    },
    {"up": ModuleWeights(torch.ones(2, 4), torch.ones(8, 2), 2.0, magnitude=torch.ones(8))},
    {"embed": ModuleWeights(EMBED_A, EMBED_B, 0.25, token_ids=(5, 2), token_rows=-torch.ones(2, 4))},
    {"head": ModuleWeights(weight=HEAD_ROWS)},
    {},
]


@pytest.fixture(scope="module")
def arena() -> AdapterArena:
    given = [GivenAdapter(modules, VOCAB + 2 * ("head" in modules)) for modules in ADAPTERS]
    return fill_arena(TARGETS, given, CPU, FakeGroup())


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
def test_find_segments_groups_consecutive_tokens(indices: list[int], bounds: list[int], adapters: list[int]) -> None:
    tokens = torch.tensor(indices, dtype=torch.long)
    assert find_segments(tokens) == (bounds, adapters)
    meta = AdapterBatchMetadata.from_indices(tokens)
    assert meta.adapter_indices is tokens
    assert (meta.adapter_segments, meta.segment_indices) == (bounds, adapters)


def test_lora_batch_contains_arena_and_segments(arena: AdapterArena) -> None:
    data = adapter_batch([1, 1, 0, 2], arena)
    assert data.lora is data.lora  # results from one layer are reused by the next
    assert (data.lora.bounds, data.lora.adapters) == ([0, 2, 3, 4], [1, 0, 2])
    assert data.lora.buffer is arena.buffer
    assert data.lora.table is arena.table
    assert data.lora.scales is arena.scales
    assert data.lora.host_table is arena.host_table
    assert data.lora.adapter_indices.dtype == torch.int32
    assert data.lora.adapter_indices.tolist() == [1, 1, 0, 2]
    assert data.lora.features.tolist() == [[VOCAB, 4], [4, 4], [4, 6], [4, 8], [4, VOCAB]]


def test_target_features_are_sizes_of_local_shard(arena: AdapterArena) -> None:
    target = AdapterTarget("x", TargetKind.LINEAR, Shard(8, ((4, 8),)), make_full_shard(6), slice(0, 6), None, None)
    part = AdapterArena(arena.buffer, arena.table, arena.scales, arena.host_table, [], {"x": target})
    assert part.features.tolist() == [[4, 6]]


def test_targets_keep_table_order(arena: AdapterArena) -> None:
    result = adapter_batch([1], arena).find_targets([TARGETS["gate"], TARGETS["up"]])
    assert result == [LoraTarget(2, slice(0, 6)), LoraTarget(3, slice(6, 14))]


# By adapter: targets with low-rank factors, vectors and rows.
TARGET_FLAGS = {
    1: ({"gate"}, {"norm"}, set()),
    2: ({"up"}, {"up"}, set()),
    3: ({"embed"}, set(), {"embed"}),
    4: (set(), set(), {"head"}),
    5: (set(), set(), set()),
}


@pytest.mark.parametrize(
    "indices", [[], [0, 0], [1], [2], [3], [4], [5], [0, 5, 0], [1, 0, 3], [4, 2, 1, 2, 5], [5, 4, 3, 2, 1, 0]]
)
def test_target_flags_reflect_batch_adapters(indices: list[int], arena: AdapterArena) -> None:
    data = adapter_batch(indices, arena)
    low_rank, vectors, rows = (
        set().union(*(TARGET_FLAGS[index][kind] for index in indices if index)) for kind in range(3)
    )
    for name, target in TARGETS.items():
        result = data.find_targets([target])
        assert data.lora.has_low_rank(result) == (name in low_rank)
        assert data.lora.has_vectors(result) == (name in vectors)
        assert data.lora.has_rows(result[0].index) == (name in rows)


def test_target_flags_cover_fused_layers(arena: AdapterArena) -> None:
    data = adapter_batch([2], arena)
    assert data.lora.has_low_rank(data.find_targets([TARGETS["gate"], TARGETS["up"]]))
    assert data.lora.has_vectors(data.find_targets([TARGETS["gate"], TARGETS["up"]]))
    assert not data.lora.has_low_rank([])
    assert not data.lora.has_vectors([])


def test_derived_values_are_copied_only_for_same_adapters(arena: AdapterArena) -> None:
    table = arena.host_table.clone()
    own = AdapterArena(arena.buffer, table, arena.scales, table, arena.vocab_sizes, TARGETS)
    first, same, other = (adapter_batch(indices, own) for indices in ([1, 3, 0], [3, 0, 1, 3], [3, 0]))
    gate = first.find_targets([TARGETS["gate"]])
    assert first.lora.has_low_rank(gate)
    for data in (same, other):
        data.lora.copy_derived_from(first.lora)
    table[:] = -1  # computing it again would return another result
    assert same.lora.has_low_rank(gate)
    assert not other.lora.has_low_rank(gate)


def test_added_tokens_count_as_lm_head_rows(arena: AdapterArena) -> None:
    table = torch.zeros_like(arena.host_table)
    table[..., : Field.RANK] = -1
    table[1, 4, Field.NUM_NEW_ROWS] = 2
    data = adapter_batch([1], AdapterArena(arena.buffer, table, arena.scales, table, arena.vocab_sizes, TARGETS))
    assert data.lora.has_rows(data.find_targets([TARGETS["head"]])[0].index)
    assert not data.lora.has_rows(data.find_targets([TARGETS["embed"]])[0].index)


def test_segments_include_replaced_lm_head_rows(arena: AdapterArena) -> None:
    runs = list(adapter_batch([0, 4, 4, 5, 0, 4], arena).iterate_segments("head"))
    assert [(tokens, adapter) for tokens, adapter, _ in runs] == [(slice(1, 3), 4), (slice(3, 4), 5), (slice(5, 6), 4)]
    assert [len(rows.new_rows) for _, _, rows in runs] == [2, 0, 2]
    assert (len(runs[1][2].row_ids), len(runs[1][2].rows)) == (0, 0)


def test_segments_include_added_lm_head_rows(arena: AdapterArena) -> None:
    [(tokens, adapter, result)] = adapter_batch([4, 0], arena).iterate_segments("head")
    assert (tokens, adapter) == (slice(0, 1), 4)
    assert result.row_ids.dtype == torch.int32
    assert torch.equal(HEAD_ROWS[result.row_ids], result.rows)
    assert torch.equal(result.new_rows, HEAD_ROWS[VOCAB:])
    assert arena.vocab_sizes[:6] == [VOCAB, VOCAB, VOCAB, VOCAB, VOCAB + 2, VOCAB]


def test_base_model_tokens_yield_no_segments(arena: AdapterArena) -> None:
    assert list(adapter_batch([0, 0], arena).iterate_segments("head")) == []
    assert list(adapter_batch([], arena).iterate_segments("head")) == []


def test_select_keeps_token_adapters(arena: AdapterArena) -> None:
    data = adapter_batch([1, 1, 0, 0, 2, 2, 2], arena)
    chosen = data.select(torch.tensor([1, 3, 6]))
    assert isinstance(chosen, AdapterBatchData)
    assert chosen.arena is data.arena
    assert chosen.meta.adapter_indices.tolist() == [1, 0, 2]
    assert (chosen.meta.adapter_segments, chosen.meta.segment_indices) == ([0, 1, 2, 3], [1, 0, 2])
    assert (data.meta.adapter_segments, data.meta.segment_indices) == ([0, 2, 4, 7], [1, 0, 2])


def test_select_joins_adjacent_segments(arena: AdapterArena) -> None:
    chosen = adapter_batch([1, 0, 1, 1], arena).select(torch.tensor([0, 2, 3]))
    assert (chosen.meta.adapter_segments, chosen.meta.segment_indices) == ([0, 3], [1])
