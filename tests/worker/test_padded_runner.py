"""Padded models driven by plans: each sequence matches transformers, independent of the batch."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.models.causal_lm import CausalLM
from lorax_server.models.registry import DEFAULT_MAX_POSITIONS
from lorax_server.plan import DropOp, NewSequence, StepMasks, StepPlan, StepResult
from lorax_server.sampling.sampler import History, Sampler, SequenceSampling
from lorax_server.types import Alternatives, SamplingParams, StopParams
from lorax_server.worker.padded_runner import MaskedPlan, PaddedRunner, build_padded_runner, padded_capabilities
from tests.grids import slow_except
from tests.models.driving import generate
from tests.models.tiny import EOS_ID, VOCAB, Pair, Zoo

# ALiBi, learned positions with a sliding window, RoPE, and a mixture of experts.
NAMES = ["bloom", "gpt-neo-window", "gpt-j", "mixtral"]
PROMPT, SHORT = (5, 9, 20, 33, 41), (7, 8)
TOLERANCE = 1e-4
ROUNDING = 1e-6
MAX_POSITIONS = 128
GREEDY, EIGHT = SamplingParams(), StopParams(max_new_tokens=8)
SAMPLED = SamplingParams(do_sample=True, temperature=1.3, top_p=0.95)
STYLES = [
    SamplingParams(),
    SamplingParams(do_sample=True),
    SAMPLED,
    SamplingParams(do_sample=True, temperature=2.0, top_k=20, repetition_penalty=1.4),
    SamplingParams(do_sample=True, typical_p=0.8, min_p=0.01, frequency_penalty=0.7, presence_penalty=0.3),
    SamplingParams(repetition_penalty=1.5, num_alternatives=3),
    SamplingParams(frequency_penalty=2.0, logit_bias={9: 4.0}),
    SamplingParams(do_sample=True, watermark=True, raw_logprobs=True, num_alternatives=5),
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module", params=slow_except(["gpt-neo-window"], NAMES))
def pair(request: pytest.FixtureRequest, zoo: Zoo) -> Pair:
    return zoo.pair(request.param)


@pytest.mark.parametrize(("name", "relatives"), [("llama4-chunks", "llama"), ("gpt-neo-window", "gpt2, gpt_bigcode")])
def test_log_names_missing_features_and_similar_types(
    name: str, relatives: str, zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    build_padded_runner(EngineConfig(ModelConfig(zoo.folder(name), device=device)))
    (record,) = (record for record in caplog.records if "padded batches" in record.getMessage())
    assert record.levelname == "WARNING"
    assert "runs in padded batches, without adapters and tensor parallelism" in record.getMessage()
    assert f"similar types with full support: {relatives}" in record.getMessage()


@pytest.fixture(scope="module")
def lm(zoo: Zoo) -> CausalLM:
    return zoo.served("gpt-j")


@pytest.fixture(scope="module")
def oracle(zoo: Zoo) -> Any:
    return zoo.pair("gpt-j").oracle


# --- Fake engine ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RequestState:
    """A request and its output. `token_ids` includes tokens generated before a preemption."""

    prompt: Sequence[int] = PROMPT
    sampling: SamplingParams = GREEDY
    stop: StopParams = EIGHT
    scores_prompt: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives | None] = field(default_factory=list)
    prompt_logprobs: list[list[float]] = field(default_factory=list)
    prompt_alternatives: list[list[Alternatives] | None] = field(default_factory=list)

    @property
    def all_ids(self) -> list[int]:
        return [*self.prompt, *self.token_ids]

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) == self.stop.max_new_tokens


class Engine:
    """A fake engine that reuses the most recently freed slot and orders plans randomly."""

    def __init__(self, lm: CausalLM, seed: int = 0) -> None:
        self.runner = PaddedRunner(lm)
        self.rng = random.Random(seed)
        self.running: dict[int, RequestState] = {}
        self.num_steps = 0

    def leave(self, *sequences: RequestState) -> None:
        self.running = {slot: each for slot, each in self.running.items() if each not in sequences}

    def step(self, *joining: RequestState) -> StepResult:
        slots = dict(zip(self._free_slots(len(joining)), joining, strict=True))
        order = [*self.running.items(), *slots.items()]
        self.rng.shuffle(order)
        new_sequences = [
            NewSequence(slot, each.all_ids, len(each.prompt), each.sampling, each.stop) for slot, each in slots.items()
        ]
        counts = [len(each.all_ids) if slot in slots else 1 for slot, each in order]
        plan = make_plan(
            self.num_steps,
            [slot for slot, _ in order],
            [len(each.all_ids) - count for (_, each), count in zip(order, counts, strict=True)],
            counts,
            new_sequences,
            [each.scores_prompt and slot in slots for slot, each in order],
        )
        self.num_steps += 1
        result = self.runner.collect(self.runner.submit(plan))
        self.running |= slots
        self._record_result(plan, result)
        self.leave(*[each for each in self.running.values() if each.is_full])
        return result

    def finish(self, *joining: RequestState) -> None:
        self.step(*joining)
        while self.running:
            self.step()

    def _free_slots(self, count: int) -> list[int]:
        return [slot for slot in range(len(self.running) + count) if slot not in self.running][:count]

    def _record_result(self, plan: StepPlan, result: StepResult) -> None:
        assert result.step == plan.step
        assert set(result.alternatives) <= set(range(len(plan.slots)))
        of_prompts = iter(enumerate(result.prompt_logprobs))
        columns = zip(plan.slots.tolist(), plan.scores_prompt.tolist(), result.token_ids, result.logprobs, strict=True)
        for place, (slot, scores_prompt, token_id, logprob) in enumerate(columns):
            sequence = self.running[slot]
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
            sequence.alternatives.append(result.alternatives.get(place))
            if scores_prompt:
                prompt_index, logprobs = next(of_prompts)
                sequence.prompt_logprobs.append(logprobs)
                sequence.prompt_alternatives.append(result.prompt_alternatives.get(prompt_index))
        assert next(of_prompts, None) is None


def make_plan(
    step: int,
    slots: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    new_sequences: Sequence[NewSequence] = (),
    scores_prompt: Sequence[bool] | None = None,
) -> StepPlan:
    return StepPlan(
        step=step,
        slots=np.array(slots, dtype=np.int64),
        starts=np.array(starts, dtype=np.int64),
        counts=np.array(counts, dtype=np.int64),
        samples=np.ones(len(slots), dtype=np.bool_),
        scores_prompt=np.array([False] * len(slots) if scores_prompt is None else scores_prompt, dtype=np.bool_),
        adapter_indices=np.zeros(len(slots), dtype=np.int64),
        new_sequences=tuple(new_sequences),
        new_blocks=np.zeros((0, 3), dtype=np.int64),
    )


def alone(lm: CausalLM, sequence: RequestState) -> RequestState:
    """Run the same request in a batch of one."""
    again = RequestState(sequence.prompt, sequence.sampling, sequence.stop, sequence.scores_prompt)
    Engine(lm).finish(again)
    return again


# --- Comparison with transformers -------------------------------------------------------------------------------------


@torch.no_grad()
def check(oracle: Any, sequence: RequestState) -> None:
    """Compare every token, logprob and alternative with transformers, run on the sequence alone without a cache."""
    ids, num_prompt, num_new = sequence.all_ids, len(sequence.prompt), len(sequence.logprobs)
    logits = oracle(torch.tensor([ids], device=oracle.device)).logits[0].cpu()
    lengths = torch.arange(len(ids) - num_new, len(ids))
    sampler = Sampler([SequenceSampling.from_params(sequence.sampling, sequence.stop)] * num_new, logits.shape[-1])
    history = History(lengths, torch.full_like(lengths, num_prompt), torch.tensor([ids]).expand(num_new, -1))
    expected = sampler(logits[lengths - 1], history)
    assert ids[len(ids) - num_new :] == expected.token_ids.tolist()
    actual, wanted = torch.tensor(sequence.logprobs), expected.logprobs
    if not torch.allclose(actual, wanted, rtol=0, atol=TOLERANCE):
        # Rounding decides whether a token at the top-p limit is included, which changes all probabilities.
        near = [logits + ROUNDING * torch.randn_like(logits) for _ in range(8)]
        choices = torch.stack([sampler(each[lengths - 1], history).logprobs for each in near])
        wanted = choices.gather(0, (choices - actual).abs().argmin(0, keepdim=True))[0]
    assert sequence.logprobs == pytest.approx(wanted.tolist(), abs=TOLERANCE)
    listed = expected.alternatives.by_row() if expected.alternatives else {}
    for place, ours in enumerate(sequence.alternatives):
        theirs = listed.get(place)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
    for logprobs, tops in zip(sequence.prompt_logprobs, sequence.prompt_alternatives, strict=True):
        check_prompt(logits, sequence, logprobs, tops)


def check_prompt(
    logits: torch.Tensor, sequence: RequestState, found: list[float], tops: list[Alternatives] | None
) -> None:
    logprobs, count = logits.log_softmax(-1), sequence.sampling.num_alternatives
    expected = [float(logprobs[place, token_id]) for place, token_id in enumerate(sequence.prompt[1:])]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert (tops is None) == (count == 0)
    for place, top in enumerate(tops or ()):
        assert top.logprobs == pytest.approx(logprobs[place].topk(count).values.tolist(), abs=TOLERANCE)
        assert top.logprobs == pytest.approx(logprobs[place, top.token_ids].tolist(), abs=TOLERANCE)
    assert tops is None or len(tops) == len(found)


# --- Concurrent sequences ---------------------------------------------------------------------------------------------


def random_sequence(rng: random.Random) -> RequestState:
    max_new_tokens = rng.choice([1, 2, 5, 9, 16])
    return RequestState(
        prompt=rng.choices(range(2, VOCAB), k=rng.choice([1, 1, 2, 4, 7, 19, 30])),
        sampling=replace(rng.choice(STYLES), seed=rng.randrange(2**64)),
        stop=StopParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=rng.randrange(max_new_tokens + 1),
            eos_token_ids=frozenset(rng.choices(range(VOCAB), k=100)),
            stop_strings=("e",),
        ),
        scores_prompt=rng.random() < 0.3,
    )


def run_random_sequences(lm: CausalLM, seed: int, steps: int = 50) -> list[RequestState]:
    """Run sequences that join and leave randomly. Some are preempted and resume with their tokens."""
    engine, rng = Engine(lm, seed), random.Random(seed)
    everyone: list[RequestState] = []
    paused: list[RequestState] = []
    for _ in range(steps):
        running = list(engine.running.values())
        leaving = [each for each in running if rng.random() < 0.1]
        if rng.random() < 0.05:
            leaving = running
        engine.leave(*leaving)
        back = [each for each in paused if rng.random() < 0.3]
        joining = [random_sequence(rng) for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 4]))]
        paused = [each for each in paused if each not in back] + [each for each in leaving if rng.random() < 0.5]
        everyone += joining
        resumed = [
            RequestState(each.prompt, each.sampling, each.stop, each.scores_prompt, list(each.token_ids))
            for each in back
        ]
        everyone += resumed
        engine.step(*joining, *resumed)
    while engine.running:
        engine.step()
    return everyone


@pytest.mark.parametrize("seed", slow_except([0], range(3)))
def test_batched_sequences_match_transformers(pair: Pair, seed: int) -> None:
    everyone = run_random_sequences(pair.served, seed)
    for sequence in everyone:
        check(pair.oracle, sequence)
    assert sum(len(each.logprobs) for each in everyone) > 100
    assert any(len(each.logprobs) < len(each.token_ids) for each in everyone), "none came again"
    assert any(each.prompt_logprobs for each in everyone)


def test_greedy_tokens_match_generate(pair: Pair) -> None:
    engine, stop = Engine(pair.served), StopParams(max_new_tokens=12)
    first, long, short = (
        RequestState(PROMPT, stop=stop),
        RequestState(range(40, 64), stop=stop),
        RequestState(SHORT, stop=stop),
    )
    engine.step(first)
    engine.step(long)
    engine.step()
    engine.leave(long)
    engine.finish(short)
    compared = 0
    for sequence in (first, long, short):
        expected = generate(pair.oracle, sequence.prompt, len(sequence.token_ids))
        assert sequence.token_ids[: len(expected)] == expected
        compared += len(expected)
    assert compared > 20


def test_sampling_depends_only_on_seed(lm: CausalLM) -> None:
    """Run many sequences with the same prompt that join the batch at different times."""
    sequences = [RequestState(PROMPT, replace(SAMPLED, seed=seed)) for seed in (*range(30), 2**63, 2**64 - 1)]
    engine = Engine(lm)
    for begin in range(0, len(sequences), 5):
        engine.step(*sequences[begin : begin + 5])
    engine.finish()
    for sequence in sequences:
        by_itself = alone(lm, sequence)
        assert sequence.token_ids == by_itself.token_ids
        assert sequence.logprobs == pytest.approx(by_itself.logprobs, abs=TOLERANCE)
    assert len({tuple(each.token_ids) for each in sequences}) > 25


@pytest.mark.parametrize("style", range(len(STYLES)))
def test_preempted_sequence_continues_with_same_tokens(lm: CausalLM, style: int) -> None:
    whole = RequestState(PROMPT, replace(STYLES[style], seed=11), StopParams(max_new_tokens=10, min_new_tokens=4))
    whole = alone(lm, whole)
    for cut in range(1, 10):
        again = RequestState(PROMPT, whole.sampling, whole.stop, scores_prompt=True, token_ids=whole.token_ids[:cut])
        Engine(lm).finish(again, RequestState(SHORT, SAMPLED))
        assert again.token_ids == whole.token_ids
        assert len(again.prompt_logprobs[0]) == len(PROMPT) - 1


def test_slot_is_reusable_in_next_step(lm: CausalLM, oracle: Any) -> None:
    engine = Engine(lm)
    old, stays = RequestState(PROMPT), RequestState(SHORT)
    engine.step(old, stays)
    [slot] = [slot for slot, each in engine.running.items() if each is old]
    engine.leave(old)
    new = RequestState((90, 91, 92))
    engine.step(new)
    assert engine.running[slot] is new
    engine.finish()
    for sequence in (old, stays, new):
        check(oracle, sequence)


def test_masked_rows_sample_allowed_tokens(lm: CausalLM) -> None:
    prompts = PROMPT, SHORT, (90, 91, 92)
    plan = make_plan(
        0, [2, 0, 1], [0] * 3, [len(prompt) for prompt in prompts], list(map(new_sequence, (2, 0, 1), prompts))
    )
    plain = PaddedRunner(lm)
    free = plain.collect(plain.submit(plan)).token_ids
    runner = PaddedRunner(lm)
    ticket = runner.submit(replace(plan, is_masked=True))
    assert isinstance(ticket, MaskedPlan)
    words = np.zeros((2, -(-lm.vocab_size // 32)), np.int32)
    words[0, 1] = 1 << 5  # token 37 alone
    words[1] = -1
    words[1, free[0] // 32] &= ~(1 << free[0] % 32)  # all tokens except the unmasked choice
    result = runner.collect(runner.mask(ticket, StepMasks(np.array([2, 0]), [*words])))
    other, chosen, forced = result.token_ids
    assert forced == 37
    assert result.logprobs[2] == 0
    assert chosen == free[1]
    assert other != free[0]


def test_all_sequences_finish_while_others_start(lm: CausalLM, oracle: Any) -> None:
    engine = Engine(lm)
    engine.step(RequestState(PROMPT), RequestState(SHORT))
    engine.leave(*engine.running.values())
    nothing = engine.step()
    assert (nothing.token_ids, nothing.logprobs, nothing.prompt_logprobs) == ([], [], [])
    later = RequestState((90, 91, 92), scores_prompt=True)
    engine.finish(later)
    check(oracle, later)


def test_step_runs_one_decode_and_one_prefill_forward(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    forward = lm.forward

    def counted(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(lm, "forward", counted)
    engine = Engine(lm)
    engine.step(RequestState(PROMPT), RequestState(SHORT))
    engine.step()
    engine.step(RequestState((9,) * 7), RequestState(SHORT), RequestState((4,)))
    engine.step()
    assert shapes == [(2, 5), (2, 1), (2, 1), (3, 7), (5, 1)]


# --- Logprobs and alternatives ----------------------------------------------------------------------------------------


def test_alternatives_are_returned_only_on_request(lm: CausalLM, oracle: Any) -> None:
    """Request alternatives while sequences join, together with other sequences, in plans of any order."""
    counts = [0, 3, 0, 1, 400]  # the last request exceeds the vocabulary
    for seed in range(5):
        engine = Engine(lm, seed)
        sequences = [
            RequestState((*PROMPT, i), SamplingParams(num_alternatives=count))
            for i, count in enumerate(counts, start=50)
        ]
        engine.step(*sequences[3:])
        engine.step(*sequences[:3])
        engine.finish()
        for count, sequence in zip(counts, sequences, strict=True):
            check(oracle, sequence)
            result = [len(each.token_ids) for each in sequence.alternatives if each is not None]
            assert result == ([min(count, VOCAB)] * 8 if count else [])


def test_prompt_logprobs_match_transformers(pair: Pair) -> None:
    """Prompt logprobs use the model's logits, independent of sampling parameters."""
    engine = Engine(pair.served)
    engine.step(RequestState(SHORT))
    wild = SamplingParams(do_sample=True, temperature=3.0, repetition_penalty=2.0, logit_bias={9: 50.0})
    prompts = [PROMPT, SHORT, (8,), range(30, 60)]
    scored_sequences = [
        RequestState(prompt, replace(wild, num_alternatives=n), scores_prompt=True) for n, prompt in enumerate(prompts)
    ]
    engine.finish(*scored_sequences, RequestState((44,) * 35))
    for sequence in scored_sequences:
        [result] = sequence.prompt_logprobs
        assert len(result) == len(sequence.prompt) - 1
        check(pair.oracle, sequence)


