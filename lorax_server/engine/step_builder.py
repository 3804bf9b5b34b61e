"""A step under construction."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lorax_server.engine.kv_cache import KvCache
from lorax_server.engine.sequence import Sequence
from lorax_server.plan import AdapterOp, Bools, Ints, NewSequence, StepPlan, StepResult


class Scheduled(NamedTuple):
    """The sequences of a step, in the order of its plan, and the plan's columns."""

    sequences: list[Sequence]
    slots: Ints
    starts: Ints
    counts: Ints
    samples: Bools
    scores_prompt: Bools
    adapter_indices: Ints


class SubmittedStep(NamedTuple):
    """A step in flight, as the scheduler remembers it."""

    number: int
    num_tokens: int
    submitted_at: float
    scheduled: Scheduled
    sampled: list[Sequence | None]  # sequences that get a token; None: it is chosen again by a later step
    asking: list[tuple[Sequence, int]]  # sequences whose prompt is reported on, and their first computed token
    is_masked: bool = True  # there are sequences with a structure among those that get a token

    def take_back(self, cache: KvCache) -> "SubmittedStep":
        """Undo what the step has changed of its sequences. Return the rest of it: a step without tokens."""
        scheduled = self.scheduled
        starts, flags = scheduled.starts.tolist(), scheduled.samples.tolist()
        for sequence, start, samples in zip(scheduled.sequences, starts, flags, strict=True):
            sequence.num_in_flight -= samples
            cache.take_back(sequence, start)
        return self._replace(num_tokens=0, sampled=[], asking=[])

    def list_masked(self) -> list[tuple[int, int]]:
        """List the sampled sequences that need a mask: their numbers among all, and their requests."""
        return [
            (number, sequence.request.request_id)
            for number, sequence in enumerate(self.sampled)
            if sequence is not None and sequence.request.structure is not None and not sequence.finished
        ]

    def list_chosen(self, result: StepResult) -> list[tuple[int, int]]:
        """List the tokens of answers that have a structure and go on: each request, and a token."""
        if not self.is_masked:
            return []
        return [
            (sequence.request.request_id, token_id)
            for number, sequence in enumerate(self.sampled)
            if sequence is not None and sequence.request.structure is not None and not sequence.finished
            if not math.isnan(result.logprobs[number]) and sequence.goes_on(result.token_ids[number])
            for token_id in (result.token_ids[number], *sequence.forced)
        ]

    def count_continuing(self) -> int:
        """Count the sampled sequences that have not finished."""
        return sum(sequence is not None and not sequence.finished for sequence in self.sampled)

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
            if sequence.slot is not None:
                sequence.num_computed -= 1

    def find_largest(self) -> Sequence:
        """Return the sequence that probably takes the most memory, of several such ones the last to come."""
        scheduled = self.scheduled
        counts, scores_prompt = scheduled.counts.tolist(), scheduled.scores_prompt.tolist()
        return max(zip(scheduled.sequences, counts, scores_prompt, strict=True), key=_need)[0]


def _need(entry: tuple[Sequence, int, bool]) -> tuple[bool, int, int, int]:
    sequence, num_tokens, scores_prompt = entry
    return scores_prompt, num_tokens, sequence.request.sampling.num_alternatives, sequence.arrival


class Lineup(NamedTuple):
    """The sequences that decode in a step, with one token each, and what follows. Most steps repeat the last one's."""

    version: int  # of the queue: of slots and shares
    added: list[Sequence]  # in the order in which they came into the step
    scheduled: Scheduled
    sums: Mapping[tuple[str, str], int]  # tokens of each tenant and adapter


