"""A step under construction."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lorax_server.engine.sequence import Sequence
from lorax_server.plan import AdapterOp, NewRow, StepPlan


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
    sampled: list[Sequence]  # sequences that get a token
    asking: list[tuple[Sequence, int]]  # sequences whose prompt is reported on, and their first computed token


@dataclass
class StepBuilder:
    """The sequences of the step so far, news of them for the workers, and the number of tokens in it and left."""

    budget: int
    num_tokens: int = 0
    scheduled: list[Scheduled] = field(default_factory=list)
    sequences: set[Sequence] = field(default_factory=set)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)

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

    def sort_by_adapter(self) -> None:
        self.scheduled.sort(key=lambda entry: entry.sequence.adapter_index)

    def summarize(self, number: int, num_tokens: int, now: float) -> SubmittedStep:
        sampled = [entry.sequence for entry in self.scheduled if entry.samples]
        asking = [(entry.sequence, entry.start) for entry in self.scheduled if entry.asks]
        return SubmittedStep(number, num_tokens, now, sampled, asking)

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
        )
