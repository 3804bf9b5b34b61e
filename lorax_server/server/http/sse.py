"""Server-sent events: a response that is written piece by piece."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
PIECE_WRITER = "lorax.piece_writer"  # the extension of ASGI by which a connection offers one, as a weak reference

encode_json = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


def named_event(name: str, content: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(content)


def write_events(contents: Iterable[Any]) -> bytes:
    return b"".join(map(event, contents))


class PieceWriter(Protocol):
    """A connection whose response has begun."""

    @property
    def is_writable(self) -> bool:
        """The client is there, and has read enough to get more."""

    def write(self, piece: bytes) -> None:
        """Write a piece of the body at once."""


class Shortcut:
    """A way past all tasks for the pieces of one stream, to be used while its `EventStream` waits for the next one.

    Through tasks, generators and layers of ASGI a piece takes three times as long.
    """

    def __init__(self) -> None:
        self.num_written = 0
        self._writer: PieceWriter | None = None

    def open(self, writer: PieceWriter | None) -> None:
        self._writer = writer

    def close(self) -> None:
        self._writer = None

    @property
    def is_open(self) -> bool:
        return self._writer is not None and self._writer.is_writable

    def write(self, piece: bytes) -> None:
        if piece and self._writer is not None:
            self.num_written += 1
            self._writer.write(piece)


class EventStream(Response):
    """Writes the pieces of `events`, each one or more whole events, at the pace of the client that reads them.

    The stream ends when the client disconnects. `on_end` is called once, with whether the client disconnected.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        headers: dict[str, str] | None = None,
        shortcut: Shortcut | None = None,
    ) -> None:
        # As a header, since starlette would add a charset to a media type, which events do not have.
        kind = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(None, 200, {**kind, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self.on_end: Callable[[bool], None] | None = None
        self._shortcut = shortcut or Shortcut()
        self._num_sent = 0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("extensions", {}).get(PIECE_WRITER, lambda: None)()
        writer = asyncio.create_task(self._write(send, connection))
        helpers = [asyncio.create_task(until_gone(receive)), asyncio.create_task(self._keep_alive(send))]
        try:
            await asyncio.wait((writer, *helpers), return_when=asyncio.FIRST_COMPLETED)
            has_left = not writer.done()
        except asyncio.CancelledError:
            has_left = True
            raise
        finally:
            self._shortcut.close()
            for task in (*helpers, writer):
                task.cancel()
            try:
                await asyncio.wait((*helpers, writer))
                await self._events.aclose()
            finally:
                self._end(has_left)
        if not has_left:
            writer.result()

    async def _write(self, send: Send, connection: PieceWriter | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._shortcut.open(connection)
        async for piece in self._events:
            self._is_sending = True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._is_sending = False
            self._num_sent += 1
        # Before the last message: a client that has it may ask again, and needs what this request holds.
        self._end(has_left=False)
        self._is_sending = True  # until the end, so that no comment comes after the last message
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _end(self, has_left: bool) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(has_left)

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment after each silence. Each piece is whole events, so a comment falls between events."""
        while True:
            num_sent = self._num_sent + self._shortcut.num_written
            await asyncio.sleep(self._keep_alive_s)
            if not self._is_sending and num_sent == self._num_sent + self._shortcut.num_written:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
