"""uvicorn's HTTP, hardened against hostile clients: connections are counted, headers have a limit of size and of time,
clients have a limited time to read an answer, and errors are JSON.

A connection always has a timer, so that none stays for ever: for the headers of a request, for a body that no route
wanted, for the next request, or for unwritten data. While a request is answered, its route has one.
"""

import asyncio
import socket
import sys
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lorax_server.server.http.connections import FULL, FULL_ADDRESS, Connections
from lorax_server.server.http.problems import Problem, http_problem
from lorax_server.server.http.sse import PIECE_WRITER, STUCK_S
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.request_record import RequestRecord

MAX_HEADER_BYTES = 64 * 1024
MAX_LINGERING = 256
LINGER_S = 1.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 2.0  # at a client that sends no more
TOO_LARGE = 431, f"headers of at most {MAX_HEADER_BYTES} bytes are taken"
BROKEN = 400, "this is not HTTP/1.1"
RETRY_S = 1.0
TOO_MANY = {
    FULL: (503, "the server has as many connections as it may have"),
    FULL_ADDRESS: (429, "there are as many connections from this address as there may be; close some"),
}


def make_protocol(header_timeout_s: float, connections: Connections, audit_log: AuditLog) -> type[HttpToolsProtocol]:
    """Make a protocol for connections that are counted, and closed if the headers of a request arrive too late."""

    class Protocol(GuardedProtocol):
        _timeout_s = header_timeout_s
        _connections = connections
        _audit_log = audit_log

    return Protocol


