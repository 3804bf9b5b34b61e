"""`CausalLM` step by step: outputs and errors per request."""

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lorax_server.adapters.batch import AdapterBatchMetadata
from lorax_server.errors import AdapterError, InputError, LoraxError
from lorax_server.generation.stopping import FinishReason
from lorax_server.models.causal_lm import CausalLM, CausalLMBatch
from lorax_server.pb import generate_pb2 as pb
from tests.models.driving import Driver, RequestOutput, batch_of, request, run
from tests.models.tiny import EOS_ID, VOCAB, Zoo

PROMPT, SHORT = [5, 9, 20, 33, 41], [7, 8]
ENDLESS = {"ignore_eos_token": True}
LARGE_BIAS = 1e4  # a bias that always decides the token


@pytest.fixture(scope="session")
def lm(zoo: Zoo) -> CausalLM:
    return zoo.served("llama")


@pytest.fixture(scope="session")
def oracle(zoo: Zoo) -> Any:
    return zoo.pair("llama").oracle


@torch.no_grad()
def log_probabilities(oracle: Any, ids: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([list(ids)], device=oracle.device)).logits[0]
    return logits.log_softmax(-1).cpu()


class ScriptedModel:
    """Makes the model generate these tokens for every request, in any batch.

    The next token depends only on the last one, so tokens must be unique.
    """

    def __init__(self, lm: CausalLM, monkeypatch: pytest.MonkeyPatch, tokens: Sequence[int]) -> None:
        following = dict(pairwise(tokens))
        assert len(set(tokens)) == len(tokens)
        forward = lm.model.forward

        def scripted(**inputs: Any) -> Any:
            output = forward(**inputs)
            for row, last in enumerate(inputs["input_ids"][:, -1].tolist()):
                output.logits[row, -1, following.get(last, EOS_ID)] += LARGE_BIAS
            return output

        monkeypatch.setattr(lm.model, "forward", scripted)
        self.prompt = [tokens[0]]


def tokens_of(lm: CausalLM, text: str) -> list[int]:
    return list(lm.tokenizer(text)["input_ids"])


def bytes_of(lm: CausalLM, text: str) -> list[int]:
    """Return one token for each byte."""
    names = bytes_to_unicode()
    return [lm.tokenizer.convert_tokens_to_ids(names[byte]) for byte in text.encode()]


# --- Comparison with transformers -------------------------------------------------------------------------------------


def test_token_logprobs_match_transformers(lm: CausalLM, oracle: Any) -> None:
    outputs = run(lm, request(0, PROMPT, stop=ENDLESS), request(1, SHORT, stop=ENDLESS))
    for prompt, result in zip((PROMPT, SHORT), outputs, strict=True):
        expected = log_probabilities(oracle, [*prompt, *result.token_ids])[len(prompt) - 1 : -1]
        chosen = expected.gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert result.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


def test_prompt_logprobs_are_returned_with_first_token(lm: CausalLM, oracle: Any) -> None:
    asking = {"prefill_logprobs": True}
    outputs = run(
        lm, request(0, PROMPT, fields=asking), request(1, SHORT), request(2, [250], fields=asking), request(3, PROMPT)
    )
    for prompt, result in ((PROMPT, outputs[0]), ([250], outputs[2])):
        assert result.prompt is not None
        assert result.prompt.token_ids == prompt
        assert math.isnan(result.prompt.logprobs[0])
        expected = log_probabilities(oracle, prompt)[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert result.prompt.logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-4)
        assert result.prompt.texts == [lm.detokenizer.token_text(token_id) for token_id in prompt]
    assert outputs[1].prompt is None
    assert outputs[3].prompt is None


def test_prompt_length_is_returned_with_first_token(lm: CausalLM) -> None:
    for result, length in zip(run(lm, request(0, PROMPT), request(1, SHORT)), (5, 2), strict=True):
        assert [each.prefill_tokens_length for each in result.generations] == [length] + [0] * 7


def test_prompt_tokens_are_returned_once_after_merge(lm: CausalLM) -> None:
    driver = Driver(lm)
    batches = [driver.start(request(i, PROMPT, fields={"prefill_logprobs": True})) for i in range(2)]
    driver.finish(CausalLMBatch.concatenate(batches))
    for result in driver.outputs.values():
        assert [each.prefill_tokens is not None for each in result.generations] == [True] + [False] * 7


