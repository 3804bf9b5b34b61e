"""The scheduler against a device that notices wrong blocks, and the rules: budgets, fairness, progress."""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorax_server.engine.blocks import BlockPool
from lorax_server.engine.scheduler import Limits, Scheduler
from lorax_server.errors import InputError
from lorax_server.plan import AdapterOp, StepPlan, StepResult
from lorax_server.stopping import FinishReason
from lorax_server.types import Request, SamplingParams, StopParams

EOS = 0
VOCAB = 7
SIZE = 4


def next_token(adapter: int, tokens: list[int]) -> int:
    """What the model of the tests says after these tokens: it depends on all of them and on the adapter."""
    return sha256(bytes([adapter, *tokens])).digest()[0] % VOCAB


def alone(adapter: int, prompt: list[int], stop: StopParams) -> list[int]:
    """What a request gets if it runs by itself."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < stop.max_new_tokens:
        tokens.append(next_token(adapter, tokens))
        if tokens[-1] in stop.ending_token_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Device:
    """Rows of tokens, tables of blocks, and a cache that remembers which token of whom was written to each slot.

    A step reads all keys and values of a sequence, as attention does, and so notices any that are another's.
    """

    num_rows: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    cache: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        for new in plan.new_rows:
            assert 0 <= new.row < self.num_rows
            self.tokens[new.row], self.tables[new.row] = list(new.token_ids), {}
        for row, place, block in plan.new_blocks.tolist():
            assert place not in self.tables[row], "told twice"
            self.tables[row][place] = block
        columns = (plan.rows, plan.starts, plan.counts, plan.samples, plan.adapter_indices)
        steps = list(zip(*(column.tolist() for column in columns), strict=True))
        for row, start, count, _, adapter in steps:
            assert count > 0
            for position in range(start, start + count):
                written = (adapter, tuple(self.tokens[row][: position + 1]))
                self.cache[self.tables[row][position // SIZE] * SIZE + position % SIZE] = written
        chosen = []
        for row, start, count, samples, adapter in steps:
            for position in range(start + count):
                slot = self.tables[row][position // SIZE] * SIZE + position % SIZE
                assert self.cache[slot] == (adapter, tuple(self.tokens[row][: position + 1])), "another's keys"
            if samples:
                assert start + count == len(self.tokens[row])
                token = next_token(adapter, self.tokens[row])
                self.tokens[row].append(token)
                chosen.append(token)
        return StepResult(plan.step, chosen, [0.0] * len(chosen))


@dataclass
class Loaded:
    """Adapters by identity, each with the index in its name; some may not have arrived."""

    missing: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    held: dict[str, int] = field(default_factory=dict)

    requests: dict[str, int] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    needs_step: bool = False
    is_loading: bool = False

    def add_request(self, identity: str) -> None:
        self.requests[identity] = self.requests.get(identity, 0) + 1

    def end_request(self, identity: str, has_begun: bool) -> None:
        self.requests[identity] -= 1
        self.begun[identity] = self.begun.get(identity, 0) - has_begun
        assert 0 <= self.begun[identity] <= self.requests[identity]

    def vocab_size(self, identity: str) -> int:
        assert identity not in self.missing
        return VOCAB

    def begin(self, identity: str) -> None:
        self.begun[identity] = self.begun.get(identity, 0) + 1

    def submit(self) -> tuple[AdapterOp, ...]:
        return ()

    def completed(self, step: int, loaded: Iterable[int]) -> None: ...

    def index_of(self, identity: str, has_begun: bool) -> int | None:
        return None if identity in self.missing else int(identity or 0)

    def bring(self, identity: str) -> None:
        self.wanted.add(identity)

    def hold(self, identity: str) -> None:
        assert identity not in self.missing
        self.held[identity] = self.held.get(identity, 0) + 1

    def release(self, identity: str) -> None:
        self.held[identity] -= 1
        assert self.held[identity] >= 0


def make_request(request_id: int, prompt: list[int], max_new_tokens: int = 5, eos: bool = True, **more: Any) -> Request:
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=frozenset({EOS} if eos else ()))
    return Request(request_id, prompt, SamplingParams(), stop, **more)


class Engine:
    """The loop: schedule, submit, and collect the step before, or the one before that."""

    def __init__(self, limits: Limits, num_blocks: int, depth: int = 1, **options: Any) -> None:
        self.pool, self.adapters, self.depth = BlockPool(num_blocks, SIZE), Loaded(), depth
        self.scheduler = Scheduler(limits, self.pool, self.adapters, **options)
        self.device = Device(limits.max_rows)
        self.results: deque[StepResult] = deque()
        self.answers: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.plans: list[StepPlan] = []

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.device.run(plan))
        while self.results and (plan is None or len(self.results) >= self.depth):
            self.collect()
        return plan is not None

    def collect(self) -> None:
        for emitted in self.scheduler.update(self.results.popleft()):
            assert emitted.request_id not in self.reasons, "a token after the last"
            self.answers.setdefault(emitted.request_id, []).append(emitted.token_id)
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
        expected = alone(int(request.adapter or 0), list(request.prompt_ids), request.stop)
        assert engine.answers[request.request_id] == expected
        last_is_eos = expected[-1] in request.stop.ending_token_ids
        assert engine.reasons[request.request_id] == (FinishReason.EOS_TOKEN if last_is_eos else FinishReason.LENGTH)


ROOMY = Limits(max_step_tokens=64, max_rows=8, max_length=100)


# --- One thing at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_get_what_they_get_alone(depth: int) -> None:
    engine = Engine(ROOMY, 64, depth)
    requests = [make_request(i, [1 + i % 3] * (3 * i + 1), 2 + i, adapter=str(i % 3 or "")) for i in range(8)]
    for request in requests:
        engine.scheduler.add(request)
    engine.finish()
    check(engine, *requests)
    assert engine.pool.num_free == 64


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_is_computed_in_chunks_beside_others(depth: int) -> None:
    engine = Engine(Limits(8, 4, 100), 64, depth)
    long, short = make_request(0, [1, 2, 3] * 10, 6, eos=False), make_request(1, [4], 12, eos=False)
    engine.scheduler.add(short)
    engine.step()
    engine.scheduler.add(long)
    engine.finish()
    check(engine, long, short)
    assert engine.scheduler.counters.chunks >= 3
    assert all(plan.num_tokens <= 8 for plan in engine.plans)
    assert sum(len(plan.rows) == 2 for plan in engine.plans) >= 4  # the short one never waited


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_that_matters_more_does_not_hold_up_those_that_run(depth: int) -> None:
    engine = Engine(Limits(8, 4, 100), 64, depth)
    short, long = make_request(0, [4], 30, eos=False), make_request(1, [1, 2, 3] * 20, 2, eos=False, priority=1)
    engine.scheduler.add(short)
    engine.step()
    engine.scheduler.add(long)
    engine.finish()
    check(engine, long, short)
    assert all(0 in plan.rows for plan in engine.plans[: len(engine.answers[0])])


def test_a_short_prompt_begins_beside_a_long_one() -> None:
    engine = Engine(Limits(8, 4, 100, max_chunk=6), 64)
    long, short = make_request(0, [1, 2, 3] * 20, 2, eos=False), make_request(1, [4], 3, eos=False)
    engine.scheduler.add(long)
    engine.scheduler.add(short)
    engine.finish()
    check(engine, long, short)
    assert list(engine.reasons) == [1, 0]
    assert max(plan.counts.max() for plan in engine.plans) == 6


@pytest.mark.parametrize("depth", [1, 2])
def test_when_blocks_run_out_the_last_gives_way_and_loses_nothing(depth: int) -> None:
    engine = Engine(ROOMY, 8, depth)
    requests = [make_request(i, [i + 1] * 6, 16, eos=False) for i in range(4)]
    for request in requests:
        engine.scheduler.add(request)
    engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.preemptions > 0


def test_a_prompt_that_begins_alike_is_not_computed_again() -> None:
    engine = Engine(ROOMY, 64)
    first, second = make_request(0, [1, 2, 3] * 5, 3), make_request(1, [1, 2, 3] * 5 + [4], 3)
    engine.scheduler.add(first)
    engine.finish()
    computed = engine.scheduler.counters.computed_tokens
    engine.scheduler.add(second)
    engine.finish()
    check(engine, first, second)
    assert engine.scheduler.counters.prefix_tokens == 12
    assert engine.scheduler.counters.computed_tokens - computed < 16


def test_what_another_adapter_computed_is_not_used() -> None:
    engine = Engine(ROOMY, 64)
    requests = [make_request(i, [1, 2, 3] * 5, adapter=adapter) for i, adapter in enumerate(("", "1", "2"))]
    for request in requests:
        engine.scheduler.add(request)
        engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.prefix_tokens == 0


def test_salts_share_nothing() -> None:
    engine = Engine(ROOMY, 64)
    for i, salt in enumerate(("", "mine", "mine")):
        engine.scheduler.add(make_request(i, [1, 2, 3] * 5, salt=salt))
        engine.finish()
    assert engine.scheduler.counters.prefix_tokens == 12  # the last one's only


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_can_be_aborted_at_any_step(depth: int) -> None:
    for steps in range(8):
        engine = Engine(Limits(8, 2, 100), 8, depth)
        requests = [make_request(i, [i + 1] * 7, 6, eos=False) for i in range(4)]
        for request in requests:
            engine.scheduler.add(request)
        for _ in range(steps):
            engine.step()
        aborted = requests[steps % 4]
        engine.scheduler.abort(aborted.request_id)
        before = list(engine.answers.get(aborted.request_id, []))
        engine.finish()
        assert engine.answers.get(aborted.request_id, []) == before
        check(engine, *(request for request in requests if request is not aborted))
        assert engine.pool.num_free == 8
        assert not any(engine.adapters.held.values())


def test_aborting_what_is_not_here_does_nothing() -> None:
    Engine(ROOMY, 4).scheduler.abort(7)


def test_higher_priorities_go_first() -> None:
    engine = Engine(Limits(8, 1, 100), 64)
    for i, priority in enumerate((0, 5, 1)):
        engine.scheduler.add(make_request(i, [1], 2, eos=False, priority=priority))
    engine.finish()
    assert list(engine.reasons) == [1, 2, 0]


def test_a_request_whose_adapter_is_on_its_way_keeps_nobody_waiting() -> None:
    engine = Engine(ROOMY, 64)
    engine.adapters.missing.add("1")
    cold, warm = make_request(0, [1], adapter="1"), make_request(1, [2], adapter="2")
    engine.scheduler.add(cold)
    engine.scheduler.add(warm)
    while 1 not in engine.reasons:
        assert engine.step()
    assert not engine.step()
    assert engine.adapters.wanted == {"1"}
    engine.adapters.missing.clear()
    engine.scheduler.adapter_arrived("1")
    engine.finish()
    check(engine, cold, warm)


def test_an_adapter_that_left_before_its_request_ran_is_asked_for_again() -> None:
    engine = Engine(Limits(8, 1, 100), 64)
    first, second = make_request(0, [1], 3, eos=False), make_request(1, [2], 3, adapter="1")
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step()
    engine.adapters.missing.add("1")
    for _ in range(5):
        engine.step()
    assert engine.adapters.wanted == {"1"}
    engine.adapters.missing.clear()
    engine.scheduler.adapter_arrived("1")
    engine.finish()
    check(engine, first, second)


def test_tenants_get_shares_by_their_weights() -> None:
    engine = Engine(Limits(16, 2, 100), 64, weights={"b": 3.0})
    for i in range(120):
        engine.scheduler.add(make_request(i, [1 + i % 5] * 3, 4, eos=False, tenant="ab"[i % 2]))
    while len(engine.reasons) < 60:
        engine.step()
    of_b = sum(request_id % 2 for request_id in engine.reasons)
    assert 2.5 <= of_b / (60 - of_b) <= 3.5


def test_tenants_share_also_what_one_step_has() -> None:
    engine = Engine(Limits(64, 8, 100), 64)
    for i in range(20):
        engine.scheduler.add(make_request(i, [1 + i % 5] * 3, 4, eos=False, tenant="a" if i < 16 else "b"))
    engine.step()
    assert engine.scheduler.num_running == 8
    while len(engine.reasons) < 8:
        engine.step()
    assert sum(request_id >= 16 for request_id in engine.reasons) == 4


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    engine = Engine(Limits(16, 1, 100), 64)
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
def test_what_can_never_run_is_refused(prompt: list[int], new: int, message: str) -> None:
    engine = Engine(ROOMY, 64)
    with pytest.raises(InputError, match=message):
        engine.scheduler.add(make_request(0, prompt, new))
    assert not engine.scheduler.has_work


def test_a_request_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(InputError, match="must be <= 16"):
        Engine(ROOMY, 4).scheduler.add(make_request(0, [1] * 10, 7))


# --- Many at once -----------------------------------------------------------------------------------------------------


def crowd(seed: int) -> Engine:
    """A hundred requests with few different beginnings, in a cache that holds a few of them."""
    rng = random.Random(seed)
    limits = Limits(rng.choice([4, 7, 16]), rng.choice([2, 4]), 40, rng.choice([None, 3]))
    engine = Engine(limits, rng.choice([10, 13, 20]), depth=rng.choice([1, 2]))
    beginnings = [[rng.randint(1, 6) for _ in range(rng.choice([1, 4, 8, 9, 12]))] for _ in range(4)]
    requests, aborted = [], set()
    for i in range(100):
        prompt = [*rng.choice(beginnings), *(rng.randint(1, 6) for _ in range(rng.choice([0, 0, 1, 5])))]
        options = {"adapter": rng.choice(["", "1"]), "priority": rng.choice([0, 0, 0, 1]), "tenant": rng.choice("ab")}
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
    assert not any(engine.adapters.held.values())
    return engine


def test_crowds_get_what_each_gets_alone() -> None:
    engines = [crowd(seed) for seed in range(60)]
    counters = [engine.scheduler.counters for engine in engines]
    assert sum(each.preemptions for each in counters) > 500
    assert sum(each.chunks for each in counters) > 500
    assert sum(each.prefix_tokens for each in counters) > 5000
    assert sum(engine.pool.num_evictions for engine in engines) > 5000


# --- Anything, in any order -------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    @initialize(depth=st.integers(1, 2), budget=st.integers(3, 12), blocks=st.integers(6, 14))
    def begin(self, depth: int, budget: int, blocks: int) -> None:
        self.engine = Engine(Limits(budget, 3, 24), blocks, depth)
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        new=st.integers(1, 9),
        adapter=st.sampled_from(["", "1", "2"]),
        priority=st.integers(0, 1),
        tenant=st.sampled_from("ab"),
        eos=st.booleans(),
    )
    def add(self, prompt: list[int], new: int, adapter: str, priority: int, tenant: str, eos: bool) -> None:
        request_id = len(self.requests)
        request = make_request(request_id, prompt, new, eos, adapter=adapter, priority=priority, tenant=tenant)
        self.engine.scheduler.add(request)
        self.requests[request_id] = request

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(adapter=st.sampled_from(["1", "2"]))
    def adapter_leaves_or_arrives(self, adapter: str) -> None:
        adapters = self.engine.adapters
        if adapter in adapters.missing:
            adapters.missing.remove(adapter)
            self.engine.scheduler.adapter_arrived(adapter)
        elif not adapters.held.get(adapter):
            adapters.missing.add(adapter)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            request_id = data.draw(st.integers(0, len(self.requests) - 1))
            if request_id not in self.engine.reasons:
                self.aborted.add(request_id)
            self.engine.scheduler.abort(request_id)

    @invariant()
    def budgets_hold(self) -> None:
        if hasattr(self, "engine"):
            limits = self.engine.scheduler.limits
            assert all(plan.num_tokens <= limits.max_step_tokens for plan in self.engine.plans)
            assert self.engine.scheduler.num_running <= limits.max_rows

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for adapter in sorted(self.engine.adapters.missing):
            self.engine.adapters.missing.remove(adapter)
            self.engine.scheduler.adapter_arrived(adapter)
        bound = 20 + 40 * len(self.requests)  # every request that is left finishes
        self.engine.finish(bound)
        check(self.engine, *(each for i, each in self.requests.items() if i not in self.aborted))
        assert self.engine.pool.num_free == self.engine.pool.num_blocks
        assert not any(self.engine.adapters.held.values())


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150, stateful_step_count=30, derandomize=True, deadline=None, database=None
)
