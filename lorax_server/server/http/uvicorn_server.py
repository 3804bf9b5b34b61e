"""A uvicorn server with limits for headers, connections and time, and with a graceful shutdown.

This is the only module that uses uvicorn and httptools internals; pyproject.toml pins the uvicorn version for this
reason.

Every connection always has a timeout: for the request headers, or for the next request (keep-alive). While a request
runs, the timeouts of the middleware and the route apply. The kernel closes connections whose client stops reading.
"""

import asyncio
import logging
import socket
import weakref
from asyncio import TimerHandle
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lorax_server.config import ServerConfig
from lorax_server.server.http.error_responses import ErrorResponse, make_http_error
from lorax_server.server.http.sse import CHUNK_WRITER
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.request_record import RequestRecord

BACKLOG = 4096
KEEP_ALIVE_TIMEOUT_S = 75  # longer than the idle timeout of load balancers, so that they close idle connections first
SHUTDOWN_GRACE_S = 5.0  # time to send final events after the drain deadline
MAX_HEADER_BYTES = 64 * 1024
WRITE_TIMEOUT_S = 120.0  # close the connection if the client reads no data for this long
OVERLOAD_RETRY_S = 1.0

HEADERS_TOO_LARGE_ERROR = make_http_error(431, f"request headers must be at most {MAX_HEADER_BYTES} bytes")
INVALID_REQUEST_ERROR = make_http_error(400, "this is not a valid HTTP/1.1 request")
UPGRADE_NOT_SUPPORTED_ERROR = make_http_error(
    400, "protocol upgrades and CONNECT are not supported; send plain HTTP/1.1 without an `Upgrade` header"
)
TOO_MANY_CONNECTIONS_ERROR = ErrorResponse(
    503, "overloaded", "the server has reached --max-connections", retry_after_s=OVERLOAD_RETRY_S
)


class _ProtocolError(Exception):
    """Raised in a parser callback to stop parsing after a rejection."""


class _ChunkedCycle(RequestResponseCycle):
    """A request and its response. It implements `ChunkWriter` after the response has started."""

    @property
    def is_writable(self) -> bool:
        return bool(self.chunked_encoding) and not (
            self.flow.write_paused or self.disconnected or self.response_complete
        )

    def write(self, chunk: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


class LimitedProtocol(HttpToolsProtocol):
    """The HTTP/1.1 protocol with limits and JSON errors. There is one instance per connection."""

    def __init__(
        self,
        *args: Any,
        header_timeout_s: float,
        max_connections: int,
        metrics: Metrics,
        audit_log: AuditLog,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout_s = header_timeout_s
        self._max_connections = max_connections
        self._metrics = metrics
        self._audit_log = audit_log
        self._header_timer: TimerHandle | None = None
        self._num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only
            timeout_ms = int(1000 * WRITE_TIMEOUT_S)
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self._metrics.connections.set(len(self.connections))
        if len(self.connections) <= self._max_connections:
            self._start_header_timer()
            return
        self._metrics.rejected_connections.labels("full").inc()
        self._audit_log.log_rejected_connection(
            self._address, TOO_MANY_CONNECTIONS_ERROR.status, TOO_MANY_CONNECTIONS_ERROR.message
        )
        self._write_error_response(TOO_MANY_CONNECTIONS_ERROR)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._metrics.connections.set(len(self.connections))

    # --- Requests -----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received data. The parser buffers incomplete headers, so their size is also checked here."""
        if self.transport.is_closing():
            return
        self._num_header_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._reject(HEADERS_TOO_LARGE_ERROR if self._are_headers_too_large else INVALID_REQUEST_ERROR)
        if self._are_headers_too_large:
            self._reject(HEADERS_TOO_LARGE_ERROR)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # not in data_received, because stray bytes must not keep a connection open
        self._num_header_bytes = 0
        if self._header_timer is None:
            self._start_header_timer()

    def on_headers_complete(self) -> None:
        self._num_header_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._are_headers_too_large or self.parser.should_upgrade():
            self._reject(HEADERS_TOO_LARGE_ERROR if self._are_headers_too_large else UPGRADE_NOT_SUPPORTED_ERROR)
            raise _ProtocolError
        self._stop_header_timer()
        self._unset_keepalive_if_required()  # the timer was set again if the previous response completed
        super().on_headers_complete()
        self.cycle.__class__ = _ChunkedCycle  # uvicorn has no hook to set the cycle class
        self.cycle.scope["extensions"] = {CHUNK_WRITER: weakref.ref(self.cycle)}  # type: ignore[dict-item]

    @property
    def _are_headers_too_large(self) -> bool:
        return self._header_timer is not None and self._num_header_bytes > MAX_HEADER_BYTES

    @property
    def _is_responding(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    # --- Timeouts -----------------------------------------------------------------------------------------------------

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._header_timeout_s, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        if self._is_responding:  # a response to the previous pipelined request
            self._start_header_timer()
        else:
            self._reject(make_http_error(408, f"the headers did not arrive within {self._header_timeout_s:g} s"))

    # --- Errors -------------------------------------------------------------------------------------------------------

    def _reject(self, error_response: ErrorResponse) -> None:
        """Close the connection. Send an error response first unless another response has started."""
        if self.transport.is_closing():
            return
        if not (self._is_responding and self.cycle.response_started):
            self._write_error_response(error_response)
            if self._num_header_bytes or hasattr(self, "url"):  # idle connections are not logged
                record = RequestRecord("", self._path, address=self._address)
                self._audit_log.log_rejection(
                    record, error_response.status, error_response.error_type, error_response.message
                )
        self.transport.close()

    def _write_error_response(self, error_response: ErrorResponse) -> None:
        response = error_response.to_response(self._path)
        headers = [*response.raw_headers, (b"connection", b"close")]
        lines = [b"HTTP/1.1 %d %s" % (error_response.status, HTTPStatus(error_response.status).phrase.encode())]
        lines += [b"%s: %s" % header for header in headers]
        self.transport.write(b"\r\n".join([*lines, b"", b""]) + bytes(response.body))

    @property
    def _path(self) -> str:
        """The request path without the query, which may contain secrets that must not be logged."""
        return getattr(self, "url", b"").partition(b"?")[0].decode("latin-1")

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""


class GracefulServer(uvicorn.Server):
    """A uvicorn server that drains on the first signal and stops immediately on the second signal."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Request a shutdown. The base method would raise the signal again after shutdown."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def make_uvicorn_config(app: ASGIApp, config: ServerConfig, metrics: Metrics, audit_log: AuditLog) -> uvicorn.Config:
    protocol: Any = partial(
        LimitedProtocol,
        header_timeout_s=config.body_timeout_s,
        max_connections=config.max_connections,
        metrics=metrics,
        audit_log=audit_log,
    )
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
        timeout_graceful_shutdown=int(config.drain_s + SHUTDOWN_GRACE_S),
        backlog=BACKLOG,
    )