def test_running_sequence_reports_no_prompt_logprobs(lm: CausalLM) -> None:
    runner = PaddedRunner(lm)
    new = NewSequence(3, list(PROMPT), len(PROMPT), SamplingParams(), StopParams())
    runner.submit(make_plan(0, [3], [0], [5], [new], scores_prompt=[True]))
    assert runner.collect(runner.submit(make_plan(1, [3], [5], [1], scores_prompt=[True]))).prompt_logprobs == [[]]


# --- Stop conditions, which the engine handles ------------------------------------------------------------------------


def test_runner_ignores_eos_and_stop_strings(lm: CausalLM) -> None:
    stop = StopParams(max_new_tokens=6, eos_token_ids=frozenset([EOS_ID]), stop_strings=("<", "e"))
    sequence = alone(lm, RequestState(PROMPT, SamplingParams(logit_bias={EOS_ID: 1e4}), stop))
    assert sequence.token_ids == [EOS_ID] * 6


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_stop_tokens_are_forbidden_before_min_new_tokens(lm: CausalLM, num_before: int) -> None:
    """Cover resumed sequences that have generated part of `min_new_tokens`."""
    stop = StopParams(
        max_new_tokens=6, min_new_tokens=3, eos_token_ids=frozenset([EOS_ID]), stop_token_ids=frozenset([7])
    )
    bias = SamplingParams(logit_bias={EOS_ID: 1e4, 7: 9e3, 8: 5e3})
    sequence = RequestState(PROMPT, bias, stop, token_ids=[8] * num_before)
    Engine(lm).finish(sequence, RequestState(SHORT))
    assert sequence.token_ids == [8, 8, 8, EOS_ID, EOS_ID, EOS_ID]


