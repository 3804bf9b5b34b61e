"""Limits on connections: old ones that give way, new ones that are refused, and the replies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.server.http import protocol
from lorax_server.server.http.connections import Connections, network
from lorax_server.server.http.listener import fit_connections
from lorax_server.server.http.protocol import make_protocol
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from tests.server.edge import HEALTH, Edge, Wire, head, listening


class Fake:
    def __init__(self) -> None:
        self.has_given_way = False

    def give_way(self) -> None:
        self.has_given_way = True


def make(most: int = 3, most_per_address: int = 2) -> Connections:
    return Connections(most, most_per_address, Metrics(max_input_length=1, max_total_tokens=2))


def busy(connections: Connections, address: str) -> Fake:
    connection = Fake()
    assert connections.enter(connection, address) is None
    connections.mark_busy(connection)
    return connection


def test_one_address_cannot_take_all_places() -> None:
    connections = make()
    first, _ = busy(connections, "a"), busy(connections, "a")
    assert connections.enter(Fake(), "a") == "address"
    busy(connections, "b")
    assert connections.enter(Fake(), "b") == "full"
    connections.leave(first)
    busy(connections, "a")


def test_what_has_been_idle_for_longest_gives_way() -> None:
    connections = make(3, 0)
    first, second, third = (busy(connections, "a") for _ in range(3))
    connections.mark_idle(second)
    connections.mark_idle(first)
    assert connections.enter(Fake(), "b") is None
    assert connections.enter(Fake(), "b") is None
    assert [each.has_given_way for each in (first, second, third)] == [True, True, False]


def test_only_an_addresses_own_connections_give_way_to_it() -> None:
    connections = make(10, 1)
    idle = Fake()
    connections.enter(idle, "a")
    busy(connections, "b")
    assert connections.enter(Fake(), "b") == "address"
    assert not idle.has_given_way
    assert connections.enter(Fake(), "a") is None
    assert idle.has_given_way


def test_one_that_has_gone_leaves_nothing_behind() -> None:
    connections = make()
    for _ in range(3):
        connection = busy(connections, "a")
        connections.mark_idle(connection)
        connections.leave(connection)
        connections.leave(connection)
        connections.mark_idle(connection)
        connections.mark_busy(connection)
    assert (connections._open, connections._idle, connections._addresses) == ({}, {}, {})


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("1.2.3.4", "1.2.3.5", False),
        ("::ffff:1.2.3.4", "1.2.3.4", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),  # one customer has all of these addresses
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
        ("no address", "1.2.3.4", False),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, is_same: bool) -> None:
    assert (network(one) == network(other)) is is_same


@pytest.mark.parametrize(("max_files", "expected"), [(10_000, 8192), (4096, 3584), (100, 1)])
def test_there_are_files_for_all_connections(max_files: int, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base")
    assert fit_connections(config, max_files).max_connections == expected
    assert ("LimitNOFILE" in caplog.text) is (expected < config.max_connections)


# --- On sockets -------------------------------------------------------------------------------------------------------

BUSY = head("GET", "/stay", [b"host: localhost"])
LONG = b"x" * 2**23  # more than the sockets of both ends take
ASK_LONG = head("GET", "/long", [b"host: localhost"])
BEGUN = b"GET /health HTTP/1.1\r\nhost: loc"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer, at length for `/long`; for `/stay`, wait until the client leaves."""
    while scope["path"] == "/stay" and (await receive())["type"] != "http.disconnect":
        pass
    body = LONG if scope["path"] == "/long" else b""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def limited(most: int, most_per_address: int = 0, keep_alive_s: float = 1000.0) -> AsyncIterator[Edge]:
    """Serve without timers that close a connection in the place of what is tested."""
    metrics = Metrics(max_input_length=1, max_total_tokens=2)
    kind = make_protocol(1000.0, Connections(most, most_per_address, metrics), AuditLog(metrics))
    keep_alive: Any = keep_alive_s  # it takes fractions too
    settings = uvicorn.Config(app, http=kind, lifespan="off", log_config=None, timeout_keep_alive=keep_alive)
    async with listening(settings, metrics) as edge:
        yield edge


