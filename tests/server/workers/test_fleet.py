"""Places for workers whose processes cannot be started."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lorax_server.server.workers.desk import Desk
from lorax_server.server.workers.fleet import Fleet, WorkerError


def never(*_: object) -> None:
    raise AssertionError("no process can be started")


def without_files(*_: object) -> Any:
    raise OSError(24, "Too many open files")


async def fail_to_start() -> None:
    fleet = Fleet(never, 2, cast(Desk, SimpleNamespace(seats=[])))
    with pytest.raises(WorkerError, match=r"API process 1 of 2 cannot start: OSError: .*Too many open files"):
        await asyncio.wait_for(fleet.start(), 60)
    await fleet.stop()


def test_a_start_without_files_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr("socket.socketpair", without_files)  # the loop has its own pair already
        await fail_to_start()

    asyncio.run(run())


def test_sockets_are_closed_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    make = socket.socketpair

    def noted() -> tuple[socket.socket, socket.socket]:
        pair = make()
        made.extend(pair)
        return pair

    async def run() -> None:
        monkeypatch.setattr("socket.socketpair", noted)
        monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", without_files)
        await fail_to_start()

    asyncio.run(run())
    assert len(made) == 8
    assert all(end.fileno() == -1 for end in made)
