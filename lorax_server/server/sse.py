"""Server-sent events: a response that is written as it comes to be."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


def event(content: Any) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


class EventStream(Response):
    """Writes what `events` yields, each piece one or more whole events, at the pace of who reads it. A client that goes
    away ends it. `on_end`, set by whoever has to know, is told whether it did."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self.on_end: Callable[[bool], None] = lambda has_left: None  # noqa: ARG005
        self._is_silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        writer = asyncio.create_task(self._write(send))
        helpers = [asyncio.create_task(until_gone(receive)), asyncio.create_task(self._keep_alive(send))]
        try:
            await asyncio.wait((writer, helpers[0]), return_when=asyncio.FIRST_COMPLETED)
            has_left = not writer.done()
        except asyncio.CancelledError:
            has_left = True
            raise
        finally:
            for task in (*helpers, writer):
                task.cancel()
            try:
                await asyncio.wait((*helpers, writer))
                await self._events.aclose()
            finally:
                self.on_end(has_left)
        if not has_left:
            writer.result()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._events:
            self._is_silent = False
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Say that it is still there after each silence. Whole events are written at once, so this falls between."""
        while True:
            self._is_silent = True
            await asyncio.sleep(self._keep_alive_s)
            if self._is_silent:
                with suppress(Exception):
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
