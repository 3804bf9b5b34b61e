"""Tests that constrained completions of tiny random models match their grammar."""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lorax_server.engine import engine
from lorax_server.errors import InputError
from lorax_server.generation.generation import Completion
from lorax_server.llm import LLM
from lorax_server.structured_output.grammars import from_choices, from_grammar, from_json_schema, from_regex
from lorax_server.types import FinishReason, SamplingParams, StopParams, Structure
from tests.demo.server import FOLDER, read_examples
from tests.models.tiny import SERVED, make_model, make_tokenizer, save
from tests.structured_output.schemas import PERSON, SCHEMAS
from tests.test_llm import SMALL, ReferenceModels, write_adapter

Completions = list[Completion]
LONG = StopParams(max_new_tokens=100)
SETTINGS: dict[str, Any] = SMALL | {"max_num_seqs": 8, "cache_bytes": 2**20, "max_step_tokens": 64}
WORDS = from_regex("([a-z]{1,8} ){2,6}end")
STRUCTURES: dict[str, Structure] = {
    "json": from_json_schema(PERSON),
    "regex": from_regex(r"[a-c]{3,5}-\d{1,3}"),
    "choice": from_choices(["yes", "no", "perhaps, or 日本語"]),
    "lark": from_grammar('start: "x" y\ny: "1" | "2" z\nz: /[a-z]/'),
    "gbnf": from_grammar('root ::= "on" | "off" tail\ntail ::= [0-9] | "!"'),
}
PATTERNS = {
    "regex": r"[a-c]{3,5}-[0-9]{1,3}",
    "choice": "yes|no|perhaps, or 日本語",
    "lark": "x(1|2[a-z])",
    "gbnf": "on|off([0-9]|!)",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModels:
    return ReferenceModels(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def llm(world: ReferenceModels) -> Iterator[LLM]:
    with LLM(world.model, world.adapters, **SETTINGS) as made:
        yield made


def sampled_params(count: int, first: int = 0) -> list[SamplingParams]:
    return [SamplingParams(do_sample=True, seed=first + seed) for seed in range(count)]


def check(completion: Completion, schema: dict[str, Any]) -> None:
    assert completion.finish_reason is FinishReason.EOS_TOKEN, completion.text
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    # Grammars allow a leap second in every minute (see docs/structured-output.md), but jsonschema rejects it.
    instance = json.loads(re.sub(r"(T|\")(\d\d:\d\d):60", r"\1\2:59", completion.text))
    jsonschema.validate(instance, schema, jsonschema.Draft202012Validator, format_checker=checker)


@pytest.mark.parametrize("name", STRUCTURES)
def test_completion_matches_each_format(name: str, llm: LLM) -> None:
    for completion in llm.generate(["the quick"] * 8, sampled_params(8), LONG, structure=STRUCTURES[name]):
        if name == "json":
            check(completion, PERSON)
        else:
            assert completion.finish_reason is FinishReason.EOS_TOKEN
            assert re.fullmatch(PATTERNS[name], completion.text)


def check_schemas(llm: LLM, count: int) -> int:
    """Check `count` completions for each schema. Return how many finished before the length limit."""
    names = [name for name in SCHEMAS for _ in range(count)]
    structures = [from_json_schema(SCHEMAS[name]) for name in names]
    completions = llm.generate(["the lazy dog"] * len(names), sampled_params(len(names)), LONG, structure=structures)
    ended = 0
    for name, completion in zip(names, completions, strict=True):
        if completion.finish_reason is FinishReason.EOS_TOKEN:
            ended += 1
            check(completion, SCHEMAS[name])
    return ended


@pytest.mark.slow
def test_completions_match_many_schemas(llm: LLM) -> None:
    assert check_schemas(llm, 1) > 0.8 * len(SCHEMAS)


@pytest.mark.slow
def test_thousand_completions_match_their_schemas(llm: LLM) -> None:
    assert check_schemas(llm, 24) >= 1000


def test_unconstrained_sequences_are_unchanged_in_mixed_batch(llm: LLM) -> None:
    prompts, params = ["the quick brown fox"] * 4, [SamplingParams(), SamplingParams(), *sampled_params(2)]
    alone = llm.generate(prompts[::2], params[::2], LONG)
    mixed = llm.generate(prompts, params, LONG, structure=[None, STRUCTURES["json"]] * 2)
    for one, other in zip(alone, mixed[::2], strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_matching_greedy_completion_is_unchanged(llm: LLM) -> None:
    stop = StopParams(max_new_tokens=8)
    for prompt in ("the quick brown fox", "hello", "and the world"):
        (plain,) = llm.generate(prompt, stop=stop)
        if "\ufffd" in plain.text:
            continue
        params = [SamplingParams(), SamplingParams(raw_logprobs=True)]
        completion, raw = llm.generate([prompt] * 2, params, stop, structure=from_choices([plain.text, "other"]))
        assert completion.token_ids == raw.token_ids == plain.token_ids
        # By default, log probabilities are computed after the mask. Raw log probabilities are not masked.
        assert raw.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert all(masked >= own - 1e-4 for masked, own in zip(completion.logprobs, plain.logprobs, strict=True))


def test_adapter_completions_match_schema(llm: LLM, world: ReferenceModels) -> None:
    names = [*world.adapters, None]
    completions = llm.generate(["hello"] * 4, sampled_params(4), LONG, adapter=names, structure=STRUCTURES["json"])
    for completion in completions:
        check(completion, PERSON)


def test_adapter_with_larger_vocabulary_matches_schema(world: ReferenceModels, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(['{"name":', "ADDED"] + [f"<added-{i}>" for i in range(25)])
    base = make_model(SERVED["llama"]())
    base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    folder = write_adapter(base, tmp_path / "larger", 3, modules_to_save=["embed_tokens", "lm_head"])
    tokenizer.save_pretrained(folder)
    added = len(make_tokenizer())
    assert tokenizer.convert_tokens_to_ids('{"name":') == added
    structure = from_json_schema(PERSON)
    with LLM(world.model, {"larger": folder}, **SETTINGS) as llm:
        params = SamplingParams(logit_bias={added: 50.0})
        sampled, biased, plain = llm.generate(
            ["hello"] * 3,
            [*sampled_params(1), params, *sampled_params(1)],
            LONG,
            adapter=["larger", "larger", None],
            structure=structure,
        )
    for completion in (sampled, biased, plain):
        check(completion, PERSON)
    assert biased.token_ids[0] == added  # the mask includes tokens that only the adapter has


def test_stop_string_or_length_can_finish_before_full_match(llm: LLM) -> None:
    stops = [StopParams(max_new_tokens=100, stop_strings=(" ",)), StopParams(max_new_tokens=3)]
    stopped, short = llm.generate(["the"] * 2, sampled_params(2), stops, structure=WORDS)
    assert stopped.finish_reason is FinishReason.STOP_SEQUENCE
    assert re.fullmatch("[a-z]{1,8} ", stopped.text)
    assert short.finish_reason is FinishReason.LENGTH
    assert len(short.token_ids) == 3


def test_min_new_tokens_applies_while_grammar_can_continue(llm: LLM) -> None:
    stop = StopParams(max_new_tokens=100, min_new_tokens=12)
    letters, choice = from_regex("[a-z]{1,40}"), from_choices(["yes"])
    completions = llm.generate(["the"] * 6, sampled_params(6), stop, structure=[letters, choice] * 3)
    for long, short in zip(completions[::2], completions[1::2], strict=True):
        assert len(long.token_ids) >= 12
        assert short.text == "yes"
        assert short.finish_reason is FinishReason.EOS_TOKEN


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (from_json_schema({"not": {}}), 'Unimplemented keys: \\["not"\\]'),
        (from_regex("(?=a)b"), "look-around"),
        (from_grammar("start: nothing"), 'unknown name: "nothing"'),
        (from_json_schema({"$ref": "#"}), "no text matches"),
        (from_json_schema(False), "not"),
    ],
)
def test_unsupported_grammar_is_rejected(structure: Structure, message: str, llm: LLM) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate("the", stop=LONG, structure=structure)


def test_gbnf_is_detected_and_reserved_rule_name_is_rejected() -> None:
    for text in ('start ::= "a"', 'root ::= start\n  start ::= "a"'):
        with pytest.raises(InputError, match="may not be named `start`"):
            from_grammar(text)
    for lark in ('start: "a ::= b"', '// c ::= d\nstart : "a"', '%llguidance {}\nstart: "::="'):
        assert from_grammar(lark).grammar == lark
    assert "st_start" in from_grammar('root ::= st-start [a-z]\nst-start ::= "start:" root').grammar.lower()


def test_ignore_eos_with_grammar_is_rejected(llm: LLM) -> None:
    with pytest.raises(InputError, match="ignore_eos"):
        llm.generate("the", stop=StopParams(max_new_tokens=9, ignore_eos=True), structure=STRUCTURES["json"])


# --- Steps and forced tokens ------------------------------------------------------------------------------------------

PROMPTS = ["the quick brown fox", "hello hello hello hello hello hello there", "and", "the world saw them there; and"]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    completions = llm.generate(PROMPTS * 2, sampled_params(8), LONG, structure=[WORDS, STRUCTURES["json"]] * 4)
    return [completion.token_ids for completion in completions]


def generate_all(llm: LLM) -> list[list[int]]:
    completions = llm.generate(PROMPTS * 2, sampled_params(8), LONG, structure=[WORDS, STRUCTURES["json"]] * 4)
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_step_tokens": 8, "max_num_seqs": 8}, id="prompts in parts"),
        pytest.param({"max_steps_in_flight": 2}, id="two steps at once"),
        pytest.param({"max_steps_in_flight": 3}, id="three steps at once"),
        pytest.param({"cache_bytes": 3 * 2**14}, id="preempted"),
    ],
)
def test_completions_do_not_depend_on_step_settings(
    settings: dict[str, Any], world: ReferenceModels, expected: list[list[int]]
) -> None:
    with LLM(world.model, **SETTINGS | settings) as other:
        for _ in range(2):  # in the second round all grammars are cached
            assert generate_all(other) == expected
        assert other.status.preemptions > 0 or "cache_bytes" not in settings
        assert other.status.chunks > 0 or "max_step_tokens" not in settings


