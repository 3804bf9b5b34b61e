"""Processes that try grammars: what ends them, what takes their place, and what they give way to."""

import os
import pickle
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from lorax_server.structured_output import program, trials, wire
from lorax_server.structured_output.grammars import from_regex
from lorax_server.structured_output.slots import WrittenSlots
from lorax_server.structured_output.structures import Structures
from lorax_server.structured_output.trials import NICENESS, TOO_LARGE, TOO_LONG, Trier
from tests.e2e.wire import wait_for
from tests.models.tiny import SERVED, make_model, make_tokenizer, save
from tests.structured_output.test_hostile import Follower

NOTHING: Any = None  # in place of a vocabulary


@pytest.fixture(params=[True, False], ids=["gives way", "does not"])
def trier(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Trier]:
    """One whose grammars say what becomes of their trial."""

    def play(_: object, grammar: str) -> str | None:
        while grammar == "takes for ever":
            pass
        if grammar == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return None if grammar == "is fine" else f"{grammar} is wrong"

    monkeypatch.setattr(trials, "_try", play)
    monkeypatch.setattr(trials, "COMPILE_S", 0.02)  # one that gives way has little of a busy machine
    made = Trier(NOTHING, gives_way=request.param)
    yield made
    if not made.is_lost:
        made.end()
    wait_for(lambda: not psutil.pid_exists(made._keeper_id), "the keeper has ended")


def find_child(trier: Trier) -> psutil.Process:
    (child,) = children_of(psutil.Process(trier._keeper_id), 1)
    return child


