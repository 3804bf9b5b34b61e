"""What stands before all routes: an id for each request, bodies of JSON, of bounded size, that arrive in time."""

import asyncio
import re
import uuid
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorax_server.server.problems import Problem, http_problem

MAX_DISCARDED = 16 * 2**20
DISCARD_S = 5.0
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)


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


class Guard:
    """Reads the whole body before a route begins; routes take them whole, and so it is known here what is wrong."""

    def __init__(self, app: ASGIApp, methods: Methods, max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._methods = methods
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server knows, and sends no body
        if scope["method"] == "POST" and "POST" in self._methods.of(scope["path"]):
            body, problem = await self._read(headers, receive)
            if body is None:
                return  # nobody is there any more
            if problem is not None:
                if problem.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                    await self._discard(receive)
                await problem.response(scope["path"])(scope, receive, send_with_id)
                return
            receive = _replay(body, receive)
        await self._app(scope, receive, send_with_id)

    async def _read(self, headers: Headers, receive: Receive) -> tuple[bytes | None, Problem | None]:
        """The body, or None if the client left; or what is wrong with it."""
        problem = self._find_problem(headers)
        if problem is not None:
            return b"", problem
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
                        return b"", self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts), None
        except TimeoutError:
            late = f"the body did not arrive within {self._body_timeout_s:g} s"
            return b"", http_problem(408, late, {"connection": "close"})

    async def _discard(self, receive: Receive) -> None:
        """Take what still comes, for a while: who is cut off in the middle of sending does not hear why."""
        left = MAX_DISCARDED
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    def _find_problem(self, headers: Headers) -> Problem | None:
        if not JSON.fullmatch(headers.get("content-type", "")):
            return http_problem(415, "Expected request with `Content-Type: application/json`")
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            return http_problem(415, "Expected request without `Content-Encoding`", {"accept-encoding": "identity"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Problem:
        message = f"Failed to buffer the request body: at most {self._max_body_bytes} bytes are taken"
        return http_problem(413, message, {"connection": "close"})


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