def run(
    check: Callable[[Edge], Awaitable[None]], most: int, most_per_address: int = 0, keep_alive_s: float = 75.0
) -> None:
    """Run a check on the event loop of the server, whose transports are not those of asyncio."""

    async def inside() -> None:
        async with limited(most, most_per_address, keep_alive_s) as edge:
            await check(edge)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


async def stay(edge: Edge, address: str = "127.0.0.1") -> Wire:
    """Open a connection whose request the server has, and does not answer."""
    wire = await edge.connect(address)
    await wire.send(HEALTH)
    await wire.hear(1)
    await wire.send(BUSY)
    await until_app_has(edge, wire)
    return wire


async def until_app_has(edge: Edge, wire: Wire) -> None:
    """Wait until the application has the request for `/stay`."""

    def is_there(connection: Any) -> bool:
        return bool(connection.client == wire.address and connection.scope and connection.scope.get("path") == "/stay")

    async with asyncio.timeout(30):
        while not any(map(is_there, edge.state.connections)):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("limits", "status", "reason"), [((2, 0), 503, "full"), ((9, 2), 429, "address")])
def test_who_finds_no_place_is_told_when_to_come_back(
    limits: tuple[int, int], status: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.02)

    async def check(edge: Edge) -> None:
        first, _ = await stay(edge), await stay(edge)
        for data in (HEALTH, b"", b"\0garbage", BEGUN):
            wire = await edge.connect()
            await wire.send(data)
            (answer,) = await wire.hear()
            assert answer.status == status
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
            assert answer.json()["error_type"] == "overloaded"
        assert edge.count("lorax_connections_refused_total", f'reason="{reason}"') == 4
        assert edge.count("lorax_connections") == 2
        if reason == "address":
            assert (await edge.ask(HEALTH, "127.0.0.2")).status == 200
        await first.close()
        while edge.count("lorax_connections") == 2:
            await asyncio.sleep(0.001)
        assert (await edge.ask(HEALTH)).status == 200

    run(check, *limits)


def test_idle_connections_give_way() -> None:
    async def check(edge: Edge) -> None:
        idle, slow = await edge.connect(), await edge.connect()
        await idle.send(HEALTH)
        assert [answer.status for answer in await idle.hear(1)] == [200]
        await slow.send(BEGUN)
        await stay(edge)
        await stay(edge)
        told = [answer.status for wire in (idle, slow) for answer in await wire.hear()]
        assert told == [200, 503]
        assert edge.count("lorax_connections_refused_total", 'reason="gave_way"') == 2

    run(check, 2)


def test_a_flood_of_slow_headers_leaves_room_for_who_asks() -> None:
    """Open connections that send one byte and wait: a client with a whole request is still served."""

    async def check(edge: Edge) -> None:
        for _ in range(10):
            slow = await edge.connect()
            await slow.send(b"G")
            assert (await edge.ask(HEALTH)).status == 200

    run(check, 3)


def test_the_limit_of_an_address_can_be_switched_off() -> None:
    async def check(edge: Edge) -> None:
        for _ in range(20):
            await stay(edge)
        assert edge.count("lorax_connections") == 20

    run(check, 100, 0)


def test_those_that_are_refused_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_LINGERING", 3)
    monkeypatch.setattr(protocol, "LINGER_S", 1000.0)

    async def check(edge: Edge) -> None:
        await stay(edge)
        refused = [await edge.connect() for _ in range(6)]
        for wire in refused[3:]:
            assert [answer.status for answer in await wire.hear()] == [503]
        assert edge.count("lorax_connections_refused_total", 'reason="full"') == 6

    run(check, 1)


# --- Clients that do not read -----------------------------------------------------------------------------------------


async def until_open(edge: Edge, count: int) -> None:
    async with asyncio.timeout(30):
        while len(edge.state.connections) != count:
            await asyncio.sleep(0.001)


async def until_written(edge: Edge) -> None:
    """Wait until each answer has begun and its writing is blocked."""
    async with asyncio.timeout(30):
        while not all(each.transport.get_write_buffer_size() for each in edge.state.connections):
            await asyncio.sleep(0.001)


