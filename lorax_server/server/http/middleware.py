"""Checks before all routes: of hosts and keys first, then of bodies: JSON of bounded size that arrives in time.

Each request gets an id, and refusals are logged. Every route of a router needs a key, except those named here.
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
from lorax_server.server.http.hosts import Hosts
from lorax_server.server.http.problems import Problem, describe, http_problem
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.request_record import RequestRecord

MAX_DISCARDED = 16 * 2**20
DISCARD_S = 2.0
LARGE = 2**15  # bytes of a body whose parsing takes milliseconds
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
SINGLE = ("host", "authorization", "content-type")  # of two, a proxy might look at one and this server at the other
PUBLIC = re.compile(r"/(|health|ping|startup|metrics|ui(/.*)?)")  # readable without a key


def methods_at(path: str, routes: Sequence[BaseRoute]) -> set[str]:
    """Return the methods of a path. A route that answers GET also answers HEAD."""
    matching = (route for route in routes if isinstance(route, Route) and route.path_regex.match(path))
    methods = {method for route in matching for method in route.methods or ()}
    return methods | {"HEAD"} if "GET" in methods else methods


class _RefusedError(Exception):
    """A request that is answered here and reaches no route."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem._replace(headers={**problem.headers, "connection": "close"})


class Guard(Protocol):
    """The part of the service that authenticates requests and logs rejected ones."""

    config: ServerConfig
    audit_log: AuditLog

    def identify(self, headers: Headers) -> Key: ...


class RequestMiddleware:
    """Reads the whole body before a route begins: routes take bodies whole, and a bad one is refused here."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], service: Guard, address: str = "") -> None:
        config = service.config
        self._app = app
        self._routes = routes
        self._service = service
        self._hosts = Hosts(config.host, config.allowed_hosts, address)
        self._max_body_bytes = config.max_body_bytes
        self._body_timeout_s = config.body_timeout_s
        self._large_body_lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = _describe_request(scope, headers)
        state = scope.setdefault("state", {})
        state["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn knows of the HEAD, and sends no body
        try:
            await self._answer(scope, headers, record, receive, send_with_id)
        except _RefusedError as refused:
            await self._refuse(record, refused.problem, receive, send_with_id)
        finally:
            self._service.audit_log.end(record, state.get("admin_action"))

    async def _answer(
        self, scope: Scope, headers: Headers, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        """Refuse a request as early as possible, or hand it to a route."""
        method, path = scope["method"], scope["path"]
        has_route = method in methods_at(path, self._routes)
        is_public = method == "GET" and PUBLIC.fullmatch(path) is not None
        self._check_headers(headers)
        if has_route and not is_public:
            try:
                key = scope["state"]["key"] = self._service.identify(headers)
                record.key = key.name
            except LoraxError as error:
                raise _RefusedError(describe(error, path)) from None
        if has_route and method == "POST":
            self._check_body_headers(headers)
            body = await self._read_body(receive)
            if body is None:
                return  # the client has left
            receive = _replay(body, receive)
            if len(body) > LARGE:
                # Large bodies are parsed one by one, and streams go on in between. Parsing holds Python's lock, so that
                # another thread would not help.
                async with self._large_body_lock:
                    await asyncio.sleep(0)
        await self._app(scope, receive, send)
        problem = scope["state"].get("problem")  # of the schema, or of a route
        if problem is not None:
            self._service.audit_log.refuse(record, problem.status, problem.error_type, problem.message)

    def _check_headers(self, headers: Headers) -> None:
        for name in SINGLE:
            if len(headers.getlist(name)) > 1:
                raise _RefusedError(http_problem(400, f"there must be one header `{name.title()}`, not several"))
        if not self._hosts.allow(headers.get("host", "localhost")):  # every browser names one
            message = f"this server is not called {headers['host'][:64]!r}; allow that name by --allowed-host"
            raise _RefusedError(Problem(403, "permission", message))

    def _check_body_headers(self, headers: Headers) -> None:
        if not JSON.fullmatch(headers.get("content-type", "")):
            raise _RefusedError(http_problem(415, "Expected request with `Content-Type: application/json`"))
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            accepted = {"accept-encoding": "identity"}
            raise _RefusedError(http_problem(415, "Expected request without `Content-Encoding`", accepted))
        length = headers.get("content-length", "")
        if length.isdigit():
            self._check_size(int(length[:20]))

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            message = f"Failed to buffer the request body: at most {self._max_body_bytes} bytes are taken"
            raise _RefusedError(http_problem(413, message))

    async def _read_body(self, receive: Receive) -> bytes | None:
        """Return the body; None if the client left."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    self._check_size(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            problem = http_problem(408, f"the body did not arrive within {self._body_timeout_s:g} s")
            raise _RefusedError(problem) from None

    async def _refuse(self, record: RequestRecord, problem: Problem, receive: Receive, send: Send) -> None:
        """Answer at once, then read on for a while: a client that is cut off while it sends does not see the answer."""
        self._service.audit_log.refuse(record, problem.status, problem.error_type, problem.message)
        response = problem.response(record.route)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _describe_request(scope: Scope, headers: Headers) -> RequestRecord:
    request_id = headers.get("x-request-id", "")
    if not REQUEST_ID.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    return RequestRecord(request_id, scope["path"], status=0, address=(scope.get("client") or ("",))[0])


async def _discard(receive: Receive) -> None:
    left = MAX_DISCARDED
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return the body first, then what comes after it: that the client leaves."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
