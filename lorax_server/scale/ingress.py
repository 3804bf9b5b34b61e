"""The ingress: an ASGI application that forwards each request to a replica."""

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote

import aiohttp
import ray
from multidict import CIMultiDict
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from lorax_server.errors import (
    AdapterAccessError,
    AdapterNotFoundError,
    BusyError,
    EngineError,
    InputError,
    LoraxError,
)
from lorax_server.scale.change_registry import CONFIRM_S, RegistryError, find_registry, share_secret
from lorax_server.scale.placement import RoutingKey
from lorax_server.scale.routing_key import read_routing_key
from lorax_server.server.http.problems import WORDINGS, describe, http_problem
from lorax_server.server.http.replica_protocol import (
    CHANGE_HEADER,
    CHANGE_PATHS,
    CLIENT_HEADER,
    SECRET_HEADER,
    AdapterChange,
)
from lorax_server.server.http.sse import event
from lorax_server.server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

CHOOSE_S = 10.0  # to wait for a replica if there is none
PROBE_CHOOSE_S = 2.0  # the same for health probes
SCRAPE_S = 5.0
REGISTRY_S = 5.0  # for a registry call that waits for no replica
RETRY_S = 10.0  # from the first attempt to forward a request until the ingress gives up
PAUSE_S = 0.2  # before another attempt at a replica that has failed
# Bytes of all request bodies that one ingress holds. Replicas check keys, so callers without a key can fill it.
MAX_BUFFERED_BYTES = 2**30
PROBES = ("/", "/health", "/ping", "/startup")
# Errors about an adapter: another replica may have the adapter, or a token for it. All replicas reject a key that may
# not use the adapter.
ADAPTER_STATUS = 424
ADAPTER_CODES = frozenset(WORDINGS[kind].code for kind in (AdapterNotFoundError, AdapterAccessError))
TOKEN_NOTE = (
    b"only the replica that responded has used api_token, and no replica stores it; the other replicas need a token of "
    b"their own: in requests for the adapter, or HF_TOKEN and --use-global-hf-token on each machine"
)
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .*)")  # a line of Prometheus's text format

Headers = list[tuple[bytes, bytes]]

# Headers that belong to a connection and not to a request.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
NOT_FORWARDED = HOP_BY_HOP | {b"content-length", CLIENT_HEADER.encode(), SECRET_HEADER.encode()}
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server", b"x-request-id", CHANGE_HEADER.encode()}  # Ray's proxy adds its own
AUTOMATIC_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")  # those that aiohttp would add
EVENT_STREAM = "text/event-stream"
EVENT_END = b"\n\n"
CONNECT_S = 5.0
# A machine that loses power closes no connection. Keep-alive probes: seconds until the first one, seconds between them,
# and their number; then milliseconds that sent bytes may stay unacknowledged. Not all systems have all options.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
KEEP_ALIVE_OPTIONS = {getattr(socket, name): value for name, value in KEEP_ALIVE.items() if hasattr(socket, name)}


class LostReplicaError(Exception):
    """A replica disconnected before the end of its response."""


