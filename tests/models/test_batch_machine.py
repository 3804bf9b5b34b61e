"""Random batch operations do not change the output of any request.

Batches are stepped, filtered, reordered and joined at random, and finished requests may stay for a while. Each output
is compared with the same request in a batch of one and, if it is greedy, with `transformers.generate`.
"""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from tests.models.driving import Driver, RequestOutput, batch_of, generate, request, run
from tests.models.tiny import EOS_ID, TOKENS, Zoo


@dataclass(frozen=True)
class Spec:
    """A request without its ID."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[tuple[str, Any], ...]
    parameters: tuple[tuple[str, Any], ...]

    def request(self, request_id: int) -> Any:
        return request(request_id, self.prompt, self.max_new_tokens, stop=dict(self.stop), **dict(self.parameters))

    @property
    def is_plain(self) -> bool:
        """Return True if `transformers.generate` supports the request."""
        return not self.parameters and not self.stop


STOP: dict[str, list[Any]] = {
    "min_new_tokens": [1, 2, 4],
    "stop_sequences": [("e", "ch"), ("\ufffd",), (" ", "a", "\u00e9"), ("no such",)],
    "stop_token_ids": [tuple(range(2, 300, 2)), tuple(range(3, 300, 5))],
    "ignore_eos_token": [True],
    "exclude_stop": [True],
}
PARAMETERS: dict[str, list[Any]] = {
    "do_sample": [True],
    "seed": [0, 7, 2**63, 2**64 - 1],
    "temperature": [0.0, 0.3, 2.5],
    "top_k": [1, 5, 1000],
    "top_p": [0.3, 0.9],
    "typical_p": [0.5],
    "min_p": [0.1],
    "repetition_penalty": [0.7, 1.5],
    "frequency_penalty": [-1.0, 0.8],
    "presence_penalty": [1.5],
    "watermark": [True],
    "return_k_alternatives": [1, 3],
    "raw_logprobs": [True],
}


def random_spec(rng: random.Random) -> Spec:
    def some(options: dict[str, list[Any]], share: float) -> tuple[tuple[str, Any], ...]:
        return tuple((name, rng.choice(values)) for name, values in options.items() if rng.random() < share)

    prompt = tuple(rng.choices(range(2, TOKENS), k=rng.randint(1, 12)))
    count = rng.choice([4, 8, 12, 16])
    return Spec(prompt, count, some(STOP, rng.choice([0, 0.5])), some(PARAMETERS, rng.choice([0, 0.3])))


# Few specs, so that each one runs alone only once.
SPECS = [random_spec(random.Random(i)) for i in range(100)]


class Batches(RuleBasedStateMachine):
    """Random batch operations. Set `oracle`, `lm` and `alone` before running."""

    oracle: ClassVar[Any]
    lm: ClassVar[CausalLM]
    alone: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.lm)
        self.specs: dict[int, Spec] = {}
        self.batches: list[CausalLMBatch] = []

    @rule(new=st.lists(st.sampled_from(SPECS), min_size=1, max_size=4), start=st.sampled_from([True, True, False]))
    def create(self, new: list[Spec], start: bool) -> None:
        ids = range(len(self.specs), len(self.specs) + len(new))
        self.specs |= dict(zip(ids, new, strict=True))
        batch = batch_of(self.lm, *(self.specs[i].request(i) for i in ids), batch_id=ids[0])
        self.batches.append(batch)
        if start:
            self._step(batch, keep_finished=False)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), keep_finished=st.booleans())
    def step_one(self, data: st.DataObject, keep_finished: bool) -> None:
        self._step(data.draw(st.sampled_from(self.batches)), keep_finished)

    @precondition(lambda self: self.batches)
    @rule(count=st.integers(1, 3), keep_finished=st.booleans())
    def step_all(self, count: int, keep_finished: bool) -> None:
        for _ in range(count):
            for batch in list(self.batches):
                self._step(batch, keep_finished)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        """Remove some requests, finished or not, and shuffle the rest. Sometimes remove all."""
        batch = data.draw(st.sampled_from(self.batches))
        ids = [each.id for each in batch.requests]
        kept = data.draw(st.permutations(ids))[: data.draw(st.sampled_from([0, 1, 2, 3, 3, len(ids)]))]
        self._replace(batch, batch.filter(kept))

    @precondition(lambda self: any(len(batch) > 1 for batch in self.batches))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Remove one request and keep all others."""
        batch = data.draw(st.sampled_from([batch for batch in self.batches if len(batch) > 1]))
        ids = [each.id for each in batch.requests]
        ids.remove(data.draw(st.sampled_from(ids)))
        assert batch.filter(ids) is batch
        self._step(batch, keep_finished=True)

    @precondition(lambda self: sum(batch.past_key_values is not None for batch in self.batches) > 1)
    @rule(data=st.data())
    def concatenate(self, data: st.DataObject) -> None:
        started = [batch for batch in self.batches if batch.past_key_values is not None]
        order = data.draw(st.permutations(range(len(started))))
        joining = [started[i] for i in order[: data.draw(st.integers(2, 4))]]
        joined = CausalLMBatch.concatenate(joining)
        self.batches = [batch for batch in self.batches if all(batch is not used for used in joining)] + [joined]

    @invariant()
    def batches_are_consistent(self) -> None:
        for batch in self.batches:
            assert batch.max_input_length == max(batch.input_lengths)
            width = batch.max_input_length + batch.padding_right_offset
            assert batch.attention_mask.shape == (len(batch), width)
            seen = batch.attention_mask[:, : batch.max_input_length].sum(1).tolist()
            assert seen == batch.input_lengths == [len(ids) for ids in batch.all_input_ids]
            assert batch.attention_mask.sum().item() == sum(seen)  # no columns for later tokens are visible
            assert batch.max_tokens >= len(batch) * batch.max_input_length
            assert list(batch.requests_idx_mapping) == [each.id for each in batch.requests]
            assert len(batch.adapter_meta.adapter_indices) == batch.input_ids.numel()
            if batch.past_key_values is not None:
                assert batch.input_ids.shape == batch.position_ids.shape == (len(batch), 1)
                assert {part.shape[2] for past in batch.past_key_values for part in past} == {
                    batch.max_input_length - 1
                }

    def _step(self, batch: CausalLMBatch, keep_finished: bool) -> None:
        before = {i: len(output.token_ids) for i, output in self.driver.outputs.items()}
        running = [each.id for each in batch.requests if not self._is_finished(each.id)]
        self._replace(batch, self.driver.step(batch, keep_finished=keep_finished))
        for request_id in running:
            assert len(self.driver.outputs[request_id].token_ids) == before.get(request_id, 0) + 1
            self._compare(request_id)

    def _is_finished(self, request_id: int) -> bool:
        return request_id in self.driver.outputs and self.driver.outputs[request_id].end is not None

    def _replace(self, batch: CausalLMBatch, following: CausalLMBatch | None) -> None:
        self.batches = [each for each in self.batches if each is not batch]
        if following is not None:
            self.batches.append(following)

    def _compare(self, request_id: int) -> None:
        actual, expected = self.driver.outputs[request_id], self.alone(self.specs[request_id])
        count = len(actual.token_ids)
        assert actual.token_ids == expected.token_ids[:count]
        assert actual.logprobs == pytest.approx(expected.logprobs[:count], abs=1e-3)
        assert (actual.end is None) == (count < len(expected.token_ids))
        shown = [each.next_tokens for each in actual.generations]
        also = [each.next_tokens for each in expected.generations[:count]]
        assert [(each.texts, each.is_special) for each in shown] == [(each.texts, each.is_special) for each in also]
        assert [[a.token_ids for a in each.alternative_tokens] for each in shown] == [
            [a.token_ids for a in each.alternative_tokens] for each in also
        ]
        if actual.end is not None:
            assert actual.end == expected.end
            assert "".join(actual.texts) == actual.end.text


SLOW = ("deepseek-v3", "falcon-new", "gemma3-window", "gpt2")  # test_padded_cache.py covers their caches


@pytest.mark.parametrize(
    ("name", "max_examples"),
    [("llama", 2), *(pytest.param(name, 8, marks=pytest.mark.slow) for name in (*SLOW, "llama"))],
)
def test_requests_are_independent_of_batch(name: str, max_examples: int, zoo: Zoo) -> None:
    oracle, lm = zoo.pair(name)

    @cache
    def alone(spec: Spec) -> RequestOutput:
        (output,) = run(lm, spec.request(0))
        if spec.is_plain:
            tokens = generate(oracle, spec.prompt, spec.max_new_tokens, [EOS_ID])
            assert output.token_ids[: len(tokens)] == tokens
        return output

    machine = type("Machine", (Batches,), {"oracle": oracle, "lm": lm, "alone": staticmethod(alone)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
