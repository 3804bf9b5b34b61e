"""`Engine.wait`. Steps are tested with the scheduler and in tests/parity."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lorax_server.engine.engine import MAX_IDLE_WAIT_S, Engine


@pytest.mark.parametrize(("deadline_s", "expected"), [(None, MAX_IDLE_WAIT_S), (0.01, 0.01), (9.0, MAX_IDLE_WAIT_S)])
def test_wait_is_bounded_and_clears_wake(deadline_s: float | None, expected: float) -> None:
    waits: list[float | str] = []
    engine: Any = Engine.__new__(Engine)
    engine.wake = SimpleNamespace(wait=waits.append, clear=lambda: waits.append("clear"))
    with mock.patch.multiple(Engine, is_busy=False, deadline_s=deadline_s):
        engine.wait()
    assert waits == [expected, "clear"]


def test_busy_engine_does_not_wait() -> None:
    waits: list[str] = []
    engine: Any = Engine.__new__(Engine)
    engine.wake = SimpleNamespace(wait=lambda _: waits.append("wait"), clear=lambda: waits.append("clear"))
    with mock.patch.multiple(Engine, is_busy=True):
        engine.wait()
    assert waits == ["clear"]