def test_a_client_that_does_not_read_gives_its_socket_up_with_its_place() -> None:
    async def check(edge: Edge) -> None:
        for count in range(1, 7):
            wire = await edge.connect_deaf()
            await wire.send(ASK_LONG)
            while edge.count("lorax_connections_refused_total", 'reason="gave_way"') < count - 2:
                await asyncio.sleep(0.001)
            await until_open(edge, min(count, 2))
            await until_written(edge)
        assert edge.count("lorax_connections") == 2

    run(check, 2)


@pytest.mark.parametrize("kind", ["kept", "close"])
def test_a_whole_answer_that_nobody_reads_does_not_keep_a_connection(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "STUCK_S", 0.05)

    async def check(edge: Edge) -> None:
        wire = await edge.connect_deaf()
        closing = [b"connection: close"] if kind == "close" else []
        await wire.send(head("GET", "/long", [b"host: localhost", *closing]))
        await until_open(edge, 1)
        await until_open(edge, 0)
        assert edge.count("lorax_connections") == 0

    run(check, 2)


def test_a_little_that_nobody_reads_does_not_keep_one_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer too small to pause writing: the connection is closed as idle, but not at once."""
    monkeypatch.setattr(protocol, "STUCK_S", 0.05)

    async def check(edge: Edge) -> None:
        await edge.connect_deaf()
        await until_open(edge, 1)
        (connection,) = edge.state.connections
        connection.transport.set_write_buffer_limits(high=2 * len(LONG))  # so that all of it is little
        connection.data_received(ASK_LONG)
        await until_written(edge)
        await until_open(edge, 0)

    run(check, 2, keep_alive_s=0.05)


def test_a_slow_reader_gets_all_of_a_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check of the timer finds less to write than the one before."""
    monkeypatch.setattr(protocol, "STUCK_S", 1000.0)

    async def check(edge: Edge) -> None:
        wire = await edge.connect_deaf()
        await wire.send(ASK_LONG)
        await until_open(edge, 1)
        await until_written(edge)
        connection: Any
        (connection,) = edge.state.connections
        looks, taken, left = 0, 0, connection.transport.get_write_buffer_size()
        while taken < len(LONG):
            got = await wire.take(2**16)
            assert got, "it was cut off"
            taken += got
            now = connection.transport.get_write_buffer_size()
            if now < left and connection._write_timer.is_set:
                looks, left = looks + 1, now
                connection._write_timer.stop()
                connection._check_writing()  # as the timer does
        assert looks > 3
        assert (await edge.ask(HEALTH)).status == 200

    run(check, 2)


# --- A timer for every connection -------------------------------------------------------------------------------------

REST = head("GET", "/health", [b"host: localhost", b"content-length: 3"])


@pytest.mark.parametrize(
    ("first", "then"), [(HEALTH, b"\r\n"), (HEALTH, b"\r\n\r\n"), (REST, b"xxx"), (REST, b"xxx\r\n")], ids=repr
)
def test_bytes_that_are_no_request_do_not_keep_a_connection(first: bytes, then: bytes) -> None:
    async def check(edge: Edge) -> None:
        wire = await edge.connect()
        await wire.send(first)
        assert [answer.status for answer in await wire.hear(1)] == [200]
        await wire.send(then)
        assert len(await wire.hear()) == 1, "closed without another word"

    run(check, 2, keep_alive_s=0.05)


def test_a_connection_that_answers_is_not_taken_for_an_idle_one() -> None:
    """End the first answer while the headers of the second request are on their way."""

    async def check(edge: Edge) -> None:
        wire = await edge.connect()
        await wire.send(HEALTH + BUSY[:-2])
        assert [answer.status for answer in await wire.hear(1)] == [200]
        await wire.send(BUSY[-2:])
        await until_app_has(edge, wire)
        connection: Any
        (connection,) = edge.state.connections
        assert connection.timeout_keep_alive_task is None
        assert not connection._header_timer.is_set

    run(check, 2)
