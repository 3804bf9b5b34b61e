"""Forward sizes: each prompt once, then one token per row and step, without recomputation after joins."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from tests.models.driving import Driver, generate, request
from tests.models.tiny import Zoo
from tests.parity.causal_lm.test_greedy import ENDLESS, PROMPTS

NAMES = ["bloom", "gemma3-window", "gpt2", "llama"]
COUNT = 9


class ForwardRecorder:
    """Records the input shape of every forward."""

    def __init__(self, lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, int]] = []
        forward = lm.model.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.shapes.append(tuple(kwargs["input_ids"].shape))
            return forward(*args, **kwargs)

        monkeypatch.setattr(lm.model, "forward", counting)


def join_one_by_one(lm: CausalLM) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
    """Return the tokens and the expected input shapes."""
    driver, expected = Driver(lm), []
    requests = [request(i, prompt, COUNT, stop=ENDLESS) for i, prompt in enumerate(PROMPTS)]
    batch = driver.start(requests[0], requests[1])
    expected.append((2, 5))
    for joining in requests[2:]:
        batch = driver.steps(batch, 1)
        expected.append((len(batch), 1))
        batch = CausalLMBatch.concatenate([batch, driver.start(joining)])
        expected.append((1, len(joining.tokenized_inputs.ids)))
    kept = batch.filter([4, 2, 5, 0])
    while kept is not None:
        expected.append((len(kept), 1))
        kept = driver.step(kept)
    return {i: output.token_ids for i, output in driver.outputs.items()}, expected


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_computed_once(name: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = zoo.served(name)
    recorder = ForwardRecorder(lm, monkeypatch)
    tokens, expected = join_one_by_one(lm)
    assert recorder.shapes == expected
    prompts = 2 * 5 + sum(len(prompt) for prompt in PROMPTS[2:])  # the first two prompts are padded to equal length
    decoded = sum(len(ids) - 1 for ids in tokens.values())  # prefill returns the first token
    assert sum(rows * columns for rows, columns in recorder.shapes) == prompts + decoded


def test_prompts_in_one_batch_share_one_forward(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = zoo.served("llama")
    recorder = ForwardRecorder(lm, monkeypatch)
    Driver(lm).start(*(request(i, prompt) for i, prompt in enumerate(PROMPTS)))
    assert recorder.shapes == [(6, 14)]


@pytest.mark.parametrize("name", NAMES)
def test_head_runs_only_on_last_prompt_column(name: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits for every token of a long prompt would take a lot of memory."""
    lm = zoo.served(name)
    model: Any = lm.model
    head, seen = model.get_output_embeddings(), []
    hook = head.register_forward_hook(lambda *args: seen.append(args[-1].shape[1]))
    driver = Driver(lm)
    driver.start(*(request(i, prompt) for i, prompt in enumerate(PROMPTS)), steps=2)
    driver.start(request(9, PROMPTS[0], fields={"prefill_logprobs": True}))
    hook.remove()
    assert seen == [1, 1, 5]


def concatenate_by_recomputing(batches: Sequence[CausalLMBatch]) -> CausalLMBatch:
    """Join batches by recomputing every token. The result is correct but wasteful."""
    lists = {
        name: [each for batch in batches for each in getattr(batch, name)]
        for name in ("requests", "next_token_choosers", "stopping_criterias", "prefix_offsets", "read_offsets")
    }
    prompts = [ids[:, 0].tolist() for batch in batches for ids in batch.all_input_ids]
    choosers, stops = lists["next_token_choosers"], lists["stopping_criterias"]
    device = batches[0].input_ids.device
    joined = CausalLMBatch.from_prompts(lists["requests"], prompts, choosers, stops, 0, device, batch_id=0)
    joined.prefix_offsets, joined.read_offsets = lists["prefix_offsets"], lists["read_offsets"]
    return joined


def test_recomputation_is_detected_by_counts(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = zoo.served("llama")
    tokens, _ = join_one_by_one(lm)
    recorder = ForwardRecorder(lm, monkeypatch)
    monkeypatch.setattr(CausalLMBatch, "concatenate", concatenate_by_recomputing)
    recomputed_tokens, expected = join_one_by_one(lm)
    assert recomputed_tokens == tokens
    assert recorder.shapes != expected
    assert len(recorder.shapes) == len(expected)  # equal number of forwards with different sizes


def join_without_padding_mask(batches: Sequence[CausalLMBatch], join: Callable[..., CausalLMBatch]) -> CausalLMBatch:
    """Join batches without masking the padding."""
    joined = join(batches)
    joined.attention_mask = torch.cat(
        [
            torch.ones_like(joined.attention_mask[:, : joined.max_input_length]),
            joined.attention_mask[:, joined.max_input_length :],
        ],
        dim=1,
    )
    return joined


def join_with_shifted_positions(batches: Sequence[CausalLMBatch], join: Callable[..., CausalLMBatch]) -> CausalLMBatch:
    """Join batches with the longest row's positions for all rows."""
    joined = join(batches)
    joined.position_ids = torch.full_like(joined.position_ids, joined.max_input_length - 1)
    return joined


@pytest.mark.parametrize("spoiled", [join_without_padding_mask, join_with_shifted_positions])
def test_wrong_mask_or_positions_change_tokens(
    spoiled: Callable[..., CausalLMBatch], zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, lm = zoo.pair("gpt2")
    join = CausalLMBatch.concatenate
    expected = {i: generate(oracle, prompt, COUNT) for i, prompt in enumerate(PROMPTS)}

    def agrees(tokens: dict[int, list[int]]) -> bool:
        return all(ids == expected[i][: len(ids)] for i, ids in tokens.items())

    assert agrees(join_one_by_one(lm)[0])
    monkeypatch.setattr(CausalLMBatch, "concatenate", lambda batches: spoiled(batches, join))
    assert not agrees(join_one_by_one(lm)[0])
