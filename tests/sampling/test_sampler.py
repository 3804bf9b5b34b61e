"""Batched sampling: rows are independent and have the right probabilities."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lorax_server.errors import InputError
from lorax_server.models.contract.next_token_chooser import NextTokenChooser
from lorax_server.sampling import Sampler, SamplerOutput
from lorax_server.sampling.sampler import History, SequenceSampling
from lorax_server.sampling.watermark import green_mask, hash_tokens
from lorax_server.types import MAX_SEED, Alternatives, SamplingParams, StopParams
from tests.grids import slow_except
from tests.optional import present

INF = math.inf


class Row(NamedTuple):
    """A sequence with the logits for its next token."""

    params: SamplingParams
    ids: tuple[int, ...]
    prompt_length: int
    logits: torch.Tensor  # [vocabulary]
    stop: StopParams | None = None

    @property
    def sequence_sampling(self) -> SequenceSampling:
        return (
            SequenceSampling(self.params) if self.stop is None else SequenceSampling.from_params(self.params, self.stop)
        )


def choose(rows: Sequence[Row], device: torch.device, garbage: int = 0, extra: int = 0) -> SamplerOutput:
    """Sample all rows in one batch, with `garbage` tokens beyond each row's length."""
    width = max(len(row.ids) for row in rows) + extra
    ids = torch.tensor([[*row.ids, *[garbage] * (width - len(row.ids))] for row in rows], device=device)
    lengths = torch.tensor([len(row.ids) for row in rows], device=device)
    prompts = torch.tensor([row.prompt_length for row in rows], device=device)
    logits = torch.stack([row.logits for row in rows]).to(device)
    sampler = Sampler([row.sequence_sampling for row in rows], logits.shape[1], device)
    return sampler(logits, History(lengths, prompts, ids))


def choose_alone(row: Row, device: torch.device) -> SamplerOutput:
    chooser = NextTokenChooser(row.params, row.stop, row.prompt_length)
    return chooser(torch.tensor([row.ids], device=device), row.logits[None].to(device))


def make_row(params: SamplingParams, logits: Sequence[float], *ids: int, stop: StopParams | None = None) -> Row:
    return Row(params, ids or (0,), 1, torch.tensor(logits), stop)


def bits(value: Any) -> Any:
    """Return the bits of a value, which can be compared even if it is NaN."""
    if isinstance(value, Alternatives):
        return value.token_ids, np.array(value.logprobs, np.float32).tobytes()
    return value.cpu().numpy().tobytes()


def of_row(sampled: SamplerOutput, row: int) -> tuple[Any, ...]:
    alternatives = sampled.alternatives.by_row() if sampled.alternatives is not None else {}
    result = alternatives.get(row)
    return int(sampled.token_ids[row]), bits(sampled.logprobs[row]), None if result is None else bits(result)


# --- Batch independence


def params_of(vocab: int) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        do_sample=st.sampled_from([True, True, False]),
        temperature=st.sampled_from([1.0, 0.0, 0.01, 0.7, 1.9]),
        top_k=st.sampled_from([0, 0, 1, 2, 5, 40, vocab - 1, vocab, 10**9]),
        top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 1 - 1e-9]),
        min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
        typical_p=st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.95]),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        frequency_penalty=st.sampled_from([0.0, -1.0, 0.4]),
        presence_penalty=st.sampled_from([0.0, 2.0, -0.6]),
        logit_bias=st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-100.0, -1.0, 0.5, 3.0]), max_size=3),
        watermark=st.sampled_from([False, False, True]),
        seed=st.one_of(st.integers(0, 5), st.integers(0, MAX_SEED)),
        num_alternatives=st.sampled_from([0, 0, 1, 2, 7, 30]),
        raw_logprobs=st.booleans(),
    )


