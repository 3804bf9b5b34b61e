"""Token masks: disallowed tokens have a score of -inf."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lorax_server.kernels import Ops, reference, select_ops
from lorax_server.sampling.general_sampler import GeneralSampler
from lorax_server.sampling.sampler import History, Sampler, SamplerOutput, SequenceSampling, TokenMasks
from lorax_server.types import SamplingParams

SETTINGS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "raw_logprobs": True},
    {"do_sample": False, "num_alternatives": 4},
    {"do_sample": False, "repetition_penalty": 1.4},
    {"top_p": 0.9},
    {"top_p": 0.9, "raw_logprobs": True},
    {"top_k": 7, "temperature": 0.6},
    {"min_p": 0.05},
    {},
    {"temperature": 1.4},
    {"typical_p": 0.7},
    {"watermark": True, "frequency_penalty": 0.5, "num_alternatives": 3},
    {"logit_bias": {1: 40.0}},
]


def make_rows() -> list[SequenceSampling]:
    params = (SamplingParams(**{"do_sample": True, "seed": seed, **each}) for seed, each in enumerate(SETTINGS))
    return [*map(SequenceSampling, params), SequenceSampling(SamplingParams(), 9, frozenset({0, 3}))]


def pack(allowed: np.ndarray, beyond: int) -> torch.Tensor:
    """Pack a [rows, vocabulary] bool tensor into bits. Bits beyond the vocabulary are set to `beyond`."""
    rows, vocab = allowed.shape
    words = np.zeros((rows, -(-vocab // 32)), np.uint32)
    for row in range(rows):
        for token in range(words.shape[1] * 32):
            bit = int(allowed[row, token]) if token < vocab else beyond
            words[row, token // 32] |= np.uint32(bit << token % 32)
    return torch.from_numpy(words.view(np.int32))


@pytest.fixture(params=["torch", "kernels"])
def ops(request: pytest.FixtureRequest, device: torch.device) -> Ops:
    return reference if request.param == "torch" else select_ops(device)


def move_to(device: torch.device, value: Any) -> Any:
    return type(value)(*(each.to(device) for each in value))


def make_batch(vocab: int, rows: int) -> tuple[torch.Tensor, History, np.ndarray]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    tokens = torch.randint(vocab, (rows, 6), generator=generator)
    allowed = torch.rand(rows, vocab, generator=generator).numpy() < 0.3
    allowed[:, vocab // 2] = True
    return logits, History(torch.full((rows,), 6), torch.full((rows,), 4), tokens), allowed


def check_row(found: SamplerOutput, row: int, expected: SamplerOutput, logprob: float | None) -> None:
    assert int(found.token_ids[row]) == int(expected.token_ids[row])
    wanted = float(expected.logprobs[row]) if logprob is None else logprob
    assert float(found.logprobs[row]) == pytest.approx(wanted, abs=1e-5, nan_ok=True)
    if expected.alternatives is not None and row in (tops := expected.alternatives.by_row()):
        assert found.alternatives is not None
        assert found.alternatives.by_row()[row].token_ids == tops[row].token_ids


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("vocab", [2, 33, 300, 1000])
def test_disallowed_tokens_have_no_probability(vocab: int, beyond: int, ops: Ops, device: torch.device) -> None:
    rows = make_rows()
    logits, history, allowed = make_batch(vocab, len(rows))
    history, sampler = move_to(device, history), Sampler(rows, vocab, device, ops)
    plain = sampler(logits.to(device), history)
    for masked in ([*range(len(rows))], [*range(len(rows))[::-2]], [4], [0, 8]):
        words = pack(allowed[masked], beyond)
        actual = sampler(logits.to(device), history, move_to(device, TokenMasks(torch.tensor(masked), words)))
        changed = logits.clone()
        changed[masked] = torch.where(torch.from_numpy(allowed[masked]), logits[masked], -math.inf)
        expected = sampler(changed.to(device), history)
        for row, sampling in enumerate(rows):
            raw = logits[row].log_softmax(-1)[int(expected.token_ids[row])]
            is_raw = row in masked and sampling.params.raw_logprobs
            check_row(actual, row, expected, float(raw) if is_raw else None)
            if row not in masked:
                assert actual.logprobs[row].view(torch.int32) == plain.logprobs[row].view(torch.int32)


def test_masks_do_not_change_bits_of_other_rows(ops: Ops, device: torch.device) -> None:
    """Includes sampled rows with raw log probabilities."""
    drawn = SamplingParams(do_sample=True, temperature=2.0, top_p=0.99, raw_logprobs=True)
    rows = [SequenceSampling(replace(drawn, seed=seed)) for seed in range(40)]
    logits, history, allowed = make_batch(5000, len(rows))
    sampler, history = Sampler(rows, 5000, device, ops), move_to(device, history)
    plain = sampler(logits.to(device), history)
    result = sampler(logits.to(device), history, move_to(device, TokenMasks(torch.tensor([7]), pack(allowed[7:8], 0))))
    others = [row for row in range(len(rows)) if row != 7]
    assert torch.equal(result.token_ids[others], plain.token_ids[others])
    assert torch.equal(result.logprobs[others].view(torch.int32), plain.logprobs[others].view(torch.int32))


@pytest.mark.parametrize("count", [1, 3, 40, 700])
def test_masks_of_any_width_match_reference(count: int, ops: Ops, device: torch.device) -> None:
    rows, vocab = make_rows(), 1000
    logits, history, allowed = make_batch(vocab, len(rows))
    allowed[:] = False
    for row in range(len(rows)):
        allowed[row, np.random.default_rng(row).choice(vocab, count, replace=False)] = True
    masks = move_to(device, TokenMasks(torch.arange(len(rows)), pack(allowed, 0)))
    history = move_to(device, history)
    actual = Sampler(rows, vocab, device, ops)(logits.to(device), history, masks)
    expected = GeneralSampler(rows, vocab, device)(logits.to(device), history, masks)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.allclose(actual.logprobs, expected.logprobs, atol=1e-4, equal_nan=True)


def test_greedy_rows_with_masks_need_no_history(ops: Ops, device: torch.device) -> None:
    logits, _, allowed = make_batch(100, 3)
    sampler = Sampler([SequenceSampling(SamplingParams())] * 3, 100, device, ops)
    masks = TokenMasks(torch.tensor([2, 0]), pack(allowed[[2, 0]], 1))
    result = sampler(logits.to(device), None, move_to(device, masks)).token_ids.tolist()
    best = np.where(allowed, logits.numpy(), -np.inf).argmax(-1).tolist()
    assert result == [best[0], int(logits[1].argmax()), best[2]]


def test_empty_mask_gives_token_with_nan_logprob(ops: Ops, device: torch.device) -> None:
    rows = [row for row in make_rows() if not row.params.raw_logprobs]
    logits, history, _ = make_batch(70, len(rows))
    masks = TokenMasks(torch.tensor([*range(len(rows))]), torch.zeros(len(rows), 3, dtype=torch.int32))
    result = Sampler(rows, 70, device, ops)(logits.to(device), move_to(device, history), move_to(device, masks))
    assert all(0 <= token < 70 for token in result.token_ids.tolist())
    assert bool(result.logprobs.isnan().all())


def test_select_returns_masks_of_selected_rows() -> None:
    masks = TokenMasks(torch.tensor([5, 1, 3]), torch.tensor([[50], [10], [30]], dtype=torch.int32))
    taken = masks.select(torch.tensor([0, 3, 5]), 6)
    assert taken.rows.tolist() == [0, 1, 2]
    assert taken.masks.tolist() == [[-1], [30], [50]]
