"""The guard before all routes: it checks hosts and keys first, then bodies of JSON, of bounded size, that arrive
in time. Each request gets an id, and what is refused here is written down.

Every route of a router needs a key, but for those that are named here."""

import asyncio
import re
import uuid
from collections.abc import Iterable
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorax_server.errors import LoraxError
from lorax_server.server.http.hosts import Hosts
from lorax_server.server.http.problems import Problem, describe, http_problem
from lorax_server.server.service import Service
from lorax_server.server.telemetry.audit import AuditedRequest

MAX_DISCARDED = 16 * 2**20
DISCARD_S = 2.0
LARGE = 2**15  # bytes of a body that takes milliseconds to parse
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
SINGLE = ("host", "authorization", "content-type")  # a proxy might look at one of two, and we at the other
CLOSE = {"connection": "close"}
PUBLIC = re.compile(r"/(|health|ping|startup|metrics|ui(/.*)?)")  # to read, without a key


class Methods:
    """What can be done at each path."""

    def __init__(self) -> None:
        self._routes: list[Route] = []

    def add(self, routes: Iterable[BaseRoute]) -> None:
        self._routes += [route for route in routes if isinstance(route, Route)]

    def of(self, path: str) -> set[str]:
        """What can be read can be looked at: whoever answers GET answers HEAD."""
        found = {method for route in self._routes if route.path_regex.match(path) for method in route.methods or ()}
        return found | {"HEAD"} if "GET" in found else found


class RequestMiddleware:
    """Reads the whole body before a route begins; routes take them whole, and so it is known here what is wrong."""

    def __init__(self, app: ASGIApp, methods: Methods, service: Service, address: str = "") -> None:
        config = service.config
        self._app = app
        self._methods = methods
        self._service = service
        self._hosts = Hosts(config.host, config.allowed_hosts, address)
        self._max_body_bytes = config.max_body_bytes
        self._body_timeout_s = config.body_timeout_s
        self._turnstile = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request = _describe_request(scope, headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request.request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request.request_id
            await send(message)

        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server knows, and sends no body
        try:
            await self._answer(scope, headers, request, receive, send_with_id)
        finally:
            self._service.audit_log.end(request, state.get("admin_action"))

    async def _answer(
        self, scope: Scope, headers: Headers, request: AuditedRequest, receive: Receive, send: Send
    ) -> None:
        """Refuse it, as early as can be, or let a route have it."""
        method, path = scope["method"], scope["path"]
        is_known = method in self._methods.of(path)
        is_post = is_known and method == "POST"
        is_public = method == "GET" and PUBLIC.fullmatch(path) is not None
        problem = self._check_caller(headers, request, needs_key=is_known and not is_public)
        if problem is not None:
            await self._refuse(request, problem, receive, send)
            return
        if is_post:
            body, problem = await self._read(headers, receive)
            if problem is not None:
                await self._refuse(request, problem, receive, send)
                return
            if body is None:
                return  # nobody is there any more
            receive = _replay(body, receive)
            if len(body) > LARGE:
                await self._wait_for_turn()
        await self._app(scope, receive, send)
        problem = scope["state"].get("problem")  # of the schema, or of a route
        if problem is not None:
            self._service.audit_log.refuse(request, problem)

    async def _wait_for_turn(self) -> None:
        """Let one large body after the other be parsed, and streams go on in between. Parsing holds Python's lock, so
        that another thread would help nobody."""
        async with self._turnstile:
            await asyncio.sleep(0)

    def _check_caller(self, headers: Headers, request: AuditedRequest, *, needs_key: bool) -> Problem | None:
        for name in SINGLE:
            if len(headers.getlist(name)) > 1:
                return http_problem(400, f"there must be one header `{name.title()}`, not several", CLOSE)
        if not self._hosts.allow(headers.get("host", "localhost")):  # every browser names one
            message = f"this server is not called {headers['host'][:64]!r}; allow that name by --allowed-host"
            return Problem(403, "permission", message, headers=CLOSE)
        if needs_key:
            try:
                request.key = self._service.check_caller(headers.get("authorization")).name
            except LoraxError as error:
                return describe(error, request.path)._replace(headers=CLOSE)
        return None

    async def _refuse(self, request: AuditedRequest, problem: Problem, receive: Receive, send: Send) -> None:
        """Answer at once, then take what still comes for a while: a client that is cut off in the middle of sending
        does not hear why."""
        self._service.audit_log.refuse(request, problem)
        response = problem.response(request.path)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, headers: Headers, receive: Receive) -> tuple[bytes | None, Problem | None]:
        """The body, or None if the client left; or what is wrong with it."""
        problem = self._find_problem(headers)
        if problem is not None:
            return None, problem
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None, None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._max_body_bytes:
                        return None, self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts), None
        except TimeoutError:
            return None, http_problem(408, f"the body did not arrive within {self._body_timeout_s:g} s", CLOSE)

    def _find_problem(self, headers: Headers) -> Problem | None:
        if not JSON.fullmatch(headers.get("content-type", "")):
            return http_problem(415, "Expected request with `Content-Type: application/json`", CLOSE)
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            accepted = {"accept-encoding": "identity"}
            return http_problem(415, "Expected request without `Content-Encoding`", CLOSE | accepted)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Problem:
        message = f"Failed to buffer the request body: at most {self._max_body_bytes} bytes are taken"
        return http_problem(413, message, CLOSE)


def _describe_request(scope: Scope, headers: Headers) -> AuditedRequest:
    asked = headers.get("x-request-id", "")
    request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
    return AuditedRequest(request_id, scope["path"], (scope.get("client") or ("",))[0])


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
    """First the body, then what comes after it: that the client leaves."""
    is_read = False

    async def replayed() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