def children_of(process: psutil.Process, count: int, but: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Wait until a process has so many children that run and are not among some others. Return them."""
    found: list[psutil.Process] = []

    def find() -> bool:
        found.clear()
        for child in process.children():
            with suppress(psutil.NoSuchProcess):
                if child not in but and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return len(found) == count

    wait_for(find, "they run")
    return found


def test_what_ends_a_trial_is_told_and_the_next_one_is_tried(trier: Trier) -> None:
    first = find_child(trier)
    for grammar, problem in (
        ("is fine", None),
        ("takes for ever", TOO_LONG),
        ("", " is wrong"),
        ("is killed", TOO_LARGE),
        ("\udc80", "\udc80 is wrong"),
        ("is fine", None),
    ):
        assert trier.begin(grammar)
        assert (trier.grammar, trier.hear(), trier.grammar) == (grammar, problem, "")
    assert not trier.begin("x" * (trials.MAX_BYTES + 1))
    assert not trier.is_lost
    assert find_child(trier) != first


def test_one_that_dies_without_a_grammar_is_replaced_and_says_nothing(trier: Trier) -> None:
    first = find_child(trier)
    first.kill()
    children_of(psutil.Process(trier._keeper_id), 1, but=[first])
    assert not trier.connection.poll(0)
    assert trier.begin("is fine")
    assert trier.hear() is None


def test_a_lost_keeper_is_noticed(trier: Trier) -> None:
    os.killpg(trier._keeper_id, signal.SIGKILL)
    os.waitid(os.P_PID, trier._keeper_id, os.WEXITED | os.WNOWAIT)
    assert trier.begin("is fine")
    assert trier.hear() is None
    assert trier.is_lost
    assert trier.grammar == ""


def test_they_end_when_nobody_asks_any_more(trier: Trier) -> None:
    keeper, child = psutil.Process(trier._keeper_id), find_child(trier)
    trier.connection.close()
    assert keeper.wait(300) == 0
    wait_for(lambda: not child.is_running(), "both have ended")
    trier.is_lost = True


def test_what_they_give_way_to(trier: Trier) -> None:
    child = find_child(trier)
    wait_for(lambda: gives_way(child) == trier.gives_way, "it has its policy")
    assert child.nice() == NICENESS


def gives_way(process: psutil.Process) -> bool:
    return os.sched_getscheduler(process.pid) == os.SCHED_IDLE


# --- Two triers of one program ----------------------------------------------------------------------------------------


class Scripted:
    """A trier whose results come when a test says so."""

    def __init__(self, _: object = None, *, gives_way: bool) -> None:
        self.gives_way, self.grammar, self.began = gives_way, "", 0.0
        self.is_outrun = self.is_lost = False
        self.problem: str | None = None
        self.begun: list[str] = []

    def begin(self, grammar: str) -> bool:
        self.begun.append(grammar)
        self.grammar, self.began, self.is_outrun = grammar, time.monotonic(), False
        return True

    def hear(self) -> str | None:
        self.grammar = ""
        return self.problem

    def end(self) -> None:
        self.grammar, self.is_lost = "", True


class Stage:
    """A program with scripted triers, and what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(program, "GIVE_WAY_S", -1.0)
        self._ours, self._theirs = Pipe()
        slots = WrittenSlots(np.zeros((4, 1), np.int32))
        self.program = program.StructureProgram(self._theirs, NOTHING, slots)
        self.slow, self.other = Scripted(gives_way=True), Scripted(gives_way=False)
        self.program._triers = cast(list[Trier], [self.slow, self.other])
        self.program._begin(wire.Begin(7, 0, "a grammar", (1,), (), 0))

    def close(self) -> None:
        for connection in (self._ours, self._theirs):
            connection.close()

    def try_and_look(self) -> None:
        self.program._try_next()
        self.program._look_at_late()

    def hear(self, trier: Scripted) -> None:
        self.program._hear(cast(Trier, trier))

    def read(self) -> list[wire.FromProgram]:
        said = []
        while self._ours.poll(0):
            said.append(pickle.loads(self._ours.recv_bytes()))
        return said


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with closing(Stage(monkeypatch)) as made:
        yield made


@pytest.mark.parametrize("is_slow_first", [True, False])
def test_of_two_trials_the_first_result_counts(stage: Stage, is_slow_first: bool) -> None:
    stage.try_and_look()
    stage.program._look_at_late()
    assert stage.slow.begun == stage.other.begun == ["a grammar"]
    first, last = (stage.slow, stage.other) if is_slow_first else (stage.other, stage.slow)
    stage.hear(first)
    last.problem = "what the last one says"
    stage.hear(last)
    assert stage.program._num_compiling == 1
    assert stage.read() == []


def test_a_result_that_nobody_waits_for_keeps_no_later_trial_from_its_own(stage: Stage) -> None:
    stage.try_and_look()
    stage.other.problem = "it is wrong"
    stage.hear(stage.other)
    stage.read()
    stage.program._refused.clear()  # as a minute later, while the first trial still goes on
    stage.program._begin(wire.Begin(8, 0, "a grammar", (1,), (), 0))
    stage.try_and_look()
    assert stage.other.begun == ["a grammar"] * 2
    stage.other.is_lost = True
    stage.hear(stage.other)
    (failed,) = stage.read()
    assert isinstance(failed, wire.FailedAnswer)
    assert (failed.request_id, failed.is_busy) == (8, True)


@pytest.mark.parametrize("is_slow_lost", [True, False])
def test_the_loss_of_one_leaves_the_other(stage: Stage, is_slow_lost: bool) -> None:
    stage.try_and_look()
    lost, left = (stage.slow, stage.other) if is_slow_lost else (stage.other, stage.slow)
    lost.is_lost = True
    stage.hear(lost)
    assert stage.read() == []
    left.problem = "it is wrong"
    stage.hear(left)
    assert stage.read() == [wire.FailedAnswer(7, "it is wrong")]


def test_one_that_takes_too_long_is_ended_and_the_last_of_them_tells(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.try_and_look()
    monkeypatch.setattr(program, "PATIENCE_S", -1.0)
    stage.program._look_at_late()
    assert stage.slow.is_lost
    assert stage.other.is_lost
    (failed,) = stage.read()
    assert isinstance(failed, wire.FailedAnswer)
    assert failed.is_busy


def test_without_room_for_a_trier_requests_are_told_to_come_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Trier:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(program, "Trier", refuse)
    stage.slow.is_lost = stage.other.is_lost = True
    stage.program._try_next()
    (failed,) = stage.read()
    assert isinstance(failed, wire.FailedAnswer)
    assert failed.is_busy
    monkeypatch.setattr(program, "Trier", Scripted)
    stage.program._begin(wire.Begin(8, 0, "another", (1,), (), 0))
    stage.program._try_next()
    assert [trier.grammar for trier in stage.program._triers] == ["another", ""]


# --- In the real process ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), make_model(SERVED["llama"]()), make_tokenizer())


@pytest.fixture
def follower(model: Path) -> Iterator[Follower]:
    structures = Structures(model)
    follower = Follower(structures)
    assert follower.begin_and_settle(from_regex("first"))[1] is None
    yield follower
    structures.close()


def find_keepers(follower: Follower) -> list[psutil.Process]:
    ((process,),) = follower.structures._processes.values()
    return children_of(psutil.Process(process._process.pid), 2)


def test_another_one_tries_what_has_to_give_way_for_too_long(follower: Follower) -> None:
    children = [child for keeper in find_keepers(follower) for child in children_of(keeper, 1)]
    slow = next(child for child in children if gives_way(child))
    slow.suspend()  # as on a machine that has no time for it
    assert follower.begin_and_settle(from_regex("second"))[1] is None
    assert follower.begin_and_settle(from_regex("third"))[1] is None  # by the other one at once
    slow.resume()
    assert follower.begin_and_settle(from_regex("fourth"))[1] is None


def test_a_keeper_that_was_killed_is_replaced_and_no_grammar_is_blamed(follower: Follower) -> None:
    keepers = find_keepers(follower)
    for keeper in keepers:
        os.killpg(keeper.pid, signal.SIGKILL)
    for text in ("second", "third", "second"):
        assert follower.begin_and_settle(from_regex(text))[1] is None
    ((process,),) = follower.structures._processes.values()
    assert children_of(psutil.Process(process._process.pid), 1, but=keepers)
