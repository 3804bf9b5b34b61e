"""uvicorn's HTTP, for clients that mean no good: headers have a size and a time to arrive, errors are JSON."""

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lorax_server.server.problems import http_problem

MAX_HEADER_BYTES = 64 * 1024
TOO_LARGE = 431, f"headers of at most {MAX_HEADER_BYTES} bytes are taken"
BROKEN = 400, "this is not HTTP/1.1"


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
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.timeout_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The parser keeps what is not complete, however long it gets."""
        self._unset_keepalive_if_required()
        while data and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            data = self._parse(data)
        if self._is_too_large:
            self._send_problem(*TOO_LARGE)

    def _parse(self, data: bytes) -> bytes:
        """What is left to do: nothing, but for who asks for another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._send_problem(*(TOO_LARGE if self._is_too_large else BROKEN))
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Who asks for another protocol is answered in this one. The parser takes such a request to have no body, so
        that it is shown the same request again without its wish."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._send_problem(HTTPStatus.METHOD_NOT_ALLOWED, "this is no proxy")
            return b""
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join([*lines, b"", b""]) + rest

    @property
    def _is_too_large(self) -> bool:
        return self._header_timer is not None and self._num_header_bytes > MAX_HEADER_BYTES

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0  # not those of the body before it
        if self._header_timer is None:  # another request on a connection that was kept
            self._header_timer = self.loop.call_later(self.timeout_s, self._give_up)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_header_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._is_too_large:
            raise OverflowError  # which the parser makes an error of its own
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _give_up(self) -> None:
        self._header_timer = None
        if self._is_answering:  # the one before; what comes next has time
            self._header_timer = self.loop.call_later(self.timeout_s, self._give_up)
        else:
            self._send_problem(408, f"the headers did not arrive within {self.timeout_s:g} s")

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _send_problem(self, status: int, message: str) -> None:
        """The last thing that is said. Nothing is said in the middle of an answer."""
        if self.transport.is_closing():
            return
        if self._is_answering and self.cycle.response_started:
            self.transport.close()
            return
        path = getattr(self, "url", b"").decode("latin-1")
        body = msgspec.json.encode(http_problem(status, message).body(path))
        phrase = HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, phrase, len(body)) + body)
        self.transport.close()
