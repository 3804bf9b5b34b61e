"""Tokens that are natively drawn from a few of the likeliest, against the sampler, which looks at all."""

import math
from typing import Any

import pytest
import torch

from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.sampling import Cuts, draw_few
from lorax_server.sampling.sampler import History, RowSampling, Sampled, Sampler
from lorax_server.sampling.uniform import uniforms
from lorax_server.types import SamplingParams

ROWS, FEW = 64, 256
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
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": FEW + 1},
    {"top_k": 10**9, "top_p": 0.9},
]
Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_logits(vocabulary: int, shape: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return scores of which a few have nearly all of the mass, as a model's do, or which are otherwise."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * 2
    logits[:, : min(vocabulary, 20)] += 9
    logits = logits[:, torch.randperm(vocabulary, generator=generator)]
    if shape == "ties":
        logits = logits.round()
    if shape == "flat":  # no few have the mass
        logits = logits / 100
    return logits.to(dtype)


def make_params(setting: dict[str, Any], rows: int) -> list[SamplingParams]:
    return [SamplingParams(do_sample=True, seed=seed, **setting) for seed in range(rows)]


def draw(library: Library, logits: torch.Tensor, params: list[SamplingParams]) -> Drawn:
    cuts = Cuts.of(
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        logits.shape[1],
    )
    seeds = torch.tensor([p.seed for p in params])
    return draw_few(library, logits, min(FEW, logits.shape[1]), cuts, uniforms(seeds, torch.zeros_like(seeds)))


def sample(logits: torch.Tensor, params: list[SamplingParams]) -> Sampled:
    lengths = torch.full((len(logits),), 3)
    return Sampler([RowSampling(each) for each in params], logits.shape[1])(logits, History(lengths, lengths))


def check(found: Drawn, expected: Sampled) -> None:
    """Compare the rows that were decided."""
    token_ids, logprobs, decided = found
    assert torch.equal(token_ids[decided], expected.token_ids[decided])
    torch.testing.assert_close(logprobs[decided], expected.logprobs[decided], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", ["usual", "ties", "flat"])
@pytest.mark.parametrize("vocabulary", [7, 300, 5003])
def test_they_are_those_of_the_whole_vocabulary(vocabulary: int, shape: str, library: Library) -> None:
    logits = make_logits(vocabulary, shape)
    for setting in SETTINGS:
        params = make_params(setting, ROWS)
        check(draw(library, logits, params), sample(logits, params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision(dtype: torch.dtype, library: Library) -> None:
    logits, params = make_logits(5003, "usual", dtype), make_params({"top_p": 0.9, "temperature": 0.8}, ROWS)
    found = draw(library, logits, params)
    check(found, sample(logits, params))
    assert found[2].float().mean() > 0.9


def test_few_tokens_decide_the_usual_rows(library: Library) -> None:
    logits = make_logits(5003, "usual")
    for setting in SETTINGS[:10]:
        assert draw(library, logits, make_params(setting, ROWS))[2].all()
    assert not draw(library, logits, make_params({"top_k": FEW + 1}, ROWS))[2].any()
    assert not draw(library, make_logits(5003, "flat"), make_params({"top_p": 0.9}, ROWS))[2].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_numbers_are_not_decided_and_harm_no_neighbour(value: float, library: Library) -> None:
    logits, params = make_logits(300, "usual"), make_params({"top_p": 0.9, "top_k": 50}, ROWS)
    alone = [draw(library, logits[row : row + 1], params[row : row + 1]) for row in range(1, ROWS, 2)]
    logits[::2] = value
    logits[::4, 5] = 0.0
    token_ids, logprobs, decided = draw(library, logits, params)
    assert decided.tolist() == [(value == -math.inf and row % 4 == 0) or row % 2 == 1 for row in range(ROWS)]
    assert torch.equal(token_ids[1::2], torch.cat([each[0] for each in alone]))
    assert torch.equal(logprobs[1::2], torch.cat([each[1] for each in alone]))


@pytest.mark.usefixtures("restored_threads")
def test_threads_change_no_bit(library: Library) -> None:
    logits, params, found = make_logits(5003, "usual"), make_params({"top_p": 0.9}, ROWS), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(draw(library, logits, params))
    for others in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], others, strict=True))


def test_numbers_must_be_as_many_as_rows(library: Library) -> None:
    params = make_params({"top_p": 0.9}, ROWS)
    with pytest.raises(ValueError, match="cannot be drawn"):
        draw(library, make_logits(300, "usual")[:5], params)
