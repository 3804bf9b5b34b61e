"""Tests for hostile grammars, which are enforced or rejected without affecting other requests."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from lorax_server.errors import InputError, LoraxError, OverloadedError
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.structured_output import matcher
from lorax_server.structured_output.grammars import from_grammar, from_json_schema, from_regex
from lorax_server.structured_output.mask_threads import STACK_BYTES
from lorax_server.structured_output.trials import TRIAL_TASK, GrammarTrials
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.types import Structure
from tests.grids import some_fast
from tests.models.tiny import SERVED, make_model, make_tokenizer, save
from tests.sandbox.tasks import make_task
from tests.structured_output.driver import STOP, TIMEOUT_S, Driver
from tests.structured_output.hostile import GRAMMARS, REGEXES, SCHEMAS

NUM_TOKENS = 6
CASES: dict[str, Callable[[], Structure]] = {
    **{f"schema: {name}": partial(from_json_schema, schema) for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": partial(from_regex, regex) for name, regex in REGEXES.items()},
    **{f"grammar: {name}": partial(from_grammar, text) for name, text in GRAMMARS.items()},
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = save(tmp_path_factory.mktemp("model"), make_model(SERVED["llama"]()), make_tokenizer())
    sandbox = Sandbox(1)
    made = Driver(folder, sandbox)
    yield made
    made.close()
    sandbox.close()


def test_there_are_at_least_60_hostile_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", some_fast((name,) for name in CASES))
def test_hostile_grammar_does_not_affect_other_requests(name: str, driver: Driver) -> None:
    random = np.random.default_rng(0)
    other = driver.start(from_regex("[a-z]{300,400}"))
    try:
        structure = CASES[name]()
        hostile = driver.begin(driver.check(structure).result(TIMEOUT_S))
    except InputError as rejection:
        error: LoraxError | None = rejection
    else:
        error = driver.settle(hostile)
        for _ in range(NUM_TOKENS if error is None else 0):
            if not driver.advance(hostile, random):
                break
        driver.finish(hostile)
    assert error is None or (isinstance(error, InputError) and 5 < len(str(error)) < 1000)
    assert driver.advance(other, random)
    driver.finish(other)


# --- Trials -----------------------------------------------------------------------------------------------------------


def test_rejected_grammar_is_not_compiled_again(driver: Driver) -> None:
    structure = from_json_schema(SCHEMAS["allOf of patterns"])
    for _ in range(2):
        with pytest.raises(InputError, match="to compile"):
            driver.check(structure).result(TIMEOUT_S)


def chain_rules(rule: str, depth: int) -> str:
    lines = [rule.format(i, i + 1) for i in range(depth)]
    return "\n".join([f"start: {rule[0]}0", *lines, f'{rule[0]}{depth}: "c"'])


def chain_references(depth: int) -> str:
    definitions: Any = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(depth)}
    return f"start: %json {json.dumps({'$defs': definitions | {f'd{depth}': {}}, '$ref': '#/$defs/d0'})}"


DEEP_GRAMMARS: dict[str, Callable[[int], str]] = {
    "rules": partial(chain_rules, 'r{}: "a" r{} | "b"'),
    "groups": partial(chain_rules, 'r{}: ("a" r{} | "b")*'),
    "terminals": partial(chain_rules, 'R{}: "a" R{} "b"'),
    "references": chain_references,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP_GRAMMARS)
def test_deep_grammar_cannot_overflow_engine_stack(name: str, driver: Driver) -> None:
    """The trial compile has a quarter of the engine's stack, so grammars that pass it also compile in the engine."""
    assert TRIAL_TASK.stack_bytes * 4 <= STACK_BYTES
    results, random = set(), np.random.default_rng(0)
    for depth in (300, 480, 520, 800, 850, 1200, 1250, 1300, 1350, 1700, 1800, 2600):
        try:
            tried = driver.check(Structure(DEEP_GRAMMARS[name](depth))).result(TIMEOUT_S)
        except InputError as error:
            results.add(str(error)[:23])
        else:
            request_id = driver.start(tried)
            for _ in range(NUM_TOKENS):
                if not driver.advance(request_id, random):
                    break
            driver.finish(request_id)
            results.add("compiled")
    assert results == {"the grammar is too deep", "compiled"}


