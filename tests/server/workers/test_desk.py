"""The parent's desk: what workers ask has one answer, what one changes all change, and what one held is given back."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.model_names import Named
from lorax_server.server.seen_adapters import SeenAdapters
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.server.workers import desk as desk_module
from lorax_server.server.workers import messages
from lorax_server.server.workers.changes import (
    AdapterForgotten,
    AdapterFound,
    AdapterPinned,
    AdapterUnpinned,
    Changes,
    FolderRead,
    NameAdded,
    NameFailed,
    NameForgotten,
    NameRemoved,
    make_change,
)
from lorax_server.server.workers.common import make_names
from lorax_server.server.workers.desk import Desk
from lorax_server.server.workers.door import Door, take_connections
from lorax_server.server.workers.seat import Seat
from tests.server.bench import INFO

KEYS = """
[keys.few]
key = "few"
max_concurrent = 3
[keys.new]
key = "new"
new_adapters_per_minute = 1
"""


class NoProcess:
    """A process that is not there."""


class HeardSeat(Seat):
    """A worker that keeps what it is told, and has an end of the door of its own."""

    def __init__(self, number: int) -> None:
        self.theirs, ours = socket.socketpair()
        for end in (self.theirs, ours):
            end.setblocking(False)
        first = asyncio.get_running_loop().create_future()
        super().__init__(number, cast(Any, NoProcess()), ours, first)
        self.told: list[Any] = []

    def send(self, message: messages.WireMessage) -> None:
        self.told.append(message)

    def take_last(self) -> Any:
        return self.told.pop()

    def end(self) -> None:
        super().end()
        self.theirs.close()


def _nowhere(config: None, address: str) -> None:
    raise AssertionError("no process is started here")


def make_config(**more: Any) -> ServerConfig:
    return ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base", default_source="local", **more)


def run(tmp_path: Path, test: Callable[[Desk, HeardSeat, HeardSeat], Awaitable[None]], **config: Any) -> None:
    """Run a test with a desk and two workers that serve."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)

    async def run_all() -> None:
        engine = RemoteEngine(_nowhere, None)
        engine.info = INFO
        desk = Desk(make_config(**config), engine, KeyRing((), None, file))
        desk._metrics = desk._make_metrics()
        seats = HeardSeat(1), HeardSeat(2)
        for seat in seats:
            desk.admit(seat)
            desk.handle(seat, messages.Serving())
        await confirm_all(desk, *seats)
        for seat in seats:
            assert seat.is_open
            seat.told.clear()
        try:
            async with asyncio.timeout(30):
                await test(desk, *seats)
        finally:
            for seat in seats:
                desk.dismiss(seat)

    asyncio.run(run_all())


async def confirm_all(desk: Desk, *seats: HeardSeat) -> None:
    """Let workers confirm all changes that they were told of."""
    await asyncio.sleep(0)
    for seat in seats:
        for message in seat.told:
            if isinstance(message, messages.ChangeMade):
                desk.handle(seat, messages.Synced(message.number))
    for _ in range(10):
        await asyncio.sleep(0)


def test_answers_of_all_workers_count_against_a_key_and_are_given_back(tmp_path: Path) -> None:
    async def test(desk: Desk, one: HeardSeat, other: HeardSeat) -> None:
        desk.handle(one, messages.EnterAsked(1, "few", 2))
        assert one.take_last() == messages.Answered(1)
        desk.handle(other, messages.EnterAsked(1, "few", 1))
        assert other.take_last() == messages.Answered(1)
        for seat in (one, other):
            desk.handle(seat, messages.EnterAsked(2, "few", 1))
            refused = seat.take_last()
            assert refused.failure.kind == "OverloadedError"
            assert "3 of at most 3 answers" in refused.failure.message
        desk.handle(other, messages.TicketLeft(1, 7))
        desk.handle(other, messages.TicketLeft(1, 7))  # nothing more is given back
        desk.handle(one, messages.EnterAsked(3, "few", 1))
        assert one.take_last() == messages.Answered(3)
        desk.dismiss(one)  # with three answers under way
        desk.handle(other, messages.EnterAsked(4, "few", 3))
        assert other.take_last() == messages.Answered(4)
        assert desk._limits.num_running == 3

    run(tmp_path, test)


def test_a_new_adapter_is_paid_for_once_by_all_workers(tmp_path: Path) -> None:
    async def test(desk: Desk, one: HeardSeat, other: HeardSeat) -> None:
        name = Named("hub", "owner/name")
        for seat in (one, other):
            desk.handle(seat, messages.FareOpened(1, "new", name))
            desk.handle(seat, messages.FareAsked(2, 1))
            assert seat.take_last() == messages.Answered(2)  # they wait for the same one
        desk.handle(one, messages.FareOpened(3, "new", Named("hub", "owner/other")))
        desk.handle(one, messages.FareAsked(4, 3))
        assert "new adapters a minute" in one.take_last().failure.message
        desk.handle(other, messages.FareGivenBack(1))
        desk.handle(other, messages.FareClosed(1, is_answered=True))
        desk.handle(one, messages.FareAsked(5, 3))
        assert one.take_last() == messages.Answered(5)
        desk.dismiss(one)
        assert not desk._limits._fares

    run(tmp_path, test)


