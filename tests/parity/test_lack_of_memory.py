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
    Models,
    Workload,
    make_engine,
    make_models,
    make_prompts,
)

MAX_NUM_SEQS = 4


class FailingWorkload(Workload):
    """A workload in which some requests may fail."""

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
                self.request_outputs.setdefault(output.request_id, []).append(output)


def inject_out_of_memory(monkeypatch: pytest.MonkeyPatch, method: str, should_fail: Callable[[int, int], bool]) -> None:
    """Raise out-of-memory errors after the runner method `method` if `should_fail(step index, attempt)` is true."""
    original: Callable[..., Any] = getattr(PagedRunner, method)
    attempts: dict[int, int] = {}

    def fail(runner: PagedRunner, plan: StepPlan, *args: Any) -> Any:
        result = original(runner, plan, *args)
        attempts[plan.step] = attempts.get(plan.step, 0) + 1
        if should_fail(list(attempts).index(plan.step), attempts[plan.step]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(PagedRunner, method, fail)


def run_all(models: Models, engine: Engine) -> FailingWorkload:
    drawn = SamplingParams(do_sample=True, temperature=0.9, seed=7, repetition_penalty=1.1, num_alternatives=2)
    workload = FailingWorkload(engine, models.folders)
    for i, prompt in enumerate(make_prompts()):
        more: dict[str, Any] = {"prompt_logprobs": True} if i % 5 == 0 else {}
        workload.add(
            i, prompt, adapter=ADAPTER_OF_REQUEST[i], sampling=drawn if i % 3 == 0 else SamplingParams(), **more
        )
    status = workload.finish()
    assert status.free_blocks == NUM_BLOCKS
    assert len(engine._scheduler._free_slots) == MAX_NUM_SEQS
    return workload


@pytest.mark.parametrize("method", ["_forward", "_sample", "_score_prompts"])
@pytest.mark.parametrize("max_steps_in_flight", slow_except([2], [1, 2]))
def test_out_of_memory_does_not_change_other_requests(
    method: str, max_steps_in_flight: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_models("llama-gqa", tmp_path, device)
    expected = run_all(models, make_engine(models, max_steps_in_flight))
    assert not expected.failures
    # Some requests must run entirely between two failed steps.
    inject_out_of_memory(monkeypatch, method, lambda step, _: step % (NEW_TOKENS + 4) == 1)
    workload = run_all(models, make_engine(models, max_steps_in_flight))
    assert 0 < len(workload.failures) < len(ADAPTER_OF_REQUEST)
    for failure in workload.failures.values():
        assert failure.to_error().status == 503
        assert "not enough device memory for this request" in failure.message
    for i in set(range(len(ADAPTER_OF_REQUEST))) - set(workload.failures):
        assert workload.tokens(i) == expected.tokens(i)
        for output, other in zip(workload.request_outputs[i], expected.request_outputs[i], strict=True):
            assert output.tokens[0].logprob == pytest.approx(other.tokens[0].logprob, abs=1e-5)
            assert output.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("seed", slow_except([0], range(6)))
def test_out_of_memory_at_any_allocation_leaves_no_stale_state(
    seed: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every host-to-device allocation in a step may run out of memory."""
    models = make_models("llama-gqa", tmp_path, device)
    expected = run_all(models, make_engine(models))
    rng, trying = random.Random(seed), [False]
    for module, name in ((runner, "to_device"), (inputs, "to_device"), (inputs, "columns_to_device")):
        original: Callable[..., Any] = getattr(module, name)

        def may_fail(*args: Any, original: Callable[..., Any] = original) -> Any:
            if trying[0] and rng.random() < 0.02:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(*args)

        monkeypatch.setattr(module, name, may_fail)
    attempt = Worker._try_run

    def try_and_watch(worker: Worker, work: Callable[[], None]) -> bool:
        trying[0] = True
        try:
            return attempt(worker, work)
        finally:
            trying[0] = False

    monkeypatch.setattr(Worker, "_try_run", try_and_watch)
    workload = run_all(models, make_engine(models))
    for i in set(range(len(ADAPTER_OF_REQUEST))) - set(workload.failures):
        assert workload.tokens(i) == expected.tokens(i)


def test_retry_after_out_of_memory_succeeds(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_models("llama-gqa", tmp_path, device)
    expected = run_all(models, make_engine(models))
    inject_out_of_memory(monkeypatch, "_forward", lambda _, number: number == 1)
    workload = run_all(models, make_engine(models))
    assert not workload.failures
    assert [workload.tokens(i) for i in range(len(ADAPTER_OF_REQUEST))] == [
        expected.tokens(i) for i in range(len(ADAPTER_OF_REQUEST))
    ]
