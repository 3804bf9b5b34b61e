"""Padded KV caches compared with plain copies, and their memory usage."""

import copy
import gc
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorax_server.kernels import LayerCache
from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from lorax_server.models.padded_cache import (
    MIN_SPARE_COLUMNS,
    GrowableCache,
    GrowingCache,
    KVBuffers,
    join_rows,
    select_rows,
)
from tests.models.driving import Driver, request
from tests.models.tiny import Zoo

HEADS, KEY, VALUE = 2, 3, 5  # in some models, values and keys differ in size


def make(rows: int, columns: int, room: int = 0) -> GrowableCache:
    keys, values = (torch.randn(rows, HEADS, columns + room, size) for size in (KEY, VALUE))
    return GrowableCache(KVBuffers(keys, values, columns), columns)


def buffers_of(past: GrowableCache) -> tuple[torch.Tensor, torch.Tensor]:
    return past.buffers.keys, past.buffers.values


def num_free_columns(past: GrowableCache) -> int:
    return int(past.buffers.keys.shape[2]) - past.buffers.num_filled


def step(rows: int, columns: int = 1) -> LayerCache:
    return torch.randn(rows, HEADS, columns, KEY), torch.randn(rows, HEADS, columns, VALUE)


def clone_layer(past: LayerCache) -> LayerCache:
    return past[0].clone(), past[1].clone()


def equal_layers(past: LayerCache, expected: LayerCache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(past, expected, strict=True))


def storages(pasts: Iterable[LayerCache]) -> dict[int, int]:
    """Return the size of each storage, including the buffers behind views."""
    tensors = [
        part for past in pasts for part in (*past, *(buffers_of(past) if isinstance(past, GrowableCache) else ()))
    ]
    return {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in tensors}


# --- Append -----------------------------------------------------------------------------------------------------------


def test_cache_is_tuple_of_column_views() -> None:
    past = make(2, 4, room=3)
    keys, values = past
    assert isinstance(past, tuple)
    assert keys.shape == (2, HEADS, 4, KEY)
    assert values.shape == (2, HEADS, 4, VALUE)
    assert num_free_columns(past) == 3


def test_append_within_capacity_does_not_copy() -> None:
    past = make(2, 4, room=3)
    expected, new = clone_layer(past), step(2, 3)
    grown = past.append(*new)
    assert equal_layers(grown, tuple(torch.cat(pair, dim=2) for pair in zip(expected, new, strict=True)))  # type: ignore[arg-type]
    assert storages([grown]) == storages([past])
    assert num_free_columns(grown) == 0
    assert equal_layers(past, expected)  # the original can be appended to again


def test_append_beyond_capacity_reallocates() -> None:
    past = make(2, 4, room=1)
    expected, new = clone_layer(past), step(2, 2)
    grown = past.append(*new)
    assert equal_layers(grown, tuple(torch.cat(pair, dim=2) for pair in zip(expected, new, strict=True)))  # type: ignore[arg-type]
    assert storages([grown]).keys().isdisjoint(storages([past]))
    assert num_free_columns(grown) == MIN_SPARE_COLUMNS


def test_growth_by_single_tokens_rarely_reallocates() -> None:
    past, moves = make(3, 40), 0
    for _ in range(400):
        grown = past.append(*step(3))
        moves += storages([grown]).keys() != storages([past]).keys()
        past = grown
    assert past[0].shape[2] == 440
    assert moves <= 20


def test_append_can_be_repeated_after_failed_step() -> None:
    past, new = make(2, 4, room=3), step(2)
    past.append(*step(2))  # from a step with NaN logits
    grown = past.append(*new)
    assert torch.equal(grown[0][:, :, -1:], new[0])
    assert grown.length == 5


def test_two_appends_to_same_cache_are_independent() -> None:
    past, news = make(2, 4, room=8), [step(2), step(2)]
    one, other = (past.append(*new) for new in news)
    longer = one.append(*step(2))
    for grown, new in ((one, news[0]), (other, news[1])):
        assert torch.equal(grown[0][:, :, -1:], new[0])
        assert torch.equal(grown[1][:, :, -1:], new[1])
    assert torch.equal(longer[0][:, :, :-1], one[0])


def test_append_supports_fused_and_expanded_keys() -> None:
    """Use keys as models return them: views of a fused projection, or one head for all."""
    fused = torch.randn(2, 4, HEADS, 2 * KEY).transpose(1, 2)
    keys, values = fused[..., :KEY], torch.randn(2, 1, 4, VALUE).expand(2, HEADS, 4, VALUE)
    new = step(2)
    grown = GrowableCache.wrap((keys, values)).append(*new)
    assert torch.equal(grown[0], torch.cat([keys, new[0]], dim=2))
    assert torch.equal(grown[1], torch.cat([values, new[1]], dim=2))


