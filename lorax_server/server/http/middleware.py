"""Middleware that checks the host, the API key and the body of each request before its route runs.

It also assigns request IDs and logs rejected requests. All routes except `PUBLIC_PATHS` require a key.
"""

import asyncio
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorax_server.config import ServerConfig
from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import Key
from lorax_server.server.http.error_responses import ErrorResponse, make_error_response, make_http_error
from lorax_server.server.http.hosts import AllowedHosts
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.request_record import RequestRecord

MAX_DISCARDED_BYTES = 16 * 2**20
DISCARD_TIMEOUT_S = 2.0
LARGE_BODY_BYTES = 2**15  # parsing a larger body would block the event loop for milliseconds
REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")
JSON_CONTENT_TYPE = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
# If one of these headers is repeated, a proxy and this server might use different values.
SINGLE_VALUE_HEADERS = ("host", "authorization", "content-type")
PUBLIC_PATHS = re.compile(r"/(|health|ping|startup|metrics|ui(/.*)?)")  # GET requests to these paths need no key


def find_methods(path: str, routes: Sequence[BaseRoute]) -> set[str]:
    """Return the HTTP methods that a path supports. GET implies HEAD."""
    matching = (route for route in routes if isinstance(route, Route) and route.path_regex.match(path))
    methods = {method for route in matching for method in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


class RejectedError(Exception):
    """Raised to reject a request before it reaches a route."""

    def __init__(self, error_response: ErrorResponse) -> None:
        self.error_response = error_response._replace(headers={**error_response.headers, "connection": "close"})


class Authenticator(Protocol):
    """The interface of the service that the middleware uses."""

    config: ServerConfig
    audit_log: AuditLog

    def identify(self, headers: Headers) -> Key: ...


class RequestMiddleware:
    """ASGI middleware that reads and checks the whole body before the route runs."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], service: Authenticator, address: str = "") -> None:
        config = service.config
        self._app = app
        self._routes = routes
        self._service = service
        self._hosts = AllowedHosts(config.host, config.allowed_hosts, address)
        self._max_body_bytes = config.max_body_bytes
        self._body_timeout_s = config.body_timeout_s
        self._large_body_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = _make_record(scope, headers)
        state = scope.setdefault("state", {})
        state["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn still sees HEAD and sends no body
        try:
            await self._handle(scope, headers, record, receive, send_with_id)
        except RejectedError as rejected:
            await self._reject(record, rejected.error_response, receive, send_with_id)
        finally:
            self._service.audit_log.log_finished(record, state.get("admin_action"))

    async def _handle(
        self, scope: Scope, headers: Headers, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        """Reject the request as early as possible, or pass it to its route."""
        method, path = scope["method"], scope["path"]
        has_route = method in find_methods(path, self._routes)
        is_public = method == "GET" and PUBLIC_PATHS.fullmatch(path) is not None
        self._check_headers(headers)
        if has_route and not is_public:
            try:
                key = scope["state"]["key"] = self._service.identify(headers)
                record.key = key.name
            except LoraxError as error:
                raise RejectedError(make_error_response(error, path)) from None
        if has_route and method == "POST":
            self._check_body_headers(headers)
            body = await read_body(receive, self._max_body_bytes, self._body_timeout_s)
            if body is None:
                return  # the client disconnected
            receive = _replay_body(body, receive)
            if len(body) > LARGE_BODY_BYTES:
                # Parse large bodies one at a time so that streams can run in between. A thread would not help, because
                # parsing holds the GIL.
                async with self._large_body_lock:
                    await asyncio.sleep(0)
        await self._app(scope, receive, send)
        error_response = scope["state"].get("error_response")  # set by schema validation or by the route
        if error_response is not None:
            self._service.audit_log.log_rejection(
                record, error_response.status, error_response.error_type, error_response.message
            )

    def _check_headers(self, headers: Headers) -> None:
        for name in SINGLE_VALUE_HEADERS:
            if len(headers.getlist(name)) > 1:
                raise RejectedError(make_http_error(400, f"the header `{name.title()}` must not be repeated"))
        if not self._hosts.is_allowed(headers.get("host", "localhost")):  # browsers always send this header
            message = f"the host {headers['host'][:64]!r} is not allowed; allow it with --allowed-host"
            raise RejectedError(ErrorResponse(403, "permission", message))

    def _check_body_headers(self, headers: Headers) -> None:
        if not JSON_CONTENT_TYPE.fullmatch(headers.get("content-type", "")):
            raise RejectedError(make_http_error(415, "Expected request with `Content-Type: application/json`"))
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            accepted = {"accept-encoding": "identity"}
            raise RejectedError(make_http_error(415, "Expected request without `Content-Encoding`", accepted))
        length = headers.get("content-length", "")
        if length.isdigit():
            _check_size(int(length[:20]), self._max_body_bytes)

    async def _reject(self, record: RequestRecord, error_response: ErrorResponse, receive: Receive, send: Send) -> None:
        """Send the error response, then read and discard the rest of the body for a short time.

        Otherwise, a client that is still sending might miss the response.
        """
        self._service.audit_log.log_rejection(
            record, error_response.status, error_response.error_type, error_response.message
        )
        response = error_response.to_response(record.route)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        await discard_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _make_record(scope: Scope, headers: Headers) -> RequestRecord:
    request_id = headers.get("x-request-id", "")
    if not REQUEST_ID_PATTERN.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    return RequestRecord(request_id, scope["path"], status=0, address=(scope.get("client") or ("",))[0])


async def read_body(receive: Receive, max_bytes: int, timeout_s: float) -> bytes | None:
    """Return the body, or None if the client disconnected. Raise `RejectedError` if the body exceeds a limit."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                _check_size(len(body), max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        error_response = make_http_error(408, f"the body did not arrive within {timeout_s:g} s")
        raise RejectedError(error_response) from None


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        message = f"Failed to buffer the request body: it must be at most {max_bytes} bytes"
        raise RejectedError(make_http_error(413, message))


async def discard_body(receive: Receive) -> None:
    num_bytes_left = MAX_DISCARDED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while num_bytes_left > 0:
                message = await receive()
                num_bytes_left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function that returns the body again before further messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
