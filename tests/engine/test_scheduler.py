"""The scheduler on a fake device that detects wrong blocks: limits, fairness and progress."""

import itertools
import math
import random
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Backlog, Limits
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.kv_cache import MIN_SHARED_TOKENS
from lorax_server.engine.scheduler import MAX_NEW_FOLLOWERS, Scheduler
from lorax_server.engine.sequence import NEVER, Sequence
from lorax_server.engine.step_builder import StepBuilder, SubmittedStep
from lorax_server.errors import AdapterError, InputError, OverloadedError
from lorax_server.generation.stopping import FinishReason
from lorax_server.plan import AdapterOp, RopeRule, StepPlan, StepResult
from lorax_server.types import (
    Alternatives,
    Failure,
    Output,
    Request,
    SamplingParams,
    SchedulerCounters,
    StopParams,
    Structure,
)

EOS = 0
VOCAB = 7
SIZE = 4


def next_token(adapter: int, tokens: list[int]) -> int:
    """Return the next token of the test model, which depends on all tokens and the adapter."""
    return sha256(bytes([adapter, *tokens])).digest()[0] % VOCAB


ACTIVATED, AFTER_KV = "3", "4"  # aLoRA, and an adapter that does not change keys and values
INVOCATION = 2


def find_start(adapter: int, prompt: list[int]) -> int:
    """Return the first token that an adapter applies to."""
    starts = [index for index, token in enumerate(prompt) if token == INVOCATION]
    return 0 if adapter != int(ACTIVATED) else starts[-1] if starts else NEVER


def find_kv_owner(adapter: int, position: int, prompt: list[int]) -> tuple[int, int]:
    """Return what determines a token's keys and values in addition to all tokens so far."""
    start = find_start(adapter, prompt)
    return (0, 0) if position < start or adapter == int(AFTER_KV) else (adapter, start)


