"""Completions are identical with and without speculation."""

import random
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from lorax_server import build
from lorax_server.engine.sequence import Sequence as EngineSequence
from lorax_server.generation.generation import Completion
from lorax_server.llm import LLM
from lorax_server.types import EngineStatus, SamplingParams, StopParams
from lorax_server.worker import worker
from lorax_server.worker.graphs import GraphSizes
from lorax_server.worker.runner import PagedRunner
from tests.engine.speculation.requests import ADAPTERS, MODEL, NAMES, RandomRequest, make_prompt, make_requests

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 6,
    "max_step_tokens": 96,
    "block_size": 4,
    "cache_tokens": 440,  # too few, so sequences are preempted
    "max_length": 300,
    "adapter_bytes": 2**26,
}


class NoisyOracle:
    """Drafts the tokens of known completions, with random lengths and errors."""

    def __init__(self, completions: Sequence[Completion], seed: int) -> None:
        self._random = random.Random(seed)
        self._known: dict[tuple[int, ...], list[list[int]]] = {}
        for completion in completions:
            self._known.setdefault(tuple(completion.prompt_ids), []).append(completion.token_ids)

    def propose(
        self, sequences: Iterable[EngineSequence], num_running: int, max_tokens: int
    ) -> dict[EngineSequence, list[int]]:
        drafts = {sequence: self._draft(sequence) for sequence in sequences}
        return {sequence: draft for sequence, draft in drafts.items() if draft}

    def _draft(self, sequence: EngineSequence) -> list[int]:
        generated = sequence.token_ids[len(sequence.request.prompt_ids) :]
        known = [ids for ids in self._known[tuple(sequence.request.prompt_ids)] if ids[: len(generated)] == generated]
        assert known, "the tokens so far differ from the completion without speculation"
        draft = known[0][len(generated) :][: self._random.randint(0, 8)]
        return [token_id if self._random.random() < 0.9 else self._random.randrange(500) for token_id in draft]

    def must_run_heads(self, num_running: int) -> bool:
        return True

    def waits(self, sequences: Iterable[EngineSequence], num_running: int, max_tokens: int) -> bool:
        return True

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None: ...

    def finish(self, sequence: EngineSequence) -> None: ...

    def learn(self) -> None: ...


def generate(requests: Sequence[RandomRequest], **settings: Any) -> tuple[list[Completion], EngineStatus]:
    prompts, params, stops, adapters, structures = map(list, zip(*requests, strict=True))
    with LLM(MODEL, ADAPTERS, **SETTINGS | settings) as llm:
        result = llm.generate(prompts, params, stops, adapter=adapters, structure=structures, on_error="return")
        return result, llm.status


def check_equal(found: Sequence[Completion], expected: Sequence[Completion], requests: Sequence[RandomRequest]) -> None:
    """Compare completions. Log probabilities may differ by rounding, because prompts are split at other positions."""
    for one, other, request in zip(found, expected, requests, strict=True):
        assert str(one.error) == str(other.error), request
        assert one.token_ids == other.token_ids, request
        assert one.text == other.text, request
        assert one.finish_reason == other.finish_reason, request
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), request
        assert [each.token_ids for each in one.alternatives] == [each.token_ids for each in other.alternatives], request


def check_requests(count: int, seed: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> EngineStatus:
    requests = make_requests(count, seed)
    expected, plain = generate(requests, speculative_tokens=0, **settings)
    assert plain.drafted_tokens == 0
    monkeypatch.setattr(build, "build_drafter", lambda *_: NoisyOracle(expected, seed))
    actual, status = generate(requests, **settings)
    check_equal(actual, expected, requests)
    assert status.drafted_tokens > status.accepted_tokens > count
    return status


@pytest.mark.slow
def test_mixed_requests_with_noisy_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    status = check_requests(50, 1, monkeypatch)
    assert status.preemptions > 0


@pytest.mark.slow
def test_many_mixed_requests_with_noisy_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_requests(1000, 2, monkeypatch)


def test_log_probabilities_of_one_sequence_are_bitwise_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, alone = make_requests(8, 5), {"max_num_seqs": 1, "cache_tokens": 4000}
    expected, _ = generate(requests, speculative_tokens=0, **alone)
    monkeypatch.setattr(build, "build_drafter", lambda *_: NoisyOracle(expected, 5))
    actual, status = generate(requests, **alone)
    assert status.accepted_tokens > 0
    assert [(each.token_ids, each.logprobs) for each in actual] == [
        (each.token_ids, each.logprobs) for each in expected
    ]


def test_mixed_requests_with_two_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    check_requests(12, 6, monkeypatch, max_steps_in_flight=2)


@pytest.mark.slow
def test_mixed_requests_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "uses_cpu_graphs", lambda *_: False)
    check_requests(12, 7, monkeypatch)


@pytest.mark.slow
def test_mixed_requests_with_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    check_requests(12, 9, monkeypatch, tensor_parallel=2)


@pytest.mark.slow
def test_mixed_requests_in_padded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run eagerly on the padded inputs of CUDA graphs."""
    sizes = GraphSizes.choose(SETTINGS["max_num_seqs"], SETTINGS["max_step_tokens"])
    monkeypatch.setattr(GraphSizes, "choose_for_cpu", lambda: sizes)
    monkeypatch.setattr(worker, "PagedRunner", partial(PagedRunner, capture=False))
    check_requests(12, 8, monkeypatch)


@pytest.mark.usefixtures("equal_step_times")
def test_demo_adapters_with_the_real_drafter() -> None:
    """Each request is sent twice, greedy and with a seed."""
    stop, params = StopParams(max_new_tokens=24), (SamplingParams(), SamplingParams(do_sample=True, seed=3))
    texts = [request.prompt for request in make_requests(1, 3)]
    requests = 2 * [RandomRequest(text, each, stop, name, None) for name in NAMES for text in texts for each in params]
    actual, _ = generate(requests, speculative_tokens=6)
    expected, _ = generate(requests, speculative_tokens=0)
    check_equal(actual, expected, requests)


@pytest.mark.usefixtures("equal_step_times")
def test_repeated_request_takes_fewer_steps() -> None:
    """The second time, the drafts are the first completion."""
    prompt, stop = make_prompt(make_requests(1, 4)[0].prompt), StopParams(max_new_tokens=40, ignore_eos=True)
    with LLM(MODEL, ADAPTERS, speculative_tokens=8, **SETTINGS) as llm:
        steps = []
        for _ in range(3):
            before = llm.status.steps
            llm.generate(prompt, SamplingParams(), stop, adapter="json")
            steps.append(llm.status.steps - before)
        assert llm.status.accepted_tokens > 0
    assert steps[-1] < 15
