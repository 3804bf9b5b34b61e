"""What is computed in each step, and for whom. Plain Python: no tensors, no clock but the one it is given."""

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from lorax_server.engine.blocks import BlockPool
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Sequence
from lorax_server.errors import InputError
from lorax_server.plan import NewRow, StepPlan, StepResult
from lorax_server.stopping import FinishReason
from lorax_server.types import Request


@dataclass(frozen=True)
class Limits:
    """What a step and the workers can hold."""

    max_step_tokens: int  # that are computed in a step
    max_rows: int  # sequences that run at once
    max_length: int  # tokens of a sequence
    max_chunk: int | None = None  # tokens of one sequence in a step, so that others can begin beside a long prompt

    def __post_init__(self) -> None:
        assert self.max_chunk is None or self.max_chunk > 0, self.max_chunk
        assert self.max_step_tokens >= self.max_rows > 0, "every running sequence needs a token of each step"


class Adapters(Protocol):
    """What the scheduler asks about adapters."""

    def index_of(self, identity: str) -> int | None:
        """Where the workers have it; None if they do not yet."""

    def bring(self, identity: str) -> None:
        """Somebody waits for it; `Scheduler.adapter_arrived` is to be called when it is there."""

    def hold(self, identity: str) -> None:
        """It must stay while a sequence runs that needs it."""

    def release(self, identity: str) -> None: ...


class Emitted(NamedTuple):
    """A token of a request, and why it is the last, if it is."""

    request_id: int
    token_id: int
    logprob: float
    finish_reason: FinishReason | None


class _Scheduled(NamedTuple):
    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass
class Counters:
    """What happened so far."""

    preemptions: int = 0
    chunks: int = 0  # prompts, or what is recomputed, that did not fit into one step
    prefix_tokens: int = 0  # that were found instead of computed
    computed_tokens: int = 0


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
        self, limits: Limits, pool: BlockPool, adapters: Adapters, weights: Mapping[str, float] | None = None
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self._pool = pool
        self._adapters = adapters
        self._waiting = FairQueue(weights)
        self._cold: dict[str, set[Sequence]] = {}  # those that wait for an adapter, by its identity
        self._unsettled: set[Sequence] = set()  # those that were preempted while a token of theirs was in flight
        self._running: list[Sequence] = []  # by rank
        self._by_id: dict[int, Sequence] = {}
        self._free_rows = list(reversed(range(limits.max_rows)))
        self._in_flight: deque[tuple[int, list[Sequence]]] = deque()  # by step, those that a token is chosen for
        self._num_steps = 0
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

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
        sequence = Sequence(request, self._num_arrived)
        self._num_arrived += 1
        self._by_id[request.request_id] = sequence
        self._wait(sequence)

    def adapter_arrived(self, identity: str) -> None:
        for sequence in self._cold.pop(identity, ()):
            self._waiting.push(sequence)

    def abort(self, request_id: int) -> None:
        """Let go of a request wherever it is. One that is not here has ended already."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute now."""
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
        return self._submit(draft) if draft.scheduled else None

    def update(self, result: StepResult) -> list[Emitted]:
        """Take note of the oldest step in flight; what is to be told."""
        step, sequences = self._in_flight.popleft()
        assert step == result.step, f"step {step} was to come next, not {result.step}"
        emitted = []
        for sequence, token_id, logprob in zip(sequences, result.token_ids, result.logprobs, strict=True):
            sequence.num_in_flight -= 1
            if sequence.finished:
                continue
            sequence.token_ids.append(token_id)
            reason = sequence.ended_by(token_id)
            emitted.append(Emitted(sequence.request.request_id, token_id, logprob, reason))
            if reason is not None:
                self._end(sequence)
            elif sequence in self._unsettled and not sequence.num_in_flight:
                self._unsettled.remove(sequence)
                self._wait(sequence)
        return emitted

    # --- A step -------------------------------------------------------------------------------------------------------

    def _continue(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> None:
        count = self._share(draft, num_tokens)
        # Without a row it was preempted for one before it.
        if count > 0 and sequence.row is not None and self._make_room(draft, sequence, count):
            self._put(draft, sequence, count, samples=count == num_tokens)

    def _share(self, draft: _Draft, num_tokens: int) -> int:
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
        reusable = (len(sequence.token_ids) - 1) // block_size  # one token at least is computed, to choose from
        sequence.blocks = self._pool.reuse(sequence.hashes(block_size)[:reusable])
        sequence.num_published = len(sequence.blocks)
        sequence.num_computed = len(sequence.blocks) * block_size
        num_tokens = sequence.num_uncomputed
        count = self._share(draft, num_tokens)
        if not self._hold_blocks(sequence, count):
            self._give_back_blocks(sequence)
            return False
        self._waiting.remove(sequence)
        self._enter(draft, sequence)
        self._put(draft, sequence, count, samples=count == num_tokens)
        return True

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
        self._num_steps += 1
        self._in_flight.append((self._num_steps, [each.sequence for each in scheduled if each.samples]))
        for each in scheduled:
            self._publish(each.sequence)
        self.counters.computed_tokens += self.limits.max_step_tokens - draft.budget
        self.counters.chunks += sum(not each.samples for each in scheduled)
        return StepPlan(
            step=self._num_steps,
            rows=np.array([each.sequence.row for each in scheduled], dtype=np.int64),
            starts=np.array([each.start for each in scheduled], dtype=np.int64),
            counts=np.array([each.num_tokens for each in scheduled], dtype=np.int64),
            samples=np.array([each.samples for each in scheduled], dtype=np.bool_),
            adapter_indices=np.array([each.sequence.adapter_index for each in scheduled], dtype=np.int64),
            new_rows=tuple(draft.new_rows),
            new_blocks=np.array(draft.new_blocks, dtype=np.int64).reshape(-1, 3),
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
        if self._adapters.index_of(identity) is not None:
            self._waiting.push(sequence)
            return
        self._cold.setdefault(identity, set()).add(sequence)
        self._adapters.bring(identity)

    def _next(self) -> Sequence | None:
        """The next one that can run. Those whose adapter has left meanwhile wait for it again."""
        while (sequence := self._waiting.peek()) is not None:
            if self._adapters.index_of(sequence.request.adapter) is not None:
                return sequence
            self._waiting.remove(sequence)
            self._wait(sequence)
        return None

    def _enter(self, draft: _Draft, sequence: Sequence) -> None:
        request = sequence.request
        sequence.row = self._free_rows.pop()
        tokens = sequence.token_ids.copy()
        draft.new_rows.append(NewRow(sequence.row, tokens, len(request.prompt_ids), request.sampling, request.stop))
        index = self._adapters.index_of(request.adapter)
        assert index is not None
        sequence.adapter_index = index
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
        cold = self._cold.get(sequence.request.adapter, set())
        if sequence.row is not None:
            self._leave(sequence)
        elif sequence in self._unsettled:
            self._unsettled.remove(sequence)
        elif sequence in cold:
            cold.remove(sequence)
        else:
            self._waiting.remove(sequence)
