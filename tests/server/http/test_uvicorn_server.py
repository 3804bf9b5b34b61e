"""Connection limits and timeouts, on sockets, and the graceful stop."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.server.http import uvicorn_server
from lorax_server.server.http.uvicorn_server import GracefulServer, make_uvicorn_config
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from tests.server.socket_server import HEALTH, TIMEOUT_S, ClientConnection, SocketServer, head, run_socket_server

# --- On sockets -------------------------------------------------------------------------------------------------------

BUSY = head("GET", "/stay", [b"host: localhost"])
LONG = b"x" * 2**23  # larger than both socket buffers
LONG_REQUEST = head("GET", "/long", [b"host: localhost"])


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Respond; `/long` sends a long body and `/stay` blocks until a disconnect."""
    while scope["path"] == "/stay" and (await receive())["type"] != "http.disconnect":
        pass
    body = LONG if scope["path"] == "/long" else b""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def limited(max_connections: int, keep_alive_s: float) -> AsyncIterator[SocketServer]:
    """Run a server whose other timeouts do not interfere with the test."""
    metrics = Metrics(max_input_length=1, max_total_tokens=2)
    config = ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base")
    config = replace(config, max_connections=max_connections, body_timeout_s=1000.0)
    settings: Any = make_uvicorn_config(app, config, metrics, AuditLog(metrics))
    settings.timeout_keep_alive = keep_alive_s  # uvicorn accepts fractions
    async with run_socket_server(settings, metrics) as edge:
        yield edge


def run(check: Callable[[SocketServer], Awaitable[None]], max_connections: int = 2, keep_alive_s: float = 75.0) -> None:
    """Run a check on uvloop, as the server does."""

    async def inside() -> None:
        async with limited(max_connections, keep_alive_s) as edge:
            await check(edge)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


async def open_busy_connection(edge: SocketServer, address: str = "127.0.0.1") -> ClientConnection:
    """Open a connection with a request that gets no response."""
    wire = await edge.connect(address)
    await wire.send(HEALTH)
    await wire.read_responses(1)
    await wire.send(BUSY)
    await wait_for_app(edge, wire)
    return wire


async def wait_for_app(edge: SocketServer, wire: ClientConnection) -> None:
    """Wait until the application has the request for `/stay`."""

    def is_there(connection: Any) -> bool:
        return bool(connection.client == wire.address and connection.scope and connection.scope.get("path") == "/stay")

    async with asyncio.timeout(30):
        while not any(map(is_there, edge.state.connections)):
            await asyncio.sleep(0.001)


def test_connections_above_the_limit_get_503() -> None:
    async def check(edge: SocketServer) -> None:
        first, _ = await open_busy_connection(edge), await open_busy_connection(edge)
        for _ in range(4):
            wire = await edge.connect()
            (answer,) = await wire.read_responses()
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
            assert answer.json()["error_type"] == "overloaded"
        assert edge.count("lorax_connections_rejected_total", 'reason="full"') == 4
        await until_open(edge, 2)
        assert edge.count("lorax_connections") == 2
        await first.close()
        await until_open(edge, 1)
        assert (await edge.fetch(HEALTH)).status == 200

    run(check)


@pytest.mark.parametrize("data", [BUSY, head("POST", "/", [b"host: localhost", b"content-length: 9"]) + b"half"])
def test_disconnect_stops_request(data: bytes) -> None:
    async def check(edge: SocketServer) -> None:
        wire = await edge.connect()
        await wire.send(data)
        await until_open(edge, 1)
        await wire.close()
        await until_open(edge, 0)

    run(check)


@pytest.mark.parametrize("method", ["GET", "POST", "CONNECT"])
def test_upgrade_is_rejected(method: str) -> None:
    async def check(edge: SocketServer) -> None:
        wire = await edge.connect()
        path = "example.com:443" if method == "CONNECT" else "/"
        headers = [b"host: localhost", b"connection: upgrade", b"upgrade: h2c", b"content-length: 2"]
        await wire.send(head(method, path, headers) + b"{}")
        (answer,) = await wire.read_responses()
        assert answer.status == 400
        assert "HTTP/1.1 without an `Upgrade` header" in answer.json()["error"]

    run(check)


# --- Clients that do not read -----------------------------------------------------------------------------------------


async def until_open(edge: SocketServer, count: int) -> None:
    async with asyncio.timeout(30):
        while len(edge.state.connections) != count:
            await asyncio.sleep(0.001)


async def until_written(edge: SocketServer) -> None:
    """Wait until each response has started and its writing is blocked."""
    async with asyncio.timeout(30):
        while not all(each.transport.get_write_buffer_size() for each in edge.state.connections):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["kept", "close"])
def test_unread_response_does_not_keep_connection(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "WRITE_TIMEOUT_S", 0.05)

    async def check(edge: SocketServer) -> None:
        wire = await edge.connect_slow_reader()
        closing = [b"connection: close"] if kind == "close" else []
        await wire.send(head("GET", "/long", [b"host: localhost", *closing]))
        await until_open(edge, 1)
        await until_open(edge, 0)
        assert edge.count("lorax_connections") == 0

    run(check)


