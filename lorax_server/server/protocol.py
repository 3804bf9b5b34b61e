"""uvicorn's HTTP, for clients that mean no good: headers have a size and a time to arrive, errors are JSON."""

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lorax_server.server.problems import http_problem

MAX_HEADER_BYTES = 64 * 1024


def make_protocol(header_timeout_s: float) -> type[HttpToolsProtocol]:
    """A protocol whose connections are closed if a request's headers take longer than this to arrive."""

    class Protocol(GuardedProtocol):
        timeout_s = header_timeout_s

    return Protocol


class GuardedProtocol(HttpToolsProtocol):
    timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0  # since the last headers were complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.timeout_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The parser keeps what is not complete, however long it gets."""
        self._num_header_bytes += len(data)
        super().data_received(data)
        is_late = self._header_timer is not None and self._num_header_bytes > MAX_HEADER_BYTES
        if is_late and not self.transport.is_closing():
            self._send_problem(431, f"headers of at most {MAX_HEADER_BYTES} bytes are taken")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._header_timer is None:  # another request on a connection that was kept
            self._header_timer = self.loop.call_later(self.timeout_s, self._give_up)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._num_header_bytes = 0
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._send_problem(400, msg)

    def _give_up(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self._send_problem(408, f"the headers did not arrive within {self.timeout_s:g} s")

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _send_problem(self, status: int, message: str) -> None:
        problem = http_problem(status, message)
        body = msgspec.json.encode(problem.body("/"))
        phrase = HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, phrase, len(body)) + body)
        self.transport.close()
