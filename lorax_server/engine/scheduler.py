"""What is computed in each step, and for whom. Plain Python: no tensors, no clock but the one it is given."""

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from lorax_server.engine.blocks import BlockPool
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.pace import Pace
from lorax_server.engine.sequence import Sequence
from lorax_server.errors import InputError, LoraxError, OverloadedError, SourceError
from lorax_server.plan import AdapterOp, NewRow, RopeRule, StepPlan, StepResult
from lorax_server.types import Output, Request


@dataclass(frozen=True)
class Limits:
    """What a step and the workers can hold."""

    max_step_tokens: int  # that are computed in a step
    max_rows: int  # sequences that run at once
    max_length: int  # tokens of a sequence
    max_chunk: int | None = None  # tokens of one sequence in a step, so that others can begin beside a long prompt
    can_chunk: bool = True  # else a sequence is computed in one step up to its last token, and never gives way
    can_reuse: bool = True  # blocks of one sequence can serve another
    rope: RopeRule = field(default_factory=RopeRule)
    max_waiting: int | None = None  # requests; more are refused
    max_wait_s: float | None = None  # requests that would probably wait for longer are refused
    adapter_timeout_s: float | None = None  # how long a request waits for its adapter to come

    def __post_init__(self) -> None:
        assert self.max_chunk is None or self.max_chunk > 0, self.max_chunk
        assert self.max_step_tokens >= self.max_rows > 0, "every running sequence needs a token of each step"
        least = self.max_length + self.max_rows
        assert self.can_chunk or self.max_step_tokens >= least, "a prompt must fit into a step beside all that run"


class Adapters(Protocol):
    """What the scheduler asks about adapters, and tells those who move them."""

    def add_request(self, identity: str) -> None:
        """A request needs it; raises if it cannot be had."""

    def end_request(self, identity: str, has_begun: bool) -> None: ...

    def vocab_size(self, identity: str) -> int:
        """Of one that the workers have."""

    def index_of(self, identity: str, has_begun: bool) -> int | None:
        """Where the workers have it; None if a sequence cannot begin, or go on, with it now."""

    def bring(self, identity: str) -> None:
        """Somebody waits for it; `Scheduler.adapter_arrived` or `adapter_failed` is to be called then."""

    def begin(self, identity: str) -> None:
        """A sequence runs for the first time."""

    def hold(self, identity: str) -> None:
        """It must stay while a sequence runs that needs it."""

    def release(self, identity: str) -> None: ...

    @property
    def needs_step(self) -> bool:
        """Whether there is something to be told to the workers."""

    @property
    def is_loading(self) -> bool:
        """Whether something is on its way that the workers will report."""

    def submit(self) -> tuple[AdapterOp, ...]:
        """A step goes out, and this with it."""

    def completed(self, step: int, loaded: Iterable[int]) -> None: ...


class _Scheduled(NamedTuple):
    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class _InFlight(NamedTuple):
    step: int
    num_tokens: int
    submitted: float
    sampled: list[Sequence]  # those that a token is chosen for
    asking: list[tuple[Sequence, int]]  # those whose prompt is reported on, and the first token that is computed


@dataclass
class Counters:
    """What happened so far."""

    preemptions: int = 0
    chunks: int = 0  # prompts, or what is recomputed, that did not fit into one step
    prefix_tokens: int = 0  # that were found instead of computed
    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    refused: int = 0  # requests, because of overload


@dataclass
class _Draft:
    """A plan that is being made."""

    budget: int
    scheduled: list[_Scheduled] = field(default_factory=list)
    placed: set[Sequence] = field(default_factory=set)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)


