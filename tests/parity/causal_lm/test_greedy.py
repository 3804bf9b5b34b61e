"""Greedy tokens of causal models equal `transformers.generate` while requests join and leave the batch."""

from collections.abc import Sequence

import pytest

from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from tests.grids import slow_except
from tests.models.driving import Driver, RequestOutput, generate, request, run
from tests.models.tiny import SERVED, Zoo

PROMPTS: list[list[int]] = [
    [5, 9, 20, 33, 41],
    [7, 8],
    [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110],
    [250],
    [60, 61, 62, 160, 161, 162, 63],
    [30, 200, 31, 201, 32, 202, 33, 203, 34, 204, 35, 205, 36, 206],
]
COUNTS = [14, 6, 9, 12, 10, 7]
# Plain attention, absolute positions, compressed keys, sliding windows, mixture of experts.
QUICK = ("llama", "gpt2", "deepseek-v3", "gemma3-window", "mixtral")
ENDLESS = {"ignore_eos_token": True}


def join_and_leave(lm: CausalLM) -> dict[int, RequestOutput]:
    """Add long requests to batches of short requests and vice versa, and remove requests from front, middle and end."""
    requests = [request(i, prompt, COUNTS[i], stop=ENDLESS) for i, prompt in enumerate(PROMPTS)]
    driver = Driver(lm)
    batch = driver.start(requests[0], requests[1], steps=3)
    longer = driver.start(requests[2])
    batch = driver.steps(CausalLMBatch.concatenate([batch, longer]), 2)  # 0 1 2
    shorter = driver.start(requests[3], steps=2)
    batch = driver.steps(CausalLMBatch.concatenate([shorter, batch]), 1)  # 3 0 1 2; 1 is finished: the middle
    batch = driver.steps(_keep(batch, [2, 3, 0]), 1)  # in another order
    last = driver.start(requests[4], requests[5], steps=2)
    batch = driver.steps(CausalLMBatch.concatenate([last, batch]), 1)  # 4 5 2 3 0
    batch = driver.steps(_keep(batch, [5, 2, 3, 0]), 1)  # 4 leaves the front and is not finished
    batch = driver.steps(_keep(batch, [5, 2, 3]), 1)  # 0 leaves the end
    driver.finish(batch)
    return driver.outputs


def _keep(batch: CausalLMBatch, request_ids: list[int]) -> CausalLMBatch:
    kept = batch.filter(request_ids)
    assert kept is not None
    return kept


def check(output: RequestOutput, expected: Sequence[int]) -> int:
    """Compare the output with the expected tokens. Return the number of compared tokens."""
    compared = min(len(output.token_ids), len(expected))
    assert output.token_ids[:compared] == list(expected[:compared])
    return compared


@pytest.mark.parametrize("name", slow_except(QUICK, SERVED))
def test_joining_and_leaving_requests_do_not_change_tokens(name: str, zoo: Zoo) -> None:
    oracle, lm = zoo.pair(name)
    outputs = join_and_leave(lm)
    assert len(outputs) == len(PROMPTS)
    compared = 0
    for i, prompt in enumerate(PROMPTS):
        compared += check(outputs[i], generate(oracle, prompt, COUNTS[i]))
    assert compared >= 25  # of 46 tokens, the rest may be ties
    tokens = [token_id for output in outputs.values() for token_id in output.token_ids]
    assert len(set(tokens)) >= 5  # the text does not repeat one token


@pytest.mark.parametrize("name", slow_except(QUICK, SERVED))
def test_prompts_of_all_lengths_match_transformers_in_one_batch(name: str, zoo: Zoo) -> None:
    oracle, lm = zoo.pair(name)
    outputs = run(lm, *(request(i, prompt, 5) for i, prompt in enumerate(PROMPTS)))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = generate(oracle, prompt, 5, lm.config.eos_token_id)
        assert output.token_ids[: len(expected)] == expected
        assert output.end is not None