def test_deepcopy_is_independent() -> None:
    past = make(2, 4, room=3)
    copied = copy.deepcopy(past)
    assert isinstance(copied, GrowableCache)
    assert equal_layers(copied, past)
    assert (copied.length, num_free_columns(copied)) == (past.length, num_free_columns(past))
    assert storages([copied]).keys().isdisjoint(storages([past]))
    assert {part.untyped_storage().data_ptr() for part in copied} == {
        part.untyped_storage().data_ptr() for part in buffers_of(copied)
    }
    expected = clone_layer(past)
    copied.append(*step(2))
    copied[0].zero_()
    assert equal_layers(past, expected)


def test_copied_batch_continues_independently(zoo: Zoo) -> None:
    lm = zoo.served("llama")
    one = Driver(lm)
    batch = one.steps(one.start(request(0), request(1, [7, 8], 12)), 2)
    other = Driver(lm)
    other.outputs = copy.deepcopy(one.outputs)
    copied = copy.deepcopy(batch)
    one.finish(batch)
    other.finish(copied)
    assert one.outputs[1].token_ids == other.outputs[1].token_ids


# --- Select and concatenate -------------------------------------------------------------------------------------------


def test_selected_rows_are_copied() -> None:
    past = make(8, 6, room=4)
    kept = select_rows(past, [1, 2], 6)
    assert equal_layers(kept, tuple(part[1:3] for part in past))  # type: ignore[arg-type]
    assert storages([kept]).keys().isdisjoint(storages([past]))


def test_row_selections_grow_independently() -> None:
    past = make(4, 6, room=4)
    expected = clone_layer(past)
    halves = [select_rows(past, rows, 6) for rows in ([0, 1], [2, 3])]
    new = [step(2) for _ in halves]
    grown = [half.append(*added) for half, added in zip(halves, new, strict=True)]
    for i, half in enumerate(grown):
        for part, before, added in zip(half, expected, new[i], strict=True):
            assert torch.equal(part, torch.cat([before[2 * i : 2 * i + 2], added], dim=2))


def test_joined_cache_shares_no_memory_with_sources() -> None:
    parts = [make(2, 4, room=3), make(1, 9)]
    joined = join_rows(parts, 9)
    assert storages([joined]).keys().isdisjoint(storages(parts))


def reference_select(past: LayerCache, rows: Sequence[int], length: int) -> LayerCache:
    keys, values = (part[list(rows)][:, :, part.shape[2] - length :].clone() for part in past)
    return keys, values


def reference_join(pasts: Sequence[LayerCache], length: int) -> LayerCache:
    def padded(part: torch.Tensor) -> torch.Tensor:
        part = part[:, :, max(0, part.shape[2] - length) :]
        return torch.nn.functional.pad(part, (0, 0, length - part.shape[2], 0))

    keys, values = (torch.cat([padded(past[i]) for past in pasts]) for i in range(2))
    return keys, values


@given(st.data())
@settings(max_examples=75, derandomize=True, deadline=None, database=None)
def test_random_operations_match_plain_tensor_copies(data: st.DataObject) -> None:
    draw = data.draw
    held: list[tuple[LayerCache, LayerCache]] = []
    for _ in range(draw(st.integers(2, 3))):
        past: LayerCache = make(draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.integers(0, 20)))
        held.append((past, clone_layer(past)))
    for _ in range(draw(st.integers(1, 12))):
        i = draw(st.integers(0, len(held) - 1))
        past, expected = held[i]
        action = draw(st.sampled_from(["append", "select", "run", "join"]))
        rows, columns = expected[0].shape[0], expected[0].shape[2]
        if action == "append":
            new = step(rows, draw(st.integers(1, 3)))
            assert isinstance(past, GrowableCache)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(expected, new, strict=True))
            held[i] = (past.append(*new), (keys, values))
        elif action == "join" and len(held) > 1:
            order = draw(st.permutations(range(len(held))))
            length = max(both[1][0].shape[2] for both in held)
            joined = join_rows([held[j][0] for j in order], length)
            held = [(joined, reference_join([held[j][1] for j in order], length))]
        else:
            count = draw(st.integers(1, rows))
            first = draw(st.integers(0, rows - count))
            kept = list(range(first, first + count)) if action == "run" else draw(st.permutations(range(rows)))[:count]
            length = draw(st.integers(0, columns))
            held[i] = (select_rows(past, kept, length), reference_select(expected, kept, length))
        assert all(equal_layers(*both) for both in held)  # includes unchanged caches


# --- transformers cache interface -------------------------------------------------------------------------------------


