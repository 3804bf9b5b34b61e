"""Step plans from the engine to the workers, and step results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.errors import LoraxError
from lorax_server.types import Alternatives, Pooled, SamplingParams, StopParams

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


# --- Adapters ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareOp:
    """Worker operation: prepare an adapter in host memory. `PrepareResult` reports the result."""

    spec: AdapterSpec
    is_packed: bool = False  # `Executor.pack` has packed the adapter and returned the result


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Worker operation: copy a prepared adapter to the device."""

    identity: str
    index: int  # used in `StepPlan.adapter_indices`
    first_unit: int
    is_ordered: bool = False  # the next step may use the adapter; results do not report the load


@dataclass(frozen=True, slots=True)
class MoveOp:
    """Worker operation: move an adapter to a lower position in the device buffer."""

    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class UnloadOp:
    """Worker operation: free an adapter index. Later steps do not use the index until another adapter is loaded."""

    index: int


@dataclass(frozen=True, slots=True)
class DropOp:
    """Worker operation: drop a prepared adapter from host memory."""

    identity: str


AdapterOp = PrepareOp | LoadOp | MoveOp | UnloadOp | DropOp


@dataclass(frozen=True)
class PrepareResult:
    """The result of `PrepareOp` on all ranks or of `Executor.pack`, with the adapter sizes or the error."""

    identity: str
    units: int = 0  # size in the device buffer
    num_bytes: int = 0  # size in host memory
    vocab_size: int = 0
    error: LoraxError | None = None
    changes_kv: bool = True  # keys and values depend on the adapter
    is_on_device: bool = False  # packed in device memory, so that the load takes much less time than a step


# --- Steps ------------------------------------------------------------------------------------------------------------


class Drafts(NamedTuple):
    """Draft tokens to verify in a step: the last tokens of their sequences, guessed by the engine."""

    counts: Ints  # draft tokens per sequence, in plan order
    token_ids: Ints  # all draft tokens, in plan order


class NewSequence(NamedTuple):
    """A sequence that starts running in `slot`, with all its tokens so far."""

    slot: int
    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop: StopParams
    second_start: int = 0  # see `Request`


@dataclass(frozen=True)
class StepPlan:
    """Describes a step. Each column has one entry per sequence, and the entries are sorted by adapter. A plan may have
    no sequences.

    A plan contains token positions instead of token IDs, because the workers store the tokens, and the engine may not
    have received the latest sampled tokens yet. The only exception is draft tokens. A sequence with draft tokens
    samples one token before the first draft token, and one after each draft token.
    """

    step: int
    slots: Ints
    starts: Ints  # number of tokens computed in earlier steps
    counts: Ints  # number of tokens to compute in this step, including draft tokens
    samples: Bools  # True if the step samples the next token
    scores_prompt: Bools  # True if the step returns log probabilities of prompt tokens
    adapter_indices: Ints
    new_sequences: tuple[NewSequence, ...]
    new_blocks: Ints  # [blocks, 3]: slot, index in the slot's block table, block
    adapter_ops: tuple[AdapterOp, ...] = ()  # executed before the step, in this order
    is_masked: bool = False  # sampling waits for `StepMasks`
    drafts: Drafts | None = None
    runs_draft_heads: bool = False  # the result contains `head_guesses`

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    def without_sequences(self) -> "StepPlan":
        """Return a plan with the same slot and block updates, but no tokens and no adapter operations."""
        none, no = np.empty(0, np.int64), np.empty(0, np.bool_)
        plan = replace(self, slots=none, starts=none, counts=none, adapter_indices=none)
        return replace(plan, samples=no, scores_prompt=no, adapter_ops=(), is_masked=False, drafts=None)


class StepMasks(NamedTuple):
    """Token masks for some sampled tokens in a step."""

    rows: Ints  # rows of the logits: indices in `StepResult.token_ids`
    masks: Sequence[npt.NDArray[np.int32]]  # one bit per token; tokens beyond a mask's end are not allowed
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, forced tokens after the sampled token)


@dataclass(frozen=True)
class StepResult:
    """The result of a step: sampled tokens for each sequence with `samples`, in plan order.

    A sequence has one sampled token, and one more for each draft token. A sampled token is valid if all draft tokens
    before it are equal to the sampled tokens at their positions.
    """

    step: int
    token_ids: list[int]
    logprobs: list[float]
    alternatives: Mapping[int, Alternatives] = field(default_factory=dict)  # by index in `token_ids`
    prompt_logprobs: list[list[float]] = field(default_factory=list)
    """One list per sequence with `scores_prompt`: log probabilities of the prompt token after each computed token."""
    prompt_alternatives: Mapping[int, list[Alternatives]] = field(default_factory=dict)
    """Maps indices in `prompt_logprobs` to one entry per log probability, for sequences that request alternatives."""
    head_guesses: list[list[int]] = field(default_factory=list)
    """By index in `token_ids`, the tokens that the draft heads guess after this sampled token."""
    loaded: list[int] = field(default_factory=list)  # adapter indices whose load has finished
    expert_imbalance: float | None = None  # see `ExpertBalance`; None if it was not measured in this step
    pooled: Sequence[Pooled] = ()  # one result for each sequence with `samples`, if the model does not generate text


# --- Capabilities -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeRule:
    """A rule for choosing the RoPE scaling by prompt length."""

    unscaled_length: int | None = None  # prompts up to this length are not scaled; None if no prompt is scaled
    depends_on_length: bool = False  # True if each longer prompt length has different angles

    def variant(self, prompt_length: int) -> str:
        """Return an ID for the RoPE angles of a prompt. Sequences share KV blocks only if their IDs are equal."""
        if self.unscaled_length is None or prompt_length <= self.unscaled_length:
            return ""
        return str(prompt_length) if self.depends_on_length else "long"


@dataclass(frozen=True)
class Capabilities:
    """An executor's sizes and supported features."""

    vocab_size: int
    max_num_seqs: int  # maximum number of running sequences
    max_length: int  # maximum number of tokens per sequence
    num_blocks: int
    block_size: int
    max_step_tokens: int = 512  # maximum number of tokens per step
    max_mixed_tokens: int | None = None  # maximum prompt tokens in a step that also decodes; None if unlimited
    max_steps_in_flight: int = 1
    is_synchronous: bool = False  # `submit` blocks until the forward pass is done
    can_chunk: bool = True  # supports chunked prefill and preemption
    can_reuse: bool = True  # supports prefix caching
    num_adapter_units: int = 0  # size of the adapter buffer; 0 if adapters are not supported
    adapter_unit_bytes: int = 256
    max_adapters: int = 2**31 - 1  # maximum number on the device; their indices are 1 to max_adapters
    itemsize: int = 4  # bytes per adapter element
    max_inputs: int = 0  # largest input dimension of the target modules
    model_type: str = ""
    model_class: str = ""
    dtype: str = ""  # model dtype
    weight_format: str = ""  # how the weights are stored, such as bfloat16 or Q4_K; empty if unknown
    weight_bytes: int = 0
    rope: RopeRule = field(default_factory=RopeRule)
    num_draft_heads: int = 0
    task: str = "generate"