@st.composite
def rows_of(draw: st.DrawFn, vocab: int) -> Row:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(vocab, generator=generator) * 3
    shape = draw(st.sampled_from(["plain", "ties", "holes", "nan", "inf", "empty"]))
    if shape == "ties":
        logits = logits.round()
    elif shape == "holes":
        logits[torch.rand(vocab, generator=generator) < 0.5] = -INF
    elif shape in ("nan", "inf"):
        logits[vocab // 2] = float(shape)
    elif shape == "empty":
        logits[:] = -INF
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=9))
    ending = frozenset(draw(st.lists(st.integers(0, vocab + 3), max_size=3)))
    stop = StopParams(min_new_tokens=draw(st.sampled_from([0, 3, 20])), eos_token_ids=ending)
    return Row(draw(params_of(vocab)), tuple(ids), draw(st.integers(0, len(ids))), logits, stop)


@pytest.mark.parametrize("vocab", slow_except([7], [7, 257, 5003]))
def test_row_in_batch_equals_single_row(vocab: int, device: torch.device) -> None:
    @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rows = data.draw(st.lists(rows_of(vocab), min_size=1, max_size=6))
        garbage = data.draw(st.sampled_from([0, 1, rows[0].ids[0], vocab - 1, vocab, vocab + 5, 2**40, -1]))
        alone = [of_row(choose_alone(row, device), 0) for row in rows]
        together = choose(rows, device, garbage, extra=data.draw(st.integers(0, 3)))
        assert [of_row(together, row) for row in range(len(rows))] == alone
        order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
        regrouped = choose([rows[row] for row in order], device)
        assert [of_row(regrouped, place) for place in range(len(order))] == [alone[row] for row in order]

    check()


VARIED = [
    SamplingParams(),
    SamplingParams(do_sample=True, seed=1),
    SamplingParams(do_sample=True, typical_p=0.9, seed=2),
    SamplingParams(do_sample=True, top_p=0.95, top_k=100, temperature=0.8, seed=3),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, num_alternatives=3),
    SamplingParams(do_sample=True, min_p=0.05, watermark=True, seed=4, raw_logprobs=True, num_alternatives=20),
    SamplingParams(do_sample=True, temperature=1.5, logit_bias={5: 4.0}, seed=5),
    SamplingParams(do_sample=True, temperature=0.0, top_k=4),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", [32_000, 50_257])  # CPUs split row sums over threads from 32,768 elements
def test_large_vocabulary_sampling_is_batch_invariant(vocab: int, device: torch.device, two_threads: None) -> None:
    logits = torch.randn(3 * len(VARIED), vocab, generator=torch.Generator().manual_seed(0)) * 3
    rows = [Row(VARIED[i % len(VARIED)], (1, 2, 3 + i, 2), 2, row.bfloat16().float()) for i, row in enumerate(logits)]
    together = choose(rows, device, garbage=2, extra=2)
    alone = [choose_alone(row, device) for row in rows]
    if device.type != "cpu" and vocab % 4:  # GPUs read four elements together, so unaligned rows sum differently
        assert together.token_ids.tolist() == [int(each.token_ids) for each in alone]
        torch.testing.assert_close(together.logprobs, torch.cat([each.logprobs for each in alone]), rtol=0, atol=4e-6)
    else:
        assert [of_row(together, i) for i in range(len(rows))] == [of_row(each, 0) for each in alone]


def test_thread_count_does_not_change_sums(device: torch.device, two_threads: None) -> None:
    logits = torch.randn(100, 50_256, generator=torch.Generator().manual_seed(0)) * 3
    rows = [Row(SamplingParams(), (0,), 1, row) for row in logits]
    together = choose(rows, device)
    assert [of_row(together, i) for i in range(len(rows))] == [of_row(choose_alone(row, device), 0) for row in rows]


