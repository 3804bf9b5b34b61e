"""The mark in generated text, against transformers' own and its detector."""

from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, WatermarkDetector, WatermarkingConfig
from transformers.generation.logits_process import WatermarkLogitsProcessor

from lorax_server.sampling.sampler import History, Sampler, Wish
from lorax_server.sampling.watermark import BIAS, GREEN_SHARE, HASH_KEY, favour_green, green_list
from lorax_server.types import SamplingParams

VOCAB = 257


@pytest.mark.parametrize("vocab", [1, 2, 7, 257, 5003])
def test_the_green_half_is_transformers(vocab: int, device: torch.device) -> None:
    """Theirs on a CPU, where its permutations are the same on every machine."""
    theirs = WatermarkLogitsProcessor(vocab, "cpu", greenlist_ratio=GREEN_SHARE, bias=BIAS, hashing_key=HASH_KEY)
    previous = [0, vocab - 1, vocab // 2, vocab + 3, 2**20]
    scores = torch.randn(len(previous), vocab)
    expected = theirs(torch.tensor(previous)[:, None], scores)
    torch.testing.assert_close(favour_green(scores.to(device), previous).cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("previous", [0, 1, 31_999, 2**40])
def test_half_of_the_vocabulary_is_green_each_token_once(previous: int) -> None:
    green = green_list(previous, VOCAB)
    assert len(green) == len(green.unique()) == VOCAB // 2
    assert green.min() >= 0
    assert green.max() < VOCAB


def test_the_half_depends_on_the_token_before() -> None:
    halves = [frozenset(green_list(previous, VOCAB).tolist()) for previous in range(50)]
    assert len(set(halves)) == 50
    shared = [len(one & other) for one, other in pairwise(halves)]
    assert all(40 < count < 90 for count in shared)  # 64 are to be expected


def test_the_half_leaves_other_randomness_alone() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    green_list(3, VOCAB)
    assert torch.equal(torch.rand(3), expected)


def generate(params: list[SamplingParams], num_tokens: int, device: torch.device) -> torch.Tensor:
    """Sequences of a model that has no idea, each from a token of its own."""
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler([Wish(each) for each in params], VOCAB, device)
    ids = torch.arange(len(params), device=device)[:, None] + 10
    for _ in range(num_tokens):
        lengths = torch.full((len(params),), ids.shape[1], device=device)
        logits = torch.randn(len(params), VOCAB, generator=generator).to(device)
        ids = torch.cat([ids, sampler(logits, History(lengths, torch.ones_like(lengths), ids)).token_ids[:, None]], -1)
    return ids.cpu()


def test_transformers_detector_finds_the_mark_and_only_where_there_is_one(device: torch.device) -> None:
    params = [SamplingParams(do_sample=True, watermark=row % 2 == 0, seed=row) for row in range(4)]
    ids = generate([*params, SamplingParams(watermark=True), SamplingParams()], 100, device)
    config = WatermarkingConfig(greenlist_ratio=GREEN_SHARE, bias=BIAS, hashing_key=HASH_KEY, seeding_scheme="lefthash")
    model = LlamaConfig(vocab_size=VOCAB, bos_token_id=0)
    found = WatermarkDetector(model, "cpu", config)(ids)
    assert found.tolist() == [True, False, True, False, True, False]
