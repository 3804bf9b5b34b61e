"""Out-of-memory errors during model steps do not change the tokens of other requests."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server.engine.engine import Engine
from lorax_server.plan import StepPlan
from lorax_server.types import Failure, SamplingParams
from lorax_server.worker import inputs, runner
from lorax_server.worker.runner import PagedRunner
from lorax_server.worker.worker import Worker
from tests.grids import slow_except
from tests.parity.test_engine import (
    ADAPTER_OF_REQUEST,
    NEW_TOKENS,
    NUM_BLOCKS,
    Crowd,
    Models,
    make_engine,
    make_models,
    make_prompts,
)

MAX_NUM_SEQS = 4


class DisturbedCrowd(Crowd):
    """A crowd in which some requests may fail."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failures: dict[int, Failure] = {}

    def step(self) -> None:
        if not self.engine.is_busy:
            self.engine.wake.wait(0.01)
        self.engine.wake.clear()
        for output in self.engine.step():
            if output.failure is not None:
                self.failures[output.request_id] = output.failure
            else:
                self.answers.setdefault(output.request_id, []).append(output)


def disturb(monkeypatch: pytest.MonkeyPatch, place: str, lacks: Callable[[int, int], bool]) -> None:
    """Let runners fail after `place`, one of their methods. `lacks` is asked with the number of the step, of those that
    come there, and the number of the try."""
    whole: Callable[..., Any] = getattr(PagedRunner, place)
    tries: dict[int, int] = {}

    def fail(runner: PagedRunner, plan: StepPlan, *args: Any) -> Any:
        result = whole(runner, plan, *args)
        tries[plan.step] = tries.get(plan.step, 0) + 1
        if lacks(list(tries).index(plan.step), tries[plan.step]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(PagedRunner, place, fail)


def run_all(models: Models, engine: Engine) -> DisturbedCrowd:
    drawn = SamplingParams(do_sample=True, temperature=0.9, seed=7, repetition_penalty=1.1, num_alternatives=2)
    crowd = DisturbedCrowd(engine, models.folders)
    for i, prompt in enumerate(make_prompts()):
        more: dict[str, Any] = {"prompt_logprobs": True} if i % 5 == 0 else {}
        crowd.add(i, prompt, adapter=ADAPTER_OF_REQUEST[i], sampling=drawn if i % 3 == 0 else SamplingParams(), **more)
    status = crowd.finish()
    assert status.free_blocks == NUM_BLOCKS
    assert len(engine._scheduler._free_slots) == MAX_NUM_SEQS
    return crowd


@pytest.mark.parametrize("place", ["_forward", "_choose", "_score_prompts"])
@pytest.mark.parametrize("depth", slow_except([2], [1, 2]))
def test_out_of_memory_does_not_change_other_requests(
    place: str, depth: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_models("llama-gqa", tmp_path, device)
    undisturbed = run_all(models, make_engine(models, depth))
    assert not undisturbed.failures
    # Whenever adapters come, some answers have all of their steps between two that fail.
    disturb(monkeypatch, place, lambda step, _: step % (NEW_TOKENS + 4) == 1)
    crowd = run_all(models, make_engine(models, depth))
    assert 0 < len(crowd.failures) < len(ADAPTER_OF_REQUEST)
    for failure in crowd.failures.values():
        assert failure.to_error().status == 503
        assert "not enough device memory for this request" in failure.message
    for i in set(range(len(ADAPTER_OF_REQUEST))) - set(crowd.failures):
        assert crowd.tokens(i) == undisturbed.tokens(i)
        for output, other in zip(crowd.answers[i], undisturbed.answers[i], strict=True):
            assert output.tokens[0].logprob == pytest.approx(other.tokens[0].logprob, abs=1e-5)
            assert output.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("seed", slow_except([0], range(6)))
def test_out_of_memory_at_any_allocation_leaves_no_stale_state(
    seed: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every host-to-device allocation in a step may run out of memory."""
    models = make_models("llama-gqa", tmp_path, device)
    undisturbed = run_all(models, make_engine(models))
    rng, trying = random.Random(seed), [False]
    for module, name in ((runner, "to_device"), (inputs, "to_device"), (inputs, "columns_to_device")):
        whole: Callable[..., Any] = getattr(module, name)

        def may_fail(*args: Any, whole: Callable[..., Any] = whole) -> Any:
            if trying[0] and rng.random() < 0.02:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return whole(*args)

        monkeypatch.setattr(module, name, may_fail)
    attempt = Worker._try_run

    def try_and_watch(worker: Worker, work: Callable[[], None]) -> bool:
        trying[0] = True
        try:
            return attempt(worker, work)
        finally:
            trying[0] = False

    monkeypatch.setattr(Worker, "_try_run", try_and_watch)
    crowd = run_all(models, make_engine(models))
    for i in set(range(len(ADAPTER_OF_REQUEST))) - set(crowd.failures):
        assert crowd.tokens(i) == undisturbed.tokens(i)


def test_retry_after_out_of_memory_succeeds(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_models("llama-gqa", tmp_path, device)
    undisturbed = run_all(models, make_engine(models))
    disturb(monkeypatch, "_forward", lambda _, number: number == 1)
    crowd = run_all(models, make_engine(models))
    assert not crowd.failures
    assert [crowd.tokens(i) for i in range(len(ADAPTER_OF_REQUEST))] == [
        undisturbed.tokens(i) for i in range(len(ADAPTER_OF_REQUEST))
    ]