class Scheduler:
    """Knows no prompts and no decoding, only how many tokens of each sequence are computed in a step.

    `schedule` may be called again before the result of the step is there: tokens that are not known yet are counted,
    not named. A sequence that then turns out to have ended had one step too many, whose token is dropped.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        adapters: Adapters,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self._pool = pool
        self._adapters = adapters
        self._clock = clock
        self._pace = Pace()
        self._waiting = FairQueue(weights)
        self._cold: dict[str, set[Sequence]] = {}  # those that wait for an adapter, by its identity
        self._cold_queue: deque[tuple[float, Sequence]] = deque()  # of them, who waits how long; some are gone already
        self._failed: list[Output] = []  # to be told
        self._unsettled: set[Sequence] = set()  # those that were preempted while a token of theirs was in flight
        self._running: list[Sequence] = []  # by rank
        self._by_id: dict[int, Sequence] = {}
        self._free_rows = list(reversed(range(limits.max_rows)))
        self._in_flight: deque[_InFlight] = deque()
        self._backlog = 0.0  # tokens expected of those that have not begun
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """Of those that wait: for nothing but their turn."""
        return len(self._waiting)

    @property
    def num_cold(self) -> int:
        """Of those that wait: for their adapter."""
        return sum(map(len, self._cold.values()))

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def deadline_s(self) -> float | None:
        """When `schedule` is to be called though nothing has happened: when a request gives up its adapter."""
        return max(0.0, self._cold_queue[0][0] - self._clock()) if self._cold_queue else None

    def add(self, request: Request) -> None:
        """Take a request, or refuse what could never run."""
        length = len(request.prompt_ids) + request.stop.max_new_tokens
        most = min(self.limits.max_length, self._pool.num_blocks * self._pool.block_size)
        if not request.prompt_ids:
            raise InputError("`inputs` cannot be empty")
        if length > most:
            raise InputError(
                f"`inputs` tokens + `max_new_tokens` must be <= {most}. Given: {len(request.prompt_ids)} `inputs` "
                f"tokens and {request.stop.max_new_tokens} `max_new_tokens`"
            )
        assert request.request_id not in self._by_id, f"request {request.request_id} is here already"
        self._refuse_overload()
        self._adapters.add_request(request.adapter)
        sequence = Sequence(request, self._num_arrived)
        sequence.rope_variant = self.limits.rope.variant(len(request.prompt_ids))
        sequence.cost = self._pace.expect(request)
        self._backlog += sequence.cost
        self._num_arrived += 1
        self._by_id[request.request_id] = sequence
        self._wait(sequence)

    def adapter_arrived(self, identity: str) -> None:
        for sequence in self._cold.pop(identity, ()):
            self._enqueue(sequence)

    def adapter_failed(self, identity: str, error: LoraxError) -> None:
        for sequence in tuple(self._cold.get(identity, ())):
            self._fail(sequence, error)

    def abort(self, request_id: int) -> None:
        """Let go of a request wherever it is. One that is not here has ended already."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step; None if there is nothing to do now."""
        self._give_up_waiting()
        draft = _Draft(self.limits.max_step_tokens)
        long = []
        for sequence in tuple(self._running):
            num_tokens = sequence.num_uncomputed
            if num_tokens == 1:
                self._continue(draft, sequence, 1)
            elif num_tokens > 1:
                long.append(sequence)  # after all that need a single token
        for sequence in long:
            self._continue(draft, sequence, sequence.num_uncomputed)
        while draft.budget > 0 and self._free_rows and self._admit(draft):
            pass
        is_needed = draft.scheduled or self._adapters.needs_step
        # What is on its way is heard of with the result of a step, so there must be one.
        must_ask = self._adapters.is_loading and not self._in_flight
        return self._submit(draft) if is_needed or must_ask else None

    def update(self, result: StepResult) -> list[Output]:
        """Take note of the oldest step in flight; what is to be told."""
        done = self._in_flight.popleft()
        assert done.step == result.step, f"step {done.step} was to come next, not {result.step}"
        self._pace.step(done.num_tokens, done.submitted, self._clock())
        self._adapters.completed(result.step, result.loaded)
        for (sequence, start), logprobs in zip(done.asking, result.prompt_logprobs, strict=True):
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs[start : start + len(logprobs)] = logprobs
        outputs = []
        for place, sequence in enumerate(done.sampled):
            sequence.num_in_flight -= 1
            if not sequence.finished:
                outputs.append(self._take_token(sequence, result, place))
        self.counters.generated_tokens += len(outputs)
        return self.take_failed() + outputs

    def take_failed(self) -> list[Output]:
        """Failures that were not told yet."""
        taken, self._failed = self._failed, []
        return taken

    def _take_token(self, sequence: Sequence, result: StepResult, place: int) -> Output:
        request_id, token_id, logprob = sequence.request.request_id, result.token_ids[place], result.logprobs[place]
        if math.isnan(logprob):
            self._end(sequence)
            return Output.failed(
                request_id, LoraxError("the model's scores are not numbers (too large for its dtype?)")
            )
        sequence.token_ids.append(token_id)
        reason = sequence.ended_by(token_id)
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None  # with the first token only
        if reason is not None:
            self._pace.finish(len(sequence.token_ids) - len(sequence.request.prompt_ids))
            self._end(sequence)
        elif sequence in self._unsettled and not sequence.num_in_flight:
            self._unsettled.remove(sequence)
            self._wait(sequence)
        return Output(request_id, token_id, logprob, reason, result.alternatives.get(place), prompt_logprobs)

    # --- What is refused or given up ----------------------------------------------------------------------------------

    def _refuse_overload(self) -> None:
        limits, wait_s = self.limits, self._pace.seconds_for(self._backlog)
        is_full = limits.max_waiting is not None and self.num_waiting >= limits.max_waiting
        is_late = limits.max_wait_s is not None and wait_s > limits.max_wait_s
        if is_full or is_late:
            self.counters.refused += 1
            raise OverloadedError(
                f"{self.num_waiting} requests are waiting, about {wait_s:.0f} s of work; try again later",
                retry_after_s=max(1.0, wait_s - (limits.max_wait_s or 0.0)),
            )

    def _give_up_waiting(self) -> None:
        """Fail those that have waited for their adapter for too long."""
        now = self._clock() if self._cold_queue else 0.0
        while self._cold_queue:
            until, sequence = self._cold_queue[0]
            is_cold = sequence in self._cold.get(sequence.request.adapter, ()) and not sequence.has_begun
            is_current = is_cold and until == sequence.cold_until
            if is_current and until > now:
                return
            self._cold_queue.popleft()
            if is_current:
                limit = self.limits.adapter_timeout_s
                self._fail(sequence, SourceError(f"the adapter did not arrive within {limit:g} s; try again"))

    def _find_problem(self, sequence: Sequence) -> InputError | None:
        """What fails in a step fails for all, so token ids are checked before."""
        request, vocab_size = sequence.request, self._adapters.vocab_size(sequence.request.adapter)
        if max(request.prompt_ids) >= vocab_size or min(request.prompt_ids) < 0:
            return InputError(f"`inputs` has tokens beyond the vocabulary of {vocab_size}")
        if max(request.sampling.logit_bias, default=0) >= vocab_size:
            return InputError(f"`logit_bias` has tokens beyond the vocabulary of {vocab_size}")
        if request.stop.min_new_tokens and request.stop.ending_token_ids.issuperset(range(vocab_size)):
            return InputError("`min_new_tokens`: every token of the vocabulary would end the request")
        return None

    def _fail(self, sequence: Sequence, error: LoraxError) -> None:
        self._failed.append(Output.failed(sequence.request.request_id, error))
        self._end(sequence)

    # --- A step -------------------------------------------------------------------------------------------------------

    def _continue(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        count = self._share(draft, num_tokens)
        # Without a row it was preempted for one before it.
        if count > 0 and sequence.row is not None and self._make_room(draft, sequence, count):
            self._put(draft, sequence, count, samples=count == num_tokens)

    def _share(self, draft: _Draft, num_tokens: int) -> int:
        if not self.limits.can_chunk:
            return num_tokens if num_tokens <= draft.budget else 0
        return min(num_tokens, draft.budget, self.limits.max_chunk or draft.budget)

    def _make_room(self, draft: _Draft, sequence: Sequence, count: int) -> bool:
        """Hold blocks for more tokens, if need be those of sequences that come after it and have no part in the step.

        Where that is not enough it keeps what it has and waits. The first of all can always go on, since it fits alone.
        """
        while not self._hold_blocks(sequence, count):
            last = next((each for each in reversed(self._running) if each not in draft.placed), None)
            if last is None or last.rank <= sequence.rank:
                return False
            self._preempt(last)
        return True

    def _hold_blocks(self, sequence: Sequence, count: int) -> bool:
        wanted = -(-(sequence.num_computed + count) // self._pool.block_size) - len(sequence.blocks)
        if wanted > 0:
            more = self._pool.allocate(wanted)
            if more is None:
                return False
            sequence.blocks += more
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """It gives up its blocks and waits; its tokens stay, and are computed again where they are not found."""
        self.counters.preemptions += 1
        self._leave(sequence)
        if sequence.num_in_flight:
            self._unsettled.add(sequence)
        else:
            self._wait(sequence)

    def _admit(self, draft: _Draft) -> bool:
        """Let the next one in that waits, if there are blocks for as much of it as the step has left."""
        sequence = self._next()
        if sequence is None:
            return False
        block_size = self._pool.block_size
        sequence.blocks = self._pool.reuse(sequence.hashes(block_size)[: self._num_reusable(sequence)])
        sequence.num_published = len(sequence.blocks)
        sequence.num_computed = len(sequence.blocks) * block_size
        num_tokens = sequence.num_uncomputed
        count = self._share(draft, num_tokens)
        if count == 0 or not self._hold_blocks(sequence, count):
            self._give_back_blocks(sequence)
            return False
        self._waiting.remove(sequence)
        self._enter(draft, sequence)
        self._put(draft, sequence, count, samples=count == num_tokens)
        return True

    def _num_reusable(self, sequence: Sequence) -> int:
        """Blocks: one token at least is computed, to choose from, and all that are to be reported on."""
        if not self.limits.can_reuse or sequence.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self._pool.block_size

    def _put(self, draft: _Draft, sequence: Sequence, count: int, samples: bool) -> None:
        """A number of the sequence's tokens into the step; it holds the blocks for them."""
        assert sequence.row is not None
        for place in range(sequence.num_sent_blocks, len(sequence.blocks)):
            draft.new_blocks.append((sequence.row, place, sequence.blocks[place]))
        sequence.num_sent_blocks = len(sequence.blocks)
        draft.scheduled.append(_Scheduled(sequence, sequence.num_computed, count, samples))
        draft.placed.add(sequence)
        draft.budget -= count
        sequence.num_computed += count
        sequence.num_in_flight += samples
        self._waiting.charge(sequence.request.tenant, count)  # at once: it decides who is let in next

    def _submit(self, draft: _Draft) -> StepPlan:
        # Tokens of one adapter beside each other.
        scheduled = sorted(draft.scheduled, key=lambda each: each.sequence.adapter_index)
        num_tokens = self.limits.max_step_tokens - draft.budget
        asks = [_asks(each) for each in scheduled]
        self.counters.steps += 1
        self._in_flight.append(
            _InFlight(
                self.counters.steps,
                num_tokens,
                self._clock(),
                [each.sequence for each in scheduled if each.samples],
                [(each.sequence, each.start) for each, does in zip(scheduled, asks, strict=True) if does],
            )
        )
        for each in scheduled:
            self._publish(each.sequence)
        self.counters.computed_tokens += num_tokens
        self.counters.chunks += sum(not each.samples for each in scheduled)
        return StepPlan(
            step=self.counters.steps,
            rows=np.array([each.sequence.row for each in scheduled], dtype=np.int64),
            starts=np.array([each.start for each in scheduled], dtype=np.int64),
            counts=np.array([each.num_tokens for each in scheduled], dtype=np.int64),
            samples=np.array([each.samples for each in scheduled], dtype=np.bool_),
            asks=np.array(asks, dtype=np.bool_),
            adapter_indices=np.array([each.sequence.adapter_index for each in scheduled], dtype=np.int64),
            new_rows=tuple(draft.new_rows),
            new_blocks=np.array(draft.new_blocks, dtype=np.int64).reshape(-1, 3),
            adapter_ops=self._adapters.submit(),
        )

    def _publish(self, sequence: Sequence) -> None:
        """Let others find the blocks that are full, once it is known what they are full of."""
        block_size = self._pool.block_size
        full = min(sequence.num_computed, len(sequence.token_ids)) // block_size
        if full > sequence.num_published:
            hashes = sequence.hashes(block_size)
            for place in range(sequence.num_published, full):
                self._pool.publish(sequence.blocks[place], hashes[place])
            sequence.num_published = full

    # --- Coming and going ---------------------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        identity = sequence.request.adapter
        if self._adapters.index_of(identity, sequence.has_begun) is not None:
            self._enqueue(sequence)
            return
        self._cold.setdefault(identity, set()).add(sequence)
        if self.limits.adapter_timeout_s is not None and not sequence.has_begun:
            sequence.cold_until = self._clock() + self.limits.adapter_timeout_s
            self._cold_queue.append((sequence.cold_until, sequence))
        self._adapters.bring(identity)

    def _enqueue(self, sequence: Sequence) -> None:
        """Its adapter is there, and with it is known what it can take."""
        self._waiting.push(sequence)
        problem = None if sequence.has_begun else self._find_problem(sequence)
        if problem is not None:
            self._fail(sequence, problem)

    def _next(self) -> Sequence | None:
        """The next one that can run. Those whose adapter has left meanwhile wait for it again."""
        while (sequence := self._waiting.peek()) is not None:
            if self._adapters.index_of(sequence.request.adapter, sequence.has_begun) is not None:
                return sequence
            self._waiting.remove(sequence)
            self._wait(sequence)
        return None

    def _enter(self, draft: _Draft, sequence: Sequence) -> None:
        request = sequence.request
        sequence.row = self._free_rows.pop()
        tokens = sequence.token_ids.copy()
        draft.new_rows.append(NewRow(sequence.row, tokens, len(request.prompt_ids), request.sampling, request.stop))
        index = self._adapters.index_of(request.adapter, sequence.has_begun)
        assert index is not None
        sequence.adapter_index = index
        if not sequence.has_begun:
            sequence.has_begun = True
            self._backlog -= sequence.cost
            self._adapters.begin(request.adapter)
        self._adapters.hold(request.adapter)
        insort(self._running, sequence, key=lambda each: each.rank)
        self.counters.prefix_tokens += sequence.num_computed

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = None
        self._give_back_blocks(sequence)
        self._adapters.release(sequence.request.adapter)

    def _give_back_blocks(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = sequence.num_sent_blocks = 0

    def _end(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self._by_id[sequence.request.request_id]
        adapter = sequence.request.adapter
        cold = self._cold.get(adapter, set())
        if sequence.row is not None:
            self._leave(sequence)
        elif sequence in self._unsettled:
            self._unsettled.remove(sequence)
        elif sequence in cold:
            cold.remove(sequence)
            if not cold:
                del self._cold[adapter]
        else:
            self._waiting.remove(sequence)
        self._backlog -= 0.0 if sequence.has_begun else sequence.cost
        self._adapters.end_request(adapter, sequence.has_begun)


def _asks(scheduled: _Scheduled) -> bool:
    sequence = scheduled.sequence
    return sequence.prompt_logprobs is not None and scheduled.start < len(sequence.request.prompt_ids) - 1