def test_growing_cache_returns_appended_layers() -> None:
    cache, new, more = GrowingCache(None), step(2, 4), step(2)
    assert cache.get_seq_length() == 0
    assert equal_layers(cache.update(*new, 0), new)
    cache.update(*more, 0)
    assert cache.get_seq_length() == 5
    (past,) = cache.layer_caches()
    assert equal_layers(past, tuple(torch.cat(pair, dim=2) for pair in zip(new, more, strict=True)))  # type: ignore[arg-type]


def test_growing_cache_does_not_modify_its_source() -> None:
    past = make(2, 4, room=2)
    expected, pasts = clone_layer(past), [past]
    cache = GrowingCache(pasts)
    cache.update(*step(2), 0)
    assert pasts == [past]
    assert equal_layers(past, expected)
    assert cache.layer_caches()[0][0].shape[2] == 5


def test_growing_cache_accepts_plain_tensors() -> None:
    new, more = step(2, 4), step(2)
    cache = GrowingCache([new])
    cache.update(*more, 0)
    assert cache.layer_caches()[0][0].shape[2] == 5


# --- Memory -----------------------------------------------------------------------------------------------------------


def needed_bytes(batch: CausalLMBatch) -> int:
    """Return the bytes for all rows padded to the longest row, including spare columns."""
    assert batch.past_key_values is not None
    columns = batch.max_input_length - 1
    with_room = columns + max(MIN_SPARE_COLUMNS, columns // 8)
    return sum(part.nbytes // part.shape[2] * with_room for past in batch.past_key_values for part in past)


def join_and_leave(lm: CausalLM, count: int, seed: int) -> tuple[float, float]:
    """Return the largest ratios of allocated bytes to needed bytes, with and without spare columns."""
    rng, driver = random.Random(seed), Driver(lm)
    batch: CausalLMBatch | None = None
    worst = worst_bare = 0.0
    for i in range(count):
        prompt = [rng.randrange(2, 280) for _ in range(rng.choice([1, 3, 10, 60]))]
        new = driver.start(request(i, prompt, rng.randint(2, 40), stop={"ignore_eos_token": True}))
        batch = new if batch is None else CausalLMBatch.concatenate(rng.sample([batch, new], 2))
        for _ in range(rng.randint(0, 6)):
            batch = driver.step(batch) if batch is not None else None
        while batch is not None and len(batch) > rng.randint(1, 9):
            ids = [each.id for each in batch.requests]
            ids.pop(rng.choice([0, len(ids) // 2, -1]))  # the front, the middle or the end
            batch = batch.filter(ids)
        if batch is not None:
            assert batch.past_key_values is not None
            held = sum(storages(batch.past_key_values).values())
            worst = max(worst, held / needed_bytes(batch))
            bare = sum(part.nbytes for past in batch.past_key_values for part in past)
            worst_bare = max(worst_bare, held / bare)
    return worst, worst_bare


def live_tensors() -> int:
    gc.collect()
    return sum(1 for each in gc.get_objects() if type(each) is torch.Tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon-new", "gpt2", "llama"])
def test_memory_is_bounded_over_many_joins_and_filters(name: str, zoo: Zoo) -> None:
    lm = zoo.served(name)
    join_and_leave(lm, 5, seed=0)  # allocate one-time buffers
    before = live_tensors()
    worst, worst_bare = join_and_leave(lm, 200, seed=1)
    print(f"\n{name}: at most {worst:.2f} times the columns and their room, {worst_bare:.2f} times the columns alone")
    assert worst <= 2
    assert live_tensors() - before <= 20  # last batch's sampler


@pytest.mark.parametrize("name", ["falcon-new", "gpt2", "llama"])
def test_prompt_buffers_are_released_after_next_step(name: str, zoo: Zoo) -> None:
    """After prefill, a batch holds the model's buffers, for example a fused projection."""
    driver = Driver(zoo.served(name))
    batch = driver.steps(driver.start(request(0, [5] * 60), request(1, [5] * 60)), 1)
    assert batch.past_key_values is not None
    assert sum(storages(batch.past_key_values).values()) <= needed_bytes(batch) * 1.1


def test_concatenate_releases_source_layer_by_layer(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one layer is duplicated in memory."""
    driver = Driver(zoo.served("llama"))
    batches = [driver.steps(driver.start(request(i, [5] * 40)), 1) for i in range(2)]
    lists = [batch.past_key_values or [] for batch in batches]
    held: list[int] = []

    def watching(parts: Sequence[LayerCache], *args: Any) -> LayerCache:
        held.append(sum(past[0].numel() > 0 for pasts in lists for past in pasts))
        return join_rows(parts, *args)

    monkeypatch.setattr("lorax_server.models.padded_batch.join_rows", watching)
    CausalLMBatch.concatenate(batches)
    assert held == [2, 0]  # layers of both batches that are not released yet
