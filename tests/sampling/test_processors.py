"""Logits processors compared with transformers' classes, row by row."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lorax_server.sampling import processors
from lorax_server.sampling.processors import (
    apply_temperature,
    count_tokens,
    draw_tokens,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
    make_sortable,
    penalize_counts,
    penalize_repetition,
)

INF = math.inf
VOCABS = [1, 2, 7, 257, 5003]


def edge_case_scores(vocab: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Create score rows with edge cases for the processors."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(14, vocab, generator=generator)
    normal[1] *= 10
    normal[2] *= 1e-3
    normal[3] *= 1e30  # all probability on one token
    normal[4] *= 1e-30  # equal probabilities with different scores
    normal[5] = (normal[5] * 2).round()  # ties
    normal[6] = (normal[6] > 1).float() * 5  # only two distinct values
    normal[7] = 0
    normal[8] = -3.25
    normal[9, torch.rand(vocab, generator=generator) < 0.5] = -INF
    normal[10] = -INF
    normal[10, vocab // 2] = 1.5  # one left
    normal[11] = (normal[11] * 2).round() * math.log(2)  # probabilities that are sums of powers of two
    normal[11, ::3] = -INF
    normal[9, -1] = normal[11, -1] = 0.5  # a small vocabulary may have no other token left
    normal[12] = normal[12].bfloat16().float() * 4
    normal[13] = -normal[13].abs() - 1e4
    return normal.to(device)


def processed_one_by_one(
    scores: torch.Tensor, processor: LogitsProcessor, ids: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.cat(
        [processor(None if ids is None else ids[row, None], scores[row, None]) for row in range(len(scores))]
    )


def repeat_for_rows(scores: torch.Tensor, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((len(scores),), value, dtype=dtype, device=scores.device)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bitwise on a CPU. On a GPU, division is replaced by multiplication with the inverse."""
    rtol = 0 if found.device.type == "cpu" else 1e-6
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)


def is_at_least_one_left(scores: torch.Tensor) -> bool:
    return bool((scores > -INF).any(-1).all())


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [1e-4, 0.1, 0.7, 1.0, 1.3, 100.0])
def test_temperature_matches_transformers(vocab: int, temperature: float, device: torch.device) -> None:
    scores = edge_case_scores(vocab, device)
    expected = processed_one_by_one(scores, TemperatureLogitsWarper(temperature))
    check(apply_temperature(scores.clone(), repeat_for_rows(scores, temperature)), expected)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", [1, 2, 3, 50, 256, 257, 5002, 5003, 10**6])
def test_top_k_matches_transformers(vocab: int, k: int, device: torch.device) -> None:
    scores = edge_case_scores(vocab, device)
    counts = repeat_for_rows(scores, min(k, vocab), torch.int64)
    expected = processed_one_by_one(scores, TopKLogitsWarper(k))
    check(keep_top_k(scores.clone(), counts, min(k, vocab)), expected)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("p", [1e-30, 1e-6, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 1e-7])
def test_top_p_matches_transformers(vocab: int, p: float, device: torch.device) -> None:
    scores = edge_case_scores(vocab, device)
    actual = keep_top_p(scores.clone(), repeat_for_rows(scores, 1 - p))
    expected = processed_one_by_one(scores, TopPLogitsWarper(p))
    check(actual.sort(-1).values, expected.sort(-1).values)  # transformers may keep any of several equal tokens
    assert torch.equal(actual[actual > -INF], scores[actual > -INF])
    assert is_at_least_one_left(actual)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_candidate_search_matches_full_sort(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.cat([edge_case_scores(5003, torch.device("cpu")), torch.randn(8, 5003) * 4])
    result = []
    for few in (1, 64, 256, 5003):
        monkeypatch.setattr(processors, "TOP_P_SEARCH_TOKENS", few)
        result.append(keep_top_p(scores.clone(), repeat_for_rows(scores, 1 - p)))
    assert all(torch.equal(each, result[-1]) for each in result)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("p", [1e-45, 1e-30, 0.01, 0.1, 0.25, 0.5, 0.99, 1.0])
def test_min_p_matches_transformers(vocab: int, p: float, device: torch.device) -> None:
    scores = edge_case_scores(vocab, device)
    result = keep_min_p(scores.clone(), repeat_for_rows(scores, p))
    check(result, processed_one_by_one(scores, MinPLogitsWarper(p)))
    assert is_at_least_one_left(result)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("p", [1e-30, 1e-6, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 2**-20])
def test_typical_p_matches_transformers(vocab: int, p: float, device: torch.device) -> None:
    """Compare in float64, because float32 in transformers creates false ties."""
    scores = edge_case_scores(vocab, device)
    result = keep_typical_p(scores.clone(), repeat_for_rows(scores, p))
    check(result, processed_one_by_one(scores.double(), TypicalLogitsWarper(p)).float())
    assert is_at_least_one_left(result)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("penalty", [1e-3, 0.5, 1.0, 1.2, 1e3])
def test_repetition_penalty_matches_transformers(vocab: int, penalty: float, device: torch.device) -> None:
    scores = edge_case_scores(vocab, device)
    ids = torch.randint(vocab, (len(scores), 9), device=device)
    seen = count_tokens(ids, torch.ones_like(ids, dtype=torch.bool), vocab) > 0
    expected = processed_one_by_one(scores, RepetitionPenaltyLogitsProcessor(penalty), ids)
    check(penalize_repetition(scores.clone(), seen, repeat_for_rows(scores, penalty)), expected)


def test_each_row_uses_its_own_parameters(device: torch.device) -> None:
    scores = edge_case_scores(257, device)
    rows = range(len(scores))
    cases: list[tuple[Callable[..., torch.Tensor], Callable[[Any], LogitsProcessor], list[float], tuple[int, ...]]]
    cases = [
        (apply_temperature, TemperatureLogitsWarper, [0.1 + 0.2 * row for row in rows], ()),
        (keep_top_k, TopKLogitsWarper, [1 + 13 * row for row in rows], (257,)),
        (lambda s, p: keep_top_p(s, 1 - p), TopPLogitsWarper, [0.05 + 0.07 * row for row in rows], ()),
        (keep_min_p, MinPLogitsWarper, [0.01 + 0.07 * row for row in rows], ()),
        (keep_typical_p, TypicalLogitsWarper, [0.05 + 0.07 * row for row in rows], ()),
    ]
    for ours, theirs, values, more in cases:
        expected = torch.cat([theirs(value)(None, scores[row, None]) for row, value in enumerate(values)])
        actual = ours(scores.clone(), torch.tensor(values, device=device), *more)
        check(actual.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 0.7), (1.5, -2.0), (-2.0, 2.0), (0.3, 0.4)])