def test_alternatives_are_sorted_by_probability(lm: CausalLM, oracle: Any) -> None:
    result, silent = run(lm, request(0, PROMPT, return_k_alternatives=3, stop=ENDLESS), request(1, SHORT))
    expected = log_probabilities(oracle, [*PROMPT, *result.token_ids])[len(PROMPT) - 1 : -1].topk(3)
    for i, each in enumerate(result.generations):
        (alternatives,) = each.next_tokens.alternative_tokens
        assert alternatives.token_ids == expected.indices[i].tolist()
        assert alternatives.logprobs == pytest.approx(expected.values[i].tolist(), abs=1e-4)
        assert alternatives.texts == [lm.detokenizer.token_text(token_id) for token_id in alternatives.token_ids]
        assert alternatives.token_ids[0] == each.next_tokens.token_ids[0]  # greedy
    assert all(each.next_tokens.alternative_tokens == [] for each in silent.generations)


def test_alternatives_are_limited_to_vocabulary(lm: CausalLM) -> None:
    (result,) = run(lm, request(0, PROMPT, 1, return_k_alternatives=1000))
    (alternatives,) = result.generations[0].next_tokens.alternative_tokens
    assert sorted(alternatives.token_ids) == list(range(VOCAB))


def test_raw_logprobs_match_model_logits(lm: CausalLM, oracle: Any) -> None:
    settings: dict[str, Any]
    settings = {"do_sample": True, "temperature": 0.3, "top_k": 4, "repetition_penalty": 1.5, "seed": 5}
    raw, processed = run(lm, request(0, PROMPT, raw_logprobs=True, **settings), request(1, PROMPT, **settings))
    assert raw.token_ids == processed.token_ids
    expected = log_probabilities(oracle, [*PROMPT, *raw.token_ids])[len(PROMPT) - 1 : -1]
    chosen = expected.gather(-1, torch.tensor(raw.token_ids)[:, None])[:, 0]
    assert raw.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
    assert raw.logprobs != pytest.approx(processed.logprobs, abs=1e-2)


# --- Stop conditions --------------------------------------------------------------------------------------------------


def bias(*token_ids: int) -> list[pb.LogitBias]:
    return [pb.LogitBias(token_id=token_id, bias=LARGE_BIAS) for token_id in token_ids]


def end_of(result: RequestOutput) -> tuple[str, int, FinishReason]:
    assert result.end is not None
    return result.end.text, result.end.generated_tokens, result.end.finish_reason


def test_eos_stops_request_and_is_excluded_from_text(lm: CausalLM) -> None:
    (result,) = run(lm, request(0, PROMPT, logit_bias=bias(EOS_ID)))
    assert result.token_ids == [EOS_ID]
    assert end_of(result) == ("", 1, FinishReason.EOS_TOKEN)
    (shown,) = [each.next_tokens for each in result.generations]
    assert (shown.texts, shown.is_special) == (["</s>"], [True])


def test_ignored_eos_does_not_stop_request(lm: CausalLM) -> None:
    (result,) = run(lm, request(0, PROMPT, 4, logit_bias=bias(EOS_ID), stop=ENDLESS))
    assert result.token_ids == [EOS_ID] * 4
    assert end_of(result) == ("", 4, FinishReason.LENGTH)


def test_min_new_tokens_delays_eos_and_stop_tokens(lm: CausalLM) -> None:
    stop = {"min_new_tokens": 3, "stop_token_ids": [77]}
    for ending in (EOS_ID, 77):
        (result,) = run(lm, request(0, PROMPT, logit_bias=bias(ending), stop=stop))
        assert len(result.token_ids) == 4
        assert result.token_ids.index(ending) == 3


def test_stop_token_stops_request_and_may_be_excluded(lm: CausalLM) -> None:
    (letter,) = tokens_of(lm, "q")
    for exclude, text in ((False, "q"), (True, "")):
        stop = {"stop_token_ids": [letter], "exclude_stop": exclude}
        (result,) = run(lm, request(0, PROMPT, logit_bias=bias(letter), stop=stop))
        assert result.token_ids == [letter]
        assert end_of(result) == (text, 1, FinishReason.STOP_SEQUENCE)


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ({"stop_sequences": ["ef"]}, "bcdef", 5),
        ({"stop_sequences": ["ef"], "exclude_stop": True}, "bcd", 5),
        ({"stop_sequences": ["fg", "de"]}, "bcde", 4),
        ({"stop_sequences": ["de"], "min_new_tokens": 4}, "bcdefgh", 8),
        ({"stop_sequences": ["gh", "ghi"]}, "bcdefgh", 7),
        ({"stop_sequences": ["ab"]}, "bcdefgh", 8),  # stop strings in the prompt are ignored
        ({"stop_sequences": ["ghx"], "exclude_stop": True}, "bcdefgh", 8),  # held back and emitted at the end
    ],
)
def test_stop_strings_are_found_across_tokens(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch, stop: dict[str, Any], text: str, count: int
) -> None:
    script = ScriptedModel(lm, monkeypatch, [tokens_of(lm, letter)[0] for letter in "abcdefgh"])
    result, _ = run(lm, request(0, script.prompt, 12, stop=stop), request(1, SHORT, 12))
    assert end_of(result)[:2] == (text, count)
    assert "".join(result.texts) == text


