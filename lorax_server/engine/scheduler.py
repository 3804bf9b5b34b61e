"""What is computed in each step, and for whom. Plain Python: no tensors, no clock but the one it is given."""

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from lorax_server.engine.adapter_queue import AdapterQueue
from lorax_server.engine.adapters.protocol import Adapters
from lorax_server.engine.admission import Backlog, Limits, check_length, check_task, find_token_problem
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.counters import SchedulerCounters
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.sequence import Sequence
from lorax_server.engine.standing import by_standing, find_spare, may_spare
from lorax_server.engine.step_builder import StepBuilder
from lorax_server.engine.throughput import Throughput
from lorax_server.errors import InputError, LoraxError, SourceError
from lorax_server.plan import NewRow, StepPlan, StepResult
from lorax_server.types import Output, Request, SampledToken, Started


class _InFlight(NamedTuple):
    step: int
    num_tokens: int
    submitted: float
    sampled: list[Sequence]  # those that a token is chosen for
    asking: list[tuple[Sequence, int]]  # those whose prompt is reported on, and the first token that is computed


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
        self.counters = SchedulerCounters()
        self._pool = pool
        self._adapters = adapters
        self._clock = clock
        self._throughput = Throughput()
        self._backlog = Backlog(limits, self._throughput, self.counters)
        self._waiting = FairQueue(weights, limits.max_rows)  # for nothing but their turn
        self._adapter_queue = AdapterQueue()  # for their adapter
        self._failed: list[Output] = []  # to be told
        self._unsettled: set[Sequence] = set()  # those that were preempted while a token of theirs was in flight
        self._running: list[Sequence] = []  # by rank
        self._by_id: dict[int, Sequence] = {}
        self._free_rows = list(reversed(range(limits.max_rows)))
        self._in_flight: deque[_InFlight] = deque()
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
        return len(self._adapter_queue)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def deadline_s(self) -> float | None:
        """When `schedule` is to be called though nothing has happened: when a request gives up its adapter."""
        deadline = self._adapter_queue.deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    def add(self, request: Request) -> None:
        """Take a request, or refuse what could never run or would wait for too long."""
        check_task(request)
        check_length(request, min(self.limits.max_length, self._pool.num_blocks * self._pool.block_size))
        assert request.request_id not in self._by_id, f"request {request.request_id} is here already"
        self._backlog.refuse_overload(self.num_waiting)
        self._adapters.add_request(request.adapter_identity)
        sequence = Sequence(request, self._num_arrived, arrived_at=self._clock())
        sequence.rope_variant = self.limits.rope.variant(len(request.prompt_ids))
        sequence.cost = self._backlog.add(request)
        self._num_arrived += 1
        self._by_id[request.request_id] = sequence
        self._wait(sequence)

    def adapter_arrived(self, identity: str) -> None:
        for sequence in self._adapter_queue.pop_all(identity):
            self._enqueue(sequence)

    def adapter_failed(self, identity: str, error: LoraxError) -> None:
        for sequence in self._adapter_queue.pop_all(identity):
            self._fail(sequence, error)

    def abort(self, request_id: int) -> None:
        """Let go of a request wherever it is. One that is not here has ended already."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def schedule(self) -> StepPlan | None:
        """The next step; None if there is nothing to do now."""
        self._give_up_waiting()
        self._take_rows_back()
        builder = StepBuilder(self.limits.max_step_tokens)
        long = []
        for sequence in by_standing(self._running, self._waiting):
            num_tokens = sequence.num_uncomputed
            if num_tokens == 1:
                self._continue(builder, sequence, 1, samples=True)  # the limits leave one for all that run
            elif num_tokens > 1:
                long.append(sequence)  # after all that need a single token
        is_held_up = False  # one that runs waits for blocks, which those who come now would take
        kept = self._keep_for_others() if long else 0
        for sequence in long:
            num_tokens = sequence.num_uncomputed
            count = self._share(builder, num_tokens, kept)
            if count > 0 and not self._continue(builder, sequence, count, samples=count == num_tokens):
                is_held_up = True
        while not is_held_up and builder.budget > 0 and self._free_rows and self._admit(builder):
            pass
        return self._submit(builder) if builder.scheduled or self._adapters.needs_step else None

    def update(self, result: StepResult) -> list[Output]:
        """Take note of the oldest step in flight; what is to be told."""
        done = self._in_flight.popleft()
        assert done.step == result.step, f"step {done.step} was to come next, not {result.step}"
        self._throughput.step(done.num_tokens, done.submitted, self._clock())
        self._adapters.completed(result.step, result.loaded)
        for place, ((sequence, start), logprobs) in enumerate(zip(done.asking, result.prompt_logprobs, strict=True)):
            sequence.note_prompt(start, logprobs, result.prompt_alternatives.get(place))
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
            return Output.failed(request_id, self._not_numbers(sequence.request.adapter_identity))
        sequence.token_ids.append(token_id)
        reason = sequence.ended_by(token_id)
        if reason is not None:
            self._throughput.finish(len(sequence.token_ids) - len(sequence.request.prompt_ids))
            self._end(sequence)
        elif sequence in self._unsettled and not sequence.num_in_flight:
            self._unsettled.remove(sequence)
            self._wait(sequence)
        output = Output(request_id, (SampledToken(token_id, logprob, result.alternatives.get(place)),), reason)
        return output if sequence.started is None else sequence.report_start(output)

    def _not_numbers(self, adapter: str) -> LoraxError:
        """The mistake of a request if it chose the weights of a merge, else ours."""
        if self._adapters.is_merged(adapter):
            return InputError("the scores of these merged adapters are not numbers; give them smaller weights")
        return LoraxError("the model's scores are not numbers (too large for its dtype?)")

    # --- A step -------------------------------------------------------------------------------------------------------

    def _continue(self, builder: StepBuilder, sequence: Sequence, count: int, samples: bool) -> bool:
        """Whether it has a part in the step."""
        # Without a row it was preempted for one before it.
        is_possible = sequence.row is not None and self._make_room(builder, sequence, count)
        if is_possible:
            self._put(builder, sequence, count, samples)
        return is_possible

    def _share(self, builder: StepBuilder, num_tokens: int, kept: int = 0) -> int:
        if not self.limits.can_chunk:
            return num_tokens if num_tokens <= builder.budget else 0
        return min(
            num_tokens, max(builder.budget - kept, min(builder.budget, 1)), self.limits.max_chunk or builder.budget
        )

    def _keep_for_others(self) -> int:
        """Tokens of a step that long prompts leave to a tenant which waits for a row of its own, and finds one."""
        is_due = bool(self._free_rows) and self._waiting.is_shared and self._waiting.has_due
        return self.limits.max_step_tokens // 2 if is_due else 0

    def _make_room(self, builder: StepBuilder, sequence: Sequence, count: int) -> bool:
        """Hold blocks for more tokens, if need be those of sequences that come after it and have no part in the step.

        Where that is not enough it keeps what it has and waits. The first of all can always go on, since it fits alone.
        """
        while not self._hold_blocks(sequence, count):
            last = next(
                (each for each in reversed(by_standing(self._running, self._waiting)) if each not in builder.placed),
                None,
            )
            if last is None or last is sequence:
                return False
            self.counters.preemptions += 1
            self._preempt(last)
        return True

    def _take_rows_back(self) -> None:
        """Preempt those that have more than their share for those that wait and have less."""
        head = self._next() if may_spare(self._running, self._waiting) else None
        if head is None:
            return
        num_free = 0 if self._lacks_blocks(head) else len(self._free_rows)
        for sequence in find_spare(self._running, self._waiting, head, num_free):
            self.counters.rows_taken_back += 1
            self._preempt(sequence)

    def _lacks_blocks(self, sequence: Sequence) -> bool:
        """Tell whether a step would probably have none left for one that waits."""
        wanted = min(len(sequence.token_ids), self.limits.max_step_tokens) + len(self._running)
        return self._pool.num_free * self._pool.block_size < wanted

    def _hold_blocks(self, sequence: Sequence, count: int) -> bool:
        wanted = -(-(sequence.num_computed + count) // self._pool.block_size) - len(sequence.blocks)
        if wanted > 0:
            more = self._pool.allocate(wanted)
            if more is None:
                return False
            sequence.blocks += more
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """It gives up its row and its blocks and waits; its tokens stay, and are computed again where not found."""
        self._leave(sequence)
        if sequence.num_in_flight:
            self._unsettled.add(sequence)
        else:
            self._wait(sequence)

    def _admit(self, builder: StepBuilder) -> bool:
        """Let the next one in that waits, if there are blocks for as much of it as the step has left."""
        sequence = self._next()
        if sequence is None:
            return False
        block_size = self._pool.block_size
        sequence.blocks = self._pool.reuse(sequence.hashes(block_size)[: self._num_reusable(sequence)])
        sequence.num_published = len(sequence.blocks)
        sequence.num_computed = len(sequence.blocks) * block_size
        num_tokens = sequence.num_uncomputed
        count = self._share(builder, num_tokens)
        if count == 0 or not self._hold_blocks(sequence, count):
            self._give_back_blocks(sequence)
            return False
        self._waiting.remove(sequence)
        self._enter(builder, sequence)
        self._put(builder, sequence, count, samples=count == num_tokens)
        return True

    def _num_reusable(self, sequence: Sequence) -> int:
        """Blocks: one token at least is computed, to choose from, and all that are to be reported on."""
        if not self.limits.can_reuse or sequence.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self._pool.block_size

    def _put(self, builder: StepBuilder, sequence: Sequence, count: int, samples: bool) -> None:
        builder.put(sequence, count, samples)
        request = sequence.request
        self._waiting.charge(request.tenant, request.adapter_identity, count)  # at once: it decides who is let in next

    def _submit(self, builder: StepBuilder) -> StepPlan:
        builder.sort()
        num_tokens = self.limits.max_step_tokens - builder.budget
        self.counters.steps += 1
        self.counters.computed_tokens += num_tokens
        self.counters.chunks += sum(not each.samples for each in builder.scheduled)
        self._in_flight.append(
            _InFlight(
                self.counters.steps,
                num_tokens,
                self._clock(),
                [each.sequence for each in builder.scheduled if each.samples],
                [(each.sequence, each.start) for each in builder.scheduled if each.asks],
            )
        )
        self._publish(each.sequence for each in builder.scheduled)
        return builder.plan(self.counters.steps, self._adapters.submit())

    def _publish(self, sequences: Iterable[Sequence]) -> None:
        """Let others find the blocks that are full, once it is known what they are full of."""
        block_size = self._pool.block_size
        for sequence in sequences:
            full = min(sequence.num_computed, len(sequence.token_ids)) // block_size
            if full > sequence.num_published:
                hashes = sequence.hashes(block_size)
                for place in range(sequence.num_published, full):
                    self._pool.publish(sequence.blocks[place], hashes[place])
                sequence.num_published = full

    # --- Coming and going ---------------------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        identity = sequence.request.adapter_identity
        if self._adapters.index_of(identity, sequence.has_begun) is not None:
            self._enqueue(sequence)
            return
        timeout_s = None if sequence.has_begun else self.limits.adapter_timeout_s
        sequence.cold_since = now = self._clock()
        self._adapter_queue.push(sequence, math.inf if timeout_s is None else now + timeout_s)
        self._adapters.bring(identity)

    def _give_up_waiting(self) -> None:
        """Fail those that have waited for their adapter for too long."""
        while (sequence := self._adapter_queue.pop_late(self._clock())) is not None:
            limit = self.limits.adapter_timeout_s
            self._fail(sequence, SourceError(f"the adapter did not arrive within {limit:g} s; try again"))

    def _enqueue(self, sequence: Sequence) -> None:
        """Its adapter is there, and with it is known which tokens it can take."""
        request, problem = sequence.request, None
        if sequence.cold_since is not None:
            sequence.cold_s += self._clock() - sequence.cold_since
            sequence.cold_since = None
        if not sequence.has_begun:
            problem = find_token_problem(request, self._adapters.vocab_size(request.adapter_identity))
        if problem is None:
            self._waiting.push(sequence)
        else:
            self._fail(sequence, problem)

    def _next(self) -> Sequence | None:
        """The next one that can run. Those whose adapter has left meanwhile wait for it again."""
        while (sequence := self._waiting.peek()) is not None:
            if self._adapters.index_of(sequence.request.adapter_identity, sequence.has_begun) is not None:
                return sequence
            self._waiting.remove(sequence)
            self._wait(sequence)
        return None

    def _enter(self, builder: StepBuilder, sequence: Sequence) -> None:
        request = sequence.request
        sequence.row = self._free_rows.pop()
        self._waiting.take_row(request.tenant)
        tokens = sequence.token_ids.copy()
        builder.new_rows.append(NewRow(sequence.row, tokens, len(request.prompt_ids), request.sampling, request.stop))
        index = self._adapters.index_of(request.adapter_identity, sequence.has_begun)
        assert index is not None
        sequence.adapter_index = index
        if not sequence.has_begun:
            sequence.has_begun = True
            sequence.started = Started(self._clock() - sequence.arrived_at, sequence.cold_s, sequence.num_computed)
            self._backlog.remove(sequence.cost)
            self._adapters.begin(request.adapter_identity)
        self._adapters.hold(request.adapter_identity)
        insort(self._running, sequence, key=lambda each: each.order_key)
        self.counters.prefix_tokens += sequence.num_computed

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        self._waiting.give_row(sequence.request.tenant)
        sequence.row = None
        self._give_back_blocks(sequence)
        self._adapters.release(sequence.request.adapter_identity)

    def _give_back_blocks(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = sequence.num_sent_blocks = 0

    def _fail(self, sequence: Sequence, error: LoraxError) -> None:
        """One that is in no queue ends without a token."""
        self._failed.append(Output.failed(sequence.request.request_id, error))
        self._forget(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Take it from wherever it is."""
        if sequence.row is not None:
            self._leave(sequence)
        elif sequence in self._unsettled:
            self._unsettled.remove(sequence)
        elif not self._adapter_queue.remove(sequence):
            self._waiting.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self._by_id[sequence.request.request_id]
        if not sequence.has_begun:
            self._backlog.remove(sequence.cost)
        self._adapters.end_request(sequence.request.adapter_identity, sequence.has_begun)