@dataclass
class StepBuilder:
    """The sequences of the step so far, news of them for the workers, and the number of tokens left in it."""

    budget: int
    max_chunk: int | None = None  # tokens of one sequence
    can_chunk: bool = True
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each
    samples: list[bool] = field(default_factory=list)
    asking: dict[Sequence, int] = field(default_factory=dict)  # for log probabilities of their prompts; from where on
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    has_structures: bool = False  # of sequences that get a token

    def add_tokens(self, sequence: Sequence, count: int, samples: bool) -> None:
        """Add a number of tokens of a sequence that has a slot, and the blocks for them."""
        if sequence.num_sent_blocks < len(sequence.blocks):
            self._send_blocks(sequence)
        start = sequence.num_computed
        if sequence.prompt_logprobs is not None and start < len(sequence.request.prompt_ids) - 1:
            self.asking[sequence] = start
        self.sequences.append(sequence)
        self.counts.append(count)
        self.samples.append(samples)
        self.budget -= count
        sequence.num_computed = start + count
        if samples:
            sequence.num_in_flight += 1
            sequence.has_jumped = False
            if sequence.request.structure is not None:
                self.has_structures = True

    def _send_blocks(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        first = sequence.num_sent_blocks
        for index, block in enumerate(sequence.blocks[first:], first):
            self.new_blocks.append((sequence.slot, index, block))
        sequence.num_sent_blocks = len(sequence.blocks)

    def sum_tokens(self, first: int = 0) -> Mapping[tuple[str, str], int]:
        """Return the tokens of each tenant and adapter, of those sequences that were added from the `first` on."""
        sums: dict[tuple[str, str], int] = {}
        for sequence, count in zip(self.sequences[first:], self.counts[first:], strict=True):
            sums[sequence.account] = sums.get(sequence.account, 0) + count
        return sums

    def cut(self, num_tokens: int, reserve: int = 0) -> int:
        """Return how many of a sequence's tokens the step takes, `reserve` tokens being kept for others."""
        if not self.can_chunk:
            return num_tokens if num_tokens <= self.budget else 0
        available = max(self.budget - reserve, min(self.budget, 1))
        return min(num_tokens, available, self.max_chunk or self.budget)

    def line_up(self, version: int, known: Lineup | None) -> Lineup:
        """Order the sequences so far, all of which decode. A known lineup serves, if they are the same in the same
        slots."""
        if known is None or known.version != version or known.added != self.sequences:
            return Lineup(version, self.sequences.copy(), self.order(), self.sum_tokens())
        starts = np.array([sequence.num_computed - 1 for sequence in known.scheduled.sequences], np.int64)
        return known._replace(scheduled=known.scheduled._replace(starts=starts))

    def order(self) -> Scheduled:
        """Put the sequences in the order of their adapters."""
        indices = [sequence.adapter_index for sequence in self.sequences]
        places = sorted(range(len(indices)), key=indices.__getitem__)
        sequences = [self.sequences[place] for place in places]
        counts = [self.counts[place] for place in places]
        slots, starts = [sequence.slot for sequence in sequences], [sequence.num_computed for sequence in sequences]
        # Few arrays, since a small one takes as long to make as dozens of its numbers.
        numbers = np.array([slots, starts, counts, [indices[place] for place in places]], dtype=np.int64)
        numbers[1] -= numbers[2]
        flags = [self.samples[place] for place in places], [each in self.asking for each in sequences]
        samples, scores_prompt = np.array(flags, dtype=np.bool_)
        return Scheduled(sequences, numbers[0], numbers[1], numbers[2], samples, scores_prompt, numbers[3])

    def summarize(self, number: int, scheduled: Scheduled, now: float) -> SubmittedStep:
        sampled: list[Sequence | None] = [*scheduled.sequences]
        if not all(self.samples):
            sampled = [*itertools.compress(sampled, scheduled.samples.tolist())]
        asking = [(each, self.asking[each]) for each in scheduled.sequences if each in self.asking]
        return SubmittedStep(number, sum(self.counts), now, scheduled, sampled, asking, self.has_structures)

    def build_plan(self, step: int, scheduled: Scheduled, adapter_ops: tuple[AdapterOp, ...]) -> StepPlan:
        return StepPlan(
            step,
            *scheduled[1:],
            new_sequences=tuple(self.new_sequences),
            new_blocks=np.array(self.new_blocks, np.int64) if self.new_blocks else np.empty((0, 3), np.int64),
            adapter_ops=adapter_ops,
            is_masked=self.has_structures,
        )
