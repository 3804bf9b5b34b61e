"""Speculation pays off on simulated machines, and is never much slower than plain decoding."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest

from lorax_server.engine.speculation.step_costs import CPU_PRIOR, GPU_PRIOR
from tests.engine.speculation.simulation import Machine, simulate

MIN_SPEEDUP = 0.97
# Step times in ms by number of tokens, with the Llama-3.1-8B shape and LoRA of rank 16.
H200_MS = ((1, 4.26), (8, 4.4), (16, 4.7), (32, 5.3), (64, 6.8), (128, 8.5), (256, 12.1), (512, 23.6))
CPU_TIMES = ((1, 1.0), (2, 1.3), (4, 1.9), (8, 3.2), (80, 27.0))  # relative to one token
SLOW_FIRST = {"num_slow_steps": 3}
# Step times in ms on an H200: without drafts, and by number of tokens with drafts. Steps with drafts do not overlap
# with the next step, and more than 64 tokens use other kernels.
MEASURED_MS = {
    1: (4.19, ((2, 5.17), (8, 5.17), (9, 5.37))),
    16: (4.9, ((32, 6.3), (64, 7.9), (80, 9.5), (128, 10.9), (144, 11.0))),
    64: (6.93, ((65, 9.0), (128, 10.7), (192, 13.1), (256, 13.9), (320, 18.0))),
}
SLOW_SMALL_DRAFTS_MS = 6.93, ((65, 9.0), (128, 12.0), (192, 13.5), (256, 13.9))  # one draft per sequence does not pay
FAST_DRAFTS_MS = 6.93, ((65, 8.0), (128, 9.0), (192, 11.5), (256, 12.3))
SLOW_LARGE_DRAFTS_MS = 6.93, ((65, 8.0), (128, 9.0), (192, 16.0), (256, 16.5))
MEASURED = [
    *((num_sequences, times) for num_sequences, times in MEASURED_MS.items()),
    *((64, times) for times in (SLOW_SMALL_DRAFTS_MS, FAST_DRAFTS_MS, SLOW_LARGE_DRAFTS_MS)),
]
MEASURED_IDS = ["1", "16", "64", "64, slow small drafts", "64, fast drafts", "64, slow large drafts"]
Times = tuple[float, tuple[tuple[int, float], ...]]
NOISE = {"noise": 0.3, "outliers": 0.03}


def interpolated(points: tuple[tuple[int, float], ...]) -> Callable[[int], float]:
    def cost(num_tokens: int) -> float:
        index = max(1, bisect_left(points, (num_tokens, 0.0)))
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)

    return cost


def h200(**options: Any) -> Machine:
    return Machine(interpolated(H200_MS), draft_overhead=0.8, **options)


def measured(num_sequences: int, times: Times, **options: Any) -> Machine:
    plain, with_drafts = times
    cost = interpolated(with_drafts)
    return Machine(lambda num_tokens: plain if num_tokens <= num_sequences else cost(num_tokens), **options)


def best_speedup(machine: Machine, num_sequences: int, acceptance: float) -> float:
    """Return the speedup if every sequence has the best number of draft tokens in every step."""
    speedups = [
        machine.cost(num_sequences) / machine.cost(num_sequences * (1 + k)) * sum(acceptance**i for i in range(k + 1))
        for k in range(1, 9)
        if num_sequences * (1 + k) <= 256
    ]
    return max(1.0, *speedups)


def cpu(**options: Any) -> Machine:
    return Machine(interpolated(CPU_TIMES), draft_overhead=0.1, **options)


def without_fixed_costs(**options: Any) -> Machine:
    return Machine(float, **options)


@pytest.mark.parametrize("options", [{}, NOISE], ids=["steady", "noise"])
@pytest.mark.parametrize(("num_sequences", "goal"), [(1, 3.0), (16, 1.8), (64, 1.5), (256, MIN_SPEEDUP)])
def test_drafts_pay_off_on_gpu(num_sequences: int, goal: float, options: dict[str, float]) -> None:
    assert simulate(h200(**options), num_sequences, 0.8, GPU_PRIOR) >= goal


@pytest.mark.parametrize(("num_sequences", "goal"), [(1, 3.0), (64, 1.45)])
def test_slow_first_steps_are_ignored(num_sequences: int, goal: float) -> None:
    assert simulate(h200(**SLOW_FIRST), num_sequences, 0.8, GPU_PRIOR) >= goal


@pytest.mark.parametrize(("num_sequences", "goal"), [(1, 1.35), (2, 1.1), (8, MIN_SPEEDUP)])
def test_drafts_pay_off_on_cpu(num_sequences: int, goal: float) -> None:
    assert simulate(cpu(), num_sequences, 0.8, CPU_PRIOR) >= goal


@pytest.mark.parametrize("num_sequences", [1, 16, 64, 256])
@pytest.mark.parametrize("options", [{}, NOISE, SLOW_FIRST], ids=["steady", "noise", "slow first steps"])
def test_wrong_drafts_cost_little(num_sequences: int, options: dict[str, float]) -> None:
    assert simulate(h200(**options), num_sequences, 0.0, GPU_PRIOR) >= MIN_SPEEDUP


@pytest.mark.parametrize(("num_sequences", "times"), MEASURED, ids=MEASURED_IDS)
@pytest.mark.parametrize(
    ("options", "share"), [({}, 0.92), (NOISE, 0.9), (SLOW_FIRST, 0.75)], ids=["steady", "noise", "slow first steps"]
)
def test_best_number_of_drafts_is_found(
    num_sequences: int, times: Times, options: dict[str, float], share: float
) -> None:
    """The measured costs are not convex: one draft token per sequence may not pay, although several do."""
    machine = measured(num_sequences, times, **options)
    goal = share * best_speedup(machine, num_sequences, 0.8)
    assert simulate(machine, num_sequences, 0.8, GPU_PRIOR, num_steps=600) >= goal


@pytest.mark.parametrize(("num_sequences", "times"), MEASURED, ids=MEASURED_IDS)
def test_wrong_drafts_cost_little_at_measured_times(num_sequences: int, times: Times) -> None:
    machine = measured(num_sequences, times, **SLOW_FIRST)
    assert simulate(machine, num_sequences, 0.0, GPU_PRIOR) >= MIN_SPEEDUP


def test_no_drafts_if_a_step_has_no_space_for_them() -> None:
    machine = measured(256, (12.1, ((257, 20.0), (512, 25.0))))
    assert simulate(machine, 256, 0.8, GPU_PRIOR) == 1.0


@pytest.mark.parametrize(("num_sequences", "acceptance"), [(1, 0.8), (1, 0.5), (16, 0.8), (64, 0.8)])
@pytest.mark.parametrize("options", [{}, NOISE], ids=["steady", "noise"])
def test_expensive_drafts_are_rarely_tried(num_sequences: int, acceptance: float, options: dict[str, float]) -> None:
    """A draft token costs as much as a step's first token, contrary to the assumed costs."""
    machine = without_fixed_costs(**options)
    assert simulate(machine, num_sequences, acceptance, GPU_PRIOR, num_steps=2000) >= MIN_SPEEDUP


def test_expensive_drafts_are_rarely_tried_although_first_steps_are_slow() -> None:
    machine = without_fixed_costs(**SLOW_FIRST)
    assert simulate(machine, 16, 0.8, GPU_PRIOR, num_steps=4000) >= MIN_SPEEDUP
