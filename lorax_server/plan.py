"""What the engine tells the workers to do in a step, and what they answer."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorax_server.types import SamplingParams, StopParams

Ints = npt.NDArray[np.int64]


class NewRow(NamedTuple):
    """A sequence that takes a row of the workers' tables, with all its tokens so far."""

    row: int
    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop: StopParams


@dataclass(frozen=True)
class StepPlan:
    """Columns with an entry for each sequence of the step, in the order of their adapters.

    Which tokens are computed is not said: the workers have them, also those they have chosen themselves and that the
    engine does not know yet.
    """

    step: int
    rows: Ints
    starts: Ints  # tokens computed before
    counts: Ints  # tokens to be computed now
    samples: npt.NDArray[np.bool_]  # whether the token after them is chosen
    adapter_indices: Ints
    new_rows: tuple[NewRow, ...]
    new_blocks: Ints  # [blocks, 3] row, place in its table, block

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True)
class StepResult:
    """The chosen tokens, in the order of those sequences of the plan that `samples`."""

    step: int
    token_ids: list[int]
    logprobs: list[float]
