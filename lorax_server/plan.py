"""What the engine tells the workers to do, and what they answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.errors import LoraxError
from lorax_server.types import Alternatives, SamplingParams, StopParams

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


# --- Adapters ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Begin to make an adapter ready, in host memory; `Prepared` will tell when it is."""

    spec: AdapterSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Begin to copy an adapter, which has been prepared, to the device."""

    identity: str
    index: int  # by which steps call it
    first_unit: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy an adapter to a lower place of the device's buffer."""

    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Unload:
    """No step from this one on uses the index, until it is given to another."""

    index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what was prepared."""

    identity: str


AdapterOp = Prepare | Load | Move | Unload | Drop


@dataclass(frozen=True)
class Prepared:
    """An adapter is ready to be loaded on every rank; or why it cannot be."""

    identity: str
    units: int = 0  # of the device's buffer
    num_bytes: int = 0  # of this machine's memory
    vocab_size: int = 0
    error: LoraxError | None = None


# --- Steps ------------------------------------------------------------------------------------------------------------


class NewRow(NamedTuple):
    """A sequence that takes a row of the workers' tables, with all its tokens so far."""

    row: int
    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop: StopParams


@dataclass(frozen=True)
class StepPlan:
    """Columns with an entry for each sequence of the step, in the order of their adapters; there may be none.

    Which tokens are computed is not said: the workers have them, also those they have chosen themselves and that the
    engine does not know yet.
    """

    step: int
    rows: Ints
    starts: Ints  # tokens computed before
    counts: Ints  # tokens to be computed now
    samples: Bools  # whether the token after them is chosen
    asks: Bools  # whether it is reported how likely those of them were that belong to the prompt
    adapter_indices: Ints
    new_rows: tuple[NewRow, ...]
    new_blocks: Ints  # [blocks, 3] row, place in its table, block
    adapter_ops: tuple[AdapterOp, ...] = ()  # to be done before, in this order
    token_masks: npt.NDArray[np.int32] | None = None  # [sampled rows, ceil(vocab / 32)] a bit for each allowed token

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True)
class StepResult:
    """The chosen tokens, in the order of those sequences of the plan that `samples`."""

    step: int
    token_ids: list[int]
    logprobs: list[float]
    alternatives: Mapping[int, Alternatives] = field(default_factory=dict)  # by place in `token_ids`
    prompt_logprobs: list[list[float]] = field(default_factory=list)
    """In the order of those sequences that `asks`: of the prompt's tokens after each that was computed."""
    prompt_alternatives: Mapping[int, list[Alternatives]] = field(default_factory=dict)
    """By place in `prompt_logprobs`, of those that ask for alternatives: as many as there are log probabilities."""
    loaded: list[int] = field(default_factory=list)  # adapter indices whose load has ended


# --- What workers can do ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeRule:
    """How a model's rotary angles depend on the length of the prompt."""

    unscaled_length: int | None = None  # up to here they do not; None: they never do
    by_length: bool = False  # beyond it, every length has angles of its own, not only all of them together

    def variant(self, prompt_length: int) -> str:
        """Keys of two sequences can be shared only if this is the same."""
        if self.unscaled_length is None or prompt_length <= self.unscaled_length:
            return ""
        return str(prompt_length) if self.by_length else "long"


@dataclass(frozen=True)
class Capabilities:
    """What an executor holds, and what it cannot do."""

    vocab_size: int
    max_rows: int  # sequences at once
    max_length: int  # tokens of a sequence
    num_blocks: int
    block_size: int
    max_step_tokens: int = 512  # that are computed in a step
    depth: int = 1  # steps that may be under way at once
    can_chunk: bool = True  # a prompt can be computed in parts, and again after it was given up
    can_reuse: bool = True  # blocks of one sequence can serve another
    num_adapter_units: int = 0  # 0: there are no adapters
    adapter_unit_bytes: int = 256
    itemsize: int = 4  # bytes of a number of an adapter
    model_type: str = ""
    model_class: str = ""
    dtype: str = ""  # of the weights
    rope: RopeRule = field(default_factory=RopeRule)
