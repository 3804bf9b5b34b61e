"""A step under construction."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lorax_server.engine.kv_cache import KvCache
from lorax_server.engine.sequence import OrderKey, Sequence
from lorax_server.plan import AdapterOp, NewRow, StepPlan, StepResult


class Scheduled(NamedTuple):
    """The tokens of one sequence in a step."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    asks: bool  # for the log probabilities of the prompt's tokens


class SubmittedStep(NamedTuple):
    """A step in flight, as the scheduler remembers it."""

    number: int
    num_tokens: int
    submitted_at: float
    scheduled: list[Scheduled]
    sampled: list[Sequence | None]  # sequences that get a token; None: it is chosen again by a later step
    asking: list[tuple[Sequence, int]]  # sequences whose prompt is reported on, and their first computed token

    def take_back(self, cache: KvCache) -> "SubmittedStep":
        """Undo what the step has changed of its sequences. Return what is left of it: a step without any."""
        for entry in self.scheduled:
            entry.sequence.num_in_flight -= entry.samples
            cache.take_back(entry.sequence, entry.start)
        return SubmittedStep(self.number, 0, self.submitted_at, [], [], [])

    def list_masked(self) -> list[tuple[int, int]]:
        """List the sampled sequences that need a mask: their numbers among all, and their requests."""
        return [
            (number, sequence.request.request_id)
            for number, sequence in enumerate(self.sampled)
            if sequence is not None and sequence.request.structure is not None and not sequence.finished
        ]

    def list_chosen(self, result: StepResult) -> list[tuple[int, int]]:
        """List the tokens of answers that have a structure and go on: each request, and a token."""
        return [
            (sequence.request.request_id, token_id)
            for number, sequence in enumerate(self.sampled)
            if sequence is not None and sequence.request.structure is not None and not sequence.finished
            if not math.isnan(result.logprobs[number]) and sequence.goes_on(result.token_ids[number])
            for token_id in (result.token_ids[number], *sequence.forced)
        ]

    def find_room(self, number: int) -> int:
        """Return how many tokens a sampled sequence may get after the one that it chooses.

        None while another step chooses a token as well: that one would come between.
        """
        sequence = self.sampled[number]
        return 0 if sequence is None or sequence.num_in_flight > 1 else sequence.num_left

    def force(self, forced: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Let some sampled sequences get more tokens after the one that they choose, which is forced as well."""
        for number, token_ids in forced:
            sequence = self.sampled[number]
            assert sequence is not None
            sequence.forced, sequence.has_jumped = token_ids, True

    def postpone(self, numbers: Iterable[int]) -> None:
        """Take back the choice of some sampled sequences: a later step computes their last token again, and chooses."""
        for number in numbers:
            sequence = self.sampled[number]
            assert sequence is not None
            self.sampled[number] = None
            sequence.num_in_flight -= 1
            if sequence.row is not None:
                sequence.num_computed -= 1

    def find_largest(self) -> Sequence:
        """Return the sequence that probably takes the most memory, of several such ones the last to come."""
        return max(self.scheduled, key=_need).sequence


def _need(entry: Scheduled) -> tuple[bool, int, int, OrderKey]:
    sequence = entry.sequence
    return entry.asks, entry.num_tokens, sequence.request.sampling.num_alternatives, sequence.order_key


@dataclass
class StepBuilder:
    """The sequences of the step so far, news of them for the workers, and the number of tokens in it and left."""

    budget: int
    max_chunk: int | None = None  # tokens of one sequence
    can_chunk: bool = True
    num_tokens: int = 0
    scheduled: list[Scheduled] = field(default_factory=list)
    sequences: set[Sequence] = field(default_factory=set)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    has_structures: bool = False  # of sequences that get a token

    def add_tokens(self, sequence: Sequence, count: int, samples: bool) -> None:
        """Add a number of tokens of a sequence that has a row, and the blocks for them."""
        assert sequence.row is not None
        if sequence.num_sent_blocks < len(sequence.blocks):
            for index in range(sequence.num_sent_blocks, len(sequence.blocks)):
                self.new_blocks.append((sequence.row, index, sequence.blocks[index]))
            sequence.num_sent_blocks = len(sequence.blocks)
        start = sequence.num_computed
        asks = sequence.prompt_logprobs is not None and start < len(sequence.request.prompt_ids) - 1
        self.scheduled.append(Scheduled(sequence, start, count, samples, asks))
        self.sequences.add(sequence)
        self.budget -= count
        self.num_tokens += count
        sequence.num_computed = start + count
        sequence.num_in_flight += samples
        sequence.has_jumped &= not samples
        self.has_structures |= samples and sequence.request.structure is not None

    def sum_tokens(self, first: int = 0) -> dict[tuple[str, str], int]:
        """Return the tokens of each tenant and adapter, of those sequences that were added from the `first` on."""
        sums: dict[tuple[str, str], int] = {}
        for entry in self.scheduled[first:]:
            request = entry.sequence.request
            name = request.tenant, request.adapter_identity
            sums[name] = sums.get(name, 0) + entry.num_tokens
        return sums

    def cut(self, num_tokens: int, reserve: int = 0) -> int:
        """Return how many of a sequence's tokens the step takes, `reserve` tokens being kept for others."""
        if not self.can_chunk:
            return num_tokens if num_tokens <= self.budget else 0
        available = max(self.budget - reserve, min(self.budget, 1))
        return min(num_tokens, available, self.max_chunk or self.budget)

    def sort_by_adapter(self) -> None:
        self.scheduled.sort(key=lambda entry: entry.sequence.adapter_index)

    def summarize(self, number: int, num_tokens: int, now: float) -> SubmittedStep:
        sampled: list[Sequence | None] = [entry.sequence for entry in self.scheduled if entry.samples]
        asking = [(entry.sequence, entry.start) for entry in self.scheduled if entry.asks]
        return SubmittedStep(number, num_tokens, now, self.scheduled, sampled, asking)

    def build_plan(self, step: int, adapter_ops: tuple[AdapterOp, ...]) -> StepPlan:
        sequences, starts, counts, samples, asks = zip(*self.scheduled, strict=True) if self.scheduled else [()] * 5
        rows = [sequence.row for sequence in sequences]
        adapter_indices = [sequence.adapter_index for sequence in sequences]
        # Few arrays, since a small one takes as long to make as dozens of its numbers.
        numbers = np.array([rows, starts, counts, adapter_indices], dtype=np.int64)
        flags = np.array([samples, asks], dtype=np.bool_)
        new_blocks = np.array(self.new_blocks, np.int64) if self.new_blocks else np.empty((0, 3), np.int64)
        return StepPlan(
            step=step,
            rows=numbers[0],
            starts=numbers[1],
            counts=numbers[2],
            samples=flags[0],
            asks=flags[1],
            adapter_indices=numbers[3],
            new_rows=tuple(self.new_rows),
            new_blocks=new_blocks,
            adapter_ops=adapter_ops,
            is_masked=self.has_structures,
        )