def expected_tokens(adapter: int, prompt: list[int], stop: StopParams) -> list[int]:
    """Return the expected tokens of a request."""
    tokens = list(prompt)
    adapter = 0 if find_start(adapter, prompt) == NEVER else adapter
    while len(tokens) - len(prompt) < stop.max_new_tokens:
        tokens.append(next_token(adapter, tokens))
        if tokens[-1] in stop.all_stop_token_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Device:
    """A fake device with tokens, block tables and a cache that stores the adapter and tokens behind each KV entry.

    Each step checks all cached entries of a sequence, as attention would read them.
    """

    max_num_seqs: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    cache: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        for new in plan.new_sequences:
            assert 0 <= new.slot < self.max_num_seqs
            self.tokens[new.slot], self.tables[new.slot] = list(new.token_ids), {}
            self.prompts[new.slot] = new.token_ids[: new.prompt_length]
        for slot, place, block in plan.new_blocks.tolist():
            assert place not in self.tables[slot], "told twice"
            self.tables[slot][place] = block
        num_drafts = np.zeros_like(plan.counts) if plan.drafts is None else plan.drafts.counts
        drafts = iter([] if plan.drafts is None else plan.drafts.token_ids.tolist())
        columns = (plan.slots, plan.starts, plan.counts, plan.samples, plan.adapter_indices, num_drafts)
        steps = list(zip(*(column.tolist() for column in columns), strict=True))
        for slot, start, count, _, adapter, num_drafted in steps:
            assert count > num_drafted
            self.tokens[slot] += itertools.islice(drafts, num_drafted)
            for position in range(start, start + count):
                owner = find_kv_owner(adapter, position, self.prompts[slot])
                assert owner[0] == adapter or adapter == int(AFTER_KV), "the adapter is not active yet"
                written = (owner, tuple(self.tokens[slot][: position + 1]))
                self.cache[self.tables[slot][position // SIZE] * SIZE + position % SIZE] = written
        chosen = []
        for slot, start, count, samples, adapter, num_drafted in steps:
            for position in range(start + count):
                kv_slot = self.tables[slot][position // SIZE] * SIZE + position % SIZE
                owner = find_kv_owner(adapter, position, self.prompts[slot])
                assert self.cache[kv_slot] == (owner, tuple(self.tokens[slot][: position + 1])), "another's keys"
            if samples:
                assert start + count == len(self.tokens[slot])
                known = len(self.tokens[slot]) - num_drafted
                sampled = [next_token(adapter, self.tokens[slot][: known + i]) for i in range(num_drafted + 1)]
                chosen += sampled
                draft = self.tokens[slot][known:]
                num_accepted = next((i for i in range(num_drafted) if draft[i] != sampled[i]), num_drafted)
                self.tokens[slot][known:] = sampled[: num_accepted + 1]
        return StepResult(plan.step, chosen, [0.0] * len(chosen))


class RandomDrafter:
    """Drafts a few tokens that are often right."""

    def __init__(self, seed: int, lengths: tuple[int, ...] = (0, 1, 2, 5)) -> None:
        self._random = random.Random(seed)
        self._lengths = lengths

    def propose(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> dict[Sequence, list[int]]:
        drafts = dict[Sequence, list[int]]()
        for sequence in sequences:
            if draft := self._draft(sequence)[:max_tokens]:
                drafts[sequence] = draft
                max_tokens -= len(draft)
        return drafts

    def _draft(self, sequence: Sequence) -> list[int]:
        assert not sequence.num_in_flight
        tokens, adapter = list(sequence.token_ids), int(sequence.request.adapter_identity or 0)
        for _ in range(self._random.choice(self._lengths)):
            is_right = self._random.random() < 0.8
            tokens.append(next_token(adapter, tokens) if is_right else self._random.randrange(VOCAB))
        return tokens[len(sequence.token_ids) :]

    def must_run_heads(self, num_running: int) -> bool:
        return True

    def waits(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> bool:
        return self._random.random() < 0.5

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None: ...

    def finish(self, sequence: Sequence) -> None: ...

    def learn(self) -> None: ...


@dataclass
class FakeAdapterTable(AdapterTable):
    """Adapters by identity. The index is part of the name; some adapters may not be loaded."""

    missing: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    acquired: dict[str, int] = field(default_factory=dict)

    requests: dict[str, int] = field(default_factory=dict)
    start_info: dict[str, int] = field(default_factory=dict)
    merged: set[str] = field(default_factory=set)
    needs_step: bool = False

    def add_request(self, identity: str) -> None:
        self.requests[identity] = self.requests.get(identity, 0) + 1

    def remove_request(self, identity: str, has_started: bool) -> None:
        self.requests[identity] -= 1
        self.start_info[identity] = self.start_info.get(identity, 0) - has_started
        assert 0 <= self.start_info[identity] <= self.requests[identity]

    def is_merged(self, identity: str) -> bool:
        return identity in self.merged

    def find_start(self, identity: str, prompt_ids: Any) -> int:
        return 0

    def vocab_size(self, identity: str) -> int:
        assert identity not in self.missing
        return VOCAB

    def find_starts(self, identity: str, prompt_ids: Seq[int]) -> tuple[int, int]:
        start = find_start(int(identity or 0), list(prompt_ids)) if identity else NEVER
        return start, NEVER if identity == AFTER_KV else start

    def start_request(self, identity: str) -> None:
        self.start_info[identity] = self.start_info.get(identity, 0) + 1

    def submit(self) -> tuple[AdapterOp, ...]:
        return ()

    def complete_step(self, step: int, loaded: Iterable[int]) -> None: ...

    def index_of(self, identity: str, has_started: bool) -> int | None:
        return None if identity in self.missing else int(identity or 0)

    def ensure_loaded(self, identity: str) -> None:
        self.wanted.add(identity)

    def acquire(self, identity: str) -> None:
        assert identity not in self.missing
        self.acquired[identity] = self.acquired.get(identity, 0) + 1

    def release(self, identity: str) -> None:
        self.acquired[identity] -= 1
        assert self.acquired[identity] >= 0


def make_request(request_id: int, prompt: list[int], max_new_tokens: int = 5, eos: bool = True, **more: Any) -> Request:
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=frozenset({EOS} if eos else ()))
    return Request(request_id, prompt, SamplingParams(), stop, **more)


def make_limits(
    max_step_tokens: int, max_num_seqs: int, max_length: int, max_prefill_chunk_tokens: int | None = None, **more: Any
) -> Limits:
    return Limits(
        VOCAB,
        max_num_seqs,
        max_length,
        0,
        SIZE,
        max_step_tokens,
        max_prefill_chunk_tokens=max_prefill_chunk_tokens,
        **more,
    )


class Engine:
    """The engine loop: schedule, submit, and collect an earlier step."""

    def __init__(self, limits: Limits, num_blocks: int, max_steps_in_flight: int = 1, **options: Any) -> None:
        self.pool, self.adapters, self.max_steps_in_flight = (
            BlockPool(num_blocks, SIZE),
            FakeAdapterTable(),
            max_steps_in_flight,
        )
        self.scheduler = Scheduler(limits, self.pool, self.adapters, **options)
        self.device = Device(limits.max_num_seqs)
        self.results: deque[StepResult] = deque()
        self.token_ids: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.plans: list[StepPlan] = []

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.device.run(plan))
        while self.results and (plan is None or len(self.results) >= self.max_steps_in_flight):
            self.collect()
        return plan is not None

    def collect(self) -> None:
        for emitted in self.scheduler.update(self.results.popleft()):
            assert emitted.request_id not in self.reasons, "a token after the last"
            self.token_ids.setdefault(emitted.request_id, []).extend(token.token_id for token in emitted.tokens)
            if emitted.finish_reason is not None:
                self.reasons[emitted.request_id] = emitted.finish_reason

    def finish(self, most: int = 2000) -> None:
        for _ in range(most):
            self.step()
            if not self.scheduler.has_work:
                return
        raise AssertionError(f"not finished after {most} steps")


def check(engine: Engine, *requests: Request) -> None:
    for request in requests:
        expected = expected_tokens(int(request.adapter_identity or 0), list(request.prompt_ids), request.stop)
        assert engine.token_ids[request.request_id] == expected
        last_is_eos = expected[-1] in request.stop.all_stop_token_ids
        assert engine.reasons[request.request_id] == (FinishReason.EOS_TOKEN if last_is_eos else FinishReason.LENGTH)


LARGE_LIMITS = make_limits(max_step_tokens=64, max_num_seqs=8, max_length=100)


# --- Single rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_batched_requests_match_single_requests(max_steps_in_flight: int) -> None:
    engine = Engine(LARGE_LIMITS, 64, max_steps_in_flight)
    requests = [make_request(i, [1 + i % 3] * (3 * i + 1), 2 + i, adapter_identity=str(i % 3 or "")) for i in range(8)]
    for request in requests:
        engine.scheduler.add(request)
    engine.finish()
    check(engine, *requests)
    assert engine.pool.num_free == 64


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_batch_columns_are_reused_for_same_sequences(max_steps_in_flight: int) -> None:
    engine = Engine(LARGE_LIMITS, 64, max_steps_in_flight)
    requests = [make_request(i, [1 + i], 12, eos=False, adapter_identity=adapter) for i, adapter in enumerate("21")]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(4):
        engine.step()
    first, second = engine.plans[-2:]
    assert second.slots is first.slots
    assert second.starts.tolist() == [start + 1 for start in first.starts.tolist()]
    requests.append(make_request(2, [5], 12, eos=False, adapter_identity="1"))
    engine.scheduler.add(requests[-1])
    for slots in ([1, 2, 0], [1, 2, 0]):  # with the prompt, then with the sampled token
        engine.step()
        assert engine.plans[-1].slots.tolist() == slots
    engine.scheduler.abort(1)
    engine.step()
    assert engine.plans[-1].slots.tolist() == [2, 0]
    engine.finish()
    check(engine, requests[0], requests[2])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_long_prompt_is_chunked(max_steps_in_flight: int) -> None:
    engine = Engine(make_limits(8, 4, 100), 64, max_steps_in_flight)
    long, short = make_request(0, [1, 2, 3] * 10, 6, eos=False), make_request(1, [4], 12, eos=False)
    engine.scheduler.add(short)
    engine.step()
    engine.scheduler.add(long)
    engine.finish()
    check(engine, long, short)
    assert engine.scheduler.counters.chunks >= 3
    assert all(plan.num_tokens <= 8 for plan in engine.plans)
    assert sum(len(plan.slots) == 2 for plan in engine.plans) >= 4  # the short request was never delayed


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_long_prompt_does_not_delay_decoding(max_steps_in_flight: int) -> None:
    engine = Engine(make_limits(8, 4, 100), 64, max_steps_in_flight)
    short, long = make_request(0, [4], 30, eos=False), make_request(1, [1, 2, 3] * 20, 2, eos=False)
    engine.scheduler.add(short)
    engine.step()
    engine.scheduler.add(long)
    engine.finish()
    check(engine, long, short)
    assert all(0 in plan.slots for plan in engine.plans[: len(engine.token_ids[0])])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_max_mixed_tokens_limits_prompts_while_decoding(max_steps_in_flight: int) -> None:
    engine = Engine(make_limits(32, 4, 200, max_mixed_tokens=5), 64, max_steps_in_flight)
    short, long = make_request(0, [4] * 20, 4, eos=False), make_request(1, [1, 2, 3] * 30, 2, eos=False)
    engine.scheduler.add(short)
    engine.step()
    engine.scheduler.add(long)
    engine.finish()
    check(engine, long, short)
    assert engine.plans[0].num_tokens == 20  # no sequence is decoding
    mixed = [plan for plan in engine.plans if len(plan.slots) == 2]
    assert len(mixed) >= 2
    assert all(plan.num_tokens == 6 for plan in mixed)
    assert max(plan.num_tokens for plan in engine.plans) == 32  # after the short request finished


def test_short_prompt_starts_during_long_prompt() -> None:
    engine = Engine(make_limits(8, 4, 100, max_prefill_chunk_tokens=6), 64)
    long, short = make_request(0, [1, 2, 3] * 20, 2, eos=False), make_request(1, [4], 3, eos=False)
    engine.scheduler.add(long)
    engine.scheduler.add(short)
    engine.finish()
    check(engine, long, short)
    assert list(engine.reasons) == [1, 0]
    assert max(plan.counts.max() for plan in engine.plans) == 6


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_last_sequence_is_preempted_if_blocks_run_out(max_steps_in_flight: int) -> None:
    engine = Engine(LARGE_LIMITS, 8, max_steps_in_flight)
    requests = [make_request(i, [i + 1] * 6, 16, eos=False) for i in range(4)]
    for request in requests:
        engine.scheduler.add(request)
    engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.preemptions > 0


def test_shared_prefix_is_not_recomputed() -> None:
    engine = Engine(LARGE_LIMITS, 64)
    first, second = make_request(0, [1, 2, 3] * 5, 3), make_request(1, [1, 2, 3] * 5 + [4], 3)
    engine.scheduler.add(first)
    engine.finish()
    computed = engine.scheduler.counters.computed_tokens
    engine.scheduler.add(second)
    engine.finish()
    check(engine, first, second)
    assert engine.scheduler.counters.prefix_tokens == 12
    assert engine.scheduler.counters.computed_tokens - computed < 16


@pytest.mark.parametrize(
    ("prompt", "adapter", "shared"),
    [
        ([1] * 14 + [INVOCATION], ACTIVATED, 12),
        ([1] * 9 + [INVOCATION] + [1] * 5, ACTIVATED, 8),
        ([1] * 12 + [INVOCATION] + [1] * 2, ACTIVATED, 12),
        ([INVOCATION] + [1] * 14, ACTIVATED, 0),
        ([1] * 15, ACTIVATED, 12),
        ([1] * 15, AFTER_KV, 12),
    ],
)
@pytest.mark.parametrize("base_first", [True, False])
def test_blocks_that_an_adapter_does_not_change_are_shared_with_the_base_model(
    prompt: list[int], adapter: str, shared: int, base_first: bool
) -> None:
    engine = Engine(LARGE_LIMITS, 64)
    requests = [make_request(i, prompt, adapter_identity=each) for i, each in enumerate(("", adapter))]
    for request in requests if base_first else requests[::-1]:
        engine.scheduler.add(request)
        engine.finish()
    check(engine, *requests)
    counters = engine.scheduler.counters
    assert (counters.prefix_tokens, counters.base_prefix_tokens) == (shared, shared)
    engine.scheduler.add(make_request(2, prompt, adapter_identity=adapter))
    engine.finish()
    assert counters.prefix_tokens == shared + 12
    assert counters.adapter_prefix_tokens == (12 - shared if adapter == ACTIVATED else 0)


def test_equal_blocks_with_different_activation_are_not_shared() -> None:
    engine = Engine(LARGE_LIMITS, 64)
    same = [1, 1, 1, 1, 1, INVOCATION, 1, INVOCATION]  # activated at its last token, unless the invocation follows
    requests = [
        make_request(i, [*same, *rest], adapter_identity=ACTIVATED) for i, rest in enumerate(([1], [INVOCATION]))
    ]
    for request in requests:
        engine.scheduler.add(request)
        engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.prefix_tokens == 4


# --- Sequences that wait for a prefix ---------------------------------------------------------------------------------

LONG = [1, 3, 4, 5] * 40
LONG_LIMITS = make_limits(max_step_tokens=64, max_num_seqs=8, max_length=200)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("adapter", ["", "1", ACTIVATED, AFTER_KV])
def test_concurrent_requests_compute_a_shared_prefix_once(adapter: str, max_steps_in_flight: int) -> None:
    engine = Engine(LONG_LIMITS, 400, max_steps_in_flight)
    adapters = ["", ACTIVATED, AFTER_KV, ""] if adapter != "1" else ["1"] * 4
    requests = [make_request(i, [*LONG, 6, 6], 4, adapter_identity=each) for i, each in enumerate(adapters)]
    for request in requests:
        engine.scheduler.add(request)
    engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.prefix_tokens > 3 * (len(LONG) - MIN_SHARED_TOKENS)
    assert engine.pool.num_free == 400


def test_sequence_does_not_wait_for_blocks_that_another_sequence_has_computed() -> None:
    """The other sequence cannot publish its copy, because it was computed together with the published block."""
    limits = make_limits(max_step_tokens=400, max_num_seqs=8, max_length=300)
    engine = Engine(limits, 75, drafter=RandomDrafter(0, lengths=(1,)))
    start = LONG[:48]
    first, second = make_request(0, [*start, *[6] * 16], 1), make_request(1, [*start, *[3] * 92], 100, eos=False)
    evicting, waiting = make_request(2, [5] * 120, 1), make_request(3, [*start, *[3] * 92], 1)
    for request in (first, second, evicting):
        engine.scheduler.add(request)
        if request is not first:
            engine.step()
            engine.step()
    engine.scheduler.add(waiting)
    for _ in range(3):
        engine.step()
    assert 3 not in engine.scheduler._by_id
    assert 1 in engine.scheduler._by_id
    engine.finish()
    check(engine, first, second, evicting, waiting)


def test_one_step_adds_a_limited_number_of_waiting_sequences() -> None:
    """Otherwise one step would read the prompts of all queued requests."""
    engine = Engine(LONG_LIMITS, 400)
    requests = [make_request(i, LONG, 1) for i in range(3 * MAX_NEW_FOLLOWERS)]
    for request in requests:
        engine.scheduler.add(request)
    engine.step()
    assert engine.scheduler.num_ready >= len(requests) - 1 - MAX_NEW_FOLLOWERS
    engine.finish()
    check(engine, *requests)


@pytest.mark.parametrize("stop", ["abort", "fail"])
def test_sequences_continue_if_the_sequence_that_computes_their_prefix_stops(stop: str) -> None:
    engine = Engine(LONG_LIMITS, 400)
    requests = [make_request(i, LONG, 4) for i in range(3)]
    for request in requests:
        engine.scheduler.add(request)
    engine.step()
    if stop == "abort":
        engine.scheduler.abort(0)
    else:
        engine.scheduler.fail(0, AdapterError("failed"))
        engine.scheduler.pop_failed()
    assert engine.scheduler.num_ready == 2  # otherwise the engine would sleep
    engine.finish()
    check(engine, *requests[1:])


def test_waiting_sequences_can_be_aborted() -> None:
    engine = Engine(LONG_LIMITS, 400)
    requests = [make_request(i, LONG, 4) for i in range(3)]
    for request in requests:
        engine.scheduler.add(request)
    engine.step()
    engine.scheduler.abort(1)
    engine.finish()
    check(engine, requests[0], requests[2])


def test_sequences_do_not_wait_for_other_tenants_or_short_prefixes() -> None:
    engine = Engine(make_limits(max_step_tokens=400, max_num_seqs=8, max_length=200), 400)
    prompts = [(LONG, "a"), (LONG, "b"), ([*LONG[:40], 6, *LONG], "a")]
    for i, (prompt, tenant) in enumerate(prompts):
        engine.scheduler.add(make_request(i, prompt[:160], 4, tenant=tenant))
    engine.step()
    assert engine.scheduler.num_running == 3


def test_prefix_cache_is_per_adapter() -> None:
    engine = Engine(LARGE_LIMITS, 64)
    requests = [make_request(i, [1, 2, 3] * 5, adapter_identity=adapter) for i, adapter in enumerate(("", "1", "2"))]
    for request in requests:
        engine.scheduler.add(request)
        engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.prefix_tokens == 0


def test_prefix_cache_is_per_salt() -> None:
    engine = Engine(LARGE_LIMITS, 64)
    for i, salt in enumerate(("", "mine", "mine")):
        engine.scheduler.add(make_request(i, [1, 2, 3] * 5, salt=salt))
        engine.finish()
    assert engine.scheduler.counters.prefix_tokens == 12  # only for the last request


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_abort_at_any_step_frees_all_blocks(max_steps_in_flight: int) -> None:
    for steps in range(8):
        engine = Engine(make_limits(8, 2, 100), 8, max_steps_in_flight)
        requests = [make_request(i, [i + 1] * 7, 6, eos=False) for i in range(4)]
        for request in requests:
            engine.scheduler.add(request)
        for _ in range(steps):
            engine.step()
        aborted = requests[steps % 4]
        engine.scheduler.abort(aborted.request_id)
        before = list(engine.token_ids.get(aborted.request_id, []))
        engine.finish()
        assert engine.token_ids.get(aborted.request_id, []) == before
        check(engine, *(request for request in requests if request is not aborted))
        assert engine.pool.num_free == 8
        assert not any(engine.adapters.acquired.values())


def test_abort_of_unknown_request_does_nothing() -> None:
    Engine(LARGE_LIMITS, 4).scheduler.abort(7)


def test_loading_adapter_does_not_block_other_requests() -> None:
    engine = Engine(LARGE_LIMITS, 64)
    engine.adapters.missing.add("1")
    cold, warm = make_request(0, [1], adapter_identity="1"), make_request(1, [2], adapter_identity="2")
    engine.scheduler.add(cold)
    engine.scheduler.add(warm)
    while 1 not in engine.reasons:
        assert engine.step()
    assert not engine.step()
    assert engine.adapters.wanted == {"1"}
    engine.adapters.missing.clear()
    engine.scheduler.queues.adapter_loaded("1")
    engine.finish()
    check(engine, cold, warm)


def test_evicted_adapter_is_requested_again() -> None:
    engine = Engine(make_limits(8, 1, 100), 64)
    first, second = make_request(0, [1], 3, eos=False), make_request(1, [2], 3, adapter_identity="1")
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step()
    engine.adapters.missing.add("1")
    for _ in range(5):
        engine.step()
    assert engine.adapters.wanted == {"1"}
    engine.adapters.missing.clear()
    engine.scheduler.queues.adapter_loaded("1")
    engine.finish()
    check(engine, first, second)


def test_tenants_share_by_weight() -> None:
    engine = Engine(make_limits(16, 2, 100), 64, weights={"b": 3.0})
    for i in range(120):
        engine.scheduler.add(make_request(i, [1 + i % 5] * 3, 4, eos=False, tenant="ab"[i % 2]))
    while len(engine.reasons) < 60:
        engine.step()
    of_b = sum(request_id % 2 for request_id in engine.reasons)
    assert 2.5 <= of_b / (60 - of_b) <= 3.5


def test_tenants_share_step_tokens() -> None:
    engine = Engine(make_limits(64, 8, 100), 64)
    for i in range(20):
        engine.scheduler.add(make_request(i, [1 + i % 5] * 3, 4, eos=False, tenant="a" if i < 16 else "b"))
    engine.step()
    assert engine.scheduler.num_running == 8
    while len(engine.reasons) < 8:
        engine.step()
    assert sum(request_id >= 16 for request_id in engine.reasons) == 4


def test_idle_tenant_gains_no_credit() -> None:
    engine = Engine(make_limits(16, 1, 100), 64)
    for i in range(20):
        engine.scheduler.add(make_request(i, [1], 4, eos=False, tenant="busy"))
    while len(engine.reasons) < 10:
        engine.step()
    for i in range(20, 30):
        engine.scheduler.add(make_request(i, [1], 4, eos=False, tenant="back"))
    while len(engine.reasons) < 18:
        engine.step()
    assert 3 <= sum(request_id >= 20 for request_id in engine.reasons) <= 5


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [([], 1, "cannot be empty"), ([1] * 99, 2, "must be <= 100"), ([1], 1000, "must be <= 100")],
)
def test_request_above_engine_limits_is_rejected(prompt: list[int], new: int, message: str) -> None:
    engine = Engine(LARGE_LIMITS, 64)
    with pytest.raises(InputError, match=message):
        engine.scheduler.add(make_request(0, prompt, new))
    assert not engine.scheduler.has_work


def test_request_larger_than_cache_is_rejected() -> None:
    with pytest.raises(InputError, match="must be <= 16"):
        Engine(LARGE_LIMITS, 4).scheduler.add(make_request(0, [1] * 10, 7))


# --- Outputs, rejections and timeouts ---------------------------------------------------------------------------------


def encode_logprob(tokens: list[int], position: int) -> float:
    """Return a fake log probability that encodes token and position."""
    return -(position + tokens[position] / 10)


@dataclass
class ReportingDevice(Device):
    """A device that returns prompt log probabilities and alternatives. Prompts starting with 6 fail at the third
    token."""

    prompts: dict[int, list[int]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new_sequences:
            self.prompts[new.slot] = list(new.token_ids[: new.prompt_length])
        result = super().run(plan)
        reports = []
        for slot, start, count, scores in zip(plan.slots, plan.starts, plan.counts, plan.scores_prompt, strict=True):
            if scores:
                prompt = self.prompts[slot]
                ends = min(start + count, len(prompt) - 1)
                assert ends > start
                reports.append([encode_logprob(prompt, position + 1) for position in range(start, ends)])
        sampled = [int(slot) for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        logprobs = [-0.5] * len(sampled)
        for place, slot in enumerate(sampled):
            if self.tokens[slot][0] == 6 and len(self.tokens[slot]) == len(self.prompts[slot]) + 3:
                logprobs[place] = math.nan
        alternatives = {place: Alternatives([token], [-0.25]) for place, token in enumerate(result.token_ids)}
        return replace(result, logprobs=logprobs, alternatives=alternatives, prompt_logprobs=reports)


class ReportingEngine(Engine):
    """An engine that records all outputs, with a fake clock."""

    def __init__(self, limits: Limits, num_blocks: int, max_steps_in_flight: int = 1, **options: Any) -> None:
        self.now = 0.0
        super().__init__(limits, num_blocks, max_steps_in_flight, clock=lambda: self.now, **options)
        self.device = ReportingDevice(limits.max_num_seqs)
        self.outputs: dict[int, list[Output]] = {}

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        self.record_outputs(self.scheduler.pop_failed())
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.device.run(plan))
        while self.results and (plan is None or len(self.results) >= self.max_steps_in_flight):
            self.collect()
        return plan is not None

    def collect(self) -> None:
        self.record_outputs(self.scheduler.update(self.results.popleft()))

    def record_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
            if output.failure is None:
                self.token_ids.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def failure(self, request_id: int) -> Failure:
        *before, last = self.outputs[request_id]
        assert all(output.failure is None for output in before)
        assert last.failure is not None
        return last.failure


def test_full_queue_rejects_requests() -> None:
    engine = ReportingEngine(replace(LARGE_LIMITS, max_num_seqs=2, max_waiting=3), 64)
    for i in range(2):
        engine.scheduler.add(make_request(i, [1], 5, eos=False))
    engine.step()
    for i in range(2, 5):
        engine.scheduler.add(make_request(i, [1], 5, eos=False))
    with pytest.raises(OverloadedError, match="3 requests are waiting") as refused:
        engine.scheduler.add(make_request(5, [1]))
    assert refused.value.retry_after_s == 1.0
    assert engine.scheduler.counters.rejected == 1
    assert engine.adapters.requests == {"": 5}
    engine.finish()
    engine.scheduler.add(make_request(5, [1]))
    engine.finish()


def test_long_estimated_wait_is_rejected_with_retry_time() -> None:
    engine = ReportingEngine(replace(LARGE_LIMITS, max_num_seqs=1, max_wait_s=10.0), 64, max_steps_in_flight=2)
    engine.scheduler.add(make_request(0, [1] * 8, 3, eos=False))  # throughput is unknown at first
    engine.step()
    while engine.scheduler.has_work:
        engine.now += 2.0
        engine.step()
    cost, throughput = 5 + 3, engine.scheduler._backlog.estimate_seconds(1)  # mean completion length is 3 tokens
    assert 0.5 < throughput < 1.0  # 10 tokens took 6 s
    num_taken = int(10.0 / (cost * throughput)) + 1
    for i in range(1, num_taken + 1):
        engine.scheduler.add(make_request(i, [1] * 5, 50, eos=False))
    with pytest.raises(OverloadedError) as refused:
        engine.scheduler.add(make_request(99, [1] * 5, 50, eos=False))
    assert refused.value.retry_after_s == pytest.approx(max(1.0, num_taken * cost * throughput - 10.0))
    engine.scheduler.abort(num_taken)
    engine.scheduler.add(make_request(100, [1] * 5, 50, eos=False))
    for i in range(1, 101):
        engine.scheduler.abort(i)
    assert engine.scheduler._backlog.num_tokens == pytest.approx(0.0)


def test_backlog_counts_waiting_requests() -> None:
    engine = ReportingEngine(make_limits(16, 2, 100), 8, max_steps_in_flight=2)
    for i in range(6):
        engine.scheduler.add(make_request(i, [1 + i] * 6, 12, eos=False))
    assert engine.scheduler._backlog.num_tokens == 6 * 18
    engine.step()
    assert engine.scheduler._backlog.num_tokens == 4 * 18
    engine.finish()
    assert engine.scheduler._backlog.num_tokens == pytest.approx(0.0)


def test_throughput_counts_overlapping_steps_once() -> None:
    backlog = Backlog(LARGE_LIMITS, SchedulerCounters())
    assert backlog.estimate_seconds(1000) == 0.0
    backlog.record_step(10, submitted=0.0, now=1.0)
    assert backlog.estimate_seconds(10) == pytest.approx(1.0)
    backlog.record_step(10, submitted=0.5, now=2.0)
    assert backlog.estimate_seconds(10) == pytest.approx(1.0)
    backlog.record_step(0, submitted=2.0, now=50.0)  # computes nothing
    backlog.record_step(10, submitted=90.0, now=91.0)  # an adapter wait is not work either
    assert backlog.estimate_seconds(10) == pytest.approx(1.0)
    for end in range(92, 500):
        backlog.record_step(10, submitted=end - 0.5, now=float(end))
    assert backlog.estimate_seconds(10) == pytest.approx(0.5, rel=1e-2)


def test_estimate_follows_recent_completion_lengths() -> None:
    backlog = Backlog(LARGE_LIMITS, SchedulerCounters())
    request = make_request(0, [1] * 4, 100)
    assert backlog.estimate_tokens(request) == 104
    backlog.record_completion(10)
    assert backlog.estimate_tokens(request) == 14
    assert backlog.estimate_tokens(make_request(0, [1] * 4, 3)) == 7
    for _ in range(500):
        backlog.record_completion(20)
    assert backlog.estimate_tokens(request) == pytest.approx(24, rel=1e-2)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_adapter_timeout_fails_request(max_steps_in_flight: int) -> None:
    engine = ReportingEngine(replace(LARGE_LIMITS, adapter_timeout_s=30.0), 64, max_steps_in_flight)
    engine.adapters.missing |= {"1", "2"}
    engine.scheduler.add(make_request(0, [1], adapter_identity="1"))
    engine.now = 10.0
    engine.scheduler.add(make_request(1, [1], adapter_identity="1"))
    engine.scheduler.add(make_request(2, [1], adapter_identity="2"))
    engine.scheduler.add(make_request(3, [1], 4, eos=False))
    assert engine.scheduler.queues.deadline_s == 20.0
    engine.now = 29.9
    engine.step()
    assert 0 not in engine.outputs
    engine.now = 30.0
    engine.step()
    failure = engine.failure(0)
    assert (failure.kind, failure.status) == ("SourceError", 503)
    assert "within 30 s" in failure.message
    engine.adapters.missing.remove("2")
    engine.scheduler.queues.adapter_loaded("2")
    engine.now = 40.0
    engine.finish()
    assert engine.failure(1).kind == "SourceError"
    assert set(engine.reasons) == {2, 3}
    assert engine.scheduler.queues.num_waiting_for_adapters == 0
    assert not any(engine.adapters.requests.values())


def test_started_request_has_no_adapter_timeout() -> None:
    engine = ReportingEngine(replace(LARGE_LIMITS, adapter_timeout_s=10.0), 6)
    engine.adapters.missing |= {"1", "2"}
    engine.scheduler.add(make_request(0, [1], adapter_identity="2"))  # keeps the timeout queue in order
    engine.scheduler.add(make_request(1, [2] * 4, 12, eos=False))
    engine.scheduler.add(make_request(2, [3] * 4, 12, eos=False, adapter_identity="1"))
    engine.adapters.missing.remove("1")
    engine.scheduler.queues.adapter_loaded("1")
    while not engine.scheduler.counters.preemptions:  # the last sequence is preempted
        assert engine.step()
    engine.adapters.missing.add("1")
    while engine.step():
        pass
    assert engine.scheduler.queues.num_waiting_for_adapters == 2
    engine.now = 100.0
    engine.step()
    assert engine.failure(0).kind == "SourceError"
    assert engine.outputs[2][-1].failure is None
    engine.adapters.missing.remove("1")
    engine.scheduler.queues.adapter_loaded("1")
    engine.finish()
    assert len(engine.token_ids[2]) == 12


def test_preemption_clears_forced_tokens_flag() -> None:
    engine = Engine(LARGE_LIMITS, 6)
    requests = [make_request(i, [i + 2] * 4, 12, eos=False) for i in range(2)]
    for request in requests:
        engine.scheduler.add(request)
    while not engine.scheduler.counters.preemptions:
        assert engine.step()
        for sequence in engine.scheduler._running:
            sequence.has_forced_tokens = True  # as by `SubmittedStep.append_forced_tokens`
    preempted = [each for each in engine.scheduler._by_id.values() if each.slot is None]
    assert [each.has_forced_tokens for each in preempted] == [False]
    engine.finish()
    check(engine, *requests)


def test_no_forced_tokens_with_two_steps_in_flight() -> None:
    sequence = Sequence(make_request(0, [1], 9), 0)
    step = SubmittedStep(1, 1, 0.0, StepBuilder(0).build_columns(), [sequence, None], [])
    for num_in_flight, room in ((1, 8), (2, 0)):
        sequence.num_in_flight = num_in_flight
        assert [step.max_forced_tokens(number) for number in (0, 1)] == [room, 0]


def test_grammar_tokens_exclude_finished_sequences() -> None:
    def start_sequence(request_id: int, max_new_tokens: int = 9, **more: Any) -> Sequence:
        return Sequence(make_request(request_id, [1], max_new_tokens, structure=Structure("any")), 0, **more)

    plain = Sequence(make_request(9, [1]), 0)
    sampled = [
        start_sequence(0, forced_tokens=(2, 3)),
        start_sequence(1),
        start_sequence(2, 1),
        start_sequence(3, is_finished=True),
        start_sequence(4),
        None,
        plain,
    ]
    tokens, logprobs = [5, EOS, 5, 5, 5, 5, 5], [-1.0] * 4 + [math.nan] + [-1.0] * 2
    step = SubmittedStep(1, 7, 0.0, StepBuilder(0).build_columns(), sampled, [])
    chosen = step.list_grammar_tokens(StepResult(1, tokens, logprobs))
    assert chosen == [(0, 5), (0, 2), (0, 3)]  # without finished or failed sequences


def test_adapter_failure_fails_waiting_requests() -> None:
    engine = ReportingEngine(LARGE_LIMITS, 64)
    engine.adapters.missing |= {"1", "2"}
    for i, adapter in enumerate(("1", "2", "1", "")):
        engine.scheduler.add(make_request(i, [1], 3, eos=False, adapter_identity=adapter))
    error = AdapterError("damaged")
    error.retry_after_s = 7.0
    engine.scheduler.queues.adapter_failed("1", error)
    engine.scheduler.queues.adapter_failed("nobody's", error)
    engine.step()
    assert engine.failure(0) == engine.failure(2) == ("AdapterError", 424, "damaged", 7.0)
    engine.adapters.missing.clear()
    engine.scheduler.queues.adapter_loaded("2")
    engine.finish()
    assert set(engine.reasons) == {1, 3}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_nan_logits_fail_only_their_request(max_steps_in_flight: int) -> None:
    engine = ReportingEngine(LARGE_LIMITS, 64, max_steps_in_flight)
    bad, good = make_request(0, [6, 1], 9, eos=False), make_request(1, [5, 1], 9, eos=False)
    engine.scheduler.add(bad)
    engine.scheduler.add(good)
    engine.finish()
    check(engine, good)
    assert len(engine.outputs[0]) == 3
    assert engine.failure(0)[:2] == ("LoraxError", 500)
    assert "are NaN" in engine.failure(0).message
    assert engine.pool.num_free == 64


def test_nan_logits_of_merge_are_input_error() -> None:
    """The request set the merge weights, so it is an input error."""
    engine = ReportingEngine(LARGE_LIMITS, 64)
    engine.adapters.merged.add("1")
    engine.scheduler.add(make_request(0, [6, 1], 9, eos=False, adapter_identity="1"))
    engine.finish()
    expected = "the logits with these merged adapters are NaN; use smaller merge weights"
    assert engine.failure(0)[:3] == ("InputError", 422, expected)


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([1, VOCAB], {}, "`inputs` has tokens beyond the vocabulary of 7"),
        ([1, -1], {}, "`inputs` has tokens beyond the vocabulary of 7"),
        ([1, VOCAB + 2], {"adapter_identity": "1"}, "`inputs` has tokens beyond the vocabulary of 9"),
        ([1], {"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, "`logit_bias` has tokens beyond"),
        ([1], {"stop": StopParams(min_new_tokens=1, stop_token_ids=frozenset(range(VOCAB)))}, "every token"),
    ],
)
def test_tokens_beyond_vocabulary_are_rejected(prompt: list[int], more: dict[str, Any], message: str) -> None:
    engine = ReportingEngine(LARGE_LIMITS, 64)
    engine.adapters.vocab_size = lambda identity: 9 if identity else VOCAB  # type: ignore[method-assign]
    engine.adapters.missing.add("1")
    bad, good = replace(make_request(0, prompt), **more), make_request(1, [1, 2])
    engine.scheduler.add(bad)
    engine.scheduler.add(good)
    engine.adapters.missing.clear()
    engine.scheduler.queues.adapter_loaded("1")
    engine.finish()
    check(engine, good)
    assert (engine.failure(0).kind, len(engine.outputs[0])) == ("InputError", 1)
    assert message in engine.failure(0).message
    assert not any(engine.adapters.requests.values())


def test_adapter_can_extend_vocabulary() -> None:
    engine = ReportingEngine(LARGE_LIMITS, 64)
    engine.adapters.vocab_size = lambda identity: 9 if identity else VOCAB  # type: ignore[method-assign]
    engine.scheduler.add(make_request(0, [1, VOCAB + 1], adapter_identity="1"))
    engine.finish()
    assert set(engine.reasons) == {0}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("max_prefill_chunk_tokens", [None, 3])
def test_prompt_logprobs_survive_chunks_and_preemption(
    max_steps_in_flight: int, max_prefill_chunk_tokens: int | None
) -> None:
    num_preempted_in_the_prompt = 0
    for seed in range(20):
        rng = random.Random(seed)
        engine = ReportingEngine(
            make_limits(8, 4, 60, max_prefill_chunk_tokens), rng.choice([8, 9]), max_steps_in_flight
        )
        requests = []
        for i in range(8):
            prompt = [1, 2, 3, 4] * 2 + [rng.randint(1, 5) for _ in range(rng.randint(0, 12))]
            if i % 4 == 3:
                prompt = prompt[:1]
            requests.append(make_request(i, prompt, rng.randint(1, 9), eos=False, prompt_logprobs=i % 2 == 1))
            engine.scheduler.add(requests[-1])
            for _ in range(rng.randint(0, 4)):
                engine.step()
                waiting = [each for each in engine.scheduler._by_id.values() if each.has_started and each.slot is None]
                num_preempted_in_the_prompt += sum(bool(each.prompt_logprobs) for each in waiting)
        engine.finish()
        check(engine, *requests)
        for request in requests:
            first, *rest = engine.outputs[request.request_id]
            prompt = list(request.prompt_ids)
            expected = [encode_logprob(prompt, position) for position in range(1, len(prompt))]
            assert first.prompt_logprobs == (expected if request.prompt_logprobs else None)
            assert all(output.prompt_logprobs is None for output in rest)
    assert num_preempted_in_the_prompt > 0


def test_outputs_contain_alternatives_of_their_request() -> None:
    engine = ReportingEngine(LARGE_LIMITS, 64, max_steps_in_flight=2)
    requests = [make_request(i, [1 + i], 4, eos=False, adapter_identity=str(2 - i or "")) for i in range(3)]
    for request in requests:
        engine.scheduler.add(request)
    engine.finish()
    for request in requests:
        for output in engine.outputs[request.request_id]:
            (token,) = output.tokens
            assert token.alternatives == ([token.token_id], [-0.25])
            assert token.logprob == -0.5


@pytest.mark.parametrize(
    ("rope", "lengths", "shared"),
    [
        (RopeRule(), (13, 17), 12),
        (RopeRule(16), (13, 16), 12),
        (RopeRule(16), (13, 17), 0),  # one short and one long prompt
        (RopeRule(16), (17, 30), 16),  # two long prompts
        (RopeRule(16, depends_on_length=True), (17, 30), 0),
        (RopeRule(16, depends_on_length=True), (30, 30), 28),
        (RopeRule(16, depends_on_length=True), (13, 16), 12),
    ],
)
def test_prefix_cache_is_per_rope_variant(rope: RopeRule, lengths: tuple[int, int], shared: int) -> None:
    engine = ReportingEngine(replace(LARGE_LIMITS, rope=rope), 64)
    for i, length in enumerate(lengths):
        engine.scheduler.add(make_request(i, [1 + j % 5 for j in range(length)], 1))
        engine.finish()
    assert engine.scheduler.counters.prefix_tokens == shared


def test_rope_variant_depends_on_prompt_length() -> None:
    engine = ReportingEngine(replace(LARGE_LIMITS, rope=RopeRule(8)), 10)
    first, second = make_request(0, [1] * 8, 16, eos=False), make_request(1, [2] * 8, 28, eos=False)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.finish()
    check(engine, first, second)
    assert engine.scheduler.counters.preemptions > 0
    assert engine.scheduler.counters.prefix_tokens > 8  # it reused its blocks, including generated tokens


def test_prefix_cache_is_disabled_without_can_reuse() -> None:
    engine = ReportingEngine(replace(LARGE_LIMITS, can_reuse=False), 64)
    requests = [make_request(i, [1, 2, 3] * 5, 3) for i in range(3)]
    for request in requests:
        engine.scheduler.add(request)
        engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.prefix_tokens == 0


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_prompts_are_not_chunked_without_can_chunk(max_steps_in_flight: int) -> None:
    limits = make_limits(44, 4, 40, can_chunk=False, can_reuse=False)
    engine = ReportingEngine(limits, 40, max_steps_in_flight)
    requests = [make_request(i, [1 + i % 5] * (20 + i), 8, eos=False) for i in range(10)]
    for request in requests:
        engine.scheduler.add(request)
    engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.chunks == engine.scheduler.counters.preemptions == 0
    assert all(plan.num_tokens <= 44 for plan in engine.plans)
    assert all(plan.samples.all() for plan in engine.plans)


def test_step_token_limit_must_fit_unchunked_prompt() -> None:
    with pytest.raises(AssertionError, match="too small for one prompt"):
        make_limits(40, 4, 40, can_chunk=False)


def test_empty_step_only_with_adapter_operations() -> None:
    engine = ReportingEngine(LARGE_LIMITS, 64)
    assert engine.scheduler.schedule() is None
    engine.adapters.needs_step = True
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert len(plan.slots) == 0
    engine.adapters.needs_step = False
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.update(StepResult(plan.step, [], [])) == []


@pytest.mark.parametrize(("num_blocks", "max_prefill_chunk_tokens"), [(14, 8), (13, None)])
def test_later_requests_do_not_starve_long_prompt(num_blocks: int, max_prefill_chunk_tokens: int | None) -> None:
    """Short requests keep arriving and use every free block."""
    engine = Engine(make_limits(32, 8, 100, max_prefill_chunk_tokens=max_prefill_chunk_tokens), num_blocks)
    long = make_request(0, [1, 2, 3] * 16, 2, eos=False)
    num_short = 0
    for step in range(400):
        while engine.scheduler.num_waiting < 4:
            num_short += 1
            engine.scheduler.add(make_request(num_short, [4, 5], 3, eos=False))
        if step == 5:
            engine.scheduler.add(long)
        engine.step()
        if 0 in engine.reasons:
            break
    assert 0 in engine.reasons
    check(engine, long)


# --- Load -------------------------------------------------------------------------------------------------------------


def run_random_requests(seed: int, drafts: bool = False) -> Engine:
    """Run a hundred requests with few distinct prefixes, in a small cache."""
    rng = random.Random(seed)
    limits = make_limits(rng.choice([4, 7, 16]), rng.choice([2, 4]), 40, rng.choice([None, 3]))
    drafter = RandomDrafter(seed) if drafts else None
    engine = Engine(limits, rng.choice([10, 13, 20]), max_steps_in_flight=rng.choice([1, 2]), drafter=drafter)
    prefixes = [[rng.randint(1, 6) for _ in range(rng.choice([1, 4, 8, 9, 12]))] for _ in range(4)]
    requests, aborted = [], set()
    for i in range(100):
        prompt = [*rng.choice(prefixes), *(rng.randint(1, 6) for _ in range(rng.choice([0, 0, 1, 5])))]
        options = {
            "adapter_identity": rng.choice(["", "1"]),
            "tenant": rng.choice("ab"),
        }
        requests.append(make_request(i, prompt, rng.randint(1, 20), rng.random() < 0.3, **options))
        engine.scheduler.add(requests[-1])
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
        if rng.random() < 0.1:
            victim = rng.randrange(i + 1)
            if victim not in engine.reasons:
                aborted.add(victim)
            engine.scheduler.abort(victim)
    engine.finish()
    check(engine, *(request for request in requests if request.request_id not in aborted))
    assert engine.pool.num_free == engine.pool.num_blocks
    assert all(plan.num_tokens <= limits.max_step_tokens for plan in engine.plans)
    assert not any(engine.adapters.acquired.values())
    return engine


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.slow)], ids=len)
def test_random_workload_matches_single_requests(seeds: range) -> None:
    engines = [run_random_requests(seed) for seed in seeds]
    counters = [engine.scheduler.counters for engine in engines]
    assert sum(each.preemptions for each in counters) > 8 * len(seeds)
    assert sum(each.chunks for each in counters) > 8 * len(seeds)
    assert sum(each.prefix_tokens for each in counters) > 80 * len(seeds)
    assert sum(engine.pool.num_evictions for engine in engines) > 80 * len(seeds)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.slow)], ids=len)
