"""A request under way. Only the scheduler changes it, directly or through its builder, its queues and its cache."""

import math
from dataclasses import dataclass, field

from lorax_server.engine.block_pool import chain_hash, root_hash
from lorax_server.generation.stopping import ended_by
from lorax_server.types import Alternatives, FinishReason, Output, Request, Started


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of a request, and what the workers hold of it."""

    request: Request
    arrival: int
    token_ids: list[int] = field(init=False)
    num_in_flight: int = 0  # tokens that steps in flight choose: they count, but are not known
    forced: tuple[int, ...] = ()  # tokens that follow the one in flight, and count as well
    has_jumped: bool = False  # it has got several tokens at once, and is to compute them
    num_computed: int = 0  # tokens whose keys and values are there once the steps in flight are done
    num_published: int = 0  # blocks that other sequences can find
    num_sent_blocks: int = 0  # blocks that the workers know of
    slot: int | None = None  # in the workers' tables, while it is running
    adapter_index: int = 0  # of its adapter there, likewise
    blocks: list[int] = field(default_factory=list)
    room: int = 0  # tokens that these have room for
    has_begun: bool = False  # has run before, if it does not now
    finished: bool = False
    arrived_at: float = 0.0
    adapter_wait_began: float | None = None  # since when it waits for its adapter
    adapter_wait_s: float = 0.0  # how long it has waited for its adapter before
    started: Started | None = None  # reported with its first token
    expected_tokens: float = 0.0  # as guessed when it arrived
    prompt_logprobs: list[float] | None = field(init=False)  # from the second token on, as they become known
    prompt_alternatives: list[Alternatives] | None = field(init=False)  # likewise
    rope_variant: str = ""
    account: tuple[str, str] = field(init=False)  # the tenant and the adapter that its tokens are charged to
    _max_tokens: int = field(init=False)
    _ending_token_ids: frozenset[int] = field(init=False)
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids = list(request.prompt_ids)
        num_reported = len(self.token_ids) - 1
        has_alternatives = request.prompt_logprobs and request.sampling.num_alternatives > 0
        self.prompt_logprobs = [math.nan] * num_reported if request.prompt_logprobs else None
        self.prompt_alternatives = [Alternatives([], [])] * num_reported if has_alternatives else None
        self.account = request.tenant, request.adapter_identity
        self._max_tokens = len(self.token_ids) + request.stop.max_new_tokens
        self._ending_token_ids = request.stop.ending_token_ids

    def note_prompt(self, start: int, logprobs: list[float], alternatives: list[Alternatives] | None) -> None:
        """Note how likely the tokens of the prompt after `start` were."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[start : start + len(logprobs)] = logprobs
        if alternatives is not None:
            assert self.prompt_alternatives is not None
            self.prompt_alternatives[start : start + len(alternatives)] = alternatives

    def report_start(self, output: Output) -> Output:
        """Add to the first output how the sequence started and how likely its prompt was."""
        output = output._replace(
            started=self.started, prompt_logprobs=self.prompt_logprobs, prompt_alternatives=self.prompt_alternatives
        )
        self.started = self.prompt_logprobs = self.prompt_alternatives = None
        return output

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute until the next one can be chosen; none if the last one is on its way."""
        num_tokens = len(self.token_ids) + self.num_in_flight + len(self.forced)
        return num_tokens - self.num_computed if num_tokens < self._max_tokens else 0

    @property
    def num_left(self) -> int:
        """Tokens that it may get beyond those in flight."""
        return self._max_tokens - len(self.token_ids) - self.num_in_flight

    def goes_on(self, token_id: int) -> bool:
        """Tell whether this token and the forced ones after it surely do not end the answer."""
        num_tokens = len(self.token_ids) + 1 + len(self.forced)
        return token_id not in self._ending_token_ids and num_tokens < self._max_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Append a token and the forced ones that follow it. Return why the last is the end, if it is. The detokenizer
        finds stop strings."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if self.forced:
            token_ids += self.forced
            self.forced = ()
        reason = None
        if token_ids[-1] in self._ending_token_ids:
            reason = ended_by(token_ids[-1], self.num_generated, self.request.stop)
        return FinishReason.LENGTH if reason is None and len(token_ids) >= self._max_tokens else reason

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    def hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of all full blocks of known tokens."""
        while (start := len(self._hashes) * block_size) + block_size <= len(self.token_ids):
            before = self._hashes[-1] if self._hashes else self._root_hash()
            self._hashes.append(chain_hash(before, self.token_ids[start : start + block_size]))
        return self._hashes

    def _root_hash(self) -> bytes:
        return root_hash(self.request.adapter_identity, self.rope_variant, self.request.salt)