def test_sequence_can_use_all_model_positions(zoo: Zoo) -> None:
    """Another sequence joins later and runs longer."""
    pair = zoo.pair("gpt-neo-window")
    engine, rng = Engine(pair.served), random.Random(5)
    full = RequestState(rng.choices(range(2, VOCAB), k=MAX_POSITIONS - 6), stop=StopParams(max_new_tokens=6))
    later = RequestState(SHORT, SAMPLED, StopParams(max_new_tokens=MAX_POSITIONS - len(SHORT)))
    engine.step(full)
    engine.finish(later)
    for sequence in (full, later):
        assert len(sequence.all_ids) == MAX_POSITIONS
        check(pair.oracle, sequence)


# --- NaN logits -------------------------------------------------------------------------------------------------------

NAN_TOKEN = VOCAB - 1


@pytest.fixture
def poisoned(lm: CausalLM) -> Iterator[CausalLM]:
    """Return a token with a NaN embedding, which makes the following keys and values NaN."""
    model: Any = lm.model
    weight = model.get_input_embeddings().weight
    kept = weight[NAN_TOKEN].detach().clone()
    with torch.no_grad():
        weight[NAN_TOKEN] = math.nan
    yield lm
    with torch.no_grad():
        weight[NAN_TOKEN] = kept


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, STYLES[5]])
def test_nan_logits_are_reported_and_isolated(poisoned: CausalLM, oracle: Any, sampling: SamplingParams) -> None:
    engine = Engine(poisoned)
    others = [RequestState(PROMPT, scores_prompt=True), RequestState(SHORT, SAMPLED), RequestState((90,) * 12)]
    bad = RequestState((9, 9, NAN_TOKEN, 9), sampling, scores_prompt=True)
    engine.step(others[0])
    engine.step(bad, others[1])
    engine.step()
    assert all(map(math.isnan, bad.logprobs))
    assert len(bad.logprobs) == 2
    assert all(0 <= token_id < VOCAB for token_id in bad.token_ids)
    assert math.isnan(bad.prompt_logprobs[0][-1])
    engine.leave(bad)
    engine.finish(others[2])
    for sequence in others:
        check(oracle, sequence)