def test_tokens_beyond_row_length_are_ignored(device: torch.device) -> None:
    params = SamplingParams(repetition_penalty=5.0, frequency_penalty=2.0, watermark=True, num_alternatives=7)
    rows = [Row(params, (3, 4), 1, torch.randn(7)), Row(params, (1, 1, 1, 1, 1), 2, torch.randn(7))]
    expected = of_row(choose_alone(rows[0], device), 0)
    for garbage in (0, 3, 4, 6, 7, 2**60, -1):
        assert of_row(choose(rows, device, garbage, extra=1), 0) == expected


def test_watermark_supports_rows_without_tokens(device: torch.device) -> None:
    logits = torch.zeros(7)
    marked = Row(SamplingParams(watermark=True, num_alternatives=7), (3,), 1, logits)
    together = choose([Row(SamplingParams(), (), 0, logits), marked], device)
    assert of_row(together, 1) == of_row(choose_alone(marked, device), 0)


def test_alternatives_order_does_not_depend_on_other_rows(device: torch.device) -> None:
    logits = torch.zeros(257)
    logits[100:] = 1.0
    for others in (1, 3, 4, 50, 257):
        rows = [Row(SamplingParams(num_alternatives=n), (0,), 1, logits) for n in (3, others)]
        assert present(choose(rows, device).alternatives).by_row()[0].token_ids == [100, 101, 102]


# --- Temperature 0


@pytest.mark.parametrize(
    "more", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"typical_p": 0.2}, {"seed": 9, "top_k": 7}], ids=str
)
@pytest.mark.parametrize("do_sample", [False, True])
def test_temperature_0_is_greedy_with_any_parameters(
    more: dict[str, Any], do_sample: bool, device: torch.device
) -> None:
    logits = torch.randn(257)
    cold = Row(SamplingParams(do_sample=do_sample, temperature=0.0, **more), (0,), 1, logits)
    hot = Row(SamplingParams(do_sample=True, temperature=5.0, seed=3), (0,), 1, logits)
    greedy = of_row(choose_alone(cold._replace(params=SamplingParams()), device), 0)
    assert greedy[0] == logits.argmax()
    assert of_row(choose_alone(cold, device), 0) == greedy
    together = choose([hot, cold, hot, cold], device)
    assert of_row(together, 1) == of_row(together, 3) == greedy


@pytest.mark.parametrize("temperature", [1e-6, 1e-10, 1e-38, 1e-45, 1e-300])
def test_very_low_temperature_is_greedy(temperature: float, device: torch.device) -> None:
    """Cover temperatures so low that they, or the scores divided by them, do not fit into a 32-bit float."""
    for seed in range(20):
        logits = torch.randn(257, generator=torch.Generator().manual_seed(seed)) * 10
        sampled = choose_alone(Row(SamplingParams(True, temperature, seed=seed), (0,), 1, logits), device)
        assert sampled.token_ids.tolist() == [logits.argmax()]
        assert sampled.logprobs.tolist() == [0.0]


# --- Comparison with transformers

CHAINS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "logit_bias": {3: 2.0, 200: -4.0}},
    {"temperature": 0.5, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.7, "min_p": 0.05},
    {"top_k": 100, "typical_p": 0.6},
    {"top_p": 0.9, "typical_p": 0.5, "temperature": 0.8},
    {"watermark": True, "repetition_penalty": 0.7},
    {
        "watermark": True,
        "repetition_penalty": 1.3,
        "logit_bias": {1: 3.0, 7: 5.0, 9: -2.0},
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
    },
]
STOP_TOKENS = [7, 9]


