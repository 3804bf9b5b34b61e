"""The engine's state for a completion. Only the scheduler and its helper classes modify this state."""

import itertools
import math
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from lorax_server.engine.block_pool import adapter_hash, chain_hash, root_hash
from lorax_server.generation.stopping import find_stop_reason
from lorax_server.types import Alternatives, FinishReason, Output, Request, StartInfo

NEVER = sys.maxsize  # token index after all tokens


@dataclass(eq=False, slots=True)
class Sequence:
    """A completion's tokens, and its KV blocks and slot on the workers."""

    request: Request
    arrival: int
    token_ids: list[int] = field(init=False)
    num_in_flight: int = 0  # steps in flight that sample for this sequence; their tokens are not known yet
    head_guesses: Seq[int] = ()  # tokens that the draft heads guessed
    first_head_guess: int = 0  # position of the first of these tokens
    num_drafts: int = 0  # draft tokens in flight; until their step is done, no other step is scheduled
    forced_tokens: tuple[int, ...] = ()  # forced tokens that follow the token in flight
    has_forced_tokens: bool = False  # forced tokens are waiting to be computed
    num_computed: int = 0  # tokens in the KV cache once the steps in flight finish
    num_published: int = 0  # leading blocks that are published in the prefix cache
    is_mixed: bool = False  # several adapters computed the keys and values, so no more blocks are published
    num_sent_blocks: int = 0  # blocks that were sent to the workers
    slot: int | None = None  # set while the sequence is running
    adapter_index: int = 0  # set while the sequence is running
    is_checked: bool = False  # the prompt's token IDs are in the adapter's vocabulary, and the next two fields are set
    adapter_start: int = 0  # first token that the adapter applies to; not 0 for aLoRA
    kv_adapter_start: int = 0  # first token whose keys and values depend on the adapter
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens that fit into `blocks`
    has_started: bool = False  # was scheduled at least once
    is_finished: bool = False
    arrived_at: float = 0.0
    adapter_wait_start: float | None = None  # set while the adapter is being loaded
    adapter_wait_s: float = 0.0  # total time spent waiting for the adapter, without the current wait
    start_info: StartInfo | None = None  # reported with the first token
    expected_tokens: float = 0.0  # estimated prompt and completion tokens, at arrival
    prompt_logprobs: list[float] | None = field(init=False)  # from the second prompt token on; filled by prefill chunks
    prompt_alternatives: list[Alternatives] | None = field(init=False)  # at the same positions
    rope_variant: str = ""
    fairness_key: tuple[str, str] = field(init=False)  # (tenant, adapter) charged for its tokens
    _max_tokens: int = field(init=False)
    _all_stop_token_ids: frozenset[int] = field(init=False)
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids = list(request.prompt_ids)
        num_reported = len(self.token_ids) - 1
        has_alternatives = request.prompt_logprobs and request.sampling.num_alternatives > 0
        self.prompt_logprobs = [math.nan] * num_reported if request.prompt_logprobs else None
        self.prompt_alternatives = [Alternatives([], [])] * num_reported if has_alternatives else None
        self.fairness_key = request.tenant, request.adapter_identity
        self._max_tokens = len(self.token_ids) + request.stop.max_new_tokens
        self._all_stop_token_ids = request.stop.all_stop_token_ids

    def record_prompt_logprobs(
        self, start: int, logprobs: list[float], alternatives: list[Alternatives] | None
    ) -> None:
        """Store log probabilities for the prompt tokens that follow token `start`."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[start : start + len(logprobs)] = logprobs
        if alternatives is not None:
            assert self.prompt_alternatives is not None
            self.prompt_alternatives[start : start + len(alternatives)] = alternatives

    def attach_start_info(self, output: Output) -> Output:
        """Move the start information and the prompt log probabilities to the first output, and return the output."""
        output = output._replace(
            start_info=self.start_info,
            prompt_logprobs=self.prompt_logprobs,
            prompt_alternatives=self.prompt_alternatives,
        )
        self.start_info = self.prompt_logprobs = self.prompt_alternatives = None
        return output

    def switch_adapter(self, identity: str, start: int, kv_start: int) -> None:
        """Compute the next tokens with another adapter, and keep the existing keys and values.

        `start` and `kv_start` are the new `adapter_start` and `kv_adapter_start`.
        """
        self.request = replace(self.request, adapter_identity=identity)
        self.fairness_key = self.request.tenant, identity
        self.adapter_start, self.kv_adapter_start = start, kv_start
        self.is_mixed, self.is_checked = bool(self.blocks), False
        self._hashes = []

    @property
    def num_uncomputed(self) -> int:
        """The number of tokens to compute before the next token can be sampled, or 0 if the last token is in flight."""
        if self.num_drafts:
            return 0
        num_tokens = len(self.token_ids) + self.num_in_flight + len(self.forced_tokens)
        return num_tokens - self.num_computed if num_tokens < self._max_tokens else 0

    @property
    def num_base_tokens(self) -> int:
        """The number of tokens to compute with the base model before the adapter applies."""
        return max(0, self.adapter_start - self.num_computed)

    @property
    def step_adapter_index(self) -> int:
        """The adapter index for the tokens that were added to the current step. No step crosses `adapter_start`."""
        return self.adapter_index if self.num_computed > self.adapter_start else 0

    @property
    def num_remaining(self) -> int:
        """The number of tokens that may be generated after the tokens in flight."""
        return self._max_tokens - len(self.token_ids) - self.num_in_flight

    @property
    def can_draft(self) -> bool:
        """Return True if only the last generated token must be computed before the next token can be sampled."""
        if self.num_in_flight or not self.request.speculation:
            return False
        return self.num_uncomputed == 1 and self.num_generated > 0

    def limit_draft(self, draft: Seq[int], max_tokens: int) -> tuple[int, ...]:
        """Return the part of a draft that can be verified in one step. It contains no stop tokens, and leaves room for
        one sampled token.
        """
        stop_ids, limit = self._all_stop_token_ids, min(max_tokens, self.num_remaining - 1)
        allowed = tuple(draft) if len(draft) <= limit else tuple(draft[: max(limit, 0)])
        if stop_ids.isdisjoint(allowed):
            return allowed
        return tuple(itertools.takewhile(lambda token_id: token_id not in stop_ids, allowed))

    def continues_after(self, token_ids: Seq[int]) -> bool:
        """Return True if the sequence continues after these tokens and the forced tokens that follow them."""
        num_tokens = len(self.token_ids) + len(token_ids) + len(self.forced_tokens)
        return token_ids[-1] not in self._all_stop_token_ids and num_tokens < self._max_tokens

    def append(self, *new_ids: int) -> FinishReason | None:
        """Append sampled tokens and the forced tokens that follow them. Return the finish reason, or None.

        Only the last sampled token may be a stop token. Stop strings are checked outside the engine, by `Generation`.
        """
        token_ids = self.token_ids
        token_ids += new_ids
        if self.forced_tokens:
            token_ids += self.forced_tokens
            self.forced_tokens = ()
        reason = None
        if token_ids[-1] in self._all_stop_token_ids:
            reason = find_stop_reason(token_ids[-1], self.num_generated, self.request.stop)
        return FinishReason.LENGTH if reason is None and len(token_ids) >= self._max_tokens else reason

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of all full blocks whose tokens are known."""
        while (start := len(self._hashes) * block_size) + block_size <= len(self.token_ids):
            before = self._hashes[-1] if self._hashes else root_hash(self.rope_variant, self.request.salt)
            if start <= self.kv_adapter_start < start + block_size:
                before = adapter_hash(before, self.request.adapter_identity, self.kv_adapter_start)
            self._hashes.append(chain_hash(before, self.token_ids[start : start + block_size]))
        return self._hashes
