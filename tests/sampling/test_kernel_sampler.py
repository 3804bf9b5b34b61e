"""The GPU sampling kernel matches CPU sampling."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lorax_server.kernels import Ops
from lorax_server.sampling.sampler import History, Sampler, SamplerOutput, SequenceSampling, TokenMasks
from lorax_server.types import SamplingParams

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
pytest.importorskip("triton", reason="needs Triton")
from lorax_server.kernels.hopper.ops import HopperOps

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCABS = [1, 5, 257, 1000, 32_000, 50_257, 128_256]
SHAPES = ["normal", "peaked", "flat", "equal", "ties", "holes", "tiny", "cliff"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.9},
    {"temperature": 1e-9},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000, "temperature": 1.3},
    {"top_k": 10**9},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 0.3, "temperature": 0.7},
    {"top_p": 1e-9},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 0.8},
    {"top_k": 50, "top_p": 0.8, "temperature": 0.8},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.95, "typical_p": 0.8},
    {"top_k": 900, "top_p": 0.9, "min_p": 0.001, "typical_p": 0.95, "temperature": 1.2},
    {"top_p": 0.9, "raw_logprobs": True},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": -0.3, "top_p": 0.9},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.2, "presence_penalty": 0.1, "top_k": 20, "raw_logprobs": True},
    {"logit_bias": {0: 3.0}, "top_p": 0.8},
    {"watermark": True, "temperature": 0.9},
    {"num_alternatives": 5, "top_p": 0.9},
    {"num_alternatives": 20, "raw_logprobs": True, "temperature": 0.5},
    {"num_alternatives": 3, "top_k": 2, "logit_bias": {0: -100.0}},
]
GREEDY: list[dict[str, Any]] = [
    {},
    {"raw_logprobs": True},
    {"num_alternatives": 7},
    {"repetition_penalty": 1.5, "num_alternatives": 2, "raw_logprobs": True},
    {"logit_bias": {0: 100.0}},
]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return HopperOps(torch.device("cuda", 0))


def make_logits(rows: int, vocab: int, shape: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    if shape == "peaked":
        logits[:, torch.randperm(vocab, generator=generator)[: max(vocab // 1000, 1)]] += 14
    elif shape == "flat":
        logits /= 300
    elif shape == "equal":
        logits[:] = 1.5
    elif shape == "ties":
        logits = logits.round()
    elif shape == "holes":
        logits[torch.rand(rows, vocab, generator=generator) < 0.7] = -math.inf
        logits[:, vocab // 3] = 2.0
    elif shape == "tiny":
        logits *= 1e-30 if dtype is torch.float32 else 1e-3
    elif shape == "cliff":  # extreme scores
        logits[:, ::2] -= 6e4
    return logits.to(dtype)


def make_rows(
    settings: Sequence[dict[str, Any]] = SETTINGS, greedy: Sequence[dict[str, Any]] = GREEDY
) -> list[SequenceSampling]:
    params = [SamplingParams(do_sample=True, seed=seed, **setting) for seed, setting in enumerate(settings)]
    rows = [SequenceSampling(each) for each in [*params, *(SamplingParams(**setting) for setting in greedy)]]
    ending = SequenceSampling(SamplingParams(do_sample=True, top_p=0.9, seed=99), 3, frozenset({0, 2, 10**9}))
    return [*rows, ending, replace(ending, min_new_tokens=1)]


def make_history(rows: int, vocab: int) -> History:
    prompts = torch.full((rows,), 5)
    tokens = torch.randint(vocab, (rows, 11), generator=torch.Generator().manual_seed(1))
    tokens[:, 2] = tokens[:, 7]
    return History(prompts + 1 + torch.arange(rows) % 5, prompts, tokens)


def make_masks(rows: Sequence[int], vocab: int) -> TokenMasks:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab // 32)), generator=generator, dtype=torch.int32)
    words[:, 0] |= 1
    return TokenMasks(torch.tensor(rows), words)


def to_cuda(value: Any) -> Any:
    return type(value)(*(None if each is None else each.cuda() for each in value))


def describe_differences(found: SamplerOutput, expected: SamplerOutput, rows: Sequence[SequenceSampling]) -> list[str]:
    """List the rows that differ, with their parameters."""
    differences = []
    found_top = found.alternatives.by_row() if found.alternatives is not None else {}
    expected_top = expected.alternatives.by_row() if expected.alternatives is not None else {}
    assert found_top.keys() == expected_top.keys()
    for row, sampling in enumerate(rows):
        ours = int(found.token_ids[row]), float(found.logprobs[row])
        theirs = int(expected.token_ids[row]), float(expected.logprobs[row])
        is_same = ours[0] == theirs[0] and (is_close(ours[1], theirs[1]))
        if row in expected_top:
            is_same = is_same and found_top[row].token_ids == expected_top[row].token_ids
            pairs = zip(found_top[row].logprobs, expected_top[row].logprobs, strict=True)
            is_same = is_same and all(is_close(a, b) for a, b in pairs)
        if not is_same:
            default = vars(SamplingParams())
            parameters = {name: value for name, value in vars(sampling.params).items() if value != default[name]}
            differences.append(f"row {row}: {ours} not {theirs}: {parameters}")
    return differences


def is_close(found: float, expected: float) -> bool:
    both_nan = math.isnan(found) and math.isnan(expected)
    return both_nan or found == expected or abs(found - expected) <= 2e-4 + 1e-6 * abs(expected)


def compare(ops: Ops, rows: list[SequenceSampling], logits: torch.Tensor, masks: TokenMasks | None = None) -> None:
    vocab, history = logits.shape[1], make_history(len(rows), logits.shape[1])
    expected = Sampler(rows, vocab)(logits, history, masks)
    sampler = Sampler(rows, vocab, "cuda", ops)
    actual = sampler(logits.cuda(), to_cuda(history), None if masks is None else to_cuda(masks))
    differences = describe_differences(actual, expected, rows)
    assert not differences, "\n".join([f"{len(differences)} differ", *differences[:6]])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_matches_cpu_sampler(ops: Ops, dtype: torch.dtype, vocab: int, shape: str) -> None:
    rows = make_rows()
    compare(ops, rows, make_logits(len(rows), vocab, shape, dtype))


@pytest.mark.parametrize("vocab", [1, 5, 1000, 32_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_with_masks_matches_cpu_sampler(ops: Ops, dtype: torch.dtype, vocab: int) -> None:
    rows = make_rows()
    masks = make_masks(range(len(rows))[::-2], vocab)
    compare(ops, rows, make_logits(len(rows), vocab, "normal", dtype), masks)


@pytest.mark.parametrize("vocab", [257, 32_000])
@pytest.mark.parametrize("kind", ["nan", "inf", "-inf", "all nan", "all inf", "all -inf"])
def test_nan_logits_give_nan_logprobs(ops: Ops, kind: str, vocab: int) -> None:
    rows = [row for row in make_rows() if not row.params.num_alternatives]
    logits = make_logits(len(rows), vocab, "normal", torch.float32)
    logits[:, slice(None) if "all" in kind else vocab // 2] = float(kind.removeprefix("all "))
    compare(ops, rows, logits)


@pytest.mark.parametrize("vocab", [5, 50_257, 128_256])
def test_rows_are_bitwise_independent_of_batch(ops: Ops, vocab: int) -> None:
    rows = make_rows()
    logits, history = make_logits(len(rows), vocab, "normal", torch.bfloat16).cuda(), make_history(len(rows), vocab)
    masks = to_cuda(make_masks(range(0, len(rows), 3), vocab))
    together = Sampler(rows, vocab, "cuda", ops)(logits, to_cuda(history), masks)
    for row in range(len(rows)):
        index = torch.tensor([row])
        own_masks = masks.select(index.cuda(), len(rows)) if row % 3 == 0 else None
        alone = Sampler([rows[row]], vocab, "cuda", ops)(
            logits[row : row + 1].clone(), to_cuda(history.select(index)), own_masks
        )
        assert int(alone.token_ids) == int(together.token_ids[row])
        assert alone.logprobs.view(torch.int32).item() == together.logprobs[row].view(torch.int32).item()
        if alone.alternatives is not None and together.alternatives is not None:
            assert alone.alternatives.by_row()[0] == together.alternatives.by_row()[row]


def test_sampling_does_not_synchronize_host(ops: Ops) -> None:
    rows, vocab = make_rows(), 5003
    logits, history = (
        make_logits(len(rows), vocab, "normal", torch.bfloat16).cuda(),
        to_cuda(make_history(len(rows), vocab)),
    )
    masks = to_cuda(make_masks([1, 3], vocab))
    expected = Sampler(rows, vocab, "cuda", ops)(logits, history, masks)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this mode does not detect all synchronizations
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(stream):
                sampler = Sampler(rows, vocab, "cuda", ops)
                actual = sampler(logits, history, masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert torch.equal(actual.logprobs, expected.logprobs)


def test_greedy_rows_need_no_history(ops: Ops) -> None:
    logits = make_logits(9, 32_000, "ties", torch.bfloat16)
    sampler = Sampler([SequenceSampling(SamplingParams())] * 9, 32_000, "cuda", ops)
    assert not sampler.needs_history
    assert sampler(logits.cuda(), None).token_ids.tolist() == logits.float().numpy().argmax(-1).tolist()


def test_alternatives_above_kernel_limit_use_general_sampler(ops: Ops) -> None:
    settings: list[dict[str, Any]] = [{"num_alternatives": count, "top_p": 0.9} for count in (3, 2048, 2049, 4000, 0)]
    rows = make_rows(settings)
    compare(ops, rows, make_logits(len(rows), 3000, "normal", torch.bfloat16), make_masks([1, 3, 4], 3000))


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.75}, {"typical_p": 0.6}, {"top_k": 5, "min_p": 0.1}], ids=str)
def test_sampled_frequencies_match_probabilities(ops: Ops, setting: dict[str, Any]) -> None:
    draws = 50_000
    logits = torch.tensor([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, -math.inf, 0.9, -2.5, 1.1, -0.7, 0.0])
    row = SequenceSampling(SamplingParams(do_sample=True, seed=1234, num_alternatives=len(logits), **setting))
    lengths = torch.arange(draws, device="cuda") + 3
    plain = replace(row, params=SamplingParams(do_sample=True, seed=1234, **setting))
    sampler = Sampler([plain] * draws, len(logits), "cuda", ops)
    tokens = sampler(logits.cuda().expand(draws, -1), History(lengths, torch.full_like(lengths, 3))).token_ids
    top = Sampler([row], len(logits))(logits[None], History(torch.tensor([3]), torch.tensor([3]))).alternatives
    assert top is not None
    expected = torch.zeros(len(logits)).scatter(0, top.token_ids[0], top.logprobs[0].exp()) * draws
    counts = torch.bincount(tokens.cpu(), minlength=len(logits)).float()
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_squared = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_squared < 2.2 * int(possible.sum()) + 12  # false positive rate 1e-4


@pytest.mark.parametrize("vocab", [257, 128_256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_match_float64(ops: Ops, dtype: torch.dtype, vocab: int) -> None:
    """Compare with float64, because float32 sums over a large vocabulary are inexact."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 0.5, "raw_logprobs": True}]
    temperatures = torch.tensor([1, 0.7, 1, 1, 1, 1, 1])
    rows = make_rows(settings, GREEDY[:2])
    logits = make_logits(len(rows), vocab, "normal", dtype)
    actual = Sampler(rows, vocab, "cuda", ops)(logits.cuda(), to_cuda(make_history(len(rows), vocab)))
    exact = (logits.float() / temperatures[:, None]).double().log_softmax(-1)
    expected = exact.gather(-1, actual.token_ids.cpu()[:, None]).squeeze(-1)[:5]
    torch.testing.assert_close(actual.logprobs[:5].cpu().double(), expected, rtol=1e-7, atol=1e-6)
