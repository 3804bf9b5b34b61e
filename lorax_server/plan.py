"""Plans of steps, from the engine to the workers, and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """Begin to prepare an adapter in host memory; a `Prepared` reports the end."""

    spec: AdapterSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Begin to copy a prepared adapter to the device."""

    identity: str
    index: int  # by which steps name it
    first_unit: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy an adapter to a lower position in the device's buffer."""

    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Free an index: no step from this one on uses it, until another adapter gets it."""

    index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop a prepared adapter from host memory."""

    identity: str


AdapterOp = Prepare | Load | Move | Unload | Drop


@dataclass(frozen=True)
class Prepared:
    """The end of a preparation, on every rank: the adapter can be loaded, or the error."""

    identity: str
    units: int = 0  # of the device's buffer
    num_bytes: int = 0  # of host memory
    vocab_size: int = 0
    error: LoraxError | None = None


# --- Steps ------------------------------------------------------------------------------------------------------------


class NewSequence(NamedTuple):
    """A sequence that takes a slot of the workers' tables, with all its tokens so far."""

    slot: int
    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop: StopParams


@dataclass(frozen=True)
class StepPlan:
    """Columns with an entry for each sequence of the step, in the order of their adapters; there may be none.

    A plan does not name tokens: the workers have them, also those that they have chosen themselves and that the engine
    does not know yet.
    """

    step: int
    slots: Ints
    starts: Ints  # tokens computed before
    counts: Ints  # tokens to be computed now
    samples: Bools  # the token after them is chosen
    scores_prompt: Bools  # log probabilities of the prompt's tokens among them are reported
    adapter_indices: Ints
    new_sequences: tuple[NewSequence, ...]
    new_blocks: Ints  # [blocks, 3] slot, index in its table, block
    adapter_ops: tuple[AdapterOp, ...] = ()  # done before the step, in this order
    is_masked: bool = False  # tokens are chosen when a `StepMasks` has come

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    def without_sequences(self) -> "StepPlan":
        """Return a plan that tells of the same slots and blocks, and computes nothing; the adapters' part is done."""
        none, no = np.empty(0, np.int64), np.empty(0, np.bool_)
        numbers = replace(self, slots=none, starts=none, counts=none, adapter_indices=none)
        return replace(numbers, samples=no, scores_prompt=no, adapter_ops=(), is_masked=False)


class StepMasks(NamedTuple):
    """The tokens that some sequences of a step may choose from."""

    rows: Ints  # of the logits: indices among the sequences with `samples`
    words: Sequence[npt.NDArray[np.int32]]  # for each row a bit for each allowed token; tokens beyond are not allowed
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()  # rows that get more tokens after the sampled one


@dataclass(frozen=True)
class StepResult:
    """The chosen tokens, in the order of the plan's sequences that `samples`."""

    step: int
    token_ids: list[int]
    logprobs: list[float]
    alternatives: Mapping[int, Alternatives] = field(default_factory=dict)  # by index in `token_ids`
    prompt_logprobs: list[list[float]] = field(default_factory=list)
    """For each sequence that `scores_prompt`: of the prompt's tokens after each computed one."""
    prompt_alternatives: Mapping[int, list[Alternatives]] = field(default_factory=dict)
    """By index in `prompt_logprobs`, of sequences that ask for alternatives: one for each log probability."""
    loaded: list[int] = field(default_factory=list)  # adapter indices whose load has ended


# --- Capabilities -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeRule:
    """The way in which a model's rotary angles depend on the length of the prompt."""

    unscaled_length: int | None = None  # up to this length they do not; None: they never do
    by_length: bool = False  # beyond it, every length has angles of its own

    def variant(self, prompt_length: int) -> str:
        """Return a name of the angles. Sequences can share keys only if it is the same."""
        if self.unscaled_length is None or prompt_length <= self.unscaled_length:
            return ""
        return str(prompt_length) if self.by_length else "long"


@dataclass(frozen=True)
class Capabilities:
    """The sizes of an executor, and its features."""

    vocab_size: int
    max_num_seqs: int  # sequences at once
    max_length: int  # tokens of a sequence
    num_blocks: int
    block_size: int
    max_step_tokens: int = 512  # computed in a step
    max_mixed_tokens: int | None = None  # of prompts, in a step in which other sequences decode; None: no limit
    depth: int = 1  # steps that may be in flight at once
    is_synchronous: bool = False  # a step has its scores when `submit` returns
    can_chunk: bool = True  # a prompt can be computed in parts, and again after a preemption
    can_reuse: bool = True  # blocks of one sequence can serve another
    num_adapter_units: int = 0  # 0: there are no adapters
    adapter_unit_bytes: int = 256
    max_adapters: int = 2**31 - 1  # on the device at once: indices 1 to this
    itemsize: int = 4  # bytes of a number of an adapter
    max_inputs: int = 0  # of any matrix that adapters change
    model_type: str = ""
    model_class: str = ""
    dtype: str = ""  # of the weights
    rope: RopeRule = field(default_factory=RopeRule)
