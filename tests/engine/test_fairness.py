"""Fair sharing of slots: new tenants start in the next step, others keep their share, and tokens do not change."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorax_server.engine.fair_queue import FairQueue
from lorax_server.engine.scheduler import Scheduler
from lorax_server.engine.sequence import Sequence
from lorax_server.plan import StepPlan
from lorax_server.types import Request
from tests.engine.test_scheduler import Engine, check, make_limits, make_request

MAX_NUM_SEQS = 8
LIMITS = make_limits(max_step_tokens=64, max_num_seqs=MAX_NUM_SEQS, max_length=100)


def flood(engine: Engine, count: int, first: int = 0, **more: object) -> list[Request]:
    """Add long requests from one tenant, which use all slots."""
    requests = [
        make_request(i, [1, 2, 3, 1 + i % 5], 40, eos=False, **{"tenant": "big"} | more)
        for i in range(first, first + count)
    ]
    for request in requests:
        engine.scheduler.add(request)
    return requests


def slots_of(engine: Engine) -> Counter[str]:
    return Counter(sequence.request.tenant for sequence in engine.scheduler._running)


def run(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_new_tenant_starts_in_next_step(max_steps_in_flight: int) -> None:
    engine = Engine(LIMITS, 200, max_steps_in_flight)
    many = flood(engine, 16)
    run(engine, 5)
    assert engine.scheduler.num_running == MAX_NUM_SEQS
    small = make_request(100, [4, 5], 3, eos=False, tenant="small", adapter_identity="1")
    engine.scheduler.add(small)
    run(engine, max_steps_in_flight)
    assert len(engine.token_ids[100]) == 1
    engine.finish()
    check(engine, *many, small)
    assert engine.scheduler.counters.fairness_preemptions == 1
    assert engine.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_single_tenant_uses_all_slots(max_steps_in_flight: int) -> None:
    engine = Engine(LIMITS, 200, max_steps_in_flight)
    many = flood(engine, 24)
    while len(engine.reasons) < MAX_NUM_SEQS:
        engine.step()
        assert engine.reasons or engine.scheduler.num_running == MAX_NUM_SEQS
    engine.finish()
    check(engine, *many)
    assert engine.scheduler.counters.fairness_preemptions == 0


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("weights", [{}, {"other": 3.0}])
def test_each_tenant_keeps_its_share(max_steps_in_flight: int, weights: dict[str, float]) -> None:
    engine = Engine(LIMITS, 400, max_steps_in_flight, weights=weights)
    many = flood(engine, 24)
    run(engine, 5)
    others = flood(engine, 24, first=100, tenant="other")
    part = 6 if weights else 4
    run(engine, 2)
    assert slots_of(engine) == {"big": MAX_NUM_SEQS - part, "other": part}
    run(engine, 20)
    assert slots_of(engine) == {"big": MAX_NUM_SEQS - part, "other": part}
    assert engine.scheduler.counters.fairness_preemptions == part
    engine.finish()
    check(engine, *many, *others)


def test_new_tenant_does_not_preempt_running_sequences() -> None:
    engine = Engine(LIMITS, 200)
    flood(engine, MAX_NUM_SEQS)
    run(engine, 3)
    flood(engine, 4, first=100, tenant="other")
    run(engine, 1)
    assert sorted(each.request.request_id for each in engine.scheduler._running) == [0, 1, 2, 3, 100, 101, 102, 103]


def test_no_preemption_of_last_slot() -> None:
    engine = Engine(LIMITS, 400)
    requests = []
    for i in range(4 * MAX_NUM_SEQS):
        requests.append(make_request(i, [1 + i % 5], 12, eos=False, tenant=str(i % (2 * MAX_NUM_SEQS))))
        engine.scheduler.add(requests[-1])
        engine.step()
    engine.finish()
    check(engine, *requests)
    assert engine.scheduler.counters.fairness_preemptions == 0


def test_new_tenants_do_not_starve_waiting_tenant() -> None:
    engine = Engine(replace(LIMITS, max_num_seqs=1), 64)
    for i in range(2):
        engine.scheduler.add(make_request(i, [1], 20, eos=False, tenant="old"))
    num_new = 100
    while 1 not in engine.reasons:
        while engine.scheduler.num_waiting < 4:
            engine.scheduler.add(make_request(num_new, [1], 4, eos=False, tenant=str(num_new)))
            num_new += 1
        engine.step()
        assert num_new < 300, "the second one of the tenant that was served never has its turn"


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_new_tenant_gets_blocks(max_steps_in_flight: int) -> None:
    engine = Engine(LIMITS, 56, max_steps_in_flight)
    many = flood(engine, 16)
    while not engine.scheduler.counters.preemptions:  # the cache is full
        engine.step()
    small = make_request(100, [4, 5] * 8, 12, eos=False, tenant="small")
    engine.scheduler.add(small)
    run(engine, 15 + max_steps_in_flight)
    assert 100 in engine.reasons
    engine.finish()
    check(engine, *many, small)


@pytest.mark.parametrize("others", [MAX_NUM_SEQS - 1, MAX_NUM_SEQS, 3 * MAX_NUM_SEQS])
def test_new_tenants_do_not_wait_for_full_completions(others: int) -> None:
    engine = Engine(LIMITS, 400)
    many = flood(engine, 2 * MAX_NUM_SEQS)
    run(engine, 3)
    small = [make_request(100 + i, [4, 5], 2, eos=False, tenant=f"small-{i}") for i in range(others)]
    for request in small:
        engine.scheduler.add(request)
    run(engine, MAX_NUM_SEQS + 3 * (1 + others // (MAX_NUM_SEQS - 1)))
    assert all(request.request_id in engine.token_ids for request in small)
    engine.finish()
    check(engine, *many, *small)


def test_long_prompt_leaves_token_budget_for_new_tenant() -> None:
    engine = Engine(replace(LIMITS, max_step_tokens=16), 400)
    long = make_request(0, [1, 2] * 45, 4, eos=False, tenant="long")
    engine.scheduler.add(long)
    run(engine, 2)
    small = make_request(1, [4, 5], 2, eos=False, tenant="small")
    engine.scheduler.add(small)
    run(engine, 3)
    assert 1 in engine.token_ids
    assert 0 not in engine.token_ids
    engine.finish()
    check(engine, long, small)


# --- One tenant -------------------------------------------------------------------------------------------------------


def test_no_fairness_preemption_within_tenant() -> None:
    engine = Engine(LIMITS, 200)
    flood(engine, 20)
    run(engine, 5)
    flood(engine, 4, first=100)
    run(engine, 20)
    assert engine.scheduler.counters.fairness_preemptions == 0


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_adapters_of_tenant_share_free_slots(max_steps_in_flight: int) -> None:
    """Many requests for one adapter do not delay another adapter of the same tenant, without preemption."""
    engine = Engine(replace(LIMITS, max_num_seqs=2), 64, max_steps_in_flight)
    many = [make_request(i, [1, 2], 6, eos=False, tenant="one", adapter_identity="1") for i in range(20)]
    few = [make_request(i, [1, 2], 6, eos=False, tenant="one", adapter_identity="2") for i in range(100, 103)]
    for request in (*many, *few):
        engine.scheduler.add(request)
    engine.finish()
    check(engine, *many, *few)
    assert max(list(engine.reasons).index(request.request_id) for request in few) < 8
    assert engine.scheduler.counters.fairness_preemptions == 0


def test_new_adapters_do_not_starve_waiting_adapter() -> None:
    engine = Engine(replace(LIMITS, max_num_seqs=1), 64)
    for i in range(2):
        engine.scheduler.add(make_request(i, [1], 20, eos=False, tenant="one"))
    num_new = 100
    while 1 not in engine.reasons:
        while engine.scheduler.num_waiting < 4:
            engine.scheduler.add(
                make_request(num_new, [1], 4, eos=False, tenant="one", adapter_identity=str(num_new % 250))
            )
            num_new += 1
        engine.step()
        assert num_new < 250


# --- FairQueue --------------------------------------------------------------------------------------------------------


def test_shares_count_active_tenants_only() -> None:
    queue = FairQueue({"heavy": 0.7, "light": 0.1}, 64)
    sequences = [Sequence(make_request(i, [1], tenant=name), i) for i, name in enumerate(("heavy", "light", "plain"))]
    for sequence in sequences:
        queue.push(sequence)
    assert [queue.slot_share(each.request.tenant) for each in sequences] == [24, 3, 35]
    assert queue.has_tenant_under_share
    assert queue.num_missing_slots == 3
    queue.remove(sequences[1])
    queue.remove(sequences[0])
    assert queue.slot_share("plain") == 64
    assert not queue.has_several_tenants
    queue.remove(sequences[2])
    queue.acquire_slot("plain")
    queue.charge({("plain", ""): 10})
    queue.release_slot("plain")
    assert len(queue) == 0
    queue.push(sequences[1])
    assert queue.slot_share("light") == 64


class CountedArrival(int):
    """An arrival number that counts comparisons."""

    num_comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountedArrival.num_comparisons += 1
        return int.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        CountedArrival.num_comparisons += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_removing_all_sequences_takes_few_comparisons(order: str) -> None:
    count, queue = 2048, FairQueue()
    sequences = [Sequence(make_request(i, [1]), CountedArrival(i)) for i in range(count)]
    for sequence in sequences:
        queue.push(sequence)
    removed = {"forward": sequences, "backward": sequences[::-1], "shuffled": sequences.copy()}[order]
    if order == "shuffled":
        random.Random(0).shuffle(removed)
    CountedArrival.num_comparisons = 0
    for sequence in removed:
        queue.remove(sequence)
    assert len(queue) == 0
    assert CountedArrival.num_comparisons < 4 * count * math.log2(count)


def test_removed_sequences_are_not_returned_unless_they_are_queued_again() -> None:
    queue, sequences = FairQueue(), [Sequence(make_request(i, [1]), i) for i in range(5)]
    for sequence in sequences:
        queue.push(sequence)
    for index in (1, 3):
        queue.remove(sequences[index])
    queue.push(sequences[1])
    result = []
    while (head := queue.peek()) is not None:
        result.append(sequences.index(head))
        queue.remove(head)
    assert result == [0, 1, 2, 4]


# --- Random operations ------------------------------------------------------------------------------------------------


class FairnessStateMachine(RuleBasedStateMachine):
    """Requests from several tenants with enough blocks and tokens, so that only slots are shared."""

    @initialize(max_steps_in_flight=st.integers(1, 2), slots=st.integers(1, 5), weight=st.sampled_from([0.2, 1.0, 2.5]))
    def start(self, max_steps_in_flight: int, slots: int, weight: float) -> None:
        self.engine = Engine(make_limits(200, slots, 24), 100, max_steps_in_flight, weights={"a": weight})
        self.engine.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=9),
        new=st.integers(1, 14),
        eos=st.booleans(),
        tenant=st.sampled_from("abc"),
        count=st.integers(1, 6),
    )
    def submit(self, prompt: list[int], new: int, eos: bool, tenant: str, count: int) -> None:
        first = len(self.requests)
        for number in range(count):
            request = make_request(first + number, prompt, new, eos, tenant=tenant)
            self.requests[request.request_id] = request
            self.engine.scheduler.add(request)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            request_id = data.draw(st.integers(0, len(self.requests) - 1))
            if request_id not in self.engine.reasons:
                self.aborted.add(request_id)
            self.engine.scheduler.abort(request_id)

    def schedule(self) -> StepPlan | None:
        """No request is queued while a slot is free. No tenant is below its share while another is above."""
        scheduler = self.engine.scheduler
        plan = Scheduler.schedule(scheduler)
        queue, slots = scheduler._waiting, slots_of(self.engine)
        assert slots == {name: tenant.num_slots for name, tenant in queue._active.items() if tenant.num_slots}
        assert not (len(queue) and scheduler._free_slots)
        short = [tenant for tenant in queue._waiting if slots[tenant] < queue.slot_share(tenant)]
        beyond = [tenant for tenant in slots if slots[tenant] > queue.guaranteed_slots(tenant)]
        assert not (short and beyond), (short, beyond, slots)
        return plan

    @invariant()
    def slot_counts_are_consistent(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.scheduler.num_running <= self.engine.scheduler.limits.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.finish(20 + 40 * len(self.requests))  # every request gets a slot
        check(self.engine, *(each for i, each in self.requests.items() if i not in self.aborted))
        assert self.engine.pool.num_free == self.engine.pool.num_blocks
        queue = self.engine.scheduler._waiting
        assert not queue._active
        assert not queue._waiting


TestMachine = FairnessStateMachine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, derandomize=True, deadline=None, database=None)