def test_multibyte_characters_are_emitted_when_complete(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é日👋"
    script = ScriptedModel(lm, monkeypatch, [250, *bytes_of(lm, text)])
    result, other = run(lm, request(0, [250], 20), request(1, [*SHORT, 250], 20))
    for each in (result, other):
        assert end_of(each) == (text, 10, FinishReason.EOS_TOKEN)
        assert each.texts == ["", "é", "", "", "日", "", "", "", "👋"]
    assert script.prompt == [250]


def test_incomplete_character_is_emitted_at_end(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedModel(lm, monkeypatch, [250, *tokens_of(lm, "x"), *bytes_of(lm, "日")])
    (result,) = run(lm, request(0, [250], 3))
    assert end_of(result) == ("x\ufffd", 3, FinishReason.LENGTH)
    assert "".join(result.texts) == "x\ufffd"


def test_prompt_with_incomplete_character_is_completed(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = bytes_of(lm, "é")
    ScriptedModel(lm, monkeypatch, [first, *rest])
    (result,) = run(lm, request(0, [5, first], 4))
    assert end_of(result)[0] == "é"


@pytest.mark.parametrize("seed", range(6))
def test_non_special_texts_join_to_full_text(lm: CausalLM, seed: int) -> None:
    stops: list[dict[str, Any]]
    stops = [{}, ENDLESS, {"stop_sequences": ["e"], "exclude_stop": True}, {"min_new_tokens": 9}]
    requests = [
        request(i, PROMPT[: i + 1], 20, do_sample=True, temperature=2.0, seed=seed * 10 + i, stop=stop)
        for i, stop in enumerate(stops)
    ]
    for result in run(lm, *requests):
        assert "".join(result.texts) == end_of(result)[0]
        assert len(result.generations) == end_of(result)[1] == len(result.token_ids)


# --- Sampling ---------------------------------------------------------------------------------------------------------


def test_seed_is_reproducible_in_any_batch(lm: CausalLM) -> None:
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "seed": 2**64 - 1}
    (alone,) = run(lm, request(0, PROMPT, 12, stop=ENDLESS, **drawn))
    together = run(lm, request(1, SHORT, 12), request(0, PROMPT, 12, stop=ENDLESS, **drawn))[1]
    driver = Driver(lm)
    batch = driver.start(request(0, PROMPT, 12, stop=ENDLESS, **drawn), request(1, SHORT, 12, stop=ENDLESS), steps=3)
    batch = driver.steps(CausalLMBatch.concatenate([driver.start(request(2, [9] * 9, 12, stop=ENDLESS)), batch]), 2)
    driver.finish(batch.filter([0, 2]))
    assert alone.token_ids == together.token_ids == driver.outputs[0].token_ids
    assert alone.end == together.end == driver.outputs[0].end
    assert alone.end is not None
    assert alone.end.seed == 2**64 - 1


def test_requests_with_different_seeds_differ(lm: CausalLM) -> None:
    outputs = run(lm, *(request(i, PROMPT, do_sample=True, temperature=2.0, seed=i, stop=ENDLESS) for i in range(4)))
    assert len({tuple(result.token_ids) for result in outputs}) == 4


def test_temperature_zero_is_greedy_in_mixed_batch(lm: CausalLM) -> None:
    (greedy,) = run(lm, request(0, PROMPT))
    cold, warm = run(
        lm, request(0, PROMPT, temperature=0.0, do_sample=True, seed=3), request(1, PROMPT, temperature=3.0, seed=3)
    )
    assert cold.token_ids == greedy.token_ids
    assert cold.end is not None
    assert cold.end.seed is None
    assert warm.token_ids != greedy.token_ids


# --- Tensor parallelism -----------------------------------------------------------------------------------------------


def test_each_request_is_returned_by_one_rank(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(i, PROMPT[: i + 1], 4, stop=ENDLESS) for i in range(5)]
    whole = run(lm, *requests)
    seen: dict[int, list[int]] = {}
    for rank in range(2):
        monkeypatch.setattr(lm, "rank", rank)
        monkeypatch.setattr(lm, "world_size", 2)
        batch: CausalLMBatch | None = batch_of(lm, *requests)
        while batch is not None:
            generations, batch = lm.generate_token(batch)
            assert [each.request_id for each in generations] == list(range(rank, 5, 2))
            for each in generations:
                seen.setdefault(each.request_id, []).extend(each.next_tokens.token_ids)
    assert seen == {i: result.token_ids for i, result in enumerate(whole)}


# --- Failures ---------------------------------------------------------------------------------------------------------


def test_adapters_are_rejected(lm: CausalLM) -> None:
    batch = batch_of(lm, request(0), request(1, fields={"adapter_index": 1}))
    with pytest.raises(AdapterError, match="do not support adapters"):
        lm.generate_token(batch)
    kept = batch.filter([0])
    assert kept is not None
    assert lm.generate_token(kept)[0]
    ids = torch.tensor([[5]], device=lm.device)
    for index in (0, 1):
        meta = AdapterBatchMetadata.from_indices(torch.tensor([index]))
        data: Any = SimpleNamespace(meta=meta)
        with pytest.raises(AdapterError, match="do not support adapters") if index else nullcontext():
            lm.forward(ids, torch.ones_like(ids), torch.zeros_like(ids), None, data)


def test_special_token_can_be_stop_string(lm: CausalLM) -> None:
    """Special tokens have no text, so the stop string is converted to a token ID."""
    stop = {"stop_sequences": ["</s>"], "ignore_eos_token": True}
    (result,) = run(lm, request(0, PROMPT, stop=stop, logit_bias=bias(EOS_ID)))
    assert result.end is not None
    assert (result.end.text, result.end.finish_reason.name) == ("", "STOP_SEQUENCE")
    assert result.token_ids == [EOS_ID]


def test_logit_bias_outside_vocabulary_is_rejected_early(lm: CausalLM) -> None:
    with pytest.raises(InputError, match="request 1: `logit_bias`: token ID 300 is outside the vocabulary of 300"):
        batch_of(lm, request(0), request(1, logit_bias=bias(VOCAB)))


def set_scores(lm: CausalLM, monkeypatch: pytest.MonkeyPatch, row: int, value: float = math.nan) -> None:
    """Make the scores of one row NaN, or another value."""
    forward = lm.model.forward

    def spoiling(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits[row] = value
        return output

    monkeypatch.setattr(lm.model, "forward", spoiling)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_logits_error_names_request(lm: CausalLM, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    (expected,) = run(lm, request(0, PROMPT))
    with monkeypatch.context() as patch:
        set_scores(lm, patch, 1, value)
        batch = batch_of(lm, request(0, PROMPT), request(1, [123, 8]))
        with pytest.raises(LoraxError, match="request 1: the logits are NaN"):
            lm.generate_token(batch)
    driver = Driver(lm)
    kept = batch.filter([0])
    driver.finish(kept)
    assert driver.outputs[0].token_ids == expected.token_ids


def test_nan_logits_leave_batch_unchanged(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(lm, request(0, PROMPT, 12, stop=ENDLESS))[0]
    driver = Driver(lm)
    batch = driver.start(request(0, PROMPT, 12, stop=ENDLESS), request(1, SHORT, 12, stop=ENDLESS), steps=3)
    with monkeypatch.context() as patch:
        set_scores(lm, patch, 1)
        for _ in range(2):
            with pytest.raises(LoraxError, match="request 1: the logits are NaN"):
                lm.generate_token(batch)
    driver.finish(batch.filter([0]))
    assert driver.outputs[0].token_ids == expected.token_ids


def test_nan_logits_of_finished_request_are_ignored(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(lm)
    batch = driver.step(batch_of(lm, request(0, PROMPT, 1), request(1, SHORT, 5, stop=ENDLESS)), keep_finished=True)
    set_scores(lm, monkeypatch, 0)
    while batch is not None:
        batch = driver.step(batch, keep_finished=True)
    assert len(driver.outputs[1].token_ids) == 5


def test_step_logs_no_messages(lm: CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        run(lm, request(0, PROMPT), request(1, SHORT))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