def test_trial_measures_size_of_large_grammar(driver: Driver) -> None:
    small = driver.check(from_regex("[a-z]{3}")).result(TIMEOUT_S)
    large = driver.check(from_json_schema({"const": "x" * 60_000})).result(TIMEOUT_S)
    assert 0 < small.num_bytes < 2**20 < 10 * 2**20 < large.num_bytes


def test_pending_trials_are_limited_per_tenant(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> None:
    go = tmp_path_factory.mktemp("go") / "go"
    sandbox = Sandbox(1)
    try:
        blocked = sandbox.submit(make_task("wait_for"), str(go))
        trials, table = GrammarTrials(sandbox), driver.tokenizer.token_table()
        hostile = [trials.submit(from_regex(f"{i}a"), table, "hostile") for i in range(TRIAL_TASK.max_pending or 0)]
        with pytest.raises(OverloadedError):
            trials.submit(from_regex("b"), table, "hostile")
        hostile += [trials.submit(from_regex("0a"), table, "hostile") for _ in range(40)]  # one shared trial
        finished: list[str] = []
        for each in hostile:
            each.add_done_callback(lambda _: finished.append("hostile"))
        other = trials.submit(from_regex("c"), table, "other")
        other.add_done_callback(lambda _: finished.append("other"))
        go.touch()
        for each in (*hostile, other):
            each.result(TIMEOUT_S)
        assert finished.index("other") <= 41  # after the first queued trial, not after all of them
        assert blocked.done()
    finally:
        sandbox.close()


# --- Shared lexer limits ----------------------------------------------------------------------------------------------

SENTENCES = from_regex(r"(.*[.!?].{0,300})X")
NUM_COMPLETIONS = 12


def make_sentences(driver: Driver, seed: int) -> list[int]:
    """Make a text with many sentences, which adds many lexer states."""
    text = np.random.default_rng(seed).choice([*"ab.!?"], 60)
    return [token_id for each in text for token_id in driver.tokenizer.encode(each, add_special_tokens=False)]


def can_follow(compiled: matcher.CompiledGrammar, token_ids: list[int]) -> bool:
    state = matcher.GrammarState(compiled, STOP)
    try:
        for token_id in token_ids:
            state.consume((token_id,))
    except matcher.GrammarError:
        return False
    return True


def test_completions_do_not_share_lexer_limits(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammar copies share a lexer, so many completions together exceed the state limit for one completion."""
    texts = [make_sentences(driver, seed) for seed in range(NUM_COMPLETIONS)]
    vocabulary = Vocabulary.from_table(driver.tokenizer.token_table())

    def compile_with(max_states: int) -> matcher.CompiledGrammar:
        limits = LLParserLimits(max_lexer_states=max_states, verbose_errors=False)
        monkeypatch.setattr(matcher, "make_limits", lambda: limits)
        return matcher.CompiledGrammar(vocabulary, SENTENCES.grammar)

    least = next(
        count for count in range(100, 100_000, 100) if all(can_follow(compile_with(count), text) for text in texts)
    )
    shared = compile_with(least)
    assert not all(can_follow(shared, text) for text in texts), "the texts share too many states for this test"
    for text in texts:
        request_id = driver.start(SENTENCES)
        driver.consume(request_id, *text)
        assert driver.allowed(request_id)
        driver.finish(request_id)


def test_trial_measures_size_and_rejects_unmatchable_grammar(driver: Driver) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert 0 < driver.check(from_json_schema(schema)).result(TIMEOUT_S).num_bytes < 2**20
    with pytest.raises(InputError, match="no text matches"):
        driver.check(from_grammar("start: A\nA: /a/ & /b/")).result(TIMEOUT_S)