class ForwardedRequest(NamedTuple):
    """A client's request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytearray
    client: str  # the client address


class Answer:
    """A replica's response: a whole body, or a stream of events."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        self._response = response
        self.status = response.status
        self.body = body
        self.is_stream = response.content_type == EVENT_STREAM
        self.change = response.headers.get(CHANGE_HEADER)
        self.headers: Headers = [pair for pair in response.raw_headers if pair[0].lower() not in NOT_RETURNED]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield complete events. An incomplete event at the end of a broken stream is dropped."""
        rest = b""
        try:
            async for chunk in self._response.content.iter_any():
                events, end, rest = (rest + chunk).rpartition(EVENT_END)
                if end:
                    yield events + end
        except (aiohttp.ClientError, OSError) as error:
            raise LostReplicaError(str(error)) from error


class Upstream:
    """Connections to the servers of all replicas."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    @asynccontextmanager
    async def send(self, address: str, request: ForwardedRequest) -> AsyncIterator[Answer]:
        """Send a request and yield the response. Leaving early closes the connection, which aborts the request."""
        query = f"?{request.query.decode('latin-1')}" if request.query else ""
        kept = ((name, value) for name, value in request.headers if name.lower() not in NOT_FORWARDED)
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)
        headers[SECRET_HEADER], headers[CLIENT_HEADER] = self._secret, request.client
        try:
            async with self.session.request(
                request.method,
                URL(f"http://{address}{request.path}{query}", encoded=True),
                headers=headers,
                data=request.body or None,
                skip_auto_headers=AUTOMATIC_HEADERS,
                allow_redirects=False,
            ) as response:
                body = b"" if response.content_type == EVENT_STREAM else await response.read()
                yield Answer(response, body)
        except (aiohttp.ClientError, OSError) as error:
            raise LostReplicaError(str(error)) from error

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """Created by the first request, on the event loop that serves it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_make_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE_OPTIONS.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class Ingress:
    """A Ray actor to which Ray's proxies send all requests."""

    def __init__(
        self,
        servers: DeploymentHandle,
        app: str,
        base_names: Sequence[str],
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self._servers = servers
        self._base_names = base_names
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._max_buffered_bytes = max(MAX_BUFFERED_BYTES, max_body_bytes)
        self._buffered_bytes = 0
        self._upstream = Upstream(share_secret(app))
        self._registry = find_registry(app)

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.serve(scope, receive, send)

        return app  # a function: uvicorn would take a method for an application of an older ASGI

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return  # nothing to start or stop
        path = scope["path"]
        try:
            async with self._read(scope, receive) as request:
                if request is not None:
                    await self._respond(request, send)
        except HTTPException as error:
            await http_problem(error.status_code, error.detail).response(path)(scope, receive, send)
        except LoraxError as error:
            await describe(error, path).response(path)(scope, receive, send)

    # --- Requests -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _read(self, scope: Scope, receive: Receive) -> AsyncIterator[ForwardedRequest | None]:
        """Read a request, and hold its body for further attempts. Yield None if the client has disconnected."""
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if not path.startswith("/"):
            raise InputError("the request path must start with /")
        client, body = (scope.get("client") or ("",))[0], bytearray()
        request = ForwardedRequest(scope["method"], path, scope["query_string"], scope["headers"], body, client)
        try:
            yield request if await self._read_body(receive, body) else None
        finally:
            self._buffered_bytes -= len(body)

    async def _read_body(self, receive: Receive, body: bytearray) -> bool:
        """Append a request body. Return False if the client has disconnected."""
        message: Message = {"more_body": True}
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while message.get("more_body", False):
                    message = await receive()
                    if message["type"] != "http.request":
                        return False
                    body += message.get("body", b"")
                    self._buffered_bytes += len(message.get("body", b""))
                    self._check_size(len(body))
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._body_timeout_s:g} s") from None
        return True

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            message = f"Failed to buffer the request body: it must have at most {self._max_body_bytes} bytes"
            raise HTTPException(413, message)
        if self._buffered_bytes > self._max_buffered_bytes:
            raise BusyError("the ingress holds too many request bodies; try again")

    # --- Responses ----------------------------------------------------------------------------------------------------

    async def _respond(self, request: ForwardedRequest, send: Send) -> None:
        """Forward a request to a replica, and to another one if the first disconnects before it responds, or cannot
        serve the adapter."""
        if request.path == "/metrics" and request.method == "GET" and not _accepts_json(request):
            headers = [(b"content-type", Metrics.content_type.encode())]
            await _send_whole(send, 200, headers, (await self._merge_metrics(request)).encode())
            return
        if request.method == "POST" and unquote(request.path) in CHANGE_PATHS:
            await self._list_replicas()  # the registry must be reachable before a replica changes anything
        key = read_routing_key(request.path, request.body, self._base_names)
        tried, rejection, deadline = list[str](), None, time.monotonic() + RETRY_S
        while time.monotonic() < deadline:
            async with self._choose(key, tried, request.path) as selection:
                replica, where = selection.replica_id, selection.replica_metadata
                if replica in tried:
                    if rejection is not None:
                        break
                    await asyncio.sleep(PAUSE_S)
                try:
                    async with self._upstream.send(f"{where['host']}:{where['port']}", request) as answer:
                        if tried or not _may_differ_elsewhere(answer, key):
                            if answer.change is not None:
                                answer.headers += await self._record(request, answer.change, replica)
                            await _send_answer(request.path, answer, send)
                            return
                        rejection = answer
                except LostReplicaError as error:
                    logger.warning("replica %s did not respond, trying another: %s", replica, error)
                tried.append(replica)
        if rejection is None:
            raise EngineError(f"no replica can respond now: {len(set(tried))} disconnected", retry_after_s=1.0)
        await _send_whole(send, rejection.status, rejection.headers, rejection.body)

    @asynccontextmanager
    async def _choose(self, key: RoutingKey, tried: Sequence[str], path: str) -> AsyncIterator[Any]:
        """Reserve a place at a replica, so that Ray counts the request while it runs."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(PROBE_CHOOSE_S if path in PROBES else CHOOSE_S):
                    selection = await stack.enter_async_context(self._servers.choose_replica(tuple(key), list(tried)))
            except (TimeoutError, RayServeException, ray.exceptions.RayError) as error:
                reason = "none is available" if isinstance(error, TimeoutError) else type(error).__name__
                raise EngineError(f"no replica can respond now: {reason}", retry_after_s=1.0) from error
            yield selection

    # --- The registry -------------------------------------------------------------------------------------------------

    async def _list_replicas(self) -> dict[str, str]:
        """Return the addresses of all replicas."""
        try:
            async with asyncio.timeout(REGISTRY_S):
                members: dict[str, str] = await self._registry.members.remote()
                return members
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise RegistryError("the adapter registry is unavailable, so nothing was changed; try again") from error

    async def _record(self, request: ForwardedRequest, change: str, replica: str) -> Headers:
        """Have all replicas apply a change that one replica has made. Return additional response headers."""
        try:
            async with asyncio.timeout(CONFIRM_S + REGISTRY_S):
                late = await self._registry.record.remote(AdapterChange(**json.loads(change)), replica)
        except (TimeoutError, ray.exceptions.RayError) as error:
            message = "the adapter registry was lost: one replica has made this change, others may not; try again"
            raise RegistryError(message) from error
        if late:
            names = ", ".join(late)
            raise RegistryError(f"these replicas have not confirmed the change, and make it when they can: {names}")
        return [(b"x-lorax-note", TOKEN_NOTE)] if json.loads(request.body).get("api_token") else []

    async def _merge_metrics(self, request: ForwardedRequest) -> str:
        members = await self._list_replicas()
        texts = await asyncio.gather(*(self._scrape(address, request) for address in members.values()))
        return merge_metrics({name: text for name, text in zip(members, texts, strict=True) if text})

    async def _scrape(self, address: str, request: ForwardedRequest) -> str:
        try:
            async with asyncio.timeout(SCRAPE_S), self._upstream.send(address, request) as answer:
                return answer.body.decode()
        except (LostReplicaError, TimeoutError):
            return ""  # the metrics of the other replicas are still useful


def _may_differ_elsewhere(answer: Answer, key: RoutingKey) -> bool:
    """Return True if another replica may be able to serve a request that this one could not."""
    if answer.status == 503:
        return True
    return bool(key.adapter) and (answer.status == ADAPTER_STATUS or _read_code(answer) in ADAPTER_CODES)


def _read_code(answer: Answer) -> str:
    """Return the OpenAI error code, which tells an adapter error from other errors with the same status."""
    if answer.status not in (403, 404):
        return ""
    try:
        return str(json.loads(answer.body)["error"]["code"])
    except (ValueError, KeyError, TypeError):  # a LoRAX error, which has no code, or not JSON
        return ""


def _accepts_json(request: ForwardedRequest) -> bool:
    return any(name.lower() == b"accept" and b"application/json" in value for name, value in request.headers)


async def _send_answer(path: str, answer: Answer, send: Send) -> None:
    """Send a response to the client. A stream starts with its first event, so that another replica can still respond
    if this one disconnects before."""
    if not answer.is_stream:
        await _send_whole(send, answer.status, answer.headers, answer.body)
        return
    events = answer.events()
    first = await anext(events, b"")
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await _send_part(send, first)
    try:
        async for part in events:
            await _send_part(send, part)
    except LostReplicaError:
        error = EngineError("the replica of this stream has gone; send the request again", retry_after_s=1.0)
        await _send_part(send, event(describe(error, path).body(path)))
    await _send_part(send, b"", more_body=False)


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _send_part(send, body, more_body=False)


async def _send_part(send: Send, body: bytes, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


# --- Metrics of all replicas ------------------------------------------------------------------------------------------


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Merge Prometheus texts by replica. The format requires that all series of a metric stay together."""
    families: dict[str, list[str]] = {}
    for replica, text in sorted(texts.items()):
        known, family = set(families), ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                lines = families.setdefault(family, [])
                if family not in known:
                    lines.append(line)
            elif match := SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                label = f'replica="{replica}"' + (f",{labels}" if labels else "")
                families.setdefault(family or name, []).append(f"{name}{{{label}}}{value}")
    return "\n".join(line for lines in families.values() for line in lines) + "\n"
