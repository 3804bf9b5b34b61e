"""The scheduler decides which tokens each step computes. It uses no tensors."""

import itertools
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Backlog, Limits, check_request, make_nan_error
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.kv_cache import KvCache
from lorax_server.engine.queues import Queues
from lorax_server.engine.sequence import Sequence
from lorax_server.engine.step_builder import BatchColumns, CachedDecodeBatch, StepBuilder, SubmittedStep
from lorax_server.errors import AdapterError, LoraxError
from lorax_server.plan import NewSequence, StepPlan, StepResult
from lorax_server.types import Output, Request, SampledToken, SchedulerCounters, StartInfo

MAX_NEW_FOLLOWERS = 32  # per step, because hashing long prompts takes time
MAX_SAMPLED_ROWS = 64  # sampled tokens per step with drafts, at least `max_num_seqs`; limits the logits' memory


class Drafter(Protocol):
    """Guesses the next tokens of sequences. A step verifies the guesses, so they never change a completion."""

    def propose(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> Mapping[Sequence, Seq[int]]:
        """Return draft tokens for the positions after the sequences' last tokens, at most `max_tokens` in total."""

    def must_run_heads(self, num_running: int) -> bool:
        """Return True if the next step should run the draft heads. This counts steps, so call it once per step."""

    def waits(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> bool:
        """Return True if the next step should wait for the tokens in flight, because drafts continue known tokens."""

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record the time of a step in which every sequence decodes."""

    def finish(self, sequence: Sequence) -> None:
        """Drop the state of a finished or aborted completion."""

    def learn(self) -> None:
        """Update the statistics with the last drafts and the finished completions."""


class Scheduler:
    """Chooses how many tokens of each sequence run in a step, for both prefill and decode.

    `schedule` may be called before the previous step has finished, because it needs only token counts. If a sequence
    turns out to be finished, its extra token is dropped.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        adapters: AdapterTable,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self._cache = KvCache(pool, limits.can_reuse)
        self._adapters = adapters
        self._clock = clock
        self._drafter = drafter if limits.can_chunk else None
        self._backlog = Backlog(limits, self.counters)
        self.queues = Queues(limits, adapters, FairQueue(weights, limits.max_num_seqs), self._fail, clock)
        self._waiting = self.queues.ready
        self._failed: list[Output] = []  # failed requests that are not reported yet
        self._running: list[Sequence] = []  # in order of arrival
        self._sorted: tuple[int, list[Sequence]] = 0, []  # queue version, and running sequences in scheduling order
        self._decode_batch: CachedDecodeBatch | None = None  # from the last step
        self._by_id: dict[int, Sequence] = {}
        # Blocked sequences, each with the running sequence that computes its prefix, and the number of shared blocks.
        self._followers: dict[Sequence, tuple[Sequence, int]] = {}
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self.in_flight: deque[SubmittedStep] = deque()  # oldest first
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self._by_id) - len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """The number of waiting sequences that are ready to run."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def add(self, request: Request) -> None:
        """Queue a request. Raise if the request can never run or would wait too long."""
        check_request(request, min(self.limits.max_length, self._cache.num_tokens), self.limits.task)
        assert request.request_id not in self._by_id, f"request {request.request_id} was already added"
        self._backlog.check_overload(self.num_waiting)
        self._adapters.add_request(request.adapter_identity)
        sequence = Sequence(request, self._num_arrived, arrived_at=self._clock())
        sequence.rope_variant = self.limits.rope.variant(len(request.prompt_ids))
        sequence.expected_tokens = self._backlog.estimate_tokens(request)
        self._backlog.num_tokens += sequence.expected_tokens
        self._num_arrived += 1
        self._by_id[request.request_id] = sequence
        if request.structure is None:
            self.queues.enqueue(sequence)
        else:
            self.queues.block(sequence)

    def grammar_ready(self, request_id: int) -> None:
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self.queues.unblock(sequence)

    def fail(self, request_id: int, error: LoraxError) -> None:
        """Fail a queued or running request. Ignore request IDs that have finished."""
        if request_id in self._by_id:
            self.abort(request_id)
            self._failed.append(Output.failed(request_id, error))

    def abort(self, request_id: int) -> None:
        """Drop a queued or running request. Ignore request IDs that have finished."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence)

    def move(self, request_ids: Iterable[int], identity: str) -> None:
        """Continue requests with another loaded adapter, starting with the next step. Ignore requests that have
        finished.

        If the adapter is not loaded, or if its vocabulary differs from the vocabulary that a started request uses,
        raise an error and change nothing.
        """
        index = self._adapters.index_of(identity, has_started=True)
        if index is None:
            raise AdapterError("requests cannot move to an adapter that is not loaded")
        found = [self._by_id[request_id] for request_id in request_ids if request_id in self._by_id]
        moving = [sequence for sequence in found if sequence.request.adapter_identity != identity]
        vocab_size = self._adapters.vocab_size(identity)
        for sequence in moving:
            if sequence.has_started and self._adapters.vocab_size(sequence.request.adapter_identity) != vocab_size:
                raise AdapterError("running requests cannot move to an adapter with another vocabulary size")
        for sequence in moving:
            old, is_queued = sequence.request.adapter_identity, sequence.slot is None
            is_blocked = is_queued and self.queues.is_blocked(sequence)
            if is_queued and not is_blocked:
                self.queues.remove(sequence)
            self._adapters.add_request(identity)
            if sequence.has_started:
                self._adapters.start_request(identity)
            if not is_queued:
                self._adapters.acquire(identity)
                self._adapters.release(old)
            sequence.switch_adapter(identity, *self._adapters.find_starts(identity, sequence.request.prompt_ids))
            sequence.adapter_index = index
            self._adapters.remove_request(old, sequence.has_started)
            if is_queued and not is_blocked:
                self.queues.enqueue(sequence)
        self._decode_batch = None  # its columns contain adapter indices

    def schedule(self) -> StepPlan | None:
        """Return the next step plan, or None if there is no work, or if drafts need the tokens in flight."""
        self.queues.fail_timed_out()
        return None if self._must_wait_for_tokens() else self._schedule()

    def _schedule(self) -> StepPlan | None:
        self._unblock_followers()
        self._preempt_for_fairness()
        builder = StepBuilder(self.limits.max_step_tokens, self.limits.max_prefill_chunk_tokens, self.limits.can_chunk)
        forced, long, drafts = list[Sequence](), list[Sequence](), self._propose_drafts()
        for sequence in self._sort_running():
            if sequence in drafts:
                continue
            num_tokens = sequence.num_uncomputed
            if num_tokens == 1:
                self._schedule_running(builder, sequence, 1, samples=True)  # the token budget suffices for all slots
            elif num_tokens > 1:  # scheduled after single-token sequences
                (forced if sequence.has_forced_tokens else long).append(sequence)
        num_single = len(builder.sequences)
        self._decode_batch = builder.reuse_or_build(self._waiting.version, self._decode_batch)
        self._waiting.charge(self._decode_batch.tokens_by_fairness_key)
        for sequence, draft in drafts.items():
            self._schedule_draft(builder, sequence, draft)
        if builder.sequences:  # limit prompt tokens, which delay the next decode tokens
            builder.token_budget = min(builder.token_budget, self.limits.max_mixed_tokens or builder.token_budget)
        is_short_of_blocks = False  # a running sequence needs blocks, so admit no new sequences
        reserve = builder.token_budget // 2 if long and self._must_reserve_tokens() else 0
        for sequence in forced + long:
            num_tokens = sequence.num_uncomputed
            count = builder.chunk_size(sequence, reserve)
            if count > 0 and not self._schedule_running(builder, sequence, count, samples=count == num_tokens):
                is_short_of_blocks = True
        if len(builder.sequences) > num_single:
            self._waiting.charge(builder.sum_tokens(num_single))
        max_followers = len(self._followers) + MAX_NEW_FOLLOWERS
        while not is_short_of_blocks and builder.token_budget > 0 and self._free_slots and self._admit(builder):
            if len(self._followers) >= max_followers:
                break
        if not builder.sequences and not self._adapters.needs_step:
            return None
        decodes_only = len(builder.sequences) == num_single
        return self._submit(builder, self._decode_batch.columns if decodes_only else builder.build_columns())

    def update(self, result: StepResult) -> list[Output]:
        """Apply the result of the oldest step in flight, and return its outputs."""
        done = self.in_flight.popleft()
        assert done.number == result.step, f"expected the result of step {done.number}, got {result.step}"
        seconds, idle_s = self._backlog.record_step(done.num_tokens, done.submitted_at, self._clock())
        if self._drafter is not None and done.is_decode:
            self._record_decode_step(self._drafter, done, seconds, idle_s)
        self._adapters.complete_step(result.step, result.loaded)
        for index, ((sequence, start), logprobs) in enumerate(
            zip(done.scored_prompts, result.prompt_logprobs, strict=True)
        ):
            sequence.record_prompt_logprobs(start, logprobs, result.prompt_alternatives.get(index))
        outputs, alternatives = list[Output](), result.alternatives
        for number, sampled in enumerate(done.sampled):
            if sampled is None:
                continue
            sampled.num_in_flight -= 1
            rows, num_drafted = done.find_accepted(number, result), sampled.num_drafts
            if num_drafted:
                self._settle_draft(sampled, len(done.drafts[number]), len(rows) - 1)
            if not sampled.is_finished:
                if result.head_guesses:
                    sampled.head_guesses = result.head_guesses[rows[-1]]
                    sampled.first_head_guess = len(sampled.token_ids) + len(rows)
                token_ids, logprobs = result.token_ids[rows.start : rows.stop], result.logprobs[rows.start : rows.stop]
                listed = [alternatives.get(row) for row in rows] if alternatives else itertools.repeat(None)
                tokens = tuple(map(SampledToken, token_ids, logprobs, listed))
                output = self._append_tokens(sampled, token_ids, tokens, num_drafted)
                if result.pooled and output.failure is None:  # the token only marks the end of the sequence
                    output = output._replace(tokens=(), pooled=result.pooled[number])
                outputs.append(output)
        self.counters.generated_tokens += sum([len(output.tokens) for output in outputs])
        return self.pop_failed() + outputs

    def learn(self) -> None:
        """Update the drafter's statistics. Call this after a step was submitted, while the device is busy."""
        if self._drafter is not None:
            self._drafter.learn()

    def rollback(self, error: LoraxError) -> None:
        """Undo the last step after an out-of-memory error. Its largest sequence fails, and the other sequences are
        scheduled again.
        """
        step = self.in_flight.pop()
        self.in_flight.append(step.rollback(self._cache))
        self.fail(step.find_largest_sequence().request.request_id, error)

    def pop_failed(self) -> list[Output]:
        """Return the outputs of failed requests that have not been reported yet, and clear the list."""
        failed, self._failed = self._failed, []
        return failed

    def _record_decode_step(self, drafter: Drafter, done: SubmittedStep, seconds: float, idle_s: float) -> None:
        """Record the time of a step, including the time before its submission.

        Steps without drafts overlap if several steps may be in flight. The first of these steps after a step with
        drafts does not overlap, so it is not recorded. Before a sequence's first token, the engine may have been idle.
        """
        is_typical = bool(done.drafts) or not idle_s or self.limits.max_steps_in_flight == 1
        if is_typical and all(each is not None and each.num_generated > 0 for each in done.sampled):
            num_sequences = len(done.sampled)
            drafter.record_step(num_sequences, done.num_tokens - num_sequences, seconds + idle_s)

    def _settle_draft(self, sequence: Sequence, num_allowed: int, num_accepted: int) -> None:
        """Roll back the rejected draft tokens. Later steps overwrite their KV cache entries.

        `num_allowed` is the number of draft tokens that the grammar allows.
        """
        if sequence.slot is not None:
            sequence.num_computed -= num_allowed - num_accepted
        self.counters.drafted_tokens += sequence.num_drafts
        self.counters.accepted_tokens += num_accepted
        sequence.num_drafts = 0

    def _append_tokens(
        self, sequence: Sequence, new_ids: list[int], tokens: tuple[SampledToken, ...], num_drafted: int
    ) -> Output:
        """Append sampled tokens, which may follow `num_drafted` draft tokens, and return the output."""
        request_id, num_accepted = sequence.request.request_id, len(tokens) - 1
        if math.isnan(tokens[-1].logprob):
            self._finish(sequence)
            is_merged = self._adapters.is_merged(sequence.request.adapter_identity)
            failed = Output.failed(request_id, make_nan_error(is_merged))
            return failed._replace(num_drafted=num_drafted, num_accepted=num_accepted)
        if sequence.forced_tokens:
            tokens += tuple([SampledToken(each, 0.0) for each in sequence.forced_tokens])
        reason = sequence.append(*new_ids)
        if reason is not None:
            self._backlog.record_completion(sequence.num_generated)
            self._finish(sequence)
        elif sequence.slot is None:
            self.queues.unblock(sequence)
        output = Output(request_id, tokens, reason, num_drafted=num_drafted, num_accepted=num_accepted)
        return output if sequence.start_info is None else sequence.attach_start_info(output)

    # --- Scheduling ---------------------------------------------------------------------------------------------------

    def _propose_drafts(self) -> dict[Sequence, tuple[int, ...]]:
        """Return draft tokens for running sequences."""
        drafts = dict[Sequence, tuple[int, ...]]()
        if self._drafter is None or (num_spare := self._count_spare_tokens()) <= 0:
            return drafts
        candidates = [sequence for sequence in self._sort_running() if sequence.can_draft]
        if candidates:
            for sequence, proposed in self._drafter.propose(candidates, len(self._running), num_spare).items():
                if draft := sequence.limit_draft(proposed, num_spare):
                    drafts[sequence] = draft
                    num_spare -= len(draft)
        return drafts

    def _count_spare_tokens(self) -> int:
        """Return the maximum number of draft tokens in the next step.

        The number is 0 if few KV blocks are free, so that drafts never cause a preemption.
        """
        num_running = len(self._running)
        num_spare = min(self.limits.max_step_tokens, max(MAX_SAMPLED_ROWS, self.limits.max_num_seqs)) - num_running
        is_short = self._cache.num_free_tokens < 2 * num_running * self._cache.block_size + num_spare
        return 0 if is_short else num_spare

    def _must_wait_for_tokens(self) -> bool:
        """Return True if the steps in flight must finish first.

        If they contain drafts, all sequences stay in the same step. Otherwise a step without the sequences in flight
        would split the batch.
        """
        if self._drafter is None or not self.in_flight:
            return False
        if any(step.drafts for step in self.in_flight):
            return True
        num_running, num_spare = len(self._running), self._count_spare_tokens()
        if num_spare < num_running:  # large batches gain little, and planning their drafts takes long
            return False
        waiting = [sequence for sequence in self._running if sequence.num_in_flight and sequence.request.speculation]
        return bool(waiting) and self._drafter.waits(waiting, num_running, num_spare)

    def _schedule_draft(self, builder: StepBuilder, sequence: Sequence, draft: tuple[int, ...]) -> None:
        """Add a running sequence and its draft tokens to the step. If too few KV blocks are free, add only its next
        token.
        """
        num_tokens = 1 + len(draft)
        if sequence.slot is not None and (
            sequence.num_computed + num_tokens <= sequence.capacity or self._cache.allocate(sequence, num_tokens)
        ):
            builder.add_tokens(sequence, 1, samples=True, draft=draft)
        else:
            self._schedule_running(builder, sequence, 1, samples=True)

    def _schedule_running(self, builder: StepBuilder, sequence: Sequence, count: int, samples: bool) -> bool:
        """Add a running sequence to the step. Return False if it was preempted or too few KV blocks are free."""
        if sequence.slot is None:
            return False
        if sequence.num_computed + count > sequence.capacity and not self._allocate_or_preempt(
            builder, sequence, count
        ):
            return False
        builder.add_tokens(sequence, count, samples)
        return True

    def _sort_running(self) -> list[Sequence]:
        """Return the running sequences in scheduling order, cached until slots change."""
        if self._sorted[0] != self._waiting.version:
            self._sorted = self._waiting.version, self._waiting.sort_running(self._running)
        return self._sorted[1]

    def _must_reserve_tokens(self) -> bool:
        """Return True if long prompts must leave part of the token budget to a waiting tenant that can get a slot."""
        return bool(self._free_slots) and self._waiting.has_several_tenants and self._waiting.has_tenant_under_share

    def _allocate_or_preempt(self, builder: StepBuilder, sequence: Sequence, count: int) -> bool:
        """Allocate KV blocks for a sequence. If necessary, preempt later sequences that are not in this step.

        Return False if too few blocks can be freed; the sequence then keeps its blocks. For the first running sequence,
        this always succeeds.
        """
        while not self._cache.allocate(sequence, count):
            columns = set(builder.sequences)
            last = next((each for each in reversed(self._sort_running()) if each not in columns), None)
            if last is None or last is sequence:
                return False
            self.counters.preemptions += 1
            self._preempt(last)
        return True

    def _preempt_for_fairness(self) -> None:
        """If tenants below their share are waiting, preempt sequences of tenants above their share."""
        head = self.queues.peek_ready() if len(self._waiting) and self._waiting.has_tenant_over_share else None
        if head is None:
            return
        # Free slots do not count if too few blocks are free for the next waiting sequence.
        num_tokens = min(len(head.token_ids), self.limits.max_step_tokens) + len(self._running)
        num_free = 0 if self._cache.num_free_tokens < num_tokens else len(self._free_slots)
        for sequence in self._waiting.select_preemptions(self._running, head, num_free):
            self.counters.fairness_preemptions += 1
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Release a sequence's slot and blocks, and queue the sequence again.

        The sequence keeps its tokens. Tokens that are no longer cached are recomputed later.
        """
        self._stop_running(sequence)
        if sequence.num_in_flight:
            self.queues.block(sequence)
        else:
            self.queues.enqueue(sequence)

    def _admit(self, builder: StepBuilder) -> bool:
        """Add the next waiting sequence to the step. Return False if no sequence is ready or too few blocks
        are free.
        """
        sequence = self.queues.peek_ready()
        if sequence is None:
            return False
        self._cache.reuse_prefix(sequence)
        if (leader := self._find_leader(builder, sequence)) is not None:
            self._followers[sequence] = leader
            self._cache.release(sequence)
            self._waiting.remove(sequence)
            self.queues.block(sequence)
            return True
        num_tokens = sequence.num_uncomputed
        count = builder.chunk_size(sequence)
        if count == 0 or not self._cache.allocate(sequence, count):
            self._cache.release(sequence)
            return False
        self._waiting.remove(sequence)
        self._start_running(builder, sequence)
        builder.add_tokens(sequence, count, samples=count == num_tokens)
        self._waiting.charge({sequence.fairness_key: count})  # now, because it affects which sequence is next
        return True

    def _find_leader(self, builder: StepBuilder, sequence: Sequence) -> tuple[Sequence, int] | None:
        """Return a sequence in this step (the leader) that computes blocks which a new sequence needs, and the end of
        these blocks, or None.

        Only sequences of the same tenant are considered, so that tenants do not wait for each other.
        """
        if not self._cache.can_reuse:
            return None
        assert self._decode_batch is not None
        first = len(sequence.blocks)
        for leader in builder.sequences[len(self._decode_batch.added) :]:  # without decoding sequences
            if leader.request.tenant == sequence.request.tenant:
                count = self._cache.count_shared_blocks(leader, sequence)
                if count:
                    return leader, first + count
        return None

    def _unblock_followers(self) -> None:
        """Queue the sequences whose prefix has been computed, or whose leader no longer computes it."""
        for sequence, (leader, end) in tuple(self._followers.items()):
            if leader.slot is None or leader.num_published >= end or leader.is_mixed:
                del self._followers[sequence]
                self.queues.unblock(sequence)

    def _submit(self, builder: StepBuilder, columns: BatchColumns) -> StepPlan:
        self.counters.steps += 1
        step = builder.build_submitted_step(self.counters.steps, columns, self._clock())
        self.counters.computed_tokens += step.num_tokens
        self.counters.chunks += len(columns.sequences) - len(step.sampled)
        self.in_flight.append(step)
        self._cache.publish_full_blocks(columns.sequences)
        adapter_ops, runs_draft_heads = self._adapters.submit(), self._must_run_draft_heads()
        return builder.build_plan(step.number, columns, adapter_ops, runs_draft_heads=runs_draft_heads)

    def _must_run_draft_heads(self) -> bool:
        """Return True if the next step may verify tokens that draft heads guess in this step."""
        num_running = len(self._running)
        if self._drafter is None or not self.limits.num_draft_heads or self._count_spare_tokens() < num_running:
            return False
        has_speculation = any(sequence.request.speculation for sequence in self._running)
        return has_speculation and self._drafter.must_run_heads(num_running)

    # --- Starting and stopping ----------------------------------------------------------------------------------------

    def _start_running(self, builder: StepBuilder, sequence: Sequence) -> None:
        request, identity = sequence.request, sequence.request.adapter_identity
        sequence.slot = self._free_slots.pop()
        self._waiting.acquire_slot(request.tenant)
        tokens = sequence.token_ids.copy()
        builder.new_sequences.append(
            NewSequence(
                sequence.slot, tokens, len(request.prompt_ids), request.sampling, request.stop, request.second_start
            )
        )
        index = self._adapters.index_of(identity, sequence.has_started)
        assert index is not None
        sequence.adapter_index = index
        if not sequence.has_started:
            sequence.has_started = True
            queue_s = self._clock() - sequence.arrived_at
            sequence.start_info = StartInfo(queue_s, sequence.adapter_wait_s, sequence.num_computed)
            self._backlog.num_tokens -= sequence.expected_tokens
            self._adapters.start_request(identity)
        self._adapters.acquire(identity)
        insort(self._running, sequence, key=lambda running: running.arrival)
        num_base_tokens = self._cache.count_base_tokens(sequence)
        self.counters.base_prefix_tokens += num_base_tokens
        self.counters.adapter_prefix_tokens += sequence.num_computed - num_base_tokens

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._waiting.release_slot(sequence.request.tenant)
        sequence.slot = None
        sequence.has_forced_tokens = False  # all its tokens are recomputed
        self._cache.release(sequence)
        self._adapters.release(sequence.request.adapter_identity)
        self._unblock_followers()

    def _fail(self, sequence: Sequence, error: LoraxError) -> None:
        """Fail a sequence that was already removed from its queue."""
        self._failed.append(Output.failed(sequence.request.request_id, error))
        self._remove_request(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Remove a finished sequence from its slot or queue."""
        if sequence.slot is not None:
            self._stop_running(sequence)
        else:
            self.queues.remove(sequence)
        self._remove_request(sequence)

    def _remove_request(self, sequence: Sequence) -> None:
        sequence.is_finished = True
        self._followers.pop(sequence, None)
        if self._drafter is not None and sequence.request.speculation:
            self._drafter.finish(sequence)
        del self._by_id[sequence.request.request_id]
        if not sequence.has_started:
            self._backlog.num_tokens -= sequence.expected_tokens
        self._adapters.remove_request(sequence.request.adapter_identity, sequence.has_started)
