"""The ingress: an ASGI application that forwards each request to a replica."""

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import aiohttp
import ray
from multidict import CIMultiDict
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from lorax_server.errors import BusyError, EngineError, InputError, LoraxError
from lorax_server.scale.change_registry import (
    CONFIRM_TIMEOUT_S,
    get_or_create_registry,
    get_or_create_secret,
)
from lorax_server.scale.placement import RoutingKey
from lorax_server.scale.routing_key import read_routing_key
from lorax_server.server.http.error_responses import ADAPTER_STATUS, make_error_response
from lorax_server.server.http.middleware import RejectedError, read_body
from lorax_server.server.http.replica_protocol import (
    CHANGE_HEADER,
    CHANGE_PATHS,
    CLIENT_HEADER,
    SECRET_HEADER,
    AdapterChange,
)
from lorax_server.server.http.sse import encode_event
from lorax_server.server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

CHOOSE_TIMEOUT_S = 10.0  # wait for an available replica
PROBE_CHOOSE_TIMEOUT_S = 2.0  # shorter, for health probes
SCRAPE_TIMEOUT_S = 5.0
REGISTRY_TIMEOUT_S = 5.0  # timeout for registry calls that do not wait for replicas
RETRY_TIMEOUT_S = 10.0  # total time for attempts to forward a request
RETRY_DELAY_S = 0.2  # before a second attempt on the same replica
# Limit for buffered request bodies per ingress. It also applies to clients without a key: replicas check keys.
MAX_BUFFERED_BYTES = 2**30
PROBE_PATHS = ("/", "/health", "/ping", "/startup")
RETRY_AFTER_S = 1.0  # for clients, if a replica or the registry is unavailable
# OpenAI error codes (status 404, 403 and 400) that are retried on another replica, which may have the adapter or a
# token for it.
ADAPTER_CODES = (b'"model_not_found"', b'"model_access_denied"', b'"invalid_adapter"')
TOKEN_NOTE = (
    b"only the replica that responded has used api_token, and no replica stores it; the other replicas need a token of "
    b"their own: in requests for the adapter, or HF_TOKEN and --use-global-hf-token on each machine"
)
SAMPLE_PATTERN = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( .*)")  # a sample in Prometheus's text format

Headers = list[tuple[bytes, bytes]]

# Connection headers, which are not forwarded.
HOP_BY_HOP_HEADERS = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip
NOT_FORWARDED_HEADERS = HOP_BY_HOP_HEADERS | {"content-length", CLIENT_HEADER, SECRET_HEADER}
# Ray's proxy adds the first three of these headers.
NOT_RETURNED_HEADERS = HOP_BY_HOP_HEADERS | {"date", "server", "x-request-id", CHANGE_HEADER}
AUTOMATIC_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")  # aiohttp adds these by default
EVENT_STREAM = "text/event-stream"
EVENT_END = b"\n\n"
CONNECT_TIMEOUT_S = 5.0
# TCP keep-alive detects replicas whose machine lost power. All values are seconds, except the number of probes
# (KEEPCNT) and TCP_USER_TIMEOUT (milliseconds). Not every system supports every option.
KEEP_ALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
DISCONNECT_ERRORS = (aiohttp.ClientError, OSError)  # raised if a replica disconnects before the end of its response


