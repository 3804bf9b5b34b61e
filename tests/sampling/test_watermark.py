"""The watermark: documented green tokens, detection and cost."""

import math
from itertools import pairwise

import pytest
import torch

from lorax_server.sampling.sampler import History, Sampler, SequenceSampling
from lorax_server.sampling.watermark import (
    GREEN_BIAS,
    GREEN_FRACTION,
    HASH_KEY,
    boost_green_tokens,
    green_mask,
    hash_tokens,
)
from lorax_server.types import SamplingParams

VOCAB = 257


def hash_of(number: int) -> int:
    """Hash a number as `docs/generation.md` defines it, in plain Python."""
    x = number % 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return (x ^ (x >> 16)) | 1


def is_green(previous: int, token: int) -> bool:
    return hash_of(token) * hash_of(previous * HASH_KEY) % 2**32 >= 2**31


def z_score(tokens: list[int]) -> float:
    """Return the excess of green tokens over unmarked text in standard deviations."""
    green = sum(is_green(previous, token) for previous, token in pairwise(tokens))
    count = len(tokens) - 1
    return (green - GREEN_FRACTION * count) / math.sqrt(count * GREEN_FRACTION * (1 - GREEN_FRACTION))


@pytest.mark.parametrize("vocab", [1, 2, 7, 257, 5003])
def test_green_tokens_match_documentation(vocab: int, device: torch.device) -> None:
    previous = [0, vocab - 1, vocab // 2, vocab + 3, 2**20, 2**31 - 1]
    scores = torch.randn(len(previous), vocab)
    expected = scores + GREEN_BIAS * torch.tensor(
        [[is_green(one, token) for token in range(vocab)] for one in previous]
    )
    hashes = hash_tokens(vocab, device)
    actual = boost_green_tokens(scores.clone().to(device), torch.tensor(previous, device=device), hashes)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)
    mask = green_mask(torch.tensor(previous, device=device), hashes)
    assert torch.equal(mask.cpu(), expected > scores)


def test_half_of_vocabulary_is_green() -> None:
    shares = green_mask(torch.arange(0, 128_000, 1999), hash_tokens(128_000)).float().mean(-1)
    assert shares.min() > 0.49
    assert shares.max() < 0.51


def test_each_token_is_green_after_half_of_previous_tokens() -> None:
    shares = green_mask(torch.arange(4000), hash_tokens(2000)).float().mean(0)
    assert shares.min() > 0.44
    assert shares.max() < 0.56


def test_green_tokens_depend_on_previous_token() -> None:
    halves = green_mask(torch.arange(50), hash_tokens(VOCAB))
    assert len({tuple(half.tolist()) for half in halves}) == 50
    shared = [int((one & other).sum()) for one, other in pairwise(halves)]
    assert all(35 < count < 95 for count in shared)  # 64 are expected


def test_green_tokens_do_not_depend_on_vocabulary_padding() -> None:
    """An adapter with added tokens in the batch pads the logits of all rows."""
    params = [SamplingParams(watermark=True)]
    scores, history = torch.randn(1, VOCAB), History(torch.tensor([2]), torch.tensor([1]), torch.tensor([[3, 5]]))
    wide = torch.cat([scores, torch.full((1, 40), -math.inf)], -1)
    narrow = Sampler([SequenceSampling(each) for each in params], VOCAB)(scores, history)
    beside = Sampler([SequenceSampling(each) for each in params], VOCAB + 40)(wide, history)
    assert torch.equal(narrow.token_ids, beside.token_ids)
    assert torch.equal(narrow.logprobs, beside.logprobs)


def test_watermark_uses_no_rng_and_no_host_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an earlier version, a permutation per row and step delayed all requests."""
    for name in ("randperm", "rand", "randint"):
        monkeypatch.setattr(torch, name, None)
    for name in ("tolist", "item", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, None)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    params = [SamplingParams(watermark=row != 1) for row in range(3)]
    sampler = Sampler([SequenceSampling(each) for each in params], VOCAB)
    lengths = torch.full((3,), 4)
    sampler(torch.zeros(3, VOCAB), History(lengths, lengths - 1, torch.arange(12).view(3, 4)))
    assert torch.equal(torch.get_rng_state(), before)


def generate(params: list[SamplingParams], num_tokens: int, device: torch.device) -> torch.Tensor:
    """Generate sequences from random logits with different first tokens."""
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler([SequenceSampling(each) for each in params], VOCAB, device)
    ids = torch.arange(len(params), device=device)[:, None] + 10
    for _ in range(num_tokens):
        lengths = torch.full((len(params),), ids.shape[1], device=device)
        logits = torch.randn(len(params), VOCAB, generator=generator).to(device)
        ids = torch.cat([ids, sampler(logits, History(lengths, torch.ones_like(lengths), ids)).token_ids[:, None]], -1)
    return ids.cpu()


def test_watermark_is_detected_only_in_marked_text(device: torch.device) -> None:
    params = [SamplingParams(do_sample=True, watermark=row % 2 == 0, seed=row) for row in range(4)]
    ids = generate([*params, SamplingParams(watermark=True), SamplingParams()], 100, device)
    assert [z_score(row) > 4 for row in ids.tolist()] == [True, False, True, False, True, False]


def test_token_hashes_are_cached() -> None:
    assert hash_tokens(VOCAB, "cpu") is hash_tokens(VOCAB, "cpu")
