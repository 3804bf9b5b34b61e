"""Those who try grammars: what ends them, who takes their place, and whom they give way to."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorax_server.structures import trials
from lorax_server.structures.grammars import from_regex
from lorax_server.structures.structures import Structures
from lorax_server.structures.trials import NICENESS, TOO_LARGE, TOO_LONG, Trier
from tests.e2e.wire import wait_for
from tests.models.tiny import SERVED, make_model, make_tokenizer, save
from tests.structures.test_hostile import Follower

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
    made = Trier(NOTHING, gives_way=request.param)
    yield made
    if not made.is_lost:
        made.end()
    wait_for(lambda: not psutil.pid_exists(made._keeper_id), "the keeper has ended")


def find_child(trier: Trier) -> psutil.Process:
    keeper = psutil.Process(trier._keeper_id)
    wait_for(keeper.children, "it has forked")
    return keeper.children()[0]


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
    wait_for(lambda: find_child(trier) != first, "another takes its place")
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
    assert keeper.wait(60) == 0
    wait_for(lambda: not child.is_running(), "both have ended")
    trier.is_lost = True


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has this policy")
def test_whom_they_give_way_to(trier: Trier) -> None:
    child, policy = find_child(trier), os.SCHED_IDLE if trier.gives_way else os.SCHED_OTHER
    wait_for(lambda: os.sched_getscheduler(child.pid) == policy, "it has its policy")
    assert child.nice() == NICENESS


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
    keepers: list[psutil.Process] = psutil.Process(process._process.pid).children()
    for keeper in keepers:
        wait_for(keeper.children, "it has forked")
    return keepers


def test_another_one_tries_what_has_to_give_way_for_too_long(follower: Follower) -> None:
    keepers = find_keepers(follower)
    assert len(keepers) == 2
    slow = next(child for keeper in keepers for child in keeper.children() if _gives_way(child))
    slow.suspend()  # as on a machine that has no time for it
    assert follower.begin_and_settle(from_regex("second"))[1] is None
    assert follower.begin_and_settle(from_regex("third"))[1] is None  # by the other one at once
    slow.resume()
    assert follower.begin_and_settle(from_regex("fourth"))[1] is None


def _gives_way(process: psutil.Process) -> bool:
    return not hasattr(os, "SCHED_IDLE") or os.sched_getscheduler(process.pid) == os.SCHED_IDLE


def test_those_who_were_killed_are_replaced_and_no_grammar_is_blamed(follower: Follower) -> None:
    keepers = find_keepers(follower)
    for keeper in keepers:
        os.killpg(keeper.pid, signal.SIGKILL)
    for text in ("second", "third", "second"):
        assert follower.begin_and_settle(from_regex(text))[1] is None
    assert len(find_keepers(follower)) == 2
    assert not set(keepers) & set(find_keepers(follower))