class Ingress:
    """A Ray actor that receives all requests from Ray's proxies and forwards them to replicas."""

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
        self._secret = get_or_create_secret(app)
        self._registry = get_or_create_registry(app)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Router(default=self.serve)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, num_bytes = scope["path"], 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._buffered_bytes += len(message.get("body", b""))
            if self._buffered_bytes > self._max_buffered_bytes:
                raise BusyError("the ingress holds too many request bodies; try again")
            return message

        try:
            # The body is kept for retries until the response is complete.
            body = await read_body(receive_limited, self._max_body_bytes, self._body_timeout_s)
            if body is not None:
                await self._respond(Request(scope), body, send)
        except RejectedError as rejected:
            await rejected.error_response.to_response(path)(scope, receive, send)
        except LoraxError as error:
            await make_error_response(error, path).to_response(path)(scope, receive, send)
        finally:
            self._buffered_bytes -= num_bytes

    # --- Responses ----------------------------------------------------------------------------------------------------

    async def _respond(self, request: Request, body: bytes, send: Send) -> None:
        """Forward a request to a replica. Retry on another replica if the first replica disconnects before it responds,
        or cannot serve the adapter.
        """
        path = _raw_path(request)
        accepts_json = "application/json" in request.headers.get("accept", "")
        if path == "/metrics" and request.method == "GET" and not accepts_json:
            headers = [(b"content-type", Metrics.content_type.encode())]
            await _send_response(send, 200, headers, (await self._merge_metrics(request)).encode())
            return
        if request.method == "POST" and unquote(path) in CHANGE_PATHS:
            await self._replica_addresses()  # fail before any change if the registry is unavailable
        key = read_routing_key(path, body, self._base_names)
        tried, rejection, deadline = list[str](), None, time.monotonic() + RETRY_TIMEOUT_S
        while time.monotonic() < deadline:
            async with self._choose_replica(key, tried, path) as selection:
                replica = selection.replica_id
                if replica in tried:
                    if rejection is not None:
                        break
                    await asyncio.sleep(RETRY_DELAY_S)
                try:
                    async with self._forward(selection.replica_metadata["address"], request, body) as response:
                        headers = [
                            each
                            for each in response.raw_headers
                            if each[0].decode().lower() not in NOT_RETURNED_HEADERS
                        ]
                        events = _read_events(response, path) if response.content_type == EVENT_STREAM else None
                        # The response starts after the first event: until then, it can be retried on another replica.
                        content = await response.read() if events is None else await anext(events, b"")
                        if tried or not _should_try_another_replica(response.status, content, key):
                            if change := response.headers.get(CHANGE_HEADER):
                                headers += await self._record_change(body, change, replica)
                            await _send_response(send, response.status, headers, content, events)
                            return
                        rejection = response.status, headers, content
                except DISCONNECT_ERRORS as error:
                    logger.warning("replica %s disconnected, retrying: %s", replica, error)
                tried.append(replica)
        if rejection is None:
            raise EngineError(f"no replica is available: {len(set(tried))} disconnected", RETRY_AFTER_S)
        await _send_response(send, *rejection)

    def _forward(
        self, address: str, request: Request, body: bytes
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request to a replica. Exiting the context early closes the connection, which aborts the request."""
        headers = CIMultiDict(pair for pair in request.headers.items() if pair[0].lower() not in NOT_FORWARDED_HEADERS)
        headers[SECRET_HEADER] = self._secret
        headers[CLIENT_HEADER] = request.client.host if request.client else ""
        query = request.scope["query_string"].decode("latin-1")
        return self._session.request(
            request.method,
            URL(f"http://{address}{_raw_path(request)}?{query}".removesuffix("?"), encoded=True),
            headers=headers,
            data=body or None,
            skip_auto_headers=AUTOMATIC_HEADERS,
            allow_redirects=False,
        )

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """The connection pool for all replicas, created on the event loop of the first request."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_make_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    @asynccontextmanager
    async def _choose_replica(self, key: RoutingKey, tried_replicas: Sequence[str], path: str) -> AsyncIterator[Any]:
        """Yield the chosen replica. The request counts toward Ray's queue length while the context is open."""
        timeout_s = PROBE_CHOOSE_TIMEOUT_S if path in PROBE_PATHS else CHOOSE_TIMEOUT_S
        choosing = self._servers.choose_replica(tuple(key), list(tried_replicas))
        try:
            async with asyncio.timeout(timeout_s) as timer, choosing as selection:
                timer.reschedule(None)
                yield selection
        except (TimeoutError, RayServeException, ray.exceptions.RayError) as error:
            reason = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
            raise EngineError(f"no replica is available: {reason}", RETRY_AFTER_S) from error

    # --- Registry -------------------------------------------------------------------------------------------------

    async def _replica_addresses(self) -> dict[str, str]:
        """Return the addresses of all replicas, keyed by replica name."""
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                return dict(await self._registry.members.remote())
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise EngineError(
                "the adapter registry is unavailable, and no adapter was changed; try again", RETRY_AFTER_S
            ) from error

    async def _record_change(self, body: bytes, change: str, replica: str) -> Headers:
        """Record an adapter change and wait until all replicas apply it. Return additional response headers."""
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT_S + REGISTRY_TIMEOUT_S):
                late = await self._registry.record.remote(AdapterChange(**json.loads(change)), replica)
        except (TimeoutError, ray.exceptions.RayError) as error:
            message = "the adapter registry failed during the change; some replicas may not have applied it; try again"
            raise EngineError(message, RETRY_AFTER_S) from error
        if late:
            names = ", ".join(late)
            raise EngineError(f"these replicas have not confirmed the change yet: {names}", RETRY_AFTER_S)
        return [(b"x-lorax-note", TOKEN_NOTE)] if json.loads(body).get("api_token") else []

    async def _merge_metrics(self, request: Request) -> str:
        members = await self._replica_addresses()
        texts = await asyncio.gather(*(self._scrape(address, request) for address in members.values()))
        return merge_metrics({name: text for name, text in zip(members, texts, strict=True) if text})

    async def _scrape(self, address: str, request: Request) -> str:
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S), self._forward(address, request, b"") as response:
                return await response.text()
        except DISCONNECT_ERRORS:
            return ""  # skip this replica and return the metrics of the others


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    client_socket = socket.socket(family, kind, protocol)
    client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_OPTIONS.items():
        if hasattr(socket, name):
            client_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return client_socket