class Timer:
    """One call at a later time, which can be put off."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def set(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        self.stop()
        self._handle = self._loop.call_later(delay_s, self._ring, callback, *args)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self, callback: Callable[..., None], *args: Any) -> None:
        self._handle = None
        callback(*args)


class ChunkedCycle(RequestResponseCycle):
    """A request of HTTP/1.1. It is a `PieceWriter` once its response has begun."""

    @property
    def is_writable(self) -> bool:
        return bool(self.chunked_encoding) and not (
            self.flow.write_paused or self.disconnected or self.response_complete
        )

    def write(self, piece: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class PlainCycle(RequestResponseCycle):
    """A request of HTTP/1.0, which has no chunks: an answer of unknown length ends with its connection."""

    is_endless = False

    async def send(self, message: Any) -> None:
        headers = dict(message.get("headers", ()))
        if message["type"] == "http.response.start" and b"content-length" not in headers:
            self.is_endless, self.chunked_encoding, self.expected_content_length = True, False, sys.maxsize
        elif self.is_endless and not message.get("more_body", False):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class GuardedProtocol(HttpToolsProtocol):
    _timeout_s: float
    _connections: Connections
    _audit_log: AuditLog

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer = Timer(self.loop)
        self._body_timer = Timer(self.loop)  # of a body that no route wanted
        self._write_timer = Timer(self.loop)
        self._look_timer = Timer(self.loop)
        self._num_unwritten = 0
        self._num_header_bytes = 0
        self._is_refused = False
        self._is_body_pending = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        reason = self._connections.enter(self, self._address)
        if reason is None:
            self._header_timer.set(self._timeout_s, self._give_up)
        else:
            self._refuse(_too_many(reason))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._body_timer, self._write_timer, self._look_timer):
            timer.stop()
        self._unset_keepalive_if_required()
        if self._is_refused:
            self._connections.num_lingering -= 1
        self._connections.leave(self)
        super().connection_lost(exc)

    def _refuse(self, problem: Problem) -> None:
        """Answer that there is no place. A client that is about to send is more likely to read this if it may send, so
        the connection is closed when something has come, or soon, or at once if too many linger."""
        self._audit_log.refuse_connection(self._address, problem)
        self._write(problem)
        self._is_refused = True
        self._connections.num_lingering += 1
        if self._connections.num_lingering > MAX_LINGERING:
            self.transport.close()
        else:
            self._header_timer.set(LINGER_S, self.transport.close)

    def give_way(self) -> None:
        """Close, since another connection needs the place. A client before its first request, or in the middle of
        headers, gets an error. What it does not read at once is dropped: its place is no longer counted."""
        if self._header_timer.is_set:
            self._send_problem(_too_many(FULL))
        else:
            self.transport.close()
        self._write_timer.set(0.0, self._drop_unwritten)

    @property
    def awaits_request(self) -> bool:
        """Tell whether a request is to be expected soon: the first of a connection, or one whose headers have begun."""
        is_over = self._is_refused or self.transport.is_closing()
        return self._header_timer.is_set and not (is_over or self._is_answering)

    def data_received(self, data: bytes) -> None:
        """Parse, within limits: the parser keeps incomplete headers, however long they get."""
        if self._is_refused:
            self.transport.close()
            return
        while data and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            data = self._parse(data)
        if self._is_too_large:
            self._send_problem(http_problem(*TOO_LARGE))

    def _parse(self, data: bytes) -> bytes:
        """Return the data that is still to be parsed: none, unless the client asks for another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._send_problem(http_problem(*(TOO_LARGE if self._is_too_large else BROKEN)))
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return a request for another protocol as one for this protocol. The parser takes such a request to have no
        body, so it gets the same request again, without the header."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._send_problem(http_problem(HTTPStatus.METHOD_NOT_ALLOWED, "this is no proxy"))
            return b""
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join([*lines, b"", b""]) + rest

    @property
    def _is_too_large(self) -> bool:
        return self._header_timer.is_set and self._num_header_bytes > MAX_HEADER_BYTES

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # not at any byte: a line end between requests begins none
        self._num_header_bytes = 0  # without the bytes of the body before it
        if not self._header_timer.is_set:  # another request on a connection that was kept
            self._header_timer.set(self._timeout_s, self._give_up)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_header_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._is_too_large:
            raise OverflowError  # which the parser turns into an error of its own
        self._header_timer.stop()
        self._unset_keepalive_if_required()  # it was set again if the previous answer ended among these headers
        self._is_body_pending = True
        self._connections.mark_busy(self)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = PlainCycle  # uvicorn makes it, and has not begun with it
        else:
            self.cycle.__class__ = ChunkedCycle
            self.cycle.scope["extensions"] = {PIECE_WRITER: weakref.ref(self.cycle)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._is_body_pending = False
            self._body_timer.stop()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Limit the time of a body that no route wanted: every byte of it would put off the time when an idle
        connection is closed."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_writing()
            return
        if self._is_answering:
            return
        self._connections.mark_idle(self)
        if self._is_body_pending:
            self._body_timer.set(self._timeout_s, self._close)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # --- Clients that send no more ------------------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a connection whose client sends no more and still waits for its answer (`nc -N`). It looks like one
        whose client has gone, until something is written to it, which is then refused. Before HTTP/1.1 only the answer
        can be written, so such a client is taken for gone: proxies speak 1.0, and close when their own clients
        leave."""
        if self._is_body_pending or not self._is_answering or self.cycle.response_started or self.pipeline:
            return False
        if self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self.transport.write(CONTINUE)
        self._look_for_client(FIRST_LOOK_S)
        return True

    def _look_for_client(self, delay_s: float) -> None:
        """Cut off a client that refused what was written. Nothing is read any more, so only this shows it."""
        sock: socket.socket = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or not self._is_answering:
            return
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif delay_s < LAST_LOOK_S:
            self._look_timer.set(delay_s, self._look_for_client, 2 * delay_s)

    # --- Clients that do not read -------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._write_timer.stop()

    def _close(self) -> None:
        """Close when all is written. A client that does not read can put this off for a limited time."""
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Begin to watch a client. Nothing more is written meanwhile, so a smaller buffer means that it reads."""
        if not self._write_timer.is_set:
            self._num_unwritten = self.transport.get_write_buffer_size()
            self._write_timer.set(STUCK_S, self._check_writing)

    def _check_writing(self) -> None:
        """Cut off a client that has read nothing since the last look."""
        if self.transport.get_write_buffer_size() < self._num_unwritten:
            self._watch_writing()
        else:
            self.transport.abort()

    def _drop_unwritten(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()

    # --- Headers that do not arrive, and errors -----------------------------------------------------------------------

    def _give_up(self) -> None:
        if self._is_answering:  # the previous request; the next one has time
            self._header_timer.set(self._timeout_s, self._give_up)
        else:
            self._send_problem(http_problem(408, f"the headers did not arrive within {self._timeout_s:g} s"))

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _send_problem(self, problem: Problem) -> None:
        """Send an error, unless an answer has begun, and close."""
        if self.transport.is_closing():
            return
        if not (self._is_answering and self.cycle.response_started):
            self._write(problem)
            if hasattr(self, "url") or self._num_header_bytes:  # else the client has asked for nothing
                self._audit_log.refuse(RequestRecord("", self._path, address=self._address), problem)
        self._close()

    def _write(self, problem: Problem) -> None:
        response = problem.response(self._path)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = [b"HTTP/1.1 %d %s" % (problem.status, HTTPStatus(problem.status).phrase.encode())]
        lines += [b"%s: %s" % header for header in headers]
        self.transport.write(b"\r\n".join([*lines, b"", b""]) + bytes(response.body))

    @property
    def _path(self) -> str:
        """The path without its query, which may hold secrets that must not be logged."""
        return getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""


def _too_many(reason: str) -> Problem:
    status, message = TOO_MANY[reason]
    return Problem(status, "overloaded", message, "rate_limit_exceeded", RETRY_S)
