"""Step inputs from tables and plans, compared with a per-token reference."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lorax_server.plan import Drafts, NewSequence, StepMasks, StepPlan
from lorax_server.types import SamplingParams, StopParams
from lorax_server.worker.inputs import MAX_SPLIT_KEYS, MaskUploader, SlotTables, build_step_tokens, split_forced_tokens

CPU = torch.device("cpu")
MAX_NUM_SEQS, LENGTH, BLOCK = 6, 40, 4


def make_plan(slots: list[int], starts: list[int], counts: list[int], **more: Any) -> StepPlan:
    given: dict[str, Any] = {
        "slots": np.array(slots, np.int64),
        "starts": np.array(starts, np.int64),
        "counts": np.array(counts, np.int64),
        "samples": np.ones(len(slots), bool),
        "scores_prompt": np.zeros(len(slots), bool),
        "adapter_indices": np.zeros(len(slots), np.int64),
        "new_sequences": (),
        "new_blocks": np.zeros((0, 3), np.int64),
    }
    return StepPlan(1, **given | more)


def new_sequence(slot: int, token_ids: list[int], prompt_length: int, seed: int = 0) -> NewSequence:
    return NewSequence(slot, token_ids, prompt_length, SamplingParams(seed=seed), StopParams())


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 1, 2], [5]])
def test_step_tokens_have_sequence_slot_and_position(counts: list[int]) -> None:
    slots, starts = [4, 0, 2][: len(counts)], [7, 0, 12][: len(counts)]
    samples = np.arange(len(counts)) % 2 == 0
    result = build_step_tokens(make_plan(slots, starts, counts, samples=samples))
    tokens = [(i, slots[i], starts[i] + j) for i, count in enumerate(counts) for j in range(count)]
    layout = result.layout
    assert list(zip(layout.sequences, result.slots, result.positions, strict=True)) == tokens
    assert result.is_single == (max(counts) == 1)
    assert layout.counts == counts
    assert layout.max_count == max(counts)
    assert layout.bounds.tolist() == [0, *np.cumsum(counts)]
    assert layout.last.tolist() == [sum(counts[: i + 1]) - 1 for i in range(len(counts)) if samples[i]]
    assert layout.samples_all == samples.all()
    assert result.lengths.tolist() == [start + count for start, count in zip(starts, counts, strict=True)]


def test_layout_is_reused_only_for_equal_counts() -> None:
    first = build_step_tokens(make_plan([0, 1], [3, 4], [1, 1]))
    again = build_step_tokens(make_plan([1, 2], [9, 5], [1, 1]), first.layout)
    assert again.layout is first.layout
    assert (again.slots.tolist(), again.positions.tolist()) == ([1, 2], [9, 5])
    others: list[dict[str, Any]] = [{"counts": [1, 2]}, {"counts": [1, 1], "samples": np.array([True, False])}]
    for other in others:
        plan = make_plan([0, 1], [3, 4], **other)
        fresh = build_step_tokens(plan)
        result = build_step_tokens(plan, first.layout)
        assert result.layout.key != first.layout.key
        assert result.layout.last.tolist() == fresh.layout.last.tolist()
        assert result.layout.counts == fresh.layout.counts


def test_forced_tokens_are_split_and_prompts_are_not() -> None:
    samples, scores = np.array([True, False, True, True]), np.array([False, True, False, False])
    adapters = np.array([0, 3, 4, 4])
    plan = make_plan(
        [2, 0, 3, 1], [9, 0, 5, 6], [1, 4, 3, 2], samples=samples, scores_prompt=scores, adapter_indices=adapters
    )
    result = split_forced_tokens(plan, np.array([4, 6, 9, 5]))
    assert result.slots.tolist() == [2, 0, 3, 3, 3, 1, 1]
    assert result.starts.tolist() == [9, 0, 5, 6, 7, 6, 7]
    assert result.counts.tolist() == [1, 4, 1, 1, 1, 1, 1]
    assert result.samples.tolist() == [True, False, False, False, True, False, True]
    assert result.scores_prompt.tolist() == [False, True, *[False] * 5]
    assert result.adapter_indices.tolist() == [0, 3, 4, 4, 4, 4, 4]
    assert split_forced_tokens(plan, np.array([4, 7, 9, 6])) is plan  # the last two prompts end here
    long = make_plan([0, 1], [MAX_SPLIT_KEYS // 2, MAX_SPLIT_KEYS // 2 - 2], [2, 2])
    assert split_forced_tokens(long, np.array([4, 5])).slots.tolist() == [0, 1, 1]


def make_draft_plan() -> StepPlan:
    """Return a plan with a decode token, three draft tokens after one token, a prompt chunk, and one after two."""
    drafts = Drafts(np.array([0, 3, 0, 1]), np.array([71, 72, 73, 74]))
    samples = np.array([True, True, False, True])
    return make_plan([2, 0, 3, 1], [9, 5, 0, 6], [1, 4, 5, 3], samples=samples, drafts=drafts)


def test_draft_tokens_are_sampled() -> None:
    result = build_step_tokens(make_draft_plan())
    assert result.layout.rows.tolist() == [0, 1, 1, 1, 1, 3, 3]
    assert result.positions[result.layout.last].tolist() == [9, 5, 6, 7, 8, 7, 8]
    assert not result.layout.samples_all
    without = replace(make_draft_plan(), drafts=None)
    assert build_step_tokens(without, result.layout).layout.rows.tolist() == [0, 1, 3]


def test_split_draft_tokens_are_sampled_in_the_same_order() -> None:
    plan = make_draft_plan()
    split = split_forced_tokens(plan, np.array([4, 4, 4, 8]))
    assert split.drafts is None
    whole, parts = build_step_tokens(plan), build_step_tokens(split)
    assert split.slots[parts.layout.rows].tolist() == plan.slots[whole.layout.rows].tolist()
    assert parts.positions[parts.layout.last].tolist() == whole.positions[whole.layout.last].tolist()


def test_long_sequence_is_split_if_it_has_draft_tokens() -> None:
    drafts = Drafts(np.array([2, 0]), np.array([7, 8]))
    plan = make_plan([0, 1], [MAX_SPLIT_KEYS, MAX_SPLIT_KEYS], [3, 3], drafts=drafts)
    assert split_forced_tokens(plan, np.array([4, 5])).counts.tolist() == [1, 1, 1, 3]


def test_draft_tokens_are_written_after_known_tokens() -> None:
    tables = SlotTables(MAX_NUM_SEQS, LENGTH, BLOCK, CPU)
    tables.write_drafts(make_draft_plan())
    assert tables.token_ids[0, 5:10].tolist() == [0, 71, 72, 73, 0]
    assert tables.token_ids[1, 7:10].tolist() == [0, 74, 0]
    assert tables.token_ids[2:].sum() == 0


@pytest.mark.parametrize("seed", range(5))
def test_tables_return_last_written_values(seed: int) -> None:
    """Slots are reused and grow in any order, while tokens are read and written."""
    some, tables = random.Random(seed), SlotTables(MAX_NUM_SEQS, LENGTH, BLOCK, CPU)
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, dict[int, int]] = {}
    prompts: dict[int, int] = {}
    for step in range(60):
        slots = some.sample(range(MAX_NUM_SEQS), some.randint(1, MAX_NUM_SEQS))
        new = [slot for slot in slots if slot not in tokens or some.random() < 0.1]
        new_blocks = []
        for slot in new:
            tokens[slot] = [some.randrange(1000) for _ in range(some.randint(1, 20))]
            prompts[slot] = some.randint(1, len(tokens[slot]))
            blocks[slot] = {}
        for slot in slots:
            for index in range(-(-(len(tokens[slot]) + 1) // BLOCK)):
                if index not in blocks[slot]:
                    blocks[slot][index] = some.randrange(500)
                    new_blocks.append((slot, index, blocks[slot][index]))
        plan = make_plan(
            slots,
            [len(tokens[slot]) - 1 for slot in slots],
            [1] * len(slots),
            new_sequences=tuple(new_sequence(slot, tokens[slot], prompts[slot], step) for slot in new),
            new_blocks=np.array(new_blocks, np.int64).reshape(-1, 3),
        )
        tables.write_new(plan)
        for _ in range(2):  # also from the cached layout
            selected = tables.select(plan.slots)
            assert selected.slots.tolist() == slots
            assert selected.prompt_lengths.tolist() == [prompts[slot] for slot in slots]
            places = selected.token_offsets + plan.starts
            assert tables.read_tokens(places).tolist() == [tokens[slot][-1] for slot in slots]
            width = max(len(tokens[slot]) for slot in slots)
            table = tables.select_blocks(selected, width)
            assert table.shape == (len(slots), -(-width // BLOCK))
            for slot, result in zip(slots, table.tolist(), strict=True):
                count = -(-len(tokens[slot]) // BLOCK)
                assert result[:count] == [blocks[slot][index] for index in range(count)]
            kv_slots = [
                blocks[slot][(len(tokens[slot]) - 1) // BLOCK] * BLOCK + (len(tokens[slot]) - 1) % BLOCK
                for slot in slots
            ]
            assert tables.compute_kv_slots(plan.slots, plan.starts).tolist() == kv_slots
        chosen = [some.randrange(1000) for _ in slots]
        tables.write_tokens(selected.token_offsets + plan.starts + 1, torch.tensor(chosen))
        for slot, token in zip(slots, chosen, strict=True):
            tokens[slot].append(token)
            if len(tokens[slot]) >= LENGTH - 1:
                del tokens[slot]


def test_reused_slot_has_new_sampling_parameters() -> None:
    tables = SlotTables(MAX_NUM_SEQS, LENGTH, BLOCK, CPU)
    for seed in (1, 2):
        tables.write_new(make_plan([3], [0], [1], new_sequences=(new_sequence(3, [5, 6], 2, seed),)))
        assert [sampling.params.seed for sampling in tables.select(np.array([3])).sequence_sampling] == [seed]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_uploaded_masks_are_padded_to_vocabulary(device: str) -> None:
    lane, words = MaskUploader(torch.device(device)), [[7], [1, -1], [3, 4, 5]]
    for _ in range(3):  # in reused memory
        masks = StepMasks(np.array([4, 0, 2]), [np.array(each, np.int32) for each in words])
        sent = lane.upload(masks, vocab_size=60)
        assert sent.rows.tolist() == [4, 0, 2]
        assert sent.masks.tolist() == [[7, 0], [1, -1], [3, 4]]
        assert sent.masks.device.type == device