def test_random_workload_with_drafts_matches_single_requests(seeds: range) -> None:
    counters = [run_random_requests(seed, drafts=True).scheduler.counters for seed in seeds]
    assert sum(each.preemptions for each in counters) > 8 * len(seeds)
    assert sum(each.accepted_tokens for each in counters) > 8 * len(seeds)
    assert sum(each.drafted_tokens - each.accepted_tokens for each in counters) > 8 * len(seeds)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_drafts_save_steps(max_steps_in_flight: int) -> None:
    steps = []
    for drafter in (None, RandomDrafter(0)):
        engine = Engine(LARGE_LIMITS, 64, max_steps_in_flight, drafter=drafter)
        request = make_request(0, [1], 30, eos=False)
        engine.scheduler.add(request)
        engine.finish()
        check(engine, request)
        steps.append(engine.scheduler.counters.steps)
    assert steps[1] < steps[0]


def test_requests_without_speculation_get_no_drafts() -> None:
    engine = Engine(LARGE_LIMITS, 64, drafter=RandomDrafter(0))
    request = make_request(0, [1], 30, eos=False, speculation=False)
    engine.scheduler.add(request)
    engine.finish()
    check(engine, request)
    assert engine.scheduler.counters.drafted_tokens == 0


class EagerDrafter(RandomDrafter):
    """Drafts the same number of tokens for every sequence, and records the measured times."""

    def __init__(self, length: int = 8) -> None:
        super().__init__(0, lengths=(length,))
        self.times: list[tuple[int, int, float]] = []

    def waits(self, sequences: Iterable[Sequence], num_running: int, max_tokens: int) -> bool:
        return True

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        self.times.append((num_sequences, num_drafted, seconds))