def _raw_path(request: Request) -> str:
    """Return the percent-encoded request path."""
    path: str = (request.scope.get("raw_path") or request.scope["path"].encode()).decode("latin-1")
    if not path.startswith("/"):
        raise InputError("the request path must start with /")
    return path


def _should_try_another_replica(status: int, body: bytes, key: RoutingKey) -> bool:
    """Return True if another replica may be able to serve a failed request."""
    if status in (400, 403, 404):
        return bool(key.adapter) and any(code in body for code in ADAPTER_CODES)
    return status == 503 or (bool(key.adapter) and status == ADAPTER_STATUS)


async def _read_events(response: aiohttp.ClientResponse, path: str) -> AsyncIterator[bytes]:
    """Yield chunks of complete events. If the replica disconnects after the first event, yield an error event."""
    has_started, rest = False, b""
    try:
        async for chunk in response.content.iter_any():
            events, end, rest = (rest + chunk).rpartition(EVENT_END)
            if end:
                has_started = True
                yield events + end
    except DISCONNECT_ERRORS:
        if not has_started:
            raise
        error = EngineError("the replica disconnected; send the request again", RETRY_AFTER_S)
        yield encode_event(make_error_response(error, path).body(path))


async def _send_response(
    send: Send, status: int, headers: Headers, body: bytes, more: AsyncIterator[bytes] | None = None
) -> None:
    """Send a response whose body is `body`, followed by the chunks in `more`."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if more is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        async for chunk in more:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body, "more_body": False})


# --- Metrics --------------------------------------------------------------------------------------------------------


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Return the metrics of all replicas with a `replica` label, grouped by metric as Prometheus requires."""
    families: dict[str, dict[str, None]] = {}  # lines by metric; a dict removes duplicate comments
    for replica, text in sorted(texts.items()):
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                families.setdefault(family, {})[line] = None
            elif match := SAMPLE_PATTERN.fullmatch(line):
                name, labels, value = match.groups()
                label = f'replica="{replica}"' + (f",{labels}" if labels else "")
                families.setdefault(family, {})[f"{name}{{{label}}}{value}"] = None
    return "\n".join(line for lines in families.values() for line in lines) + "\n"
