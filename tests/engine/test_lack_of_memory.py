"""Out-of-memory steps fail one request and only delay the others."""

import random
from dataclasses import replace

import pytest

from lorax_server.plan import StepPlan
from lorax_server.types import SamplingParams
from tests.engine.fake_workers import EngineSimulation, SubmittedRequest, expected_tokens


def fail_at(simulation: EngineSimulation, *steps: int) -> None:
    """Make the given steps, counted from 1, run out of memory."""
    simulation.workers.lacks_memory = lambda plan: plan.step in steps


def check_answers(simulation: EngineSimulation, failed: list[SubmittedRequest]) -> None:
    """Check that successful requests have the expected tokens, and that all memory is released."""
    for submitted in simulation.submitted.values():
        if submitted in failed:
            assert submitted.failure == "too little memory"
        else:
            assert submitted.tokens == expected_tokens(submitted.identity, submitted.prompt, submitted.num_tokens)
    simulation.check_all_memory_is_released()
    assert len(simulation.scheduler._free_slots) == simulation.scheduler.limits.max_num_seqs


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_longest_prompt_fails_if_step_runs_out_of_memory(max_steps_in_flight: int) -> None:
    simulation = EngineSimulation(8, 8, max_steps_in_flight=max_steps_in_flight)
    first = simulation.submit(None, [1, 2, 3], 8)
    for _ in range(3):
        simulation.advance()
    assert first.tokens
    steps = simulation.scheduler.counters.steps
    fail_at(simulation, steps + 1)
    longest, short = simulation.submit(None, [4] * 7, 4), simulation.submit(None, [5] * 3, 4)
    simulation.finish(100)
    assert [plan.step for plan in simulation.workers.refused] == [steps + 1]
    assert sorted(simulation.workers.refused[0].counts.tolist()) == [1, 3, 7]
    assert not short.failure
    check_answers(simulation, [longest])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_request_with_prompt_logprobs_fails_first(max_steps_in_flight: int) -> None:
    simulation = EngineSimulation(8, 8, max_steps_in_flight=max_steps_in_flight)
    fail_at(simulation, 1)
    long, asking = simulation.submit(None, [4] * 7, 4), simulation.submit(None, [5, 5], 4, prompt_logprobs=True)
    simulation.finish(100)
    assert not long.failure
    check_answers(simulation, [asking])


def test_newest_of_equal_requests_fails() -> None:
    simulation = EngineSimulation(8, 8, max_steps_in_flight=2)
    requests = [simulation.submit(None, [i, i], 6) for i in range(3)]
    fail_at(simulation, 3)
    simulation.finish(100)
    assert all(len(request.tokens) == 6 for request in requests[:2])
    check_answers(simulation, [requests[2]])


def test_requests_fail_until_step_fits() -> None:
    simulation = EngineSimulation(8, 8, max_steps_in_flight=2)
    simulation.workers.lacks_memory = lambda plan: len(plan.slots) > 1
    requests = [simulation.submit(None, [i] * (i + 2), 5) for i in range(3)]
    simulation.finish(100)
    check_answers(simulation, requests[1:])
    simulation.workers.lacks_memory = lambda _: True
    last = simulation.submit(None, [1, 2, 3], 5)
    simulation.finish(100)
    check_answers(simulation, [*requests[1:], last])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_uncomputed_blocks_are_unpublished(max_steps_in_flight: int) -> None:
    """Two requests share a prefix. A step of one fails, so the other must not find its blocks."""
    simulation = EngineSimulation(8, 8, max_steps_in_flight=max_steps_in_flight)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    fail_at(simulation, 1)
    first = simulation.submit(None, prompt, 3)
    simulation.advance()
    simulation.advance()
    assert first.failure
    second, third = simulation.submit(None, prompt, 3), simulation.submit(None, prompt[:8], 3)
    simulation.finish(100)
    check_answers(simulation, [first])
    assert not second.failure
    assert not third.failure


def test_failed_step_still_moves_adapters() -> None:
    simulation = EngineSimulation(8, 8, max_steps_in_flight=2)
    simulation.put("a", 0, 3)
    simulation.workers.lacks_memory = lambda plan: bool(plan.adapter_ops)
    base, adapted = simulation.submit(None, [1, 2], 12), simulation.submit("a", [3, 4], 4)
    simulation.finish(200)
    assert simulation.workers.refused
    check_answers(simulation, [each for each in (base, adapted) if each.failure])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_out_of_memory_does_not_affect_other_requests(max_steps_in_flight: int, seed: int) -> None:
    """Requests with adapters and shared prefixes, a small cache, and failing steps."""
    rng = random.Random(seed)
    simulation = EngineSimulation(6, 8, max_steps_in_flight=max_steps_in_flight, seed=seed, num_blocks=14)
    chance = rng.choice([0.05, 0.2, 0.5])

    def lacks(_: StepPlan) -> bool:
        return rng.random() < chance

    simulation.workers.lacks_memory = lacks
    for i in range(3):
        simulation.put(f"adapter {i}", 0, rng.randint(1, 3))
    beginning = rng.choices(range(7), k=9)
    for _ in range(60):
        name = rng.choice([None, "adapter 0", "adapter 1", "adapter 2"])
        prompt = beginning[: rng.randint(0, 9)] + rng.choices(range(7), k=rng.randint(1, 8))
        submitted = simulation.submit(name, prompt, rng.randint(1, 8), prompt_logprobs=False)
        for _ in range(rng.randint(0, 4)):
            simulation.advance()
            simulation.check_tokens_so_far()
        if rng.random() < 0.1:
            simulation.abort(submitted)
    simulation.workers.lacks_memory = lambda _: False
    simulation.finish(2000)
    failed = [submitted for submitted in simulation.submitted.values() if submitted.failure]
    assert len(failed) == len(simulation.workers.refused) > 0
    simulation.check_all_memory_is_released()
    assert len(simulation.scheduler._free_slots) == simulation.scheduler.limits.max_num_seqs


def test_request_with_alternatives_fails_first() -> None:
    simulation = EngineSimulation(8, 8)
    listed, plain = simulation.submit(None, [1, 1], 3), simulation.submit(None, [2, 2], 3)
    sequence = simulation.scheduler._by_id[listed.request_id]
    sequence.request = replace(sequence.request, sampling=SamplingParams(num_alternatives=5))
    fail_at(simulation, 1)
    simulation.finish(50)
    assert not plain.failure
    check_answers(simulation, [listed])