# --- Invalid plans ----------------------------------------------------------------------------------------------------


def new_sequence(slot: int, prompt: Sequence[int] = PROMPT) -> NewSequence:
    return NewSequence(slot, list(prompt), len(prompt), SamplingParams(), StopParams())


def test_sequence_missing_from_a_step_fails(lm: CausalLM) -> None:
    runner = PaddedRunner(lm)
    runner.submit(make_plan(0, [0, 1], [0, 0], [5, 5], [new_sequence(0), new_sequence(1)]))
    runner.submit(make_plan(1, [0], [5], [1]))
    with pytest.raises(AssertionError, match="slot 1 was missing from a step"):
        runner.submit(make_plan(2, [0, 1], [6, 5], [1, 1]))


BEGIN = make_plan(1, [0], [0], [5], [new_sequence(0)])
IMPOSSIBLE = {
    "part of a prompt": (make_plan(1, [0], [0], [3], [new_sequence(0)]), "expected .start, count"),
    "a prompt that is there": (make_plan(1, [0], [2], [3], [new_sequence(0)]), "expected .start, count"),
    "two tokens": (make_plan(1, [0], [4], [2]), "expected .start, count"),
    "nobody's slot": (make_plan(1, [0], [4], [1]), "slot 0 was missing from a step"),
    "a slot without a part": (make_plan(1, [], [], [], [new_sequence(0)]), "are missing from the step"),
    "no token": (replace(BEGIN, samples=np.array([False])), "chunked prefill"),
    "an adapter": (replace(BEGIN, adapter_indices=np.array([1])), "do not support adapters"),
    "an operation": (replace(BEGIN, adapter_ops=(DropOp("x"),)), "do not support adapters"),
}


