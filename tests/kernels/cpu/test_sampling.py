"""Native sampling ops against torch and float64."""

import math

import numpy as np
import pytest
import torch

from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEG_INFINITY = -math.inf


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def check(library: Library, logits: torch.Tensor) -> None:
    """Compare tokens with torch, and log probabilities with float64."""
    token_ids, logprobs = CpuOps(library).choose_greedy(logits)
    expected = logits.float().argmax(-1)
    assert torch.equal(token_ids, expected)
    assert logprobs.dtype == torch.float32
    exact = logits.double().log_softmax(-1).gather(-1, expected[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), exact, rtol=2e-7, atol=1e-6, equal_nan=True)
    same = CpuOps(library).gather_logprobs(logits, token_ids[:, None])[:, 0]
    assert torch.equal(same.view(torch.int32)[~same.isnan()], logprobs.view(torch.int32)[~logprobs.isnan()])
    assert torch.equal(same.isnan(), logprobs.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_matches_torch(dtype: torch.dtype, library: Library) -> None:
    for rows, vocabulary in [(0, 5), (1, 1), (3, 5), (2, 4095), (2, 4097), (5, 49152), (1, 49152)]:
        check(library, normal(rows, vocabulary, seed=rows, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_match_torch(dtype: torch.dtype, library: Library) -> None:
    whole = normal(3, 5000, seed=1, dtype=dtype)
    for logits in (whole[:, :4999], whole[::2], whole.T):
        check(library, logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_ties_choose_lowest_id(dtype: torch.dtype, library: Library) -> None:
    logits = normal(6, 9000, seed=1, dtype=dtype)
    for row, places in enumerate([(5, 8999), (4095, 4096), (8998, 8999), (0, 1), (4096, 8192), (8191, 8192)]):
        logits[row, list(places)] = 50
        assert CpuOps(library).choose_greedy(logits)[0][row] == places[0]
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    check(library, logits)


def test_greedy_nan_and_infinite_scores_give_nan_logprobs(library: Library) -> None:
    """Use rows with NaN, mostly masked rows, and rows with infinities."""
    logits = normal(9, 9000, seed=1)
    logits[0] = NEG_INFINITY
    logits[1] = NEG_INFINITY
    logits[1, 8500] = -3.0
    logits[2, :8192] = NEG_INFINITY
    logits[3, 4100] = math.inf
    logits[4, [7, 8000]] = math.nan
    logits[5] = math.nan
    logits[6, 8999], logits[6, 3] = math.nan, math.inf
    logits[7] = 1e30 * logits[7]
    check(library, logits)
    assert (
        CpuOps(library).choose_greedy(logits)[1].isnan().tolist()
        == [True, False, False, True, True, True, True] + [False] * 2
    )


def test_gather_logprobs_matches_float64(library: Library) -> None:
    logits = normal(4, 9001, seed=1)
    logits[1, :9000] = NEG_INFINITY
    logits[2, 4] = math.nan
    token_ids = torch.randint(9001, (4, 7), generator=torch.Generator().manual_seed(2))
    token_ids[1, :2] = torch.tensor([0, 9000])
    actual = CpuOps(library).gather_logprobs(logits, token_ids)
    expected = logits.double().log_softmax(-1).gather(-1, token_ids)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-7, atol=1e-6, equal_nan=True)
    assert torch.equal(CpuOps(library).gather_logprobs(logits, token_ids.T.contiguous().T)[0], actual[0])
    token_ids[0, 0], token_ids[3, 2] = -1, 9001
    beyond = CpuOps(library).gather_logprobs(logits, token_ids)
    assert beyond[0, 0].isnan()
    assert beyond[3, 2].isnan()
    assert torch.equal(beyond[0, 1:], actual[0, 1:])
    with pytest.raises(ValueError, match="int64"):
        CpuOps(library).gather_logprobs(logits, token_ids.int())
    with pytest.raises(ValueError, match="4 rows"):
        CpuOps(library).gather_logprobs(logits, token_ids[:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_logprobs_applies_temperature(dtype: torch.dtype, library: Library) -> None:
    logits = normal(5, 9001, seed=1, dtype=dtype)
    logits[1, :8192] = NEG_INFINITY
    token_ids = torch.arange(5).view(5, 1) + torch.tensor([0, 8990])
    temperatures = torch.tensor([1e-6, 0.5, 0.7, 1.0, 3.0])
    actual = CpuOps(library).gather_logprobs(logits, token_ids, temperatures)
    expected = (logits.double() / temperatures[:, None].double()).log_softmax(-1).gather(-1, token_ids)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(actual[3:4], CpuOps(library).gather_logprobs(logits[3:4], token_ids[3:4]))
    for wrong in (temperatures[:4], temperatures.double()):
        with pytest.raises(ValueError, match="temperatures must be"):
            CpuOps(library).gather_logprobs(logits, token_ids, wrong)


def test_empty_vocabulary_is_rejected(library: Library) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        CpuOps(library).choose_greedy(torch.zeros(2, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_bits_are_batch_invariant(dtype: torch.dtype, library: Library) -> None:
    logits = normal(8, 20000, seed=1, dtype=dtype)
    expected = [CpuOps(library).choose_greedy(logits[row : row + 1])[1] for row in range(8)]
    logits[3] = math.nan
    actual = CpuOps(library).choose_greedy(logits)[1]
    assert actual[3].isnan()
    assert all(torch.equal(actual[row : row + 1], expected[row]) for row in range(8) if row != 3)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_independent_of_threads(dtype: torch.dtype, library: Library) -> None:
    logits, result = normal(3, 50000, seed=1, dtype=dtype), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        result.append(CpuOps(library).choose_greedy(logits)[1])
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0], result[2])


# --- top-k scores


def check_top_k(library: Library, logits: torch.Tensor, count: int) -> None:
    """Compare with a stable sort: NaN first, ties by token ID."""
    expected, order = logits.float().sort(dim=-1, descending=True, stable=True)
    best, token_ids = CpuOps(library).top_k_scores(logits, count)
    assert torch.equal(token_ids, order[:, :count])
    torch.testing.assert_close(best, expected[:, :count], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_matches_stable_sort(dtype: torch.dtype, library: Library) -> None:
    for vocabulary in (1, 7, 64, 300, 5003, 49152):
        for count in {1, min(vocabulary, 7), min(vocabulary, 256), min(vocabulary, 1024)}:
            check_top_k(library, normal(2, vocabulary, seed=vocabulary, dtype=dtype), count)


def test_top_k_finds_tokens_at_any_position(library: Library) -> None:
    logits = normal(7, 20001, seed=1)
    logits[0] = logits[0].sort().values
    logits[1] = logits[1].sort(descending=True).values
    logits[2] = logits[2].round()
    logits[3] = 1.0
    logits[4, 300:] = NEG_INFINITY
    logits[5, ::500] = math.inf
    logits[6] = NEG_INFINITY
    check_top_k(library, logits, 256)
    check_top_k(library, logits[:, ::2], 256)
    check_top_k(library, logits[:, :20000], 20000)


def test_top_k_sorts_nan_first(library: Library) -> None:
    logits = normal(3, 20001, seed=1)
    expected = [CpuOps(library).top_k_scores(logits[row : row + 1], 256) for row in range(3)]
    logits[1, [5, 700, 20000]] = math.nan
    check_top_k(library, logits, 256)
    scores, token_ids = CpuOps(library).top_k_scores(logits, 256)
    for row in (0, 2):
        assert torch.equal(scores[row : row + 1], expected[row][0])
        assert torch.equal(token_ids[row : row + 1], expected[row][1])


def test_top_k_rejects_invalid_count(library: Library) -> None:
    for count in (0, 6):
        with pytest.raises(ValueError, match=r"count must be in \[1, 5\]"):
            CpuOps(library).top_k_scores(torch.zeros(2, 5), count)


# --- masks


def pack_masks(allowed: torch.Tensor) -> torch.Tensor:
    """Pack flags [masks, tokens] into words, with one extra word."""
    words = np.zeros((len(allowed), allowed.shape[1] // 32 + 2), np.int32)
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    words.view(np.uint8)[:, : packed.shape[1]] = packed
    return torch.from_numpy(words)


def make_masked_case(
    vocabulary: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores with ties and NaN, four masks, the mask number of each row, and the masked scores."""
    logits = normal(7, vocabulary, seed=vocabulary, dtype=dtype)
    logits[2] = logits[2].round()
    allowed = torch.rand(4, vocabulary, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[1] = False
    allowed[1, [0, vocabulary // 2, vocabulary - 1]] = True
    allowed[2] = torch.arange(vocabulary) % 1000 == 999
    numbers = torch.tensor([0, 1, 0, -1, 2, 3, 1])
    logits[5, allowed[3].nonzero()[::9]] = math.nan
    logits[6, ~allowed[1]] = math.nan  # at forbidden tokens
    seen = logits.float()
    for row, number in enumerate(numbers.tolist()):
        if number >= 0:
            seen[row, ~allowed[number]] = NEG_INFINITY
    return logits, pack_masks(allowed), numbers, seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [33, 64, 5003, 49152])
def test_top_k_respects_token_masks(vocabulary: int, dtype: torch.dtype, library: Library) -> None:
    logits, words, numbers, seen = make_masked_case(vocabulary, dtype)
    count = min(vocabulary, 256)
    best, token_ids = CpuOps(library).top_k_scores(logits, count, words, numbers)
    expected, order = seen.sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(best, expected[:, :count], rtol=0, atol=0, equal_nan=True)
    is_there = expected[:, :count] != NEG_INFINITY
    assert torch.equal(token_ids, torch.where(is_there, order[:, :count], 0))
    assert not is_there.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_logprobs_respects_token_masks(dtype: torch.dtype, library: Library) -> None:
    logits, words, numbers, seen = make_masked_case(5003, dtype)
    token_ids, temperatures = seen.argmax(-1, keepdim=True), torch.tensor([0.5, 0.7, 1.0, 1.0, 1.5, 1.0, 2.0])
    actual = CpuOps(library).gather_logprobs(logits, token_ids, temperatures, words, numbers)
    expected = (seen.double() / temperatures[:, None].double()).log_softmax(-1).gather(-1, token_ids)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_too_small_masks_are_rejected(library: Library) -> None:
    logits, words, numbers, _ = make_masked_case(5003, torch.float32)
    for wrong in (words[:, :100], words[:3]):
        with pytest.raises(ValueError, match="do not cover 5003 tokens"):
            CpuOps(library).top_k_scores(logits, 5, wrong, numbers)
    with pytest.raises(ValueError, match=r"`mask_indices` \(7,\) int64"):
        CpuOps(library).top_k_scores(logits, 5, words, numbers[:6])