KEYS = ("the_first_name_of_the_person", "the_last_name_of_the_person", "and_the_year")
RECORD = from_json_schema(
    {"type": "object", "required": list(KEYS), "additionalProperties": False}
    | {"properties": {key: {"type": "integer", "minimum": 0, "maximum": 99} for key in KEYS}}
)


@pytest.fixture
def wait_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for late masks, so that the number of steps does not depend on machine load."""
    for name in ("MASK_WAIT_S", "BLOCKED_MASK_WAIT_S"):
        monkeypatch.setattr(engine, name, 60.0)


@contextmanager
def fast_forward_disabled(llm: LLM) -> Iterator[None]:
    """Disable fast-forward, so that each token takes one step."""
    structures = llm._engine._structured_output
    assert structures is not None
    structures.max_fast_forward = 0
    try:
        yield
    finally:
        structures.max_fast_forward = math.inf


def count_steps(llm: LLM, generate: Callable[[], Completions]) -> tuple[Completions, int]:
    before = llm.status.steps
    return generate(), llm.status.steps - before


def check_same(fast_forwarded: Completions, stepped: Completions) -> None:
    for one, other in zip(fast_forwarded, stepped, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)  # rounding depends on the batch length
        for alternatives, others in zip(one.alternatives, other.alternatives, strict=True):
            assert alternatives.token_ids == others.token_ids
        assert replace(one, logprobs=[], alternatives=[]) == replace(other, logprobs=[], alternatives=[])


FAST_FORWARD_STOPS = [
    *(StopParams(max_new_tokens=count) for count in (1, 3, 7, 12, 30)),
    StopParams(max_new_tokens=100, min_new_tokens=70),
    StopParams(max_new_tokens=100, stop_strings=("_name_of",)),
    StopParams(max_new_tokens=100, stop_token_ids=frozenset([make_tokenizer().get_vocab()["_"]])),
]


@pytest.mark.usefixtures("wait_for_masks")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_step_tokens": 8}, id="prompts in parts"),
        pytest.param({"max_steps_in_flight": 2}, id="two steps at once"),
        pytest.param({"max_steps_in_flight": 3, "max_num_seqs": 3}, id="three steps at once"),
        pytest.param({"cache_bytes": 3 * 2**14}, id="preempted"),
    ],
)
def test_fast_forward_gives_same_completions_in_fewer_steps(settings: dict[str, Any], world: ReferenceModels) -> None:
    count = 2 * len(FAST_FORWARD_STOPS)
    names = [None, *world.adapters] * count
    with LLM(world.model, world.adapters, **SETTINGS | settings) as llm:
        generate = partial(
            llm.generate,
            (PROMPTS * count)[:count],
            sampled_params(count),
            FAST_FORWARD_STOPS * 2,
            adapter=names[:count],
            structure=[RECORD, RECORD, RECORD, STRUCTURES["json"]] * (count // 4),
        )
        with fast_forward_disabled(llm):
            stepped, num_stepped = count_steps(llm, generate)
        fast_forwarded, num_fast_forwarded = count_steps(llm, generate)
        assert llm.status.preemptions > 0 or "cache_bytes" not in settings
    check_same(fast_forwarded, stepped)
    assert num_fast_forwarded < 0.8 * num_stepped


@pytest.mark.usefixtures("wait_for_masks")
def test_raw_logprobs_disable_fast_forward(llm: LLM) -> None:
    params = [SamplingParams(raw_logprobs=True), SamplingParams(num_alternatives=2)]
    for each in params:
        generate = partial(llm.generate, "the", each, LONG, structure=RECORD)
        with fast_forward_disabled(llm):
            stepped, num_stepped = count_steps(llm, generate)
        fast_forwarded, num_fast_forwarded = count_steps(llm, generate)
        check_same(fast_forwarded, stepped)
        assert num_fast_forwarded == num_stepped


def test_each_forced_token_is_a_separate_event(llm: LLM) -> None:
    with fast_forward_disabled(llm):
        stepped = list(llm.stream("the", stop=LONG, structure=RECORD))
    fast_forwarded = list(llm.stream("the", stop=LONG, structure=RECORD))
    assert [event._replace(logprob=0) for event in fast_forwarded] == [event._replace(logprob=0) for event in stepped]


def test_late_masks_do_not_change_completions(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = llm.generate("the", stop=LONG)
    monkeypatch.setattr(engine, "MASK_WAIT_S", 0.0)
    monkeypatch.setattr(engine, "BLOCKED_MASK_WAIT_S", 0.0)
    assert generate_all(llm) == expected
    completions = llm.generate(
        ["the"] * 3, [SamplingParams(), *sampled_params(2)], LONG, structure=[None, WORDS, WORDS]
    )
    assert completions[0].token_ids == plain.token_ids


@pytest.mark.slow  # transformers converts the tokenizer twice
def test_padded_model_matches_grammar(tmp_path: Path) -> None:
    folder = save(tmp_path / "bloom", make_model(SERVED["bloom"]()), make_tokenizer())
    with LLM(folder, device="cpu", max_num_seqs=4) as padded:
        completions = padded.generate(
            ["the quick"] * 6, sampled_params(6), LONG, structure=[STRUCTURES["json"], WORDS, None] * 2
        )
        for completion in completions[::3]:
            check(completion, PERSON)
        for completion in completions[1::3]:
            assert re.fullmatch("([a-z]{1,8} ){2,6}end", completion.text)


@pytest.mark.slow
def test_tensor_parallel_gives_same_completions(world: ReferenceModels, expected: list[list[int]]) -> None:
    with LLM(world.model, tensor_parallel=2, **SETTINGS) as both:
        completions = both.generate(PROMPTS[:2], sampled_params(2), LONG, structure=[WORDS, STRUCTURES["json"]])
    assert [completion.token_ids for completion in completions] == expected[:2]


@pytest.mark.slow
def test_demo_model_matches_example_schema_at_any_temperature() -> None:
    example = next(each for each in read_examples() if "schema" in each)
    schema, structure = example["schema"], from_json_schema(example["schema"])
    prompt = f"<|user|>{example['prompt']}<|end|><|assistant|>"
    temperatures = [1.0] * 50 + [1.1 + 0.1 * (seed % 7) for seed in range(14)]
    hot = [SamplingParams(do_sample=True, temperature=each, seed=seed) for seed, each in enumerate(temperatures)]
    adapters = ["json"] * 50 + ["json", None] * 7
    with LLM(FOLDER / "model", FOLDER / "adapters", device="cpu") as demo:
        (plain,) = demo.generate(prompt, stop=LONG, adapter="json")
        (greedy,) = demo.generate(prompt, stop=LONG, adapter="json", structure=structure)
        completions = demo.generate(
            [prompt] * 64, hot, StopParams(max_new_tokens=250), adapter=adapters, structure=structure
        )
    check(plain, schema)  # the adapter was trained on this schema
    assert greedy.token_ids == plain.token_ids
    for completion in completions:
        check(completion, schema)
    assert len({completion.text for completion in completions}) > 10