@pytest.mark.parametrize("num_sequences", [8, 32, 33, 64])
def test_number_of_sampled_tokens_is_limited(num_sequences: int) -> None:
    """At most 64 sampled tokens fit into a step. If not every sequence can get a draft token, there are no drafts."""
    engine = Engine(make_limits(256, 64, 64), 600, max_steps_in_flight=2, drafter=EagerDrafter())
    for i in range(num_sequences):
        engine.scheduler.add(make_request(i, [1 + i % 6], 30, eos=False))
    for _ in range(12):
        engine.step()
    sizes = [len(plan.slots) + len(plan.drafts.token_ids) for plan in engine.plans if plan.drafts is not None]
    if num_sequences <= 32:
        assert max(sizes) == 64
    else:
        assert not sizes
        assert len(engine.plans) == 12  # no step waits for tokens in flight
    engine.finish()


def test_sequences_with_drafts_stay_in_the_same_step() -> None:
    """Two groups of sequences whose prompts run in different steps share all steps after their first drafts."""
    engine = Engine(make_limits(16, 8, 64), 200, max_steps_in_flight=2, drafter=EagerDrafter(1))
    for i in range(8):
        engine.scheduler.add(make_request(i, [1 + i % 6, 3, 4, 5], 40, eos=False))
    for _ in range(12):
        engine.step()
    drafts = [plan for plan in engine.plans if plan.drafts is not None]
    assert len(drafts) > 3
    assert [len(plan.slots) for plan in drafts[2:]] == [8] * (len(drafts) - 2)


