"""uvicorn's HTTP, for clients that mean no good: connections are counted, headers have a size and a time to arrive,
answers have a time to be taken, and errors are JSON.

A connection always has a timer, so that none stays for ever: for the headers of a request, for a body that no route
wanted, for the next request, or for what is to be written. While a request is answered, its route has one.
"""

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lorax_server.server.http.connections import FULL, FULL_ADDRESS, Connections
from lorax_server.server.http.problems import Problem, http_problem
from lorax_server.server.http.sse import STUCK_S
from lorax_server.server.telemetry.audit import AuditedRequest, AuditLog

MAX_HEADER_BYTES = 64 * 1024
MAX_LINGERING = 256
LINGER_S = 1.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 2.0  # after a client has stopped to send
TOO_LARGE = 431, f"headers of at most {MAX_HEADER_BYTES} bytes are taken"
BROKEN = 400, "this is not HTTP/1.1"
RETRY_S = 1.0
TOO_MANY = {
    FULL: (503, "the server has as many connections as it may have"),
    FULL_ADDRESS: (429, "there are as many connections from this address as there may be; close some"),
}


def make_protocol(header_timeout_s: float, connections: Connections, audit_log: AuditLog) -> type[HttpToolsProtocol]:
    """A protocol for connections that are counted, and closed if the headers of a request take longer to arrive."""

    class Protocol(GuardedProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.timeout_s, self._counted, self._audit_log = header_timeout_s, connections, audit_log

    return Protocol


class PlainCycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: an answer whose length is not known ends with its connection."""

    is_endless = False

    async def send(self, message: Any) -> None:
        headers = dict(message.get("headers", ()))
        if message["type"] == "http.response.start" and b"content-length" not in headers:
            self.is_endless, self.chunked_encoding, self.expected_content_length = True, False, sys.maxsize
        elif self.is_endless and not message.get("more_body", False):
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class GuardedProtocol(HttpToolsProtocol):
    timeout_s: float
    _counted: Connections
    _audit_log: AuditLog

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.Handle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._num_unwritten = 0
        self._num_header_bytes = 0
        self._is_refused = False
        self._has_rest = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        reason = self._counted.enter(self, self._address)
        if reason is None:
            self._header_timer = self.loop.call_later(self.timeout_s, self._give_up)
        else:
            self._refuse(_too_many(reason))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_rest_timer()
        self._stop_write_timer()
        self._stop_look_timer()
        self._unset_keepalive_if_required()
        if self._is_refused:
            self._counted.num_lingering -= 1
        self._counted.leave(self)
        super().connection_lost(exc)

    def _refuse(self, problem: Problem) -> None:
        """Say that there is no place. A client that is about to send hears it better if it may, so that the connection
        is closed when something has come, or soon, or at once if that is asked of too many."""
        self._audit_log.refuse_connection(self._address, problem)
        self._write(problem)
        self._is_refused = True
        self._counted.num_lingering += 1
        if self._counted.num_lingering > MAX_LINGERING:
            self.transport.close()
        else:
            self._header_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def give_way(self) -> None:
        """Close, since another connection needs the place. A client that waits for its first request, or in the middle
        of the headers of one, is told so. What it does not take at once is dropped: its place is no longer counted."""
        if self._header_timer is None:
            self.transport.close()
        else:
            self._send_problem(_too_many(FULL))
        self._stop_write_timer()
        self._write_timer = self.loop.call_soon(self._drop_unwritten)

    def data_received(self, data: bytes) -> None:
        """The parser keeps what is not complete, however long it gets."""
        if self._is_refused:
            self.transport.close()
            return
        while data and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            data = self._parse(data)
        if self._is_too_large:
            self._send_problem(http_problem(*TOO_LARGE))

    def _parse(self, data: bytes) -> bytes:
        """What is left to do: nothing, but for who asks for another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._send_problem(http_problem(*(TOO_LARGE if self._is_too_large else BROKEN)))
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Who asks for another protocol is answered in this one. The parser takes such a request to have no body, so
        that it is shown the same request again without its wish."""
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
        return self._header_timer is not None and self._num_header_bytes > MAX_HEADER_BYTES

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # not by any byte: a line end between requests begins none
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
        self._unset_keepalive_if_required()  # set again if the answer before ended among these headers
        self._has_rest = True
        self._counted.wake(self)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = PlainCycle  # uvicorn makes it, and has not begun with it

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._has_rest = False
            self._stop_rest_timer()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A body that no route wanted may still be on its way, but not for ever: every byte of it would put off the
        time when an idle connection is closed."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_writing()
            return
        if self._is_answering:
            return
        self._counted.rest(self)
        if self._has_rest:
            self._rest_timer = self.loop.call_later(self.timeout_s, self._close)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # --- Clients that send no more ------------------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a connection whose client has asked and still waits for its answer (`nc -N`). It looks like one that has
        gone until something is written to it, which a client that has gone refuses. Before HTTP/1.1 nothing can be
        written but the answer, so that such a client is taken for gone: proxies speak 1.0, and close when their own
        clients leave."""
        if self._has_rest or not self._is_answering or self.cycle.response_started or self.pipeline:
            return False
        if self.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self.transport.write(CONTINUE)
        self._look_for_client(FIRST_LOOK_S)
        return True

    def _look_for_client(self, delay_s: float) -> None:
        """Cut off a client that refused what was written. Nothing else tells, since nothing is read any more."""
        self._look_timer = None
        sock: socket.socket = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or not self._is_answering:
            return
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif delay_s < LAST_LOOK_S:
            self._look_timer = self.loop.call_later(delay_s, self._look_for_client, 2 * delay_s)

    def _stop_look_timer(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None

    # --- Clients that do not read -------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_timer()

    def _close(self) -> None:
        """Close when all is written, which a client that does not read can put off for a while only."""
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        """Begin to watch. Nothing more is written meanwhile, so that less to write means that the client reads."""
        if self._write_timer is None:
            self._num_unwritten = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(STUCK_S, self._check_writing)

    def _check_writing(self) -> None:
        """Cut off a client that has taken nothing since the last look."""
        self._write_timer = None
        if self.transport.get_write_buffer_size() < self._num_unwritten:
            self._watch_writing()
        else:
            self.transport.abort()

    def _drop_unwritten(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # --- Timers of requests -------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        self._header_timer = None
        if self._is_answering:  # the one before; what comes next has time
            self._header_timer = self.loop.call_later(self.timeout_s, self._give_up)
        else:
            self._send_problem(http_problem(408, f"the headers did not arrive within {self.timeout_s:g} s"))

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _send_problem(self, problem: Problem) -> None:
        """The last thing that is said. Nothing is said in the middle of an answer."""
        if self.transport.is_closing():
            return
        if not (self._is_answering and self.cycle.response_started):
            self._write(problem)
            if hasattr(self, "url") or self._num_header_bytes:  # else nobody has asked for anything
                self._audit_log.refuse(AuditedRequest("", self._path, self._address), problem)
        self._close()

    def _write(self, problem: Problem) -> None:
        response = problem.response(self._path)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = [b"HTTP/1.1 %d %s" % (problem.status, HTTPStatus(problem.status).phrase.encode())]
        lines += [b"%s: %s" % header for header in headers]
        self.transport.write(b"\r\n".join([*lines, b"", b""]) + bytes(response.body))

    @property
    def _path(self) -> str:
        """Without a query, which may hold what nobody is to read in a log."""
        return getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""


def _too_many(reason: str) -> Problem:
    status, message = TOO_MANY[reason]
    return Problem(status, "overloaded", message, "rate_limit_exceeded", RETRY_S)
