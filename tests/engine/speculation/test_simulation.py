"""Speculation pays off on simulated machines, and is never much slower than plain decoding."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest

from lorax_server.engine.speculation.step_costs import GPU_PRIOR_RATIO, PRIOR_RATIO
from tests.engine.speculation.simulation import Machine, simulate

MIN_SPEEDUP = 0.97
# Step times in ms by number of tokens, with the Llama-3.1-8B shape and LoRA of rank 16.
H200_MS = ((1, 4.26), (8, 4.4), (16, 4.7), (32, 5.3), (64, 6.8), (128, 8.5), (256, 12.1), (512, 23.6))
CPU_TIMES = ((1, 1.0), (2, 1.3), (4, 1.9), (8, 3.2), (80, 27.0))  # relative to one token
SLOW_FIRST = {"num_slow_steps": 3}
NOISE = {"noise": 0.3, "outliers": 0.03}


def interpolated(points: tuple[tuple[int, float], ...]) -> Callable[[int], float]:
    def cost(num_tokens: int) -> float:
        index = max(1, bisect_left(points, (num_tokens, 0.0)))
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)

    return cost


def h200(**options: Any) -> Machine:
    return Machine(interpolated(H200_MS), draft_overhead=0.8, **options)


def cpu(**options: Any) -> Machine:
    return Machine(interpolated(CPU_TIMES), draft_overhead=0.1, **options)


def without_fixed_costs(**options: Any) -> Machine:
    return Machine(float, **options)


@pytest.mark.parametrize("options", [{}, NOISE], ids=["steady", "noise"])
@pytest.mark.parametrize(("num_sequences", "goal"), [(1, 3.0), (16, 1.8), (64, 1.5), (256, MIN_SPEEDUP)])
def test_drafts_pay_off_on_gpu(num_sequences: int, goal: float, options: dict[str, float]) -> None:
    assert simulate(h200(**options), num_sequences, 0.8, GPU_PRIOR_RATIO) >= goal


@pytest.mark.parametrize(("num_sequences", "goal"), [(1, 3.0), (64, 1.45)])
def test_slow_first_steps_are_ignored(num_sequences: int, goal: float) -> None:
    assert simulate(h200(**SLOW_FIRST), num_sequences, 0.8, GPU_PRIOR_RATIO) >= goal


@pytest.mark.parametrize(("num_sequences", "goal"), [(1, 1.35), (2, 1.1), (8, MIN_SPEEDUP)])
def test_drafts_pay_off_on_cpu(num_sequences: int, goal: float) -> None:
    assert simulate(cpu(), num_sequences, 0.8, PRIOR_RATIO) >= goal


@pytest.mark.parametrize("num_sequences", [1, 16, 64, 256])
@pytest.mark.parametrize("options", [{}, NOISE, SLOW_FIRST], ids=["steady", "noise", "slow first steps"])
def test_wrong_drafts_cost_little(num_sequences: int, options: dict[str, float]) -> None:
    assert simulate(h200(**options), num_sequences, 0.0, GPU_PRIOR_RATIO) >= MIN_SPEEDUP


@pytest.mark.parametrize(("num_sequences", "acceptance"), [(1, 0.8), (1, 0.5), (16, 0.8), (64, 0.8)])
@pytest.mark.parametrize("options", [{}, NOISE], ids=["steady", "noise"])
def test_expensive_drafts_are_rarely_tried(num_sequences: int, acceptance: float, options: dict[str, float]) -> None:
    """A draft token costs as much as a step's first token, contrary to the assumed costs."""
    machine = without_fixed_costs(**options)
    assert simulate(machine, num_sequences, acceptance, GPU_PRIOR_RATIO, num_steps=2000) >= MIN_SPEEDUP


def test_expensive_drafts_are_rarely_tried_although_first_steps_are_slow() -> None:
    machine = without_fixed_costs(**SLOW_FIRST)
    assert simulate(machine, 16, 0.8, GPU_PRIOR_RATIO, num_steps=4000) >= MIN_SPEEDUP