def test_a_change_is_answered_when_all_have_made_it(tmp_path: Path) -> None:
    async def test(desk: Desk, one: HeardSeat, other: HeardSeat) -> None:
        desk.handle(one, messages.ChangeAsked(9, NameAdded("mine", "local", "first")))
        await asyncio.sleep(0)
        (told,) = other.told
        assert told.change == NameAdded("mine", "local", "first")
        await confirm_all(desk, one)
        assert messages.Answered(9) not in one.told
        await confirm_all(desk, other)
        assert messages.Answered(9) in one.told
        desk.handle(other, messages.ChangeAsked(9, NameAdded("base", "local", "first")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert "is the base model" in other.take_last().failure.message
        assert len(one.told) == 2  # nobody else was told
        newcomer = HeardSeat(3)
        desk.admit(newcomer)
        assert newcomer.told[0].aliases == {"mine": Named("local", "first")}
        desk.dismiss(newcomer)

    run(tmp_path, test)


def test_a_worker_that_hangs_or_ends_holds_up_no_change_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "CONFIRM_S", 0.01)

    async def test(desk: Desk, one: HeardSeat, other: HeardSeat) -> None:
        await desk.change(NameAdded("mine", "local", "first"))  # nobody confirms
        waiting = asyncio.create_task(desk.change(NameRemoved("mine")))
        await asyncio.sleep(0)
        desk.dismiss(one)
        desk.dismiss(other)
        await waiting

    run(tmp_path, test)


def test_all_workers_count_into_one_and_a_scrape_waits_for_what_they_know(tmp_path: Path) -> None:
    async def test(desk: Desk, one: HeardSeat, other: HeardSeat) -> None:
        for seat in (one, other):
            desk.handle(seat, messages.RequestBegun())
            desk.handle(seat, messages.RequestEnded(RequestRecord("", "", adapter_id="", generated_tokens=5)))
            desk.handle(seat, messages.ConnectionsOpen(4, 4))
        scraping = asyncio.create_task(desk.scrape(as_json=False))
        await asyncio.sleep(0)
        desk.handle(one, messages.RequestRefused(RequestRecord("", "", status=404, error_type="not_found")))
        await confirm_all(desk, one, other)
        text = (await scraping).decode()
        for line in ("lorax_request_count 3.0", "lorax_request_success 2.0", "lorax_connections 8.0"):
            assert line in text
        assert 'lorax_adapter_tokens_total{adapter="base",kind="generated"} 10.0' in text
        assert "lorax_api_workers 2.0" in text
        desk.dismiss(other)
        assert "lorax_connections 4.0" in desk._metrics.prometheus().decode()  # type: ignore[union-attr]

    run(tmp_path, test)


def some_changes(count: int) -> list[Changes]:
    """Draw changes of a few names and adapters."""
    draw = random.Random(7)
    made: list[Changes] = []
    for _ in range(count):
        identity = f"hash-{draw.randrange(6)}"
        name = Named(draw.choice(("hub", "local", "")), f"name-{draw.randrange(6)}")
        choices: list[Changes] = [
            NameAdded(name.name, "local", name.name),
            NameRemoved(name.name),
            FolderRead([f"name-{draw.randrange(9)}" for _ in range(3)]),
            AdapterFound(identity, name),
            AdapterForgotten(identity),
            NameForgotten(identity, name),
            AdapterPinned(identity, name),
            AdapterUnpinned(identity),
            NameFailed(name, "broken"),
        ]
        made.append(draw.choice(choices))
    return made


def test_who_makes_the_same_changes_has_the_same() -> None:
    changes = some_changes(1000)
    names, seen = make_names(make_config()), SeenAdapters()
    late_names, late_seen = make_names(make_config()), SeenAdapters()
    folder: list[str] = []
    for index, change in enumerate(changes):
        if index == 500:  # another process begins here
            late_names.restore(names.aliases, folder)
            late_seen.restore(seen.snapshot())
        if isinstance(change, FolderRead):
            folder = change.names
        make_change(change, names, seen)
        if index >= 500:
            make_change(change, late_names, late_seen)
    assert late_names.listing == names.listing
    assert late_seen.snapshot() == seen.snapshot()


def test_connections_go_to_the_worker_that_has_the_fewest(tmp_path: Path) -> None:
    async def test(desk: Desk, one: HeardSeat, other: HeardSeat) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        door = Door(listener, lambda: desk.seats)
        door.open()
        clients: list[socket.socket] = []

        async def connect(count: int) -> list[int]:
            clients.extend(socket.create_connection(listener.getsockname()) for _ in range(count))
            await asyncio.sleep(0.05)
            taken = [take_connections(seat.theirs) for seat in (one, other)]
            for connection in (*taken[0], *taken[1]):
                connection.close()
            return [len(each) for each in taken]

        try:
            assert await connect(6) == [3, 3]
            desk.handle(one, messages.ConnectionsOpen(3, 3))
            desk.handle(other, messages.ConnectionsOpen(1, 3))
            assert await connect(2) == [0, 2]
            other.is_open = False
            assert await connect(2) == [2, 0]
            one.is_open = False
            assert await connect(1) == [0, 0]  # it waits
            other.is_open = True
            door.wake()
            assert await connect(0) == [0, 1]
        finally:
            door.close()
            for client in clients:
                client.close()

    run(tmp_path, test)