def test_backlog_reports_the_time_before_the_submission() -> None:
    backlog = Backlog(LARGE_LIMITS, SchedulerCounters())
    backlog.record_step(1, submitted=0.0, now=1.0)
    assert backlog.record_step(1, submitted=2.0, now=2.25) == (0.25, 1.0)
    assert backlog.record_step(1, submitted=2.0, now=3.0) == (0.75, 0.0)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_step_times_include_the_time_before_the_submission(max_steps_in_flight: int) -> None:
    """With several steps in flight, steps without drafts are measured only if they overlap with the previous step."""
    drafter = EagerDrafter()
    limits = replace(LARGE_LIMITS, max_steps_in_flight=max_steps_in_flight)
    engine = Engine(limits, 64, max_steps_in_flight, drafter=drafter)
    times = itertools.count()
    engine.scheduler._clock = lambda: float(next(times))  # every call takes a second
    engine.scheduler.add(make_request(0, [1], 30, eos=False))
    engine.finish()
    assert {seconds for _, num_drafted, seconds in drafter.times if num_drafted} == {2.0}
    plain = [seconds for _, num_drafted, seconds in drafter.times if not num_drafted]
    assert not plain if max_steps_in_flight > 1 else set(plain) <= {2.0}


# --- Random operations ------------------------------------------------------------------------------------------------


