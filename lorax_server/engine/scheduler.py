"""Decides what each step computes, and for which sequences. Plain Python: no tensors, and the caller's clock."""

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping

from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Backlog, Limits, check_request, make_nan_error
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.kv_cache import KvCache
from lorax_server.engine.queues import Queues
from lorax_server.engine.sequence import Sequence
from lorax_server.engine.step_builder import Lineup, Scheduled, StepBuilder, SubmittedStep
from lorax_server.errors import LoraxError
from lorax_server.plan import NewSequence, StepPlan, StepResult
from lorax_server.types import Output, Request, SampledToken, SchedulerCounters, Started


class Scheduler:
    """Knows neither prompts nor decoding, only how many tokens of each sequence a step computes.

    `schedule` may be called again before the result of the step is there: unknown tokens are counted, not named. A
    sequence that turns out to have ended had one step too many, whose token is dropped.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        adapters: AdapterTable,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self._cache = KvCache(pool, limits.can_reuse)
        self._adapters = adapters
        self._clock = clock
        self._backlog = Backlog(limits, self.counters)
        self.queues = Queues(limits, adapters, FairQueue(weights, limits.max_num_seqs), self._fail, clock)
        self._waiting = self.queues.ready
        self._failed: list[Output] = []  # not reported yet
        self._running: list[Sequence] = []  # by order key
        self._sorted: tuple[int, list[Sequence]] = 0, []  # the same as they go on, at a version of the queue
        self._lineup: Lineup | None = None  # of the last step
        self._by_id: dict[int, Sequence] = {}
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self.in_flight: deque[SubmittedStep] = deque()  # the oldest first
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """Sequences that wait for nothing but their turn."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def add(self, request: Request) -> None:
        """Take a request. Raise if it could never run or would wait for too long."""
        check_request(request, min(self.limits.max_length, self._cache.num_tokens))
        assert request.request_id not in self._by_id, f"request {request.request_id} is here already"
        self._backlog.refuse_overload(self.num_waiting)
        self._adapters.add_request(request.adapter_identity)
        sequence = Sequence(request, self._num_arrived, arrived_at=self._clock())
        sequence.rope_variant = self.limits.rope.variant(len(request.prompt_ids))
        sequence.expected_tokens = self._backlog.expect_tokens(request)
        self._backlog.num_tokens += sequence.expected_tokens
        self._num_arrived += 1
        self._by_id[request.request_id] = sequence
        if request.structure is None:
            self.queues.wait(sequence)
        else:
            self.queues.hold(sequence)

    def structure_ready(self, request_id: int) -> None:
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self.queues.let_go(sequence)

    def fail(self, request_id: int, error: LoraxError) -> None:
        """End a request in whatever state it is, with an error. Do nothing if it has ended already."""
        if request_id in self._by_id:
            self.abort(request_id)
            self._failed.append(Output.failed(request_id, error))

    def abort(self, request_id: int) -> None:
        """Drop a request in whatever state it is. Do nothing if it has ended already."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def schedule(self) -> StepPlan | None:
        """Return the next step; None if there is nothing to do now."""
        self.queues.fail_late()
        self._preempt_for_fairness()
        builder = StepBuilder(self.limits.max_step_tokens, self.limits.max_chunk, self.limits.can_chunk)
        jumped, long = list[Sequence](), list[Sequence]()
        for sequence in self._sort_running():
            num_tokens = sequence.num_uncomputed
            if num_tokens == 1:
                self._continue(builder, sequence, 1, samples=True)  # the limits leave one for every running sequence
            elif num_tokens > 1:  # after all that need a single token
                (jumped if sequence.has_jumped else long).append(sequence)
        num_single = len(builder.sequences)
        self._lineup = builder.line_up(self._waiting.version, self._lineup)
        self._waiting.charge(self._lineup.sums)
        if num_single:  # their next tokens wait for the prompts of this step
            builder.budget = min(builder.budget, self.limits.max_mixed_tokens or builder.budget)
        is_held_up = False  # a running sequence waits for blocks, which new ones would take
        reserve = builder.budget // 2 if long and self._has_others() else 0
        for sequence in jumped + long:
            num_tokens = sequence.num_uncomputed
            count = builder.cut(num_tokens, reserve)
            if count > 0 and not self._continue(builder, sequence, count, samples=count == num_tokens):
                is_held_up = True
        if jumped or long:
            self._waiting.charge(builder.sum_tokens(num_single))
        while not is_held_up and builder.budget > 0 and self._free_slots and self._admit(builder):
            pass
        if not builder.sequences and not self._adapters.needs_step:
            return None
        decodes_only = len(builder.sequences) == num_single
        return self._submit(builder, self._lineup.scheduled if decodes_only else builder.order())

    def update(self, result: StepResult) -> list[Output]:
        """Take the result of the oldest step in flight, and return the outputs of its requests."""
        done = self.in_flight.popleft()
        assert done.number == result.step, f"step {done.number} was to come next, not {result.step}"
        self._backlog.note_step(done.num_tokens, done.submitted_at, self._clock())
        self._adapters.completed(result.step, result.loaded)
        for index, ((sequence, start), logprobs) in enumerate(zip(done.asking, result.prompt_logprobs, strict=True)):
            sequence.note_prompt(start, logprobs, result.prompt_alternatives.get(index))
        outputs, alternatives = list[Output](), result.alternatives
        chosen = zip(done.sampled, result.token_ids, result.logprobs, strict=True)
        for index, (sampled, token_id, logprob) in enumerate(chosen):
            if sampled is None:
                continue
            sampled.num_in_flight -= 1
            if not sampled.finished:
                token = SampledToken(token_id, logprob, alternatives.get(index) if alternatives else None)
                outputs.append(self._take_token(sampled, token))
        self.counters.generated_tokens += sum([len(output.tokens) for output in outputs])
        return self.take_failed() + outputs

    def take_back(self, error: LoraxError) -> None:
        """Undo the last step, for which there was no memory. Its largest sequence fails, the others come again."""
        step = self.in_flight.pop()
        self.in_flight.append(step.take_back(self._cache))
        self.fail(step.find_largest().request.request_id, error)

    def take_failed(self) -> list[Output]:
        """Return the failures that were not reported yet."""
        failed, self._failed = self._failed, []
        return failed

    def _take_token(self, sequence: Sequence, token: SampledToken) -> Output:
        request_id = sequence.request.request_id
        if math.isnan(token.logprob):
            self._end(sequence)
            is_merged = self._adapters.is_merged(sequence.request.adapter_identity)
            return Output.failed(request_id, make_nan_error(is_merged))
        tokens: tuple[SampledToken, ...] = (token,)
        if sequence.forced:
            tokens += tuple([SampledToken(each, 0.0) for each in sequence.forced])
        reason = sequence.append(token.token_id)
        if reason is not None:
            self._backlog.note_answer(sequence.num_generated)
            self._end(sequence)
        elif sequence.slot is None:
            self.queues.let_go(sequence)
        output = Output(request_id, tokens, reason)
        return output if sequence.started is None else sequence.report_start(output)

    # --- A step -------------------------------------------------------------------------------------------------------

    def _continue(self, builder: StepBuilder, sequence: Sequence, count: int, samples: bool) -> bool:
        """Add a running sequence to the step; False if there are no blocks, or it was preempted for another."""
        if sequence.slot is None:
            return False
        if sequence.num_computed + count > sequence.room and not self._make_room(builder, sequence, count):
            return False
        builder.add_tokens(sequence, count, samples)
        return True

    def _sort_running(self) -> list[Sequence]:
        """Return the running sequences in the order in which they go on; nothing of it changes while no slot does."""
        if self._sorted[0] != self._waiting.version:
            self._sorted = self._waiting.version, self._waiting.sort_running(self._running)
        return self._sorted[1]

    def _has_others(self) -> bool:
        """Tell whether a tenant waits for a slot of its own, and finds one: long prompts leave tokens to it."""
        return bool(self._free_slots) and self._waiting.is_shared and self._waiting.has_due

    def _make_room(self, builder: StepBuilder, sequence: Sequence, count: int) -> bool:
        """Hold blocks for more tokens: those of later sequences that are not in the step.

        Where that is not enough, the sequence keeps its blocks and waits. The first can always go on: it fits alone.
        """
        while not self._cache.hold(sequence, count):
            scheduled = set(builder.sequences)
            last = next((each for each in reversed(self._sort_running()) if each not in scheduled), None)
            if last is None or last is sequence:
                return False
            self.counters.preemptions += 1
            self._preempt(last)
        return True

    def _preempt_for_fairness(self) -> None:
        """Preempt sequences beyond their share for waiting ones with less."""
        head = self.queues.next() if len(self._waiting) and self._waiting.has_excess else None
        if head is None:
            return
        # A step would probably have no blocks left for the head: then a free slot is of no use to it.
        num_tokens = min(len(head.token_ids), self.limits.max_step_tokens) + len(self._running)
        num_free = 0 if self._cache.num_free_tokens < num_tokens else len(self._free_slots)
        for sequence in self._waiting.find_spare(self._running, head, num_free):
            self.counters.fairness_preemptions += 1
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot and blocks; it waits. Its tokens stay, and are computed again where not cached."""
        self._leave(sequence)
        if sequence.num_in_flight:
            self.queues.hold(sequence)
        else:
            self.queues.wait(sequence)

    def _admit(self, builder: StepBuilder) -> bool:
        """Add the next waiting sequence, if there are blocks for as much of it as the step has left."""
        sequence = self.queues.next()
        if sequence is None:
            return False
        self._cache.hold_prefix(sequence)
        num_tokens = sequence.num_uncomputed
        count = builder.cut(num_tokens)
        if count == 0 or not self._cache.hold(sequence, count):
            self._cache.release(sequence)
            return False
        self._waiting.remove(sequence)
        self._enter(builder, sequence)
        builder.add_tokens(sequence, count, samples=count == num_tokens)
        self._waiting.charge({sequence.account: count})  # before the next one
        return True

    def _submit(self, builder: StepBuilder, scheduled: Scheduled) -> StepPlan:
        self.counters.steps += 1
        step = builder.summarize(self.counters.steps, scheduled, self._clock())
        self.counters.computed_tokens += step.num_tokens
        self.counters.chunks += len(scheduled.sequences) - len(step.sampled)
        self.in_flight.append(step)
        self._cache.publish_all(scheduled.sequences)
        return builder.build_plan(step.number, scheduled, self._adapters.submit())

    # --- Coming and going ---------------------------------------------------------------------------------------------

    def _enter(self, builder: StepBuilder, sequence: Sequence) -> None:
        request, identity = sequence.request, sequence.request.adapter_identity
        sequence.slot = self._free_slots.pop()
        self._waiting.acquire_slot(request.tenant)
        tokens = sequence.token_ids.copy()
        builder.new_sequences.append(
            NewSequence(sequence.slot, tokens, len(request.prompt_ids), request.sampling, request.stop)
        )
        index = self._adapters.index_of(identity, sequence.has_begun)
        assert index is not None
        sequence.adapter_index = index
        if not sequence.has_begun:
            sequence.has_begun = True
            queue_s = self._clock() - sequence.arrived_at
            sequence.started = Started(queue_s, sequence.adapter_wait_s, sequence.num_computed)
            self._backlog.num_tokens -= sequence.expected_tokens
            self._adapters.begin(identity)
        self._adapters.hold(identity)
        insort(self._running, sequence, key=lambda running: running.arrival)
        self.counters.prefix_tokens += sequence.num_computed

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._waiting.release_slot(sequence.request.tenant)
        sequence.slot = None
        sequence.has_jumped = False  # all of its tokens are to be computed
        self._cache.release(sequence)
        self._adapters.release(sequence.request.adapter_identity)

    def _fail(self, sequence: Sequence, error: LoraxError) -> None:
        """End a sequence that is in no queue without a token."""
        self._failed.append(Output.failed(sequence.request.request_id, error))
        self._forget(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence from its slot or queue."""
        if sequence.slot is not None:
            self._leave(sequence)
        else:
            self.queues.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self._by_id[sequence.request.request_id]
        if not sequence.has_begun:
            self._backlog.num_tokens -= sequence.expected_tokens
        self._adapters.end_request(sequence.request.adapter_identity, sequence.has_begun)
