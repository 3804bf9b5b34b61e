"""The top-k sampler matches sampling from the whole vocabulary."""

import math
from typing import Any

import pytest
import torch

from lorax_server.kernels import reference
from lorax_server.sampling import topk_sampler
from lorax_server.sampling.general_sampler import GeneralSampler
from lorax_server.sampling.sampler import History, Sampler, SamplerOutput, SequenceSampling
from lorax_server.sampling.topk_sampler import NUM_CANDIDATES, TopKSampler
from lorax_server.types import SamplingParams

ROWS = 64
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 0.7},
    {"top_p": 1e-9},
    {"top_k": 1},
    {"top_k": 50, "temperature": 1.3},
    {"top_k": 50, "top_p": 0.8, "temperature": 0.8},
    {"top_k": 40, "min_p": 0.1},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_p": 0.95, "min_p": 0.02, "raw_logprobs": True},
    {"top_k": NUM_CANDIDATES + 1},
    {"top_k": 10**9, "top_p": 0.9},
]


def make_rows(setting: dict[str, Any]) -> list[SequenceSampling]:
    return [SequenceSampling(SamplingParams(do_sample=True, seed=seed, **setting)) for seed in range(ROWS)]


def make_history(rows: int) -> History:
    prompts = torch.full((rows,), 3)
    return History(prompts + torch.arange(rows) % 5, prompts)


def make_logits(vocab: int, shape: str) -> torch.Tensor:
    """Return peaked logits like a model's, or other distributions."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, generator=generator) * 2
    logits[:, : min(vocab, 20)] += 9
    logits = logits[:, torch.randperm(vocab, generator=generator)]
    if shape == "ties":
        return logits.round()
    if shape == "flat":  # flat: no small set has most of the probability
        return logits / 100
    return logits


def check_same(found: SamplerOutput, expected: SamplerOutput) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.dtype == torch.float32
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("shape", ["usual", "ties", "flat"])
@pytest.mark.parametrize("vocab", [7, 300, 5003])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_top_k_sampler_matches_general_sampler(setting: dict[str, Any], vocab: int, shape: str) -> None:
    rows, history, logits = make_rows(setting), make_history(ROWS), make_logits(vocab, shape)
    check_same(TopKSampler(rows, vocab, reference)(logits, history), GeneralSampler(rows, vocab)(logits, history))


def test_top_k_sampler_does_not_use_general_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_sampler, "GeneralSampler", None)
    for setting in SETTINGS[:-2]:
        TopKSampler(make_rows(setting), 5003, reference)(make_logits(5003, "usual"), make_history(ROWS))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_rows_do_not_affect_other_rows(value: float) -> None:
    rows, history, logits = make_rows({"top_p": 0.9, "top_k": 50}), make_history(ROWS), make_logits(300, "usual")
    alone = TopKSampler(rows, 300, reference)(logits, history)
    logits[::2] = value
    actual = TopKSampler(rows, 300, reference)(logits, history)
    check_same(actual, GeneralSampler(rows, 300)(logits, history))
    assert torch.equal(actual.token_ids[1::2], alone.token_ids[1::2])
    assert torch.equal(actual.logprobs[1::2], alone.logprobs[1::2])


def test_mixed_batch_uses_method_per_row() -> None:
    params = [
        SamplingParams(),
        SamplingParams(do_sample=True, top_p=0.9, seed=1),
        SamplingParams(num_alternatives=2),
        SamplingParams(do_sample=True, seed=2, num_alternatives=3),
        SamplingParams(raw_logprobs=True),
        SamplingParams(repetition_penalty=1.5),
    ]
    rows, logits = [SequenceSampling(each) for each in params], make_logits(300, "usual")[: len(params)]
    history = make_history(len(rows))._replace(token_ids=torch.arange(8 * len(rows)).view(len(rows), 8))
    actual, expected = Sampler(rows, 300)(logits, history), GeneralSampler(rows, 300)(logits, history)
    check_same(actual, expected)
    assert actual.alternatives is not None
    assert expected.alternatives is not None
    assert actual.alternatives.by_row() == expected.alternatives.by_row()
