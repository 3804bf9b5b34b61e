"""Hostile structures: each is followed or refused with a reason, and an answer beside them goes on."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest

from lorax_server.errors import InputError, LoraxError
from lorax_server.structures import wire
from lorax_server.structures.grammars import from_grammar, from_json_schema, from_regex
from lorax_server.structures.program import StructureProgram
from lorax_server.structures.structures import Structures
from lorax_server.structures.vocabulary import Vocabulary
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import Request, SamplingParams, StopParams, Structure
from tests.models.tiny import EOS_ID, SERVED, make_model, make_tokenizer, save
from tests.structures.hostile import GRAMMARS, REGEXES, SCHEMAS

STOP = StopParams(max_new_tokens=50, eos_token_ids=frozenset([EOS_ID]))
NUM_TOKENS = 6
CASES: dict[str, Callable[[], Structure]] = {
    **{f"schema: {name}": partial(from_json_schema, schema) for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": partial(from_regex, regex) for name, regex in REGEXES.items()},
    **{f"grammar: {name}": partial(from_grammar, text) for name, text in GRAMMARS.items()},
}


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

    def advance(self, request_id: int, random: np.random.Generator) -> bool:
        """Choose one of the allowed tokens; False if the answer has ended or failed."""
        mask = self.structures.gather([request_id], 60.0).get(request_id)
        if mask is None:
            return False
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), "a mask allows something"
        token_id = int(random.choice(allowed))
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
    other, random = follower.begin(from_regex("[a-z]{300,400}")), np.random.default_rng(0)
    assert follower.settle(other) is None
    hostile = follower.begin(structure)
    assert follower.advance(other, random)
    error = follower.settle(hostile)
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
    assert ended not in structures._masks
    assert ended not in structures._begun
    for request_id in (first, last):
        structures.end(request_id)
    assert not structures._begun


def test_a_grammar_that_nobody_waits_for_is_not_tried(follower: Follower) -> None:
    program = StructureProgram(Pipe()[0], Vocabulary(load_tokenizer(follower.structures._model)))
    for request_id, grammar in enumerate("abbc"):
        program._begin(wire.Begin(request_id, grammar, (EOS_ID,), (), 0))
    for request_id in (0, 1):
        program._end(request_id)
    assert program._untried == list(program._waiting) == ["b", "c"]
    program._untried.remove("c")  # it is being tried
    program._end(3)
    assert [begin.request_id for begin in program._take_waiting("b")] == [2]
    assert program._take_waiting("c") == []
    assert not program._grammar_of


def test_a_vocabulary_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    structures = Structures(tmp_path)  # without a tokenizer
    follower = Follower(structures)
    try:
        request_id = follower.begin(from_regex("a"))
        (process,) = structures._processes.values()
        assert follower.settle(request_id) is not None
        process._threads[1].join(60)  # it reads until the process has ended
        for _ in range(2):
            with pytest.raises(InputError, match="tokenizer"):
                follower.begin(from_regex("a"))
        assert list(structures._processes.values()) == [process]
    finally:
        structures.close()