def chain(params: SamplingParams, vocab: int, prompt_length: int) -> list[LogitsProcessor]:
    """Return transformers' processors for all parameters except the watermark."""
    biases: Any = {(token,): bias for token, bias in params.logit_bias.items()}
    listed: list[tuple[Any, Callable[[], Any]]] = [
        (params.watermark, lambda: lambda ids, scores: scores + 2.0 * green_mask(ids[:, -1], hash_tokens(vocab))),
        (params.repetition_penalty != 1, lambda: RepetitionPenaltyLogitsProcessor(params.repetition_penalty)),
        (biases, lambda: SequenceBiasLogitsProcessor(biases)),
        (True, lambda: MinNewTokensLengthLogitsProcessor(prompt_length, 4, STOP_TOKENS)),
        (params.temperature != 1, lambda: TemperatureLogitsWarper(params.temperature)),
        (params.top_k, lambda: TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: TopPLogitsWarper(params.top_p)),
        (params.min_p, lambda: MinPLogitsWarper(params.min_p)),
        (params.typical_p < 1, lambda: TypicalLogitsWarper(params.typical_p)),
    ]
    return [make() for is_wanted, make in listed if is_wanted]


@pytest.mark.parametrize("parameters", CHAINS, ids=" ".join)
@pytest.mark.parametrize("num_generated", [0, 3, 4, 6])
def test_combined_parameters_match_transformers(
    parameters: dict[str, Any], num_generated: int, device: torch.device
) -> None:
    vocab = 257
    params = SamplingParams(do_sample=True, num_alternatives=vocab, **parameters)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, vocab, generator=generator) * 3
        ids = torch.randint(vocab, (1, 5 + num_generated), generator=generator)
        expected = logits
        for processor in chain(params, vocab, 5):
            expected = processor(ids, expected)
        stop = StopParams(min_new_tokens=4, eos_token_ids=frozenset(STOP_TOKENS))
        actual = present(choose_alone(Row(params, tuple(ids[0].tolist()), 5, logits[0], stop), device).alternatives)
        in_order = actual.logprobs.cpu().scatter(-1, actual.token_ids.cpu(), actual.logprobs.cpu())
        torch.testing.assert_close(in_order, expected.log_softmax(-1), rtol=1e-5, atol=1e-5)


# --- Comparison with numpy probabilities

LOGITS = np.array([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, -INF, 0.9, -2.5, 1.1, -0.7, 0.0])
PROMPT, GENERATED = [0, 3, 3, 9], [1, 1, 1, 4, 7]
DRAWS = 20_000