class SchedulerStateMachine(RuleBasedStateMachine):
    @initialize(
        max_steps_in_flight=st.integers(1, 2),
        budget=st.integers(3, 12),
        blocks=st.integers(6, 14) | st.just(64),
        drafts=st.booleans(),
    )
    def start_sequence(self, max_steps_in_flight: int, budget: int, blocks: int, drafts: bool) -> None:
        drafter = RandomDrafter(0) if drafts else None
        self.engine = Engine(make_limits(budget, 3, 24), blocks, max_steps_in_flight, drafter=drafter)
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        new=st.integers(1, 9),
        adapter=st.sampled_from(["", "1", "2", ACTIVATED, AFTER_KV]),
        tenant=st.sampled_from("ab"),
        eos=st.booleans(),
    )
    def add(self, prompt: list[int], new: int, adapter: str, tenant: str, eos: bool) -> None:
        request_id = len(self.requests)
        request = make_request(request_id, prompt, new, eos, adapter_identity=adapter, tenant=tenant)
        self.engine.scheduler.add(request)
        self.requests[request_id] = request

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(adapter=st.sampled_from(["1", "2"]))
    def toggle_adapter(self, adapter: str) -> None:
        adapters = self.engine.adapters
        if adapter in adapters.missing:
            adapters.missing.remove(adapter)
            self.engine.scheduler.queues.adapter_loaded(adapter)
        elif not adapters.acquired.get(adapter):
            adapters.missing.add(adapter)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            request_id = data.draw(st.integers(0, len(self.requests) - 1))
            if request_id not in self.engine.reasons:
                self.aborted.add(request_id)
            self.engine.scheduler.abort(request_id)

    @invariant()
    def budgets_are_respected(self) -> None:
        if hasattr(self, "engine"):
            limits = self.engine.scheduler.limits
            assert all(plan.num_tokens <= limits.max_step_tokens for plan in self.engine.plans)
            assert self.engine.scheduler.num_running <= limits.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for adapter in sorted(self.engine.adapters.missing):
            self.engine.adapters.missing.remove(adapter)
            self.engine.scheduler.queues.adapter_loaded(adapter)
        bound = 20 + 40 * len(self.requests)  # all remaining requests finish
        self.engine.finish(bound)
        check(self.engine, *(each for i, each in self.requests.items() if i not in self.aborted))
        assert self.engine.pool.num_free == self.engine.pool.num_blocks
        assert not any(self.engine.adapters.acquired.values())


TestMachine = SchedulerStateMachine.TestCase
TestMachine.settings = settings(max_examples=75, stateful_step_count=30, derandomize=True, deadline=None, database=None)
