"""Scheduler and runner together, on every architecture: each request gets what transformers gives it alone."""

import random
from collections import deque
from typing import Any

import pytest
import torch

from lorax_server.engine.blocks import BlockPool
from lorax_server.engine.scheduler import Limits, Scheduler
from lorax_server.layers.targets import adapter_targets
from lorax_server.models.registry import build_model
from lorax_server.plan import StepResult
from lorax_server.types import Request, SamplingParams, StopParams
from lorax_server.worker.runner import PagedRunner, Ticket
from tests.lora import make_arena, merged, random_factors
from tests.parity.oracle import oracle_greedy
from tests.parity.variants import LENGTH_DEPENDENT, VARIANTS, checkpoint, make_oracle, make_weights

BLOCK_SIZE = 4
NUM_BLOCKS = 20
LIMITS = Limits(max_step_tokens=12, max_rows=4, max_length=48)


class Resident:
    """All adapters are there; an identity is its index."""

    def index_of(self, identity: str) -> int:
        return int(identity or 0)

    def bring(self, identity: str) -> None:
        raise AssertionError("all are there")

    def hold(self, identity: str) -> None: ...

    def release(self, identity: str) -> None: ...


class InProcess:
    """The loop of the engine around a runner in this process."""

    def __init__(self, model: Any, arena: Any = None, depth: int = 1) -> None:
        self.scheduler = Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE), Resident())
        self.runner = PagedRunner(
            model,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_rows=LIMITS.max_rows,
            max_length=LIMITS.max_length,
            arena=arena,
        )
        self.depth = depth
        self.tickets: deque[Ticket] = deque()
        self.answers: dict[int, list[int]] = {}

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.tickets.append(self.runner.submit(plan))
        while self.tickets and (plan is None or len(self.tickets) >= self.depth):
            result: StepResult = self.runner.collect(self.tickets.popleft())
            for emitted in self.scheduler.update(result):
                self.answers.setdefault(emitted.request_id, []).append(emitted.token_id)

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()


def make_requests(name: str, num_adapters: int = 0, **sampling: Any) -> list[Request]:
    """Some begin alike, some are long, and together they are too many for the cache."""
    rng = random.Random(0)
    beginning = rng.choices(range(3, 97), k=9)
    requests = []
    for i in range(10):
        prompt = [*(beginning if i % 2 else []), *rng.choices(range(3, 97), k=rng.choice([1, 3, 8, 17]))]
        salt = str(len(prompt)) if name in LENGTH_DEPENDENT else ""  # their angles depend on it
        adapter = str(i % (num_adapters + 1) or "")
        params = SamplingParams(seed=i, **sampling)
        requests.append(Request(i, prompt, params, StopParams(max_new_tokens=14), adapter=adapter, salt=salt))
    return requests


def run(engine: InProcess, requests: list[Request], seed: int = 0) -> dict[int, list[int]]:
    rng = random.Random(seed)
    for request in requests:
        engine.scheduler.add(request)
        for _ in range(rng.choice([0, 1, 2])):
            engine.step()
    engine.finish()
    return engine.answers


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_request_gets_what_it_gets_alone(name: str, device: torch.device) -> None:
    oracle = make_oracle(name).to(device)
    tensors = checkpoint(name, oracle)
    engine = InProcess(build_model(VARIANTS[name].config(), make_weights(tensors, device)), depth=2)
    requests = make_requests(name)
    answers = run(engine, requests)
    compared = 0
    for request in requests:
        expected = oracle_greedy(oracle, request.prompt_ids, 14, tensors)
        assert answers[request.request_id][: len(expected)] == expected
        compared += len(expected)
    assert compared > 100
    counters = engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.chunks > 0
    assert counters.prefix_tokens > 0 or name in LENGTH_DEPENDENT


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_requests_for_different_adapters_share_the_steps(name: str, device: torch.device) -> None:
    oracle = make_oracle(name).to(device)
    tensors = checkpoint(name, oracle)
    model = build_model(VARIANTS[name].config(), make_weights(tensors, device))
    targets = adapter_targets(model)
    adapters = [(random_factors(targets, rank, seed=rank), 0.5) for rank in (2, 5)]
    models = [oracle, *(merged(oracle, factors, scale) for factors, scale in adapters)]
    engine = InProcess(model, make_arena(targets, adapters, device), depth=2)
    requests = make_requests(name, num_adapters=2)
    answers = run(engine, requests)
    for request in requests:
        expected = oracle_greedy(models[int(request.adapter or 0)], request.prompt_ids, 14, tensors)
        assert answers[request.request_id][: len(expected)] == expected
    assert engine.scheduler.counters.preemptions > 0


def test_what_is_drawn_depends_on_nothing_but_the_request(device: torch.device) -> None:
    """A request alone, and in crowds that come at other times."""
    tensors = checkpoint("llama-gqa", make_oracle("llama-gqa"))
    model = build_model(VARIANTS["llama-gqa"].config(), make_weights(tensors, device))
    wishes = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
    requests = make_requests("llama-gqa", **wishes)
    crowds = [run(InProcess(model, depth=depth), requests, seed) for depth, seed in ((1, 0), (2, 1), (2, 2))]
    for request in requests:
        alone = run(InProcess(model), [request])[request.request_id]
        assert all(crowd[request.request_id] == alone for crowd in crowds)
