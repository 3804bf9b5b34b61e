"""A step that is being put together."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lorax_server.engine.sequence import Sequence
from lorax_server.plan import AdapterOp, NewRow, StepPlan


class Scheduled(NamedTuple):
    """A sequence's part in a step."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    asks: bool  # to be told how likely the prompt's tokens are


@dataclass
class StepBuilder:
    """Who has a part in the step so far, what the workers have to know of them, and how many tokens are left."""

    budget: int
    scheduled: list[Scheduled] = field(default_factory=list)
    placed: set[Sequence] = field(default_factory=set)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)

    def put(self, sequence: Sequence, count: int, samples: bool) -> None:
        """A number of the sequence's tokens into the step; it has a row, and the blocks for them."""
        assert sequence.row is not None
        if sequence.num_sent_blocks < len(sequence.blocks):
            for place in range(sequence.num_sent_blocks, len(sequence.blocks)):
                self.new_blocks.append((sequence.row, place, sequence.blocks[place]))
            sequence.num_sent_blocks = len(sequence.blocks)
        start = sequence.num_computed
        asks = sequence.prompt_logprobs is not None and start < len(sequence.request.prompt_ids) - 1
        self.scheduled.append(Scheduled(sequence, start, count, samples, asks))
        self.placed.add(sequence)
        self.budget -= count
        sequence.num_computed = start + count
        sequence.num_in_flight += samples

    def sort(self) -> None:
        """Tokens of one adapter beside each other."""
        self.scheduled.sort(key=lambda each: each.sequence.adapter_index)

    def plan(self, step: int, adapter_ops: tuple[AdapterOp, ...]) -> StepPlan:
        scheduled = self.scheduled
        return StepPlan(
            step=step,
            rows=np.array([each.sequence.row for each in scheduled], dtype=np.int64),
            starts=np.array([each.start for each in scheduled], dtype=np.int64),
            counts=np.array([each.num_tokens for each in scheduled], dtype=np.int64),
            samples=np.array([each.samples for each in scheduled], dtype=np.bool_),
            asks=np.array([each.asks for each in scheduled], dtype=np.bool_),
            adapter_indices=np.array([each.sequence.adapter_index for each in scheduled], dtype=np.int64),
            new_rows=tuple(self.new_rows),
            new_blocks=np.array(self.new_blocks, dtype=np.int64).reshape(-1, 3),
            adapter_ops=adapter_ops,
        )
