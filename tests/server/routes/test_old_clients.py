"""Clients that know no chunks, and clients that close their sending side before they are answered."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop

from lorax_server.server.http.connections import Connections
from lorax_server.server.http.protocol import CONTINUE, make_protocol
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from tests.server.edge import TIMEOUT_S, Edge, listening

EVENTS = (b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n")
WHOLE = b"whole"


class App:
    """An application that streams, or answers at once, when a test says so; it notices that the client has left."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.has_left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leaving = asyncio.ensure_future(receive())
        answering = asyncio.ensure_future(self.may_answer.wait())
        await asyncio.wait((leaving, answering), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.has_left.set()
            answering.cancel()
            return
        is_stream = scope["path"] == "/stream"
        length = [] if is_stream else [(b"content-length", b"%d" % len(WHOLE))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        for event in EVENTS if is_stream else (WHOLE,):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        leaving.cancel()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, path: str, version: str = "1.1") -> None:
        self.writer.write(f"GET {path} HTTP/{version}\r\nhost: localhost\r\n\r\n".encode())
        await self.writer.drain()

    async def hear(self) -> tuple[bytes, bytes]:
        """Read until the server closes the connection; return head and body."""
        async with asyncio.timeout(TIMEOUT_S):
            data = await self.reader.read()
        head, _, body = data.removeprefix(CONTINUE).partition(b"\r\n\r\n")
        return head.lower(), body

    async def stop_sending(self) -> None:
        """Close the sending half of the connection, and let the server notice."""
        self.writer.write_eof()
        await asyncio.sleep(0.02)


def run(check: Callable[[Client, App], Awaitable[None]]) -> None:
    """Run a check on the event loop of the server."""

    async def inside() -> None:
        app, metrics = App(), Metrics(max_input_length=1, max_total_tokens=2)
        kind = make_protocol(30.0, Connections(9, 0, metrics), AuditLog(metrics))
        settings = uvicorn.Config(app, http=kind, lifespan="off", log_config=None)
        async with listening(settings, metrics) as edge:
            client = Client(*await asyncio.open_connection("127.0.0.1", port_of(edge)))
            try:
                await check(client, app)
            finally:
                client.writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(inside())


def port_of(edge: Edge) -> int:
    return edge._port


def test_a_stream_to_an_old_client_has_no_chunks_and_ends_with_its_connection() -> None:
    async def check(client: Client, app: App) -> None:
        app.may_answer.set()
        await client.ask("/stream", "1.0")
        head, body = await client.hear()
        assert body == b"".join(EVENTS)
        assert b"chunked" not in head
        assert b"connection: close" in head

    run(check)


def test_a_whole_answer_to_an_old_client_has_its_length() -> None:
    async def check(client: Client, app: App) -> None:
        app.may_answer.set()
        await client.ask("/", "1.0")
        head, body = await client.hear()
        assert (body, b"content-length: 5" in head) == (WHOLE, True)

    run(check)


@pytest.mark.parametrize("path", ["/", "/stream"])
def test_a_client_that_sends_no_more_gets_its_answer(path: str) -> None:
    async def check(client: Client, app: App) -> None:
        await client.ask(path)
        await client.stop_sending()
        app.may_answer.set()
        head, body = await client.hear()
        assert head.startswith(b"http/1.1 200")
        assert (WHOLE if path == "/" else EVENTS[-1]) in body
        assert not app.has_left.is_set()

    run(check)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_has_gone_is_noticed_all_the_same(version: str) -> None:
    async def check(client: Client, app: App) -> None:
        await client.ask("/", version)
        client.writer.close()
        await client.writer.wait_closed()
        async with asyncio.timeout(TIMEOUT_S):
            await app.has_left.wait()

    run(check)


def test_a_client_that_stops_in_the_middle_has_gone() -> None:
    async def check(client: Client, app: App) -> None:
        client.writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nhalf")
        await client.stop_sending()
        assert (await client.hear())[1] == b""

    run(check)
