"""A server on a socket in the test's event loop, with a scripted engine."""

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
from tests.e2e.hostile_client import HttpResponse, _Reader, post, request
from tests.server.service_harness import ServiceHarness

GOOD = {"inputs": "ask", "parameters": {"max_new_tokens": 1}}
HEALTH = request("GET", "/health").replace(b"connection: close\r\n", b"")
TIMEOUT_S = 60  # longer than any test needs, shorter than the server's keep-alive timeout


class ClientConnection:
    """A client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = _Reader()

    @property
    def address(self) -> tuple[str, int]:
        """The client address."""
        host, port = self._writer.get_extra_info("sockname")[:2]
        return host, port

    async def send(self, data: bytes) -> None:
        """Send data. Raise ConnectionError if the server has closed the connection; uvloop would raise RuntimeError."""
        if self._writer.is_closing():
            raise ConnectionResetError("the connection is closed")
        self._writer.write(data)
        await self._writer.drain()

    async def read_responses(self, count: int | None = None) -> list[HttpResponse]:
        """Read the next `count` responses, or all responses until the server closes the connection."""
        done = 0 if count is None else sum(response.is_complete for response in self._parser.responses) + count
        async with asyncio.timeout(TIMEOUT_S):
            while count is None or sum(response.is_complete for response in self._parser.responses) < done:
                data = b""
                with suppress(ConnectionError):
                    data = await self._reader.read(2**16)
                if not data:
                    break
                self._parser.parser.feed_data(data)
        return self._parser.responses if count is None else self._parser.responses[-count:]

    async def read_up_to(self, count: int) -> int:
        """Read up to `count` bytes and return their number, or 0 if the server closed the connection."""
        with suppress(ConnectionError):
            return len(await self._reader.read(count))
        return 0

    async def read(self) -> bytes:
        """Read some bytes, or b"" if the server closed the connection."""
        with suppress(ConnectionError):
            return await self._reader.read(2**16)
        return b""

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class SocketServer:
    """A server that tests connect to over a socket."""

    def __init__(self, port: int, metrics: Metrics, state: ServerState) -> None:
        self.metrics = metrics
        self.state = state
        self._port = port
        self._wires: list[ClientConnection] = []

    async def connect_slow_reader(self) -> ClientConnection:
        """Connect a client with a small receive buffer. Tests decide when it reads."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        client = ClientConnection(*await asyncio.open_connection(sock=sock, limit=1024))
        self._wires.append(client)
        return client

    async def connect(self, address: str = "127.0.0.1") -> ClientConnection:
        client = ClientConnection(*await asyncio.open_connection("127.0.0.1", self._port, local_addr=(address, 0)))
        self._wires.append(client)
        return client

    async def fetch(self, data: bytes, address: str = "127.0.0.1") -> HttpResponse:
        """Send a request on a new connection and return the response."""
        client = await self.connect(address)
        with suppress(ConnectionError):
            await client.send(data)
        (response,) = await client.read_responses(1)
        await client.close()
        return response

    def count(self, name: str, label: str = "") -> float:
        """Return a metric's value, or 0 if it has no samples."""
        family = self.metrics.render_json().get(name, {"data": []})
        values: list[float] = [sample["value"] for sample in family["data"] if label in sample["key"]]
        return sum(values)

    async def close(self) -> None:
        for client in self._wires:
            await client.close()


@asynccontextmanager
async def run_socket_server(settings: uvicorn.Config, metrics: Metrics) -> AsyncIterator[SocketServer]:
    if not settings.loaded:
        settings.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    make: Any = settings.http_protocol_class
    server = await loop.create_server(lambda: make(config=settings, server_state=state, app_state={}), "127.0.0.1", 0)
    server_under_test = SocketServer(server.sockets[0].getsockname()[1], metrics, state)
    try:
        yield server_under_test
    finally:
        await server_under_test.close()
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        while state.connections or state.tasks:
            await asyncio.sleep(0.001)


class SharedServer:
    """A server shared by several tests, because creating one takes half a second. Tests run on its event loop."""

    def __init__(self, **config: Any) -> None:
        self.harness = ServiceHarness(**{"default_source": "local", "body_timeout_s": TIMEOUT_S} | config)
        service = self.harness.service
        self._settings = make_uvicorn_config(make_app(service), service.config, service.metrics, service.audit_log)
        self._runner = asyncio.Runner()

    @property
    def app(self) -> Any:
        return self._settings.app

    def run(self, check: Callable[[SocketServer], Awaitable[None]]) -> None:
        """Run a test after clearing the records of earlier tests."""
        self.harness.service.audit_log = AuditLog(self.harness.metrics)
        self.harness.engine.sent.clear()
        self._runner.run(self._run(check))

    async def _run(self, check: Callable[[SocketServer], Awaitable[None]]) -> None:
        async with run_socket_server(self._settings, self.harness.metrics) as edge:
            await check(edge)
        assert self.harness.service.running == set()

    def close(self) -> None:
        self._runner.run(self.harness.engine.close())
        self._runner.close()

    async def complete_all_requests(self) -> None:
        """Emit one token for every request in the engine."""
        engine = self.harness.engine
        while not (waiting := [each.request_id for each in engine.added if each.request_id in engine._streams]):
            await asyncio.sleep(0.001)
        for request_id in waiting:
            engine.emit_tokens(request_id, 42)


def with_key(path: str, body: Any, key: str = "good", *headers: tuple[str, str]) -> bytes:
    return post(path, body, ("authorization", f"Bearer {key}"), *headers)


def head(method: str, path: str, headers: Iterable[bytes]) -> bytes:
    """Return a raw request head with exactly these headers."""
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), *headers, b"", b""])


def parse_error(response: HttpResponse) -> Any:
    return json.loads(response.body)["error"]