@pytest.mark.parametrize("name", list(IMPOSSIBLE))
def test_invalid_plans_fail_assertions(lm: CausalLM, name: str) -> None:
    plan, message = IMPOSSIBLE[name]
    with pytest.raises(AssertionError, match=message):
        PaddedRunner(lm).submit(plan)


# --- Capabilities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("requested", "expected"), [(None, 128), (100, 100), (500, 128)])
def test_padded_models_have_limited_capabilities(lm: CausalLM, requested: int | None, expected: int) -> None:
    actual = padded_capabilities(lm, max_num_seqs=5, max_length=requested)
    assert (actual.vocab_size, actual.max_num_seqs, actual.max_length) == (VOCAB, 5, expected)
    assert (actual.max_steps_in_flight, actual.can_chunk, actual.can_reuse, actual.num_adapter_units) == (
        1,
        False,
        False,
        0,
    )
    assert (actual.model_type, actual.model_class) == ("gptj", "GPTJForCausalLM")
    assert actual.max_step_tokens == expected + 5
    assert actual.num_blocks == 5 * math.ceil(expected / actual.block_size)


def test_model_without_position_limit_gets_default(zoo: Zoo) -> None:
    assert padded_capabilities(zoo.served("bloom"), 1, None).max_length == DEFAULT_MAX_POSITIONS
