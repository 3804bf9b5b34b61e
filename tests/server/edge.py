"""The server on a socket, within a test's event loop, in front of an engine that is a script."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from lorax_server.server.app import make_app
from lorax_server.server.http.uvicorn_server import make_uvicorn_config
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from tests.e2e.hostile_client import Answer, _Reader, post, request
from tests.server.bench import Bench

GOOD = {"inputs": "ask", "parameters": {"max_new_tokens": 1}}
HEALTH = request("GET", "/health").replace(b"connection: close\r\n", b"")
TIMEOUT_S = 60  # nothing takes so long, and it is less than the server keeps idle connections


class Wire:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = _Reader()

    @property
    def address(self) -> tuple[str, int]:
        """The client's own address."""
        host, port = self._writer.get_extra_info("sockname")[:2]
        return host, port

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def hear(self, count: int | None = None) -> list[Answer]:
        """Read the next `count` answers, or all until the server closes the connection."""
        done = 0 if count is None else sum(answer.is_complete for answer in self._parser.answers) + count
        async with asyncio.timeout(TIMEOUT_S):
            while count is None or sum(answer.is_complete for answer in self._parser.answers) < done:
                data = b""
                with suppress(ConnectionError):
                    data = await self._reader.read(2**16)
                if not data:
                    break
                self._parser.parser.feed_data(data)
        return self._parser.answers if count is None else self._parser.answers[-count:]

    async def take(self, count: int) -> int:
        """Read at most `count` bytes; return how many, 0 when the server has closed the connection."""
        with suppress(ConnectionError):
            return len(await self._reader.read(count))
        return 0

    async def read(self) -> bytes:
        """Read some bytes; none when the server has closed the connection."""
        with suppress(ConnectionError):
            return await self._reader.read(2**16)
        return b""

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class Edge:
    """A server that can be asked over a socket."""

    def __init__(self, port: int, metrics: Metrics, state: ServerState) -> None:
        self.metrics = metrics
        self.state = state
        self._port = port
        self._wires: list[Wire] = []

    async def connect_deaf(self) -> Wire:
        """Connect a client whose socket takes little, and that reads nothing until a test does."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        wire = Wire(*await asyncio.open_connection(sock=sock, limit=1024))
        self._wires.append(wire)
        return wire

    async def connect(self, address: str = "127.0.0.1") -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0)))
        self._wires.append(wire)
        return wire

    async def ask(self, data: bytes, address: str = "127.0.0.1") -> Answer:
        """Send a request on a connection of its own."""
        wire = await self.connect(address)
        with suppress(ConnectionError):
            await wire.send(data)
        (answer,) = await wire.hear(1)
        await wire.close()
        return answer

    def count(self, name: str, label: str = "") -> float:
        """Return a metric's value; 0 if nothing was counted."""
        family = self.metrics.render_json().get(name, {"data": []})
        values: list[float] = [sample["value"] for sample in family["data"] if label in sample["key"]]
        return sum(values)

    async def close(self) -> None:
        for wire in self._wires:
            await wire.close()


@asynccontextmanager
async def listening(settings: uvicorn.Config, metrics: Metrics) -> AsyncIterator[Edge]:
    if not settings.loaded:
        settings.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    make: Any = settings.http_protocol_class
    server = await loop.create_server(lambda: make(config=settings, server_state=state, app_state={}), "127.0.0.1", 0)
    found = Edge(server.sockets[0].getsockname()[1], metrics, state)
    try:
        yield found
    finally:
        await found.close()
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        while state.connections or state.tasks:
            await asyncio.sleep(0.001)


class Shared:
    """A whole server for several tests, since making one takes half a second; tests run on its event loop."""

    def __init__(self, **config: Any) -> None:
        self.bench = Bench(**{"default_source": "local", "body_timeout_s": TIMEOUT_S} | config)
        service = self.bench.service
        self._settings = make_uvicorn_config(make_app(service), service.config, service.metrics, service.audit_log)
        self._runner = asyncio.Runner()

    @property
    def app(self) -> Any:
        return self._settings.app

    def run(self, check: Callable[[Edge], Awaitable[None]]) -> None:
        """Run a test on a server without records of earlier tests."""
        self.bench.service.audit_log = AuditLog(self.bench.metrics)
        self.bench.engine.sent.clear()
        self._runner.run(self._run(check))

    async def _run(self, check: Callable[[Edge], Awaitable[None]]) -> None:
        async with listening(self._settings, self.bench.metrics) as edge:
            await check(edge)
        assert self.bench.service.running == set()

    def close(self) -> None:
        self._runner.run(self.bench.engine.close())
        self._runner.close()

    async def answer_all(self) -> None:
        """Give every request that the engine has its one token."""
        engine = self.bench.engine
        while not (waiting := [each.request_id for each in engine.added if each.request_id in engine._streams]):
            await asyncio.sleep(0.001)
        for request_id in waiting:
            engine.give(request_id, 42)


def with_key(path: str, body: Any, key: str = "good", *headers: tuple[str, str]) -> bytes:
    return post(path, body, ("authorization", f"Bearer {key}"), *headers)


def head(method: str, path: str, headers: Iterable[bytes]) -> bytes:
    """Return the bytes of a request with the given headers only."""
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), *headers, b"", b""])


def error_of(answer: Answer) -> Any:
    return json.loads(answer.body)["error"]