def normalized(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


def mask_all_except(scores: np.ndarray, kept: Sequence[int]) -> np.ndarray:
    return np.where(np.isin(np.arange(len(scores)), kept), scores, -INF)


def select_until_mass(order: Sequence[int], probabilities: np.ndarray, mass: float) -> list[int]:
    """Return the shortest prefix of `order` whose probabilities sum to at least `mass`."""
    kept: list[int] = []
    for token in order:
        if kept and probabilities[kept].sum() >= mass:
            break
        kept.append(token)
    return kept


def probabilities_of(params: SamplingParams) -> np.ndarray:
    scores = LOGITS.copy()
    for token in {*PROMPT, *GENERATED}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in set(GENERATED):
        scores[token] -= params.frequency_penalty * GENERATED.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    scores /= params.temperature
    by_score = sorted(range(len(scores)), key=lambda token: -scores[token])
    if params.top_k:
        scores = mask_all_except(scores, by_score[: params.top_k])
    if params.top_p < 1:
        scores = mask_all_except(scores, select_until_mass(by_score, normalized(scores), params.top_p))
    if params.min_p:
        likely = normalized(scores) >= params.min_p * normalized(scores).max()
        scores = mask_all_except(scores, np.flatnonzero(likely).tolist())
    if params.typical_p < 1:
        probabilities = normalized(scores)
        with np.errstate(divide="ignore"):
            surprise = -np.log(probabilities)
        entropy = sum(p * s for p, s in zip(probabilities, surprise, strict=True) if p)
        by_distance = sorted(range(len(scores)), key=lambda token: abs(surprise[token] - entropy))
        scores = mask_all_except(scores, select_until_mass(by_distance, probabilities, params.typical_p))
    return normalized(scores)


def is_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> bool:
    """Run Pearson's chi-squared test with a false positive rate of 1e-3."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    if counts[probabilities == 0].any():
        return False
    possible = probabilities > 0
    counts, expected = counts[possible], probabilities[possible] * len(tokens)
    rare = expected < 5
    if rare.any():  # merge rare outcomes
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    freedom = len(counts) - 1
    if freedom == 0:
        return True
    spread = 2 / (9 * freedom)  # Wilson and Hilferty: the cube root is almost normal
    return bool(((counts - expected) ** 2 / expected).sum() < freedom * (1 - spread + 3.09 * spread**0.5) ** 3)


def draw_seeds(parameters: dict[str, Any], device: torch.device) -> np.ndarray:
    """Draw a token for each of many seeds, at one position."""
    sequence_sampling = [
        SequenceSampling(SamplingParams(do_sample=True, seed=seed, **parameters)) for seed in range(DRAWS)
    ]
    prompts = torch.full((DRAWS,), len(PROMPT), device=device)
    ids = torch.tensor([PROMPT + GENERATED], device=device).expand(DRAWS, -1)
    logits = torch.tensor(LOGITS, dtype=torch.float32, device=device).expand(DRAWS, -1)
    sampled = Sampler(sequence_sampling, len(LOGITS), device)(logits, History(prompts + len(GENERATED), prompts, ids))
    return sampled.token_ids.cpu().numpy()


def draw_positions(parameters: dict[str, Any], device: torch.device) -> np.ndarray:
    """Draw a token for each of many positions, with one seed."""
    lengths = torch.arange(DRAWS, device=device) + 3
    sampler = Sampler(
        [SequenceSampling(SamplingParams(do_sample=True, seed=1234, **parameters))] * DRAWS, len(LOGITS), device
    )
    logits = torch.tensor(LOGITS, dtype=torch.float32, device=device).expand(DRAWS, -1)
    return sampler(logits, History(lengths, torch.full_like(lengths, 3))).token_ids.cpu().numpy()


WARPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.75},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.6},
    "bias": {"logit_bias": {5: 3.0, 0: -1.5, 6: 50.0}},
    "all": {"temperature": 1.4, "top_k": 9, "top_p": 0.97, "min_p": 0.03, "typical_p": 0.9, "logit_bias": {8: 3.0}},
}
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.5},
    "presence": {"presence_penalty": 1.5},
    "rewards": {"frequency_penalty": -0.4, "presence_penalty": -0.5, "repetition_penalty": 0.8},
    "penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 8},
}


@pytest.mark.parametrize("name", WARPERS)
def test_frequencies_over_positions_match_probabilities(name: str, device: torch.device) -> None:
    assert is_drawn_from(draw_positions(WARPERS[name], device), probabilities_of(SamplingParams(**WARPERS[name])))


@pytest.mark.parametrize("name", slow_except(["all", "bias"], [*WARPERS, *PENALTIES]))
def test_frequencies_over_seeds_match_probabilities(name: str, device: torch.device) -> None:
    parameters = (WARPERS | PENALTIES)[name]
    assert is_drawn_from(draw_seeds(parameters, device), probabilities_of(SamplingParams(**parameters)))


def test_frequency_test_detects_wrong_distribution(device: torch.device) -> None:
    plain = draw_seeds({}, device)
    assert is_drawn_from(plain, probabilities_of(SamplingParams()))
    for wrong in ({"temperature": 1.1}, {"top_p": 0.99}, {"top_k": 11, "logit_bias": {8: -50.0}}, {"min_p": 0.02}):
        assert not is_drawn_from(plain, probabilities_of(SamplingParams(**wrong))), wrong
    for name, parameters in (WARPERS | PENALTIES).items():
        if name != "plain":
            assert not is_drawn_from(plain, probabilities_of(SamplingParams(**parameters))), name
    off = probabilities_of(SamplingParams())
    off[[0, 1]] += [0.01, -0.01]
    assert not is_drawn_from(plain, off)


# --- Logprobs and alternatives


def test_raw_logprobs_are_computed_from_unprocessed_logits(device: torch.device) -> None:
    logits = torch.randn(50)
    parameters: dict[str, Any]
    parameters = {"do_sample": True, "temperature": 0.5, "top_k": 3, "logit_bias": {4: 1.0}, "num_alternatives": 6}
    biased = logits.clone()
    biased[4] += 1
    warped = TopKLogitsWarper(3)(None, biased[None] / 0.5)[0].log_softmax(-1)
    for is_raw, expected in ((False, warped), (True, logits.log_softmax(-1))):
        actual = choose_alone(Row(SamplingParams(**parameters, raw_logprobs=is_raw), (0,), 1, logits), device)
        token = int(actual.token_ids)
        torch.testing.assert_close(actual.logprobs.cpu(), expected[token, None])
        best = expected.sort(descending=True, stable=True)
        alternatives = present(actual.alternatives)
        assert alternatives.token_ids[0].tolist() == best.indices[:6].tolist()
        torch.testing.assert_close(alternatives.logprobs[0].cpu(), best.values[:6])


def test_greedy_logprobs_include_penalties_but_not_temperature(device: torch.device) -> None:
    logits = torch.randn(50)
    row = Row(SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0), (7, 8), 1, logits)
    penalized = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[7, 8]]), logits[None])
    result = choose_alone(row, device)
    assert result.token_ids.tolist() == penalized.argmax(-1).tolist()
    torch.testing.assert_close(result.logprobs.cpu(), penalized.log_softmax(-1).amax(-1))


def test_alternatives_count_is_per_row(device: torch.device) -> None:
    counts = [0, 3, 1, 0, 100, 7]
    result = choose([Row(SamplingParams(num_alternatives=n), (0,), 1, torch.randn(7)) for n in counts], device)
    by_row = present(result.alternatives).by_row()
    assert {row: len(top.token_ids) for row, top in by_row.items()} == {1: 3, 2: 1, 4: 7, 5: 7}
    for row, top in by_row.items():
        assert len(top.logprobs) == len(top.token_ids) == len(set(top.token_ids))
        assert top.logprobs == sorted(top.logprobs, reverse=True)
        assert (top.token_ids[0], top.logprobs[0]) == (result.token_ids[row].item(), result.logprobs[row].item())


def test_alternatives_are_none_by_default(device: torch.device) -> None:
    assert choose([make_row(SamplingParams(), [1.0, 2.0])], device).alternatives is None


EVERYTHING = SamplingParams(True, 0.7, 9, 0.9, 0.01, 0.9, 1.2, 0.3, 0.4, {3: 1.0}, True, 5, 4, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_are_not_modified(dtype: torch.dtype, device: torch.device) -> None:
    stop = StopParams(min_new_tokens=4, eos_token_ids=frozenset({1, 2}))
    logits = torch.randn(57).to(dtype)
    batches = [
        [Row(EVERYTHING, (1, 2, 3), 1, logits, stop)] * 3,
        [Row(EVERYTHING, (1, 2, 3), 1, logits, stop), Row(SamplingParams(), (1,), 1, logits)],
        [Row(SamplingParams(raw_logprobs=True, num_alternatives=2), (1,), 1, logits)],
        [Row(SamplingParams(do_sample=True, top_k=2), (1,), 1, logits)] * 2,
    ]
    for rows in batches:
        given_logits = torch.stack([row.logits for row in rows]).to(device)
        before = given_logits.clone()
        ids = torch.zeros(len(rows), 3, dtype=torch.int64, device=device)
        lengths = torch.tensor([len(row.ids) for row in rows], device=device)
        sampler = Sampler([row.sequence_sampling for row in rows], 57, device)
        result = sampler(given_logits, History(lengths, torch.ones_like(lengths), ids))
        assert torch.equal(given_logits, before)
        assert result.logprobs.dtype == torch.float32
        as_wide = sampler(before.float(), History(lengths, torch.ones_like(lengths), ids))
        assert [of_row(result, i) for i in range(len(rows))] == [of_row(as_wide, i) for i in range(len(rows))]


# --- NaN logits

PARAMETER_SETS = [
    SamplingParams(),
    SamplingParams(do_sample=True),
    SamplingParams(do_sample=True, top_k=1),
    SamplingParams(do_sample=True, top_p=0.5, temperature=0.7),
    SamplingParams(do_sample=True, min_p=0.1),
    SamplingParams(do_sample=True, typical_p=0.5),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=1.0, logit_bias={0: 1.0}),
    SamplingParams(do_sample=True, raw_logprobs=True, num_alternatives=3),
    EVERYTHING,
]


@pytest.mark.parametrize("params", PARAMETER_SETS, ids=range(len(PARAMETER_SETS)))
@pytest.mark.parametrize("kind", ["one nan", "all nan", "one inf", "all inf", "all -inf", "nan and inf"])
def test_nan_logits_give_token_with_nan_logprob(kind: str, params: SamplingParams, device: torch.device) -> None:
    bad = torch.randn(57)
    what, _, more = kind.partition(" ")
    bad[slice(None) if what == "all" else 3] = float("nan" if what == "nan" else more)
    if more == "and inf":
        bad[[3, 4]] = torch.tensor([math.nan, INF])
    good = torch.randn(57)
    rows = [Row(params, (1, 2), 1, logits) for logits in (good, bad, good)]
    result = choose(rows, device)
    assert all(0 <= token < 57 for token in result.token_ids.tolist())
    assert result.logprobs.isnan().tolist() == [False, True, False]
    assert of_row(result, 0) == of_row(result, 2) == of_row(choose_alone(rows[0], device), 0)
    if result.alternatives is not None:
        assert all(0 <= token < 57 for token in result.alternatives.by_row()[1].token_ids)


# --- Minimum number of tokens


@pytest.mark.parametrize("num_generated", range(6))
def test_stop_tokens_are_forbidden_until_min_new_tokens(num_generated: int, device: torch.device) -> None:
    stop = StopParams(min_new_tokens=3, eos_token_ids=frozenset({2}), stop_token_ids=frozenset({5, 6, 10**9}))
    params = SamplingParams(num_alternatives=8)
    row = Row(params, (0,) * (4 + num_generated), 4, torch.tensor([0.0, 1, 9, 2, 3, 8, 7, 4]), stop)
    alternatives = present(choose_alone(row, device).alternatives).by_row()[0]
    impossible = {t for t, p in zip(alternatives.token_ids, alternatives.logprobs, strict=True) if p == -INF}
    assert impossible == ({2, 5, 6} if num_generated < 3 else set())
    assert alternatives.token_ids[0] == (7 if num_generated < 3 else 2)


def test_ignored_eos_is_not_forbidden(device: torch.device) -> None:
    stop = StopParams(min_new_tokens=3, eos_token_ids=frozenset({2}), ignore_eos=True)
    assert choose_alone(make_row(SamplingParams(), [0.0, 1.0, 9.0], stop=stop), device).token_ids.tolist() == [2]


def test_bias_does_not_override_forbidden_token(device: torch.device) -> None:
    stop = StopParams(min_new_tokens=3, eos_token_ids=frozenset({2}))
    params = SamplingParams(logit_bias={2: 100.0})
    assert choose_alone(make_row(params, [0.0, 1.0, 9.0], stop=stop), device).token_ids.tolist() == [1]


def test_forbidden_tokens_are_per_row(device: torch.device) -> None:
    stop = StopParams(min_new_tokens=3, eos_token_ids=frozenset({2}))
    rows = [make_row(SamplingParams(do_sample=True, seed=i), [0.0, 1.0, 9.0], stop=stop) for i in range(200)]
    assert 2 not in choose(rows, device).token_ids.tolist()
    free = [row._replace(stop=None) for row in rows]
    assert 2 in choose(rows + free, device).token_ids.tolist()[200:]
    assert 2 not in choose(rows + free, device).token_ids.tolist()[:200]


# --- Invalid values


@pytest.mark.parametrize("token", [7, 8, 2**31, 2**70])
def test_bias_outside_vocabulary_is_rejected(token: int, device: torch.device) -> None:
    with pytest.raises(InputError, match=f"`logit_bias`: token ID {token} is outside the vocabulary of 7"):
        Sampler(
            [SequenceSampling(SamplingParams()), SequenceSampling(SamplingParams(logit_bias={token: 1.0}))], 7, device
        )


def test_bias_on_last_token_is_accepted(device: torch.device) -> None:
    assert choose_alone(make_row(SamplingParams(logit_bias={2: 5.0}), [0.0, 1.0, -1.0]), device).token_ids.tolist() == [
        2
    ]


# --- Sizes


def test_empty_batch_returns_empty_tensors(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    sampler = Sampler([], 7, device)
    result = sampler(torch.empty(0, 7, device=device), History(none, none))
    assert (result.token_ids.shape, result.logprobs.shape, result.alternatives) == ((0,), (0,), None)
    assert not sampler.needs_tokens


@pytest.mark.parametrize("params", [*PARAMETER_SETS[:-1], SamplingParams(True, 0.7, 9, 0.9, 0.01, 0.9, watermark=True)])
def test_single_token_vocabulary_has_logprob_zero(params: SamplingParams, device: torch.device) -> None:
    result = choose([make_row(params, [-3.0], 0, 0)] * 2, device)
    assert result.token_ids.tolist() == [0, 0]
    assert result.logprobs.tolist() == [0.0, 0.0]


def test_large_batch_matches_single_rows(device: torch.device) -> None:
    logits = torch.randn(512, 257, generator=torch.Generator().manual_seed(0))
    rows = [Row(VARIED[i % len(VARIED)], (1, i % 257), 1, row) for i, row in enumerate(logits)]
    result = choose(rows, device)
    for row in range(0, 512, 37):
        assert of_row(result, row) == of_row(choose_alone(rows[row], device), 0)


def test_needs_tokens_only_for_penalties_and_watermark(device: torch.device) -> None:
    for params in (
        SamplingParams(watermark=True),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(presence_penalty=-0.1),
    ):
        assert Sampler([SequenceSampling(SamplingParams()), SequenceSampling(params)], 7, device).needs_tokens
    free = SamplingParams(True, 0.7, 3, 0.9, 0.1, 0.9, logit_bias={1: 2.0}, num_alternatives=2, raw_logprobs=True)
    sampler = Sampler([SequenceSampling(free, 3, frozenset({1}))], 7, device)
    length = torch.tensor([3], device=device)
    assert not sampler.needs_tokens
    assert len(sampler(torch.zeros(1, 7, device=device), History(length, length)).token_ids) == 1


# --- GPU


@pytest.mark.gpu
def test_sampler_does_not_synchronize_with_gpu() -> None:
    rows, vocab = 8, 5003
    sequence_sampling = [
        SequenceSampling(SamplingParams(**{**vars(EVERYTHING), "watermark": True}), 5, frozenset({1, 2}))
    ] * (rows - 1)
    sampler = Sampler([*sequence_sampling, SequenceSampling(SamplingParams())], vocab, "cuda")
    ids = torch.zeros(rows, 6, dtype=torch.int64, device="cuda")
    lengths = torch.full((rows,), 5, device="cuda")
    history = History(lengths, lengths - 2, ids)
    logits = torch.randn(rows, vocab, device="cuda")
    sampler(logits, history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this mode does not detect all synchronizations
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler(logits, history)
        finally:
            torch.cuda.set_sync_debug_mode("default")
