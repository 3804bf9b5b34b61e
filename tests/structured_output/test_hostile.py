"""Hostile structures: each is followed or refused with a reason, and an answer beside them goes on."""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import pytest

from lorax_server.errors import BusyError, EngineError, InputError, LoraxError
from lorax_server.structured_output import wire
from lorax_server.structured_output.grammars import from_grammar, from_json_schema, from_regex
from lorax_server.structured_output.matchers import Compiled
from lorax_server.structured_output.program import StructureProgram
from lorax_server.structured_output.slots import Words, WrittenSlots
from lorax_server.structured_output.structures import Structures
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import Request, SamplingParams, StopParams, Structure
from tests.models.tiny import EOS_ID, SERVED, make_model, make_tokenizer, save
from tests.structured_output.hostile import GRAMMARS, REGEXES, SCHEMAS

STOP = StopParams(max_new_tokens=50, eos_token_ids=frozenset([EOS_ID]))
NUM_TOKENS = 6
MAX_TRIES = 5  # of a grammar, on a busy machine
CASES: dict[str, Callable[[], Structure]] = {
    **{f"schema: {name}": partial(from_json_schema, schema) for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": partial(from_regex, regex) for name, regex in REGEXES.items()},
    **{f"grammar: {name}": partial(from_grammar, text) for name, text in GRAMMARS.items()},
}


def choose(mask: Words, random: np.random.Generator) -> int:
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert len(allowed), "a mask allows something"
    return int(random.choice(allowed))


def is_too_busy(error: LoraxError | None) -> bool:
    return isinstance(error, BusyError) and "the machine is too busy" in str(error)


class Follower:
    """Stands for the engine: follows answers with tokens that the masks allow."""

    def __init__(self, structures: Structures) -> None:
        self.structures = structures
        self.news = threading.Event()
        structures.on_news = self.news.set
        self._next_id = 0
        self._settled: dict[int, LoraxError | None] = {}

    def begin(self, structure: Structure) -> int:
        self._next_id += 1
        self.structures.begin(Request(self._next_id, [0], SamplingParams(), STOP, structure=structure))
        return self._next_id

    def settle(self, request_id: int) -> LoraxError | None:
        while request_id not in self._settled:
            assert self.news.wait(60), "it is neither refused nor begun"
            self.news.clear()
            self._settled |= dict(self.structures.take_settled())
        return self._settled[request_id]

    def begin_and_settle(self, structure: Structure) -> tuple[int, LoraxError | None]:
        """Begin, and do so again while the machine is too busy, as a client is told to."""
        for _ in range(MAX_TRIES):
            error = self.settle(request_id := self.begin(structure))
            if not is_too_busy(error):
                break
            self.structures.end(request_id)
        return request_id, error

    def advance(self, request_id: int, random: np.random.Generator) -> bool:
        """Choose one of the allowed tokens; False if the answer has ended or failed."""
        found = self.structures.gather([request_id], 60.0).get(request_id)
        if found is None:
            return False
        token_id = choose(found.words, random)
        if token_id == EOS_ID:
            return False
        self.structures.advance([(request_id, token_id)])
        return True


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    folder = save(tmp_path_factory.mktemp("model"), make_model(SERVED["llama"]()), make_tokenizer())
    structures = Structures(folder)
    yield Follower(structures)
    structures.close()


def test_there_are_enough() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_it_is_followed_or_refused_and_nobody_else_notices(name: str, follower: Follower) -> None:
    try:
        structure = CASES[name]()
    except InputError:
        return  # before it reaches the engine
    random = np.random.default_rng(0)
    other, error = follower.begin_and_settle(from_regex("[a-z]{300,400}"))
    assert error is None
    hostile = follower.begin(structure)
    assert follower.advance(other, random)
    error = follower.settle(hostile)
    if is_too_busy(error):
        follower.structures.end(hostile)
        hostile, error = follower.begin_and_settle(structure)
    if error is None:
        for _ in range(NUM_TOKENS):
            if not follower.advance(hostile, random):
                break
    else:
        assert isinstance(error, InputError)
        assert 5 < len(str(error)) < 1000
    assert follower.advance(other, random)
    for request_id in (hostile, other):
        follower.structures.end(request_id)


def test_what_is_refused_once_is_refused_at_once(follower: Follower) -> None:
    structure = from_json_schema(SCHEMAS["allOf of patterns"])
    first, second = follower.begin(structure), follower.begin(structure)
    for request_id in (first, second):
        assert "to compile" in str(follower.settle(request_id))
        follower.structures.end(request_id)
    assert "to compile" in str(follower.settle(follower.begin(structure)))


def test_what_comes_after_the_end_of_an_answer_is_dropped(follower: Follower) -> None:
    structure, structures = from_regex("[a-z]{3}"), follower.structures
    first = follower.begin(structure)
    assert follower.settle(first) is None
    ended = follower.begin(structure)  # the grammar is known: a mask is on its way
    structures.end(ended)
    last = follower.begin(structure)
    assert follower.settle(last) is None
    assert ended not in structures._next
    assert ended not in structures._begun
    for request_id in (first, last):
        structures.end(request_id)
    assert not structures._begun


def make_program(connection: Connection, vocabulary: Vocabulary) -> StructureProgram:
    return StructureProgram(connection, vocabulary, WrittenSlots(vocabulary.make_masks(64)))


def test_a_grammar_that_nobody_waits_for_is_not_tried(follower: Follower) -> None:
    program = make_program(Pipe()[0], Vocabulary(load_tokenizer(follower.structures._model)))
    for request_id, grammar in enumerate("abbc"):
        program._begin(wire.Begin(request_id, request_id, grammar, (EOS_ID,), (), 0))
    for request_id in (0, 1):
        program._end(request_id)
    assert program._untried == list(program._waiting) == ["b", "c"]
    program._untried.remove("c")  # it is being tried
    program._end(3)
    assert [begin.request_id for begin in program._take_waiting("b")] == [2]
    assert program._take_waiting("c") == []
    assert not program._grammar_of


def test_a_token_that_is_not_the_forced_one_fails_its_request_alone(
    follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    structures, random = follower.structures, np.random.default_rng(0)
    stop = StopParams(max_new_tokens=50, eos_token_ids=frozenset([EOS_ID]))
    structure = from_regex("[ab]Q{6}[ab]{9}")
    for request_id in (1001, 1002):
        structures.begin(Request(request_id, [0], SamplingParams(), stop, structure=structure), jump_below=10**6)
        assert follower.settle(request_id) is None
        assert follower.advance(request_id, random)
    found = structures.gather([1001, 1002], 60.0)
    wrong, right = found[1001].forced[0] + 1, list(found[1002].forced)
    structures.advance([(1001, wrong), *((1002, token_id) for token_id in right), (1001, wrong)])
    ((request_id, error),) = structures.take_settled()
    assert (request_id, type(error)) == (1001, EngineError)
    assert f"token {wrong} was chosen" in caplog.text
    assert structures.gather([1001], 60.0) == {}  # at once
    assert follower.advance(1002, random)
    for request_id in (1001, 1002):
        structures.end(request_id)


@pytest.fixture(scope="module")
def vocabulary(follower: Follower) -> Vocabulary:
    return Vocabulary(load_tokenizer(follower.structures._model))


def test_a_panic_of_the_library_refuses_its_grammar_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Pipe()
    program, compile_grammar, bad = make_program(theirs, vocabulary), Compiled.of, from_regex("a").grammar

    class Panic(BaseException):
        """Is no Exception, as the library's."""

    def compile_or_panic(vocabulary: Vocabulary, grammar: str) -> Compiled:
        if grammar == bad:
            raise Panic("index out of bounds")
        return compile_grammar(vocabulary, grammar)

    monkeypatch.setattr(Compiled, "of", compile_or_panic)
    thread = threading.Thread(target=program._compile_all)
    thread.start()
    for request_id, grammar in enumerate([bad, from_regex("b").grammar]):  # the thread lives on
        program._begin(wire.Begin(request_id, request_id, grammar, (EOS_ID,), (), 0))
        program._num_compiling += 1
        program._to_compile.put(grammar)
        assert wait([program._wake], 60)
        os.read(program._wake, 1)
        program._take_compiled()
    failed, masks = (pickle.loads(ours.recv_bytes()) for _ in range(2))
    assert failed == wire.FailedAnswer(0, "Panic: index out of bounds")
    assert masks.request_ids == [1]
    program._to_compile.put(None)
    thread.join()
    for connection in (ours, theirs):
        connection.close()


def choose_text(mask: Words, random: np.random.Generator) -> int:
    """Choose a token that does not end the answer."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    bits[EOS_ID] = 0
    return int(random.choice(np.flatnonzero(bits)))


def begin_all(program: StructureProgram, vocabulary: Vocabulary, grammars: list[str]) -> None:
    for request_id, grammar in enumerate(grammars):
        program._grammars[grammar] = Compiled.of(vocabulary, grammar)
        program._begin(wire.Begin(request_id, request_id, grammar, (EOS_ID,), (), 0, vocabulary.num_ids))


def choose_next(program: StructureProgram, request_id: int, random: np.random.Generator) -> int:
    return choose(program._followers[request_id].words, random)


def read_all(connection: Connection) -> list[wire.Masks]:
    masks = []
    while connection.poll():
        masks.append(pickle.loads(connection.recv_bytes()))
    return masks


def test_masks_of_a_slow_answer_come_after_those_of_others(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Pipe()
    program, random = make_program(theirs, vocabulary), np.random.default_rng(0)
    begin_all(program, vocabulary, [from_regex("[a-z]{50,60}").grammar] * 3)
    monkeypatch.setattr("lorax_server.structured_output.matchers.SLOW_S", 60.0)  # however busy this machine is
    program._advance([(request_id, choose_next(program, request_id, random)) for request_id in range(3)])
    assert [masks.request_ids for masks in read_all(ours)] == [[0], [1], [2], [0, 1, 2]]
    program._followers[0].spent_s = 61.0
    program._advance([(request_id, choose_next(program, request_id, random)) for request_id in range(1, 3)])
    monkeypatch.setattr("lorax_server.structured_output.matchers.SPENT_S", 1000.0)
    program._advance([(request_id, choose_next(program, request_id, random)) for request_id in range(3)])
    assert [masks.request_ids for masks in read_all(ours)] == [[1, 2], [1, 2], [0]]
    for connection in (ours, theirs):
        connection.close()


def test_masks_of_others_come_while_an_answer_jumps(vocabulary: Vocabulary) -> None:
    ours, theirs = Pipe()
    program, random = make_program(theirs, vocabulary), np.random.default_rng(0)
    begin_all(program, vocabulary, [from_regex("[ab]Q{12}[ab]").grammar, from_regex("[a-z]{50,60}").grammar])
    assert [masks.request_ids for masks in read_all(ours)] == [[0], [1]]
    program._advance([(request_id, choose_next(program, request_id, random)) for request_id in range(2)])
    for _ in range(4):
        (masks,) = read_all(ours)
        assert masks.request_ids == [1]
        assert 0 in program._jumping
        program._jump()
        program._advance([(1, choose_next(program, 1, random))])
    read_all(ours)
    while program._jumping:
        program._jump()
    (masks,) = read_all(ours)
    ((request_id, forced),) = masks.forced.items()
    assert request_id == 0
    assert len(forced) > 4
    program._advance([(0, choose_next(program, 0, random))])
    program._end(0)
    for connection in (ours, theirs):
        connection.close()


def test_an_answer_jumps_for_a_short_time_and_goes_on_later(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorax_server.structured_output.program.JUMP_S", 0.0)
    ours, theirs = Pipe()
    program, random = make_program(theirs, vocabulary), np.random.default_rng(0)
    begin_all(program, vocabulary, [from_regex("[ab]Q{12}[ab]").grammar])
    read_all(ours)
    program._advance([(0, choose_next(program, 0, random))])
    program._jump()
    assert not program._jumping
    (masks,) = read_all(ours)
    assert len(masks.forced[0]) == 1
    program._advance([(0, choose_next(program, 0, random))])
    assert 0 in program._jumping
    for connection in (ours, theirs):
        connection.close()


def test_an_answer_that_fails_while_it_jumps_fails_where_it_gets_there(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Pipe()
    program, random = make_program(theirs, vocabulary), np.random.default_rng(0)
    begin_all(program, vocabulary, [from_regex("[ab]Q{12}[ab]").grammar])
    (masks,) = read_all(ours)
    program._advance([(0, choose_next(program, 0, random))])
    program._jump()
    monkeypatch.setattr("lorax_server.structured_output.matchers.SPENT_S", -1.0)
    monkeypatch.setattr("lorax_server.structured_output.matchers.TOKEN_S", -1.0)
    token_id = program._jumping[0].token_id
    program._jump()
    (masks,) = read_all(ours)
    assert len(masks.forced[0]) == 1
    assert np.bitwise_count(program._followers[0].words.view(np.uint32)).sum() == 1
    assert choose_next(program, 0, random) == token_id
    monkeypatch.undo()
    program._advance([(0, token_id)])
    failed = pickle.loads(ours.recv_bytes())
    assert isinstance(failed, wire.FailedAnswer)
    assert "a token" in failed.message
    for connection in (ours, theirs):
        connection.close()


def test_a_process_that_hangs_is_ended(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    structures = follower.structures
    request_id = follower.begin(from_regex("[a-z]{3}"))
    assert follower.settle(request_id) is None
    process = structures._of_request[request_id]
    monkeypatch.setattr("lorax_server.structured_output.structures.HANG_S", 0.2)
    process._process.send_signal(signal.SIGSTOP)
    assert follower.advance(request_id, np.random.default_rng(0))
    assert structures.gather([request_id], 60.0) == {}  # long before these seconds have passed
    assert process._process.wait(60) == -signal.SIGKILL
    assert dict(structures.take_settled())[request_id].__class__ is BusyError
    structures.end(request_id)
    following = follower.begin(from_regex("[a-z]{3}"))
    assert follower.settle(following) is None
    structures.end(following)


def test_a_vocabulary_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    structures = Structures(tmp_path)  # without a tokenizer
    follower = Follower(structures)
    try:
        request_id = follower.begin(from_regex("a"))
        ((process,),) = structures._processes.values()
        assert follower.settle(request_id) is not None
        process._threads[1].join(60)  # it reads until the process has ended
        for _ in range(2):
            with pytest.raises(InputError, match="tokenizer"):
                follower.begin(from_regex("a"))
        assert list(structures._processes.values()) == [[process]]
    finally:
        structures.close()
