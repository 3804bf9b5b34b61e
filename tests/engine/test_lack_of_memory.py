"""Out-of-memory steps fail one request and only delay the others."""

import random
from dataclasses import replace

import pytest

from lorax_server.plan import StepPlan
from lorax_server.types import SamplingParams
from tests.engine.fake_workers import SubmittedRequest, World, alone


def fail_at(world: World, *steps: int) -> None:
    """Make the given steps, counted from 1, run out of memory."""
    world.workers.lacks_memory = lambda plan: plan.step in steps


def check_answers(world: World, failed: list[SubmittedRequest]) -> None:
    """Check that successful requests have the expected tokens, and that all memory is released."""
    for submitted in world.submitted.values():
        if submitted in failed:
            assert submitted.failure == "too little memory"
        else:
            assert submitted.tokens == alone(submitted.identity, submitted.prompt, submitted.num_tokens)
    world.check_all_memory_is_released()
    assert len(world.scheduler._free_slots) == world.scheduler.limits.max_num_seqs


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_longest_prompt_in_step_fails(max_steps_in_flight: int) -> None:
    world = World(8, 8, max_steps_in_flight=max_steps_in_flight)
    first = world.submit(None, [1, 2, 3], 8)
    for _ in range(3):
        world.turn()
    assert first.tokens
    steps = world.scheduler.counters.steps
    fail_at(world, steps + 1)
    longest, short = world.submit(None, [4] * 7, 4), world.submit(None, [5] * 3, 4)
    world.finish(100)
    assert [plan.step for plan in world.workers.refused] == [steps + 1]
    assert sorted(world.workers.refused[0].counts.tolist()) == [1, 3, 7]
    assert not short.failure
    check_answers(world, [longest])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_request_with_prompt_logprobs_fails_first(max_steps_in_flight: int) -> None:
    world = World(8, 8, max_steps_in_flight=max_steps_in_flight)
    fail_at(world, 1)
    long, asking = world.submit(None, [4] * 7, 4), world.submit(None, [5, 5], 4, prompt_logprobs=True)
    world.finish(100)
    assert not long.failure
    check_answers(world, [asking])


def test_newest_of_equal_requests_fails() -> None:
    world = World(8, 8, max_steps_in_flight=2)
    requests = [world.submit(None, [i, i], 6) for i in range(3)]
    fail_at(world, 3)
    world.finish(100)
    assert all(len(request.tokens) == 6 for request in requests[:2])
    check_answers(world, [requests[2]])


def test_requests_fail_until_step_fits() -> None:
    world = World(8, 8, max_steps_in_flight=2)
    world.workers.lacks_memory = lambda plan: len(plan.slots) > 1
    requests = [world.submit(None, [i] * (i + 2), 5) for i in range(3)]
    world.finish(100)
    check_answers(world, requests[1:])
    world.workers.lacks_memory = lambda _: True
    last = world.submit(None, [1, 2, 3], 5)
    world.finish(100)
    check_answers(world, [*requests[1:], last])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_uncomputed_blocks_are_unpublished(max_steps_in_flight: int) -> None:
    """Two requests share a prefix. A step of one fails, so the other must not find its blocks."""
    world = World(8, 8, max_steps_in_flight=max_steps_in_flight)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    fail_at(world, 1)
    first = world.submit(None, prompt, 3)
    world.turn()
    world.turn()
    assert first.failure
    second, third = world.submit(None, prompt, 3), world.submit(None, prompt[:8], 3)
    world.finish(100)
    check_answers(world, [first])
    assert not second.failure
    assert not third.failure


def test_failed_step_still_moves_adapters() -> None:
    world = World(8, 8, max_steps_in_flight=2)
    world.put("a", 0, 3)
    world.workers.lacks_memory = lambda plan: bool(plan.adapter_ops)
    base, adapted = world.submit(None, [1, 2], 12), world.submit("a", [3, 4], 4)
    world.finish(200)
    assert world.workers.refused
    check_answers(world, [each for each in (base, adapted) if each.failure])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_other_requests_are_unaffected(max_steps_in_flight: int, seed: int) -> None:
    """Requests with adapters and shared prefixes, a small cache, and failing steps."""
    rng = random.Random(seed)
    world = World(6, 8, max_steps_in_flight=max_steps_in_flight, seed=seed, num_blocks=14)
    chance = rng.choice([0.05, 0.2, 0.5])

    def lacks(_: StepPlan) -> bool:
        return rng.random() < chance

    world.workers.lacks_memory = lacks
    for i in range(3):
        world.put(f"adapter {i}", 0, rng.randint(1, 3))
    beginning = rng.choices(range(7), k=9)
    for _ in range(60):
        name = rng.choice([None, "adapter 0", "adapter 1", "adapter 2"])
        prompt = beginning[: rng.randint(0, 9)] + rng.choices(range(7), k=rng.randint(1, 8))
        submitted = world.submit(name, prompt, rng.randint(1, 8), prompt_logprobs=False)
        for _ in range(rng.randint(0, 4)):
            world.turn()
            world.check_tokens_so_far()
        if rng.random() < 0.1:
            world.abort(submitted)
    world.workers.lacks_memory = lambda _: False
    world.finish(2000)
    failed = [submitted for submitted in world.submitted.values() if submitted.failure]
    assert len(failed) == len(world.workers.refused) > 0
    world.check_all_memory_is_released()
    assert len(world.scheduler._free_slots) == world.scheduler.limits.max_num_seqs


def test_alternatives_count_as_memory() -> None:
    world = World(8, 8)
    listed, plain = world.submit(None, [1, 1], 3), world.submit(None, [2, 2], 3)
    sequence = world.scheduler._by_id[listed.request_id]
    sequence.request = replace(sequence.request, sampling=SamplingParams(num_alternatives=5))
    fail_at(world, 1)
    world.finish(50)
    assert not plain.failure
    check_answers(world, [listed])