def test_unread_small_response_does_not_keep_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is too small to pause writing, so the connection is closed as idle later."""
    monkeypatch.setattr(uvicorn_server, "WRITE_TIMEOUT_S", 0.05)

    async def check(edge: SocketServer) -> None:
        await edge.connect_slow_reader()
        await until_open(edge, 1)
        (connection,) = edge.state.connections
        connection.transport.set_write_buffer_limits(high=2 * len(LONG))  # so that all of it is little
        connection.data_received(LONG_REQUEST)
        await until_written(edge)
        await until_open(edge, 0)

    run(check, keep_alive_s=0.05)


@pytest.mark.slow
def test_slow_reader_gets_complete_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads for longer than the timeout, but never stops for that long."""
    monkeypatch.setattr(uvicorn_server, "WRITE_TIMEOUT_S", 5.0)

    async def check(edge: SocketServer) -> None:
        wire = await edge.connect_slow_reader()
        await wire.send(LONG_REQUEST)
        await until_open(edge, 1)
        started, taken = time.monotonic(), 0
        while taken < len(LONG):
            got = await wire.read_up_to(2**16)
            assert got, "it was cut off"
            taken += got
            if time.monotonic() - started < 6:
                await asyncio.sleep(0.05)
        assert (await edge.fetch(HEALTH)).status == 200

    run(check)


# --- A timer for every connection -------------------------------------------------------------------------------------

REQUEST_WITH_BODY = head("GET", "/health", [b"host: localhost", b"content-length: 3"])


@pytest.mark.parametrize(
    ("first", "then"),
    [(HEALTH, b"\r\n"), (HEALTH, b"\r\n\r\n"), (REQUEST_WITH_BODY, b"xxx"), (REQUEST_WITH_BODY, b"xxx\r\n")],
    ids=repr,
)
def test_invalid_bytes_do_not_keep_connection(first: bytes, then: bytes) -> None:
    async def check(edge: SocketServer) -> None:
        wire = await edge.connect()
        await wire.send(first)
        assert [answer.status for answer in await wire.read_responses(1)] == [200]
        await wire.send(then)
        assert len(await wire.read_responses()) == 1, "closed without another word"

    run(check, keep_alive_s=0.05)


def test_unread_body_does_not_keep_connection() -> None:
    async def check(edge: SocketServer) -> None:
        wire = await edge.connect()
        await wire.send(head("GET", "/health", [b"host: localhost", b"content-length: 1000000"]))
        assert [answer.status for answer in await wire.read_responses(1)] == [200]
        with suppress(ConnectionError):
            while True:
                await wire.send(b"x")
                await asyncio.sleep(0.01)

    run(check, keep_alive_s=0.05)


def test_responding_connection_is_not_closed_as_idle() -> None:
    """Finish the first response while the second request's headers arrive."""

    async def check(edge: SocketServer) -> None:
        wire = await edge.connect()
        await wire.send(HEALTH + BUSY[:-2])
        assert [answer.status for answer in await wire.read_responses(1)] == [200]
        await wire.send(BUSY[-2:])
        await wait_for_app(edge, wire)
        connection: Any
        (connection,) = edge.state.connections
        assert connection.timeout_keep_alive_task is None
        assert connection._header_timer is None

    run(check)


# --- Stop -------------------------------------------------------------------------------------------------------------


def test_stop_finishes_running_responses() -> None:
    """A running response is completed; a connection without a request is closed."""
    may_finish = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await may_finish.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    async def inside() -> None:
        metrics, events = Metrics(max_input_length=1, max_total_tokens=2), list[str]()
        config = ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base")
        settings = make_uvicorn_config(slow, config, metrics, AuditLog(metrics))
        server = GracefulServer(settings, lambda: events.append("ready"), lambda: events.append("stop"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve([listener]))
            edge = SocketServer(listener.getsockname()[1], metrics, server.server_state)
            silent, wire = await edge.connect(), await edge.connect()
            await wire.send(HEALTH)
            assert await wire.read_up_to(1) == 1
            server.handle_exit(15, None)
            assert await silent.read_responses() == []
            may_finish.set()
            rest = b""
            while data := await wire.read():
                rest += data
            await asyncio.wait_for(serving, TIMEOUT_S)
            await edge.close()
        assert rest.endswith(b"4\r\nlast\r\n0\r\n\r\n")
        assert events == ["ready", "stop"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


# --- Version ----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]


def test_uvicorn_internals_are_confined_and_version_pinned() -> None:
    pattern = re.compile(r"^\s*(?:import|from) (?:uvicorn|httptools)\b", re.MULTILINE)
    users = [path.name for path in (ROOT / "lorax_server").rglob("*.py") if pattern.search(path.read_text())]
    assert users == ["uvicorn_server.py"]
    (pin,) = re.findall(r'"(uvicorn==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert pin in (ROOT / "constraints.txt").read_text().splitlines()