def test_frequency_and_presence_penalties_ignore_prompt(
    frequency: float, presence: float, device: torch.device
) -> None:
    vocab, prompt_length = 7, 4
    rows = [[0, 1, 2, 3, 0, 0, 0, 5], [6, 6, 6, 6, 1, 2, 3, 4], [1, 1, 1, 1, 1, 1, 1, 1]]
    scores = edge_case_scores(vocab, device)[: len(rows)]
    expected = scores.tolist()
    for row, ids in enumerate(rows):
        for token, times in Counter(ids[prompt_length:]).items():
            expected[row][token] -= times * frequency + presence
    tokens = torch.tensor(rows, device=device)
    is_new = (torch.arange(tokens.shape[1], device=device) >= prompt_length).expand_as(tokens)
    counts = count_tokens(tokens, is_new, vocab)
    actual = penalize_counts(scores, counts, repeat_for_rows(scores, frequency), repeat_for_rows(scores, presence))
    torch.testing.assert_close(actual, torch.tensor(expected, device=device))


def test_count_tokens_ignores_uncounted_and_unknown_tokens(device: torch.device) -> None:
    ids = torch.tensor([[3, 3, 0, 7, 8, 2**40, 3], [-1, -(2**40), 5, 5, 2**62, 6, 7]], device=device)
    counted = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 1, 1]], dtype=torch.bool, device=device)
    assert count_tokens(ids, counted, 7).tolist() == [[1, 0, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1]]


def test_count_tokens_of_empty_rows_is_zero(device: torch.device) -> None:
    ids = torch.empty(2, 0, dtype=torch.int64, device=device)
    assert count_tokens(ids, ids > 0, 3).tolist() == [[0, 0, 0]] * 2


# --- draw


def test_draw_selects_token_by_cumulative_probability(device: torch.device) -> None:
    probabilities = [0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0]
    scores = torch.tensor(probabilities, device=device).log()
    wanted = {0.0: 1, 0.2499: 1, 0.25: 3, 0.5: 3, 0.7499: 3, 0.75: 4, 0.8749: 4, 0.875: 5, 1 - 2**-32: 5}
    uniform = torch.tensor(list(wanted), dtype=torch.float64, device=device)
    assert draw_tokens(scores.expand(len(wanted), -1), uniform).tolist() == list(wanted.values())


@pytest.mark.parametrize("vocab", VOCABS)
def test_draw_never_selects_impossible_token(vocab: int, device: torch.device) -> None:
    scores = edge_case_scores(vocab, device)
    for number in (0.0, 2**-32, 0.5, 1 - 2**-31, 1 - 2**-32):
        taken = draw_tokens(scores, repeat_for_rows(scores, number, torch.float64))
        assert (scores.softmax(-1).gather(-1, taken[:, None]) > 0).all()


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_draw_from_nan_returns_valid_token(bad: float, device: torch.device) -> None:
    for scores in (torch.full((3, 7), bad, device=device), torch.zeros(3, 7, device=device)):
        scores[1, 3] = bad
        taken = draw_tokens(scores, torch.tensor([0.0, 0.5, 1 - 2**-32], dtype=torch.float64, device=device))
        assert ((taken >= 0) & (taken < 7)).all()


# --- rank


@pytest.mark.parametrize("vocab", VOCABS)
def test_sortable_keys_order_by_score_then_token(vocab: int, device: torch.device) -> None:
    scores = edge_case_scores(vocab, device)
    expected = scores.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(make_sortable(scores).sort(-1, descending=True).indices, expected)
    assert torch.equal(make_sortable(scores).topk((vocab + 1) // 2).indices, expected[:, : (vocab + 1) // 2])


def test_sortable_keys_handle_special_floats(device: torch.device) -> None:
    numbers = torch.tensor([[-0.0, 0.0, 1e-45, -1e-45, INF, -INF, 3e38, -3e38, 1.0, -1.0, 0.0]], device=device)
    assert make_sortable(numbers).sort(-1, descending=True).indices.tolist() == [[4, 6, 8, 2, 0, 1, 10, 3, 9, 7, 5]]
