"""Tests for `StructuredOutput`: masks, forced tokens, vocabularies and the grammar cache."""

import gc
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lorax_server.build import build_vocabulary
from lorax_server.errors import BusyError, EngineError, InputError, NotSupportedError, OverloadedError
from lorax_server.structured_output import manager, matcher, vocabulary
from lorax_server.structured_output.grammars import from_choices, from_json_schema, from_regex
from lorax_server.structured_output.manager import StructuredOutput
from lorax_server.structured_output.matcher import CompiledGrammar, GrammarError, GrammarState
from lorax_server.structured_output.vocabulary import (
    MAX_TENANT_VOCABULARIES,
    MAX_VOCABULARIES,
    Vocabulary,
    VocabularyCache,
)
from lorax_server.text.token_table import MAX_TOKEN_IDS, make_token_table
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import Request, SamplingParams, StopParams, TokenTable
from tests.models.tiny import SERVED, make_model, make_tokenizer, save
from tests.structured_output.driver import EOS_ID, STOP, TIMEOUT_S, Driver, list_allowed

LETTERS = from_regex("[a-z]{400,500}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), make_model(SERVED["llama"]()), make_tokenizer())


@pytest.fixture
def driver(model: Path) -> Iterator[Driver]:
    made = Driver(model)
    yield made
    made.close()


class Compiles:
    """Counts the grammars that are compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grammars: list[str] = []
        monkeypatch.setattr(manager, "CompiledGrammar", self._compile)

    def _compile(self, vocabulary: Vocabulary, grammar: str) -> CompiledGrammar:
        self.grammars.append(grammar)
        return CompiledGrammar(vocabulary, grammar)


def treat_masks_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute masks in batches after the first masks, even if they take long on a busy machine."""
    monkeypatch.setattr(matcher, "MAX_FAST_MASK_S", 60.0)
    monkeypatch.setattr(manager, "MAX_BATCH_S", 60.0)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all grammars as slow, so that masks are computed one by one."""
    monkeypatch.setattr(matcher, "NUM_TIMED_MASKS", 10**9)


class Gate:
    """Blocks masks that are computed one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_blocked, self.may_pass = threading.Event(), threading.Event()
        consume = GrammarState.consume

        def enter(state: GrammarState, token_ids: Sequence[int], max_forced: int = 0) -> None:
            self.is_blocked.set()
            assert self.may_pass.wait(TIMEOUT_S)
            consume(state, token_ids, max_forced)

        monkeypatch.setattr(GrammarState, "consume", enter)


# --- Masks ------------------------------------------------------------------------------------------------------------


def test_slow_masks_do_not_delay_fast_masks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_masks_as_fast(monkeypatch)
    fast, random = driver.start(LETTERS), np.random.default_rng(0)
    for _ in range(matcher.NUM_TIMED_MASKS):
        assert driver.advance(fast, random)
    assert driver.allowed(fast)
    slow = [driver.start(from_regex(f"[a-z]{{{50 + i}}}")) for i in range(3)]
    gate = Gate(monkeypatch)
    driver.structured_output.advance([(each, driver.allowed(each)[0]) for each in slow])
    assert gate.is_blocked.wait(TIMEOUT_S)
    for _ in range(5):
        assert driver.advance(fast, random)
    assert driver.allowed(fast)
    assert driver.structured_output.collect_masks(slow, 0.0, num_unmasked=1) == {}
    gate.may_pass.set()
    assert set(driver.structured_output.collect_masks(slow, TIMEOUT_S)) == set(slow)


def test_masks_of_slow_grammar_are_not_batched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_FAST_MASK_S", -1.0)
    request_id, random = driver.start(LETTERS), np.random.default_rng(0)
    for _ in range(3 * matcher.NUM_TIMED_MASKS):
        assert driver.advance(request_id, random)
    assert driver.allowed(request_id)
    gate = Gate(monkeypatch)
    assert driver.advance(request_id, random)
    assert gate.is_blocked.wait(TIMEOUT_S)
    gate.may_pass.set()
    assert driver.allowed(request_id)


def test_slow_batch_measures_mask_times_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_FAST_MASK_S", 60.0)
    monkeypatch.setattr(manager, "MAX_BATCH_S", -60.0)
    request_id, random = driver.start(LETTERS), np.random.default_rng(0)
    for _ in range(matcher.NUM_TIMED_MASKS + 1):  # the last mask is computed in a batch
        assert driver.advance(request_id, random)
    assert driver.allowed(request_id)
    gate = Gate(monkeypatch)
    assert driver.advance(request_id, random)
    assert gate.is_blocked.wait(TIMEOUT_S)
    gate.may_pass.set()
    assert driver.allowed(request_id)


@pytest.mark.usefixtures("one_by_one")
def test_collect_masks_returns_without_late_masks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    late, ready = driver.start(LETTERS), driver.start(from_regex("[a-c]{9}"))
    gate = Gate(monkeypatch)
    driver.structured_output.advance([(late, driver.allowed(late)[0])])
    assert gate.is_blocked.wait(TIMEOUT_S)
    assert list(driver.structured_output.collect_masks([late, ready], 0.0)) == [ready]
    assert list(driver.structured_output.collect_masks([late], 0.0, 0.001)) == []
    gate.may_pass.set()
    assert set(driver.structured_output.collect_masks([late, ready], TIMEOUT_S)) == {late, ready}


def test_mask_wait_is_longer_if_no_sequence_can_continue(driver: Driver) -> None:
    request_id = driver.start(LETTERS)
    driver.structured_output.advance([(request_id, driver.allowed(request_id)[0])])
    assert driver.structured_output.collect_masks([request_id], 0.0, TIMEOUT_S)


def test_non_special_eos_token_cannot_truncate_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|im_end|>"])  # not special, as users often add it
    eos_id = tokenizer.get_vocab()["<|im_end|>"]
    tokenizer.save_pretrained(tmp_path)
    driver = Driver(tmp_path)
    try:
        stop = StopParams(max_new_tokens=100, eos_token_ids=frozenset([eos_id]))
        request_id = driver.start(from_json_schema({"type": "string"}), stop=stop)
        driver.write(request_id, '"hel')
        assert eos_id not in driver.allowed(request_id)
        driver.write(request_id, 'lo"')
        assert driver.allowed(request_id) == [eos_id]
    finally:
        driver.close()


@pytest.mark.usefixtures("one_by_one")
def test_slow_masks_fail_only_their_completion(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = driver.start(LETTERS), driver.start(from_regex("[a-c]{9}"))
    monkeypatch.setattr(matcher, "MIN_TOTAL_S", -1.0)
    monkeypatch.setattr(matcher, "MAX_TOKEN_S", -1.0)
    driver.structured_output.advance([(slow, driver.allowed(slow)[0])])
    assert driver.structured_output.collect_masks([slow], TIMEOUT_S) == {}
    monkeypatch.undo()
    assert "ms per token" in str(driver.find_error(slow))
    assert driver.advance(other, np.random.default_rng(0))


def test_request_removed_during_compile_is_cleaned_up(driver: Driver) -> None:
    first, ended, last = (driver.begin(LETTERS) for _ in range(3))
    driver.finish(ended)
    assert driver.settle(first) is None
    assert driver.settle(last) is None
    assert ended not in driver.structured_output
    assert ended not in dict(driver.structured_output.pop_results())


@pytest.mark.parametrize("num_timed", [2, 10**9])
def test_batched_masks_equal_single_masks(num_timed: int, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "NUM_TIMED_MASKS", num_timed)
    treat_masks_as_fast(monkeypatch)
    random, table = np.random.default_rng(0), driver.tokenizer.token_table()._replace(digest="other")
    grammars = [LETTERS] * 6 + [from_regex(f"[a-z]{{{20 + i},90}}") for i in range(6)]
    requests = {
        driver.start(grammar, vocabulary=table if i % 3 else None): grammar for i, grammar in enumerate(grammars)
    }
    vocabulary = Vocabulary.from_table(table)
    states = {
        request_id: GrammarState(CompiledGrammar(vocabulary, grammar.grammar), STOP)
        for request_id, grammar in requests.items()
    }
    for _ in range(12):
        result = driver.structured_output.collect_masks(requests, TIMEOUT_S)
        assert set(result) == set(requests)
        tokens = []
        for request_id, following in result.items():
            assert np.array_equal(following.mask, states[request_id].mask)
            tokens.append((request_id, int(random.choice(list_allowed(following.mask)))))
            states[request_id].consume(tokens[-1][1:])
        driver.structured_output.advance(tokens)


# --- Forced tokens ----------------------------------------------------------------------------------------------------


def test_forced_tokens_are_consumed_ahead(driver: Driver) -> None:
    request_id = driver.start(from_regex("[ab]Q{12}[ab]"), fast_forward=True)
    driver.consume(request_id, driver.allowed(request_id)[0])
    following = driver.structured_output.collect_masks([request_id], TIMEOUT_S)[request_id]
    assert driver.tokenizer.decode(following.forced) == "Q" * 12
    assert driver.tokenizer.decode([list_allowed(following.mask)[0]]) == "a"


def test_forced_tokens_per_step_are_limited(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MAX_FORCED_TOKENS", 5)
    request_id = driver.start(from_regex("[ab]Q{12}[ab]"), fast_forward=True)
    driver.consume(request_id, driver.allowed(request_id)[0])
    following = driver.structured_output.collect_masks([request_id], TIMEOUT_S)[request_id]
    assert len(following.forced) == 5
    assert len(list_allowed(following.mask)) == 1


def test_fast_forward_is_disabled_for_many_completions(model: Path) -> None:
    driver = Driver(model)
    driver.structured_output.max_fast_forward = 1
    try:
        first, second = (driver.start(from_regex("[ab]Q{12}[ab]"), fast_forward=True) for _ in range(2))
        driver.consume(first, driver.allowed(first)[0])
        assert not driver.structured_output.collect_masks([first], TIMEOUT_S)[first].forced
        driver.finish(second)
        driver.consume(first, driver.allowed(first)[0])
        assert driver.structured_output.collect_masks([first], TIMEOUT_S)[first].forced
    finally:
        driver.close()


def test_wrong_forced_token_fails_only_its_request(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    wrong, right = (driver.start(from_regex("[ab]Q{6}[ab]{9}"), fast_forward=True) for _ in range(2))
    for each in (wrong, right):
        driver.consume(each, driver.allowed(each)[0])
    result = driver.structured_output.collect_masks([wrong, right], TIMEOUT_S)
    bad, forced = result[wrong].forced[0] + 1, list(result[right].forced)
    driver.structured_output.advance([(wrong, bad), *((right, token_id) for token_id in forced), (wrong, bad)])
    assert isinstance(driver.find_error(wrong), EngineError)
    assert f"token {bad} was sampled" in caplog.text
    assert driver.structured_output.collect_masks([wrong], TIMEOUT_S) == {}
    assert driver.advance(right, np.random.default_rng(0))


def test_panic_in_forced_tokens_fails_only_its_completion(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_masks_as_fast(monkeypatch)
    wrong, right = (driver.start(from_regex(f"[ab]{{{count}}}"), fast_forward=True) for count in (30, 31))
    random, consume_forced = np.random.default_rng(0), GrammarState.consume_forced
    for _ in range(matcher.NUM_TIMED_MASKS):  # so that both masks are computed in one batch
        assert driver.advance(wrong, random)
        assert driver.advance(right, random)
    result = driver.structured_output.collect_masks([wrong, right], TIMEOUT_S)
    assert result[wrong].compiled.is_fast
    assert result[right].compiled.is_fast

    def panic(state: GrammarState, max_forced: int) -> None:
        if state is result[wrong]:
            raise BaseException("index out of bounds")  # like pyo3's PanicException
        consume_forced(state, max_forced)

    monkeypatch.setattr(GrammarState, "consume_forced", panic)
    driver.structured_output.advance([(each, list_allowed(result[each].mask)[0]) for each in (wrong, right)])
    assert driver.allowed(right)
    assert not driver.allowed(wrong)
    errors = dict(driver.structured_output.pop_results())
    assert list(errors) == [wrong]
    assert "index out of bounds" in str(errors[wrong])


@pytest.mark.parametrize("pattern", ["(foo|bar) don't QQQQ 12 (1|2)", r'\{"name": "[ab]{2}", "über": \[1, [23]\]\}'])
def test_forced_tokens_equal_single_token_masks(pattern: str, driver: Driver) -> None:
    ahead, alone = driver.start(from_regex(pattern), fast_forward=True), driver.start(from_regex(pattern))
    random, forced = np.random.default_rng(0), 0
    while True:
        following = driver.structured_output.collect_masks([ahead], TIMEOUT_S)[ahead]
        for token_id in list(following.forced):
            assert driver.allowed(alone) == [token_id]
            driver.structured_output.advance([(ahead, token_id), (alone, token_id)])
            forced += 1
        assert driver.allowed(alone) == list_allowed(following.mask)
        token_id = int(random.choice(list_allowed(following.mask)))
        if token_id == EOS_ID:
            break
        driver.structured_output.advance([(ahead, token_id), (alone, token_id)])
    assert forced > 3


# --- Draft tokens -----------------------------------------------------------------------------------------------------


def vocabulary_of(driver: Driver) -> Vocabulary:
    return Vocabulary.from_table(
        driver.tokenizer.token_table(), partial(driver.tokenizer.encode, add_special_tokens=False)
    )


@pytest.mark.parametrize("max_forced", [0, 4])
@pytest.mark.parametrize("pattern", ["(foo|bar) don't QQQQ 12 (1|2)", r"[a-c]{2,30}", r'\{"name": "[ab]{2}", "n": 1\}'])
def test_draft_masks_equal_single_token_masks(
    pattern: str, max_forced: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher, "MAX_DRAFT_S", TIMEOUT_S)
    random, compiled = np.random.default_rng(0), CompiledGrammar(vocabulary_of(driver), from_regex(pattern).grammar)
    for _ in range(20):
        state, expected, draft = GrammarState(compiled, STOP, 10**6), list[list[int]](), list[int]()
        for _ in range(random.integers(0, 4)):
            state.consume([int(random.choice(list_allowed(state.next_mask())))], max_forced)
            if EOS_ID in list_allowed(state.next_mask()):
                break
        single = state.copy()
        for _ in range(5):
            expected.append(list_allowed(single.next_mask()))
            draft.append(int(random.choice(expected[-1])))
            if draft[-1] == EOS_ID or random.random() < 0.2:
                draft[-1] = next(token_id for token_id in range(500) if token_id not in expected[-1])
                break
            single.consume(draft[-1:], max_forced)
        else:
            expected.append(list_allowed(single.next_mask()))
        history = list(state.history)
        masks, following = state.mask_draft(draft, max_forced)
        assert [list_allowed(mask) for mask in masks] == expected
        assert state.history == history
        if following:  # the only continuation after the positions of the draft
            for token_id in (*[list_allowed(mask)[0] for mask in masks], *following):
                assert list_allowed(state.next_mask()) == [token_id]
                state.consume([token_id], max_forced)


def test_all_accepted_draft_tokens_are_consumed(driver: Driver) -> None:
    """Forced tokens may follow any of them."""
    pattern = "(foo|bar) QQQQ [ab]{2} (1|2)"
    request_id, random = driver.start(from_regex(pattern), fast_forward=True), np.random.default_rng(0)
    alone, tokens = (
        GrammarState(CompiledGrammar(vocabulary_of(driver), from_regex(pattern).grammar), STOP, 10**6),
        list[int](),
    )
    while EOS_ID not in (allowed := list_allowed(alone.next_mask())):
        tokens.append(int(random.choice(allowed)))
        alone.consume(tokens[-1:], 32)
    middle = len(tokens) // 2
    for part in (tokens[:middle], tokens[middle:]):
        driver.structured_output.advance([(request_id, token_id) for token_id in part])
        state = driver.structured_output.collect_masks([request_id], TIMEOUT_S)[request_id]
    assert state.history == tokens
    assert list_allowed(state.mask) == [EOS_ID]


# --- Compiled grammars ------------------------------------------------------------------------------------------------


def test_shared_grammar_is_compiled_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = Compiles(monkeypatch)
    request_ids = [driver.begin(LETTERS) for _ in range(4)]
    assert [driver.settle(each) for each in request_ids] == [None] * 4
    driver.start(LETTERS)
    assert len(compiles.grammars) == 1


def test_grammar_cache_is_bounded_in_bytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "GRAMMAR_CACHE_BYTES", 40 * 2**20)
    driver, compiles = Driver(model), Compiles(monkeypatch)
    try:
        sized = [replace(from_choices([f"choice {i}"]), num_bytes=15 * 2**20) for i in range(3)]
        for structure in (*sized, sized[2], sized[1], sized[0]):  # the first was evicted by the third
            driver.finish(driver.start(structure))
        assert [compiles.grammars.count(each.grammar) for each in sized] == [2, 1, 1]
        too_large = replace(from_choices(["other"]), num_bytes=50 * 2**20)
        for _ in range(2):
            driver.finish(driver.start(too_large))
        assert compiles.grammars.count(too_large.grammar) == 2
    finally:
        driver.close()


def test_running_completions_do_not_exceed_grammar_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "GRAMMAR_CACHE_BYTES", 40 * 2**20)
    driver, compiles = Driver(model), Compiles(monkeypatch)
    try:
        sized = [replace(from_choices([f"choice {i}"]), num_bytes=15 * 2**20) for i in range(3)]
        for structure in (*sized, sized[0]):  # the third grammar evicts the first
            driver.start(structure)
        assert [compiles.grammars.count(each.grammar) for each in sized] == [2, 1, 1]
    finally:
        driver.close()


def test_grammar_of_finished_requests_is_not_compiled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_build, ended_grammar = threading.Event(), from_regex("[a-c]{9}")

    def build() -> Vocabulary:
        assert may_build.wait(TIMEOUT_S)
        return build_vocabulary(model)

    driver, compiles = Driver(model, build=build), Compiles(monkeypatch)
    try:
        first, ended = driver.begin(LETTERS), driver.begin(ended_grammar)
        driver.finish(ended)
        may_build.set()
        assert driver.settle(first) is None
        driver.start(from_regex("[d-f]{9}"))
        assert ended_grammar.grammar not in compiles.grammars
        driver.start(ended_grammar)
        assert len(compiles.grammars) == 3
    finally:
        driver.close()


def test_grammar_is_compiled_again_after_many_tokens(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MAX_SHARED_TOKENS", 10)
    compiles, random = Compiles(monkeypatch), np.random.default_rng(0)
    for _ in range(4):
        request_id = driver.start(LETTERS)
        for _ in range(6):
            driver.advance(request_id, random)
        assert driver.allowed(request_id)
        driver.finish(request_id)
    assert len(compiles.grammars) == 2


@pytest.mark.usefixtures("one_by_one")
def test_completion_continues_with_recompiled_grammar_after_failure(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared limit that earlier completions reached must not fail a later completion."""
    compiles, consume = Compiles(monkeypatch), GrammarState.consume

    def fail_when_shared(state: GrammarState, token_ids: Sequence[int], max_forced: int = 0) -> None:
        consume(state, token_ids, max_forced)
        if state.compiled.num_completions > 1 and len(state.history) == 3:
            raise GrammarError("too many states")

    driver.start(LETTERS)
    monkeypatch.setattr(GrammarState, "consume", fail_when_shared)
    request_id = driver.start(LETTERS)
    driver.write(request_id, "abcdefg")
    assert driver.allowed(request_id)
    assert driver.find_error(request_id) is None
    assert len(compiles.grammars) == 2
    driver.start(LETTERS)
    assert len(compiles.grammars) == 3


def test_rust_panic_fails_only_its_grammar(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """Like pyo3's PanicException, not a subclass of Exception."""

    def panic(vocabulary: Vocabulary, grammar: str) -> CompiledGrammar:
        if grammar == LETTERS.grammar:
            raise Panic("index out of bounds")
        return CompiledGrammar(vocabulary, grammar)

    monkeypatch.setattr(manager, "CompiledGrammar", panic)
    error = driver.settle(driver.begin(LETTERS))
    assert isinstance(error, InputError)
    assert "index out of bounds" in str(error)
    driver.start(from_regex("[a-c]{9}"))


# --- Vocabularies -----------------------------------------------------------------------------------------------------


def make_table(driver: Driver, number: int) -> TokenTable:
    return driver.tokenizer.token_table()._replace(digest=f"adapter {number}")


def test_adapter_vocabularies_never_evict_base_vocabulary(driver: Driver) -> None:
    busy = [
        driver.start(LETTERS, vocabulary=make_table(driver, number), tenant=f"tenant {number}")
        for number in range(MAX_VOCABULARIES)
    ]
    with pytest.raises(BusyError, match="custom-tokenizer adapters"):
        driver.begin(LETTERS, vocabulary=make_table(driver, 100), tenant="another tenant")
    assert driver.advance(driver.start(LETTERS, tenant="another tenant"), np.random.default_rng(0))
    driver.finish(busy[0])
    driver.start(LETTERS, vocabulary=make_table(driver, 100), tenant="another tenant")  # evicts an idle vocabulary


def test_vocabulary_eviction_removes_its_grammars(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = Compiles(monkeypatch)
    for number in (
        *range(MAX_VOCABULARIES + 1),
        MAX_VOCABULARIES,
        0,
    ):  # the last vocabulary evicts the first, which is then built again
        driver.finish(driver.start(LETTERS, vocabulary=make_table(driver, number)))
    assert len(compiles.grammars) == MAX_VOCABULARIES + 2


def test_unused_vocabulary_is_freed(driver: Driver) -> None:
    unused = Vocabulary.from_table(driver.tokenizer.token_table())
    reference = weakref.ref(unused)
    del unused
    gc.collect()
    assert reference() is None


def test_vocabulary_in_use_is_always_found(driver: Driver) -> None:
    """The compile thread reads the cache while the engine's thread reserves the vocabulary for other requests."""
    table = driver.tokenizer.token_table()
    cache, errors, is_done = VocabularyCache(lambda: Vocabulary.from_table(table)), [], threading.Event()
    cache.add(table, "", [])
    cache.find(table.digest)

    def find() -> None:
        while not is_done.is_set():
            try:
                cache.find(table.digest)
            except BusyError as error:
                errors.append(error)

    interval_s, thread = sys.getswitchinterval(), threading.Thread(target=find)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(5000):
            cache.add(table, "", [])
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    assert not errors


def test_sparse_token_ids_are_rejected(driver: Driver) -> None:
    with pytest.raises(NotSupportedError, match="token ids below"):
        make_token_table(driver.tokenizer.detokenizer, MAX_TOKEN_IDS + 1)


def test_padded_step_waits_for_its_masks(driver: Driver) -> None:
    request_id = driver.start(LETTERS)
    driver.structured_output.advance([(request_id, driver.allowed(request_id)[0])])
    assert driver.structured_output.collect_masks([request_id], math.inf, 0.05)


def test_one_tenant_cannot_use_all_adapter_vocabularies(driver: Driver) -> None:
    busy = [
        driver.start(LETTERS, vocabulary=make_table(driver, number), tenant="greedy")
        for number in range(MAX_TENANT_VOCABULARIES)
    ]
    with pytest.raises(OverloadedError, match="this client"):
        driver.begin(LETTERS, vocabulary=make_table(driver, 100), tenant="greedy")
    driver.start(LETTERS, vocabulary=make_table(driver, 0), tenant="greedy")  # this tenant already uses this vocabulary
    driver.start(LETTERS, vocabulary=make_table(driver, 101), tenant="other")
    driver.finish(busy[1])
    driver.start(LETTERS, vocabulary=make_table(driver, 100), tenant="greedy")


def test_vocabulary_build_error_is_reported() -> None:
    calls = []

    def build() -> Vocabulary:
        calls.append(1)
        raise NotSupportedError("its tokens are not bytes")

    structured_output = StructuredOutput(build)
    try:
        settled = threading.Event()
        structured_output.on_event = settled.set
        structured_output.start(Request(1, [0], SamplingParams(), STOP, structure=LETTERS))
        assert settled.wait(TIMEOUT_S)
        assert "not bytes" in str(dict(structured_output.pop_results())[1])
        settled.clear()
        structured_output.start(Request(2, [0], SamplingParams(), STOP, structure=LETTERS))
        assert settled.wait(TIMEOUT_S)
        assert "not bytes" in str(dict(structured_output.pop_results())[2])
        assert len(calls) == 1
    finally:
        structured_output.close()


def test_added_adapter_tokens_are_allowed(tmp_path: Path, driver: Driver) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["abcdef", "ADDED"])
    tokenizer.save_pretrained(tmp_path)
    larger = load_tokenizer(tmp_path)
    request_id = driver.start(LETTERS, vocabulary=larger.token_table())
    allowed = driver.allowed(request_id)
    assert tokenizer.convert_tokens_to_ids("abcdef") in allowed
    assert tokenizer.convert_tokens_to_ids("ADDED") not in allowed


def follow(driver: Driver, request_id: int) -> list[int]:
    """Consume the first allowed token until the text ends. Return all tokens except for the end token."""
    token_ids: list[int] = []
    while True:
        following = driver.structured_output.collect_masks([request_id], TIMEOUT_S)[request_id]
        token_id = following.forced[0] if following.forced else list_allowed(following.mask)[0]
        if token_id == EOS_ID:
            return token_ids
        token_ids.append(token_id)
        driver.structured_output.advance([(request_id, token_id)])


@pytest.mark.parametrize("fast_forward", [False, True])
def test_forced_text_uses_unrelated_adapter_vocabulary(fast_forward: bool, driver: Driver) -> None:
    table, last = driver.tokenizer.token_table(), b"hello"
    lengths = table.lengths[:-4] + len(last).to_bytes(4, "little")  # replace the last token
    content = table.content[: -int.from_bytes(table.lengths[-4:], "little")] + last
    other = table._replace(digest="unrelated", lengths=lengths, content=content)
    token_ids = follow(driver, driver.start(from_choices(["hello world"]), vocabulary=other, fast_forward=fast_forward))
    num_ids = len(lengths) // 4
    assert token_ids[0] == num_ids - 1
    assert driver.tokenizer.decode(token_ids[1:]) == " world"


@pytest.mark.parametrize("fast_forward", [False, True])
def test_special_token_text_is_generated_as_text(fast_forward: bool, driver: Driver) -> None:
    table = driver.tokenizer.token_table()
    special_id, special = table.special_ids[-1], table.special_tokens[-1].decode()
    text = f"a {special} b"
    assert special_id in driver.tokenizer.encode(text, add_special_tokens=False)
    token_ids = follow(driver, driver.start(from_choices([text]), fast_forward=fast_forward))
    assert special_id not in token_ids
    assert driver.tokenizer.decode(token_ids) == text


def test_failed_vocabulary_build_is_retried(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "RETRY_S", 0.0)
    errors = [MemoryError("at the moment")]

    def build() -> Vocabulary:
        if errors:
            raise errors.pop()
        return build_vocabulary(model)

    driver = Driver(model, build=build)
    try:
        assert "at the moment" in str(driver.settle(driver.begin(LETTERS)))
        driver.start(LETTERS)
    finally:
        driver.close()
