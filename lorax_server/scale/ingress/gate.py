"""The ingress: an ASGI application that has every request answered by a replica."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import unquote

import ray
from ray.actor import ActorHandle
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Receive, Scope, Send

from lorax_server.errors import (
    AdapterAccessError,
    AdapterNotFoundError,
    BusyError,
    EngineError,
    InputError,
    LoraxError,
)
from lorax_server.scale.ingress.merged_metrics import merge_metrics
from lorax_server.scale.ingress.request_key import read_wanted
from lorax_server.scale.ingress.upstream import Answer, Headers, LostError, Received, Upstream
from lorax_server.scale.placement import Wanted
from lorax_server.scale.registry import ADMIN_PATHS, CONFIRM_S, REACH_S, TOKEN, RegistryError, find_registry, share_key
from lorax_server.server.http.problems import WORDINGS, describe, http_problem
from lorax_server.server.http.sse import event
from lorax_server.server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

CHOOSE_S = 10.0  # to wait for a replica where there is none
PROBE_S = 2.0  # likewise, for probes
SCRAPE_S = 5.0
AGAIN_S = 10.0  # from the first try of a request, until it is given up
# Bytes of all request bodies that one ingress holds. Replicas check keys, so callers without a key can fill it.
MAX_BUFFERED_BYTES = 2**30
PAUSE_S = 0.2  # before a replica is asked again that has failed already
PROBES = ("/", "/health", "/ping", "/startup")
METRICS = "/metrics"
# About an adapter: another replica may have it, or a token for it. A key that may not use it is the same everywhere.
ADAPTER_STATUS = 424
ADAPTER_CODES = frozenset(WORDINGS[kind].code for kind in (AdapterNotFoundError, AdapterAccessError))
DOWN = 503
TOKEN_NOTE = (
    b"api_token is for the replica that answered and is kept nowhere; others need a token of their own: in requests "
    b"for the adapter, or HF_TOKEN and --use-global-hf-token on each machine"
)
METRICS_HEADERS: Headers = [(b"content-type", Metrics.content_type.encode())]


class Ingress:
    """An actor that has requests answered by replicas. Ray's proxies send it all of them."""

    def __init__(
        self,
        servers: DeploymentHandle,
        app: str,
        base_names: Sequence[str],
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        self._servers = servers
        self._app = app
        self._base_names = base_names
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._max_buffered_bytes = max(MAX_BUFFERED_BYTES, max_body_bytes)
        self._buffered_bytes = 0
        self._upstream = Upstream(share_key(app))

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.answer(scope, receive, send)

        return app  # a function: of a method uvicorn would think that it is of an older ASGI

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        path = scope["path"]
        try:
            async with self._read(scope, receive) as received:
                if received is not None:
                    await self._answer(received, send)
        except _BodyError as error:
            await http_problem(error.status, str(error)).response(path)(scope, receive, send)
        except LoraxError as error:
            await describe(error, path).response(path)(scope, receive, send)

    @asynccontextmanager
    async def _read(self, scope: Scope, receive: Receive) -> AsyncIterator[Received | None]:
        """Read a request and hold its body, since it may have to be sent twice; None if the client left."""
        path = scope.get("raw_path") or scope["path"].encode()
        if not path.startswith(b"/"):
            raise InputError("the path of a request begins with /")
        client = (scope.get("client") or ("",))[0]
        chunks, num_bytes = list[bytes](), 0
        message: Message = {"type": "http.request", "more_body": True}
        deadline = time.monotonic() + self._body_timeout_s
        try:
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await self._receive(receive, deadline)
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                self._buffered_bytes += len(chunks[-1])
                self._check_size(num_bytes)
            body = b"".join(chunks)
            chunks.clear()
            head = scope["method"], path.decode("latin-1"), scope["query_string"], scope["headers"]
            yield Received(*head, body, client) if message["type"] == "http.request" else None
        finally:
            self._buffered_bytes -= num_bytes

    async def _receive(self, receive: Receive, deadline: float) -> Message:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await receive()
        except TimeoutError:
            raise _BodyError(408, f"the body did not arrive within {self._body_timeout_s:g} s") from None

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            message = f"Failed to buffer the request body: at most {self._max_body_bytes} bytes are taken"
            raise _BodyError(413, message)
        if self._buffered_bytes > self._max_buffered_bytes:
            raise BusyError("the bodies of other requests fill the ingress; try again")

    # --- Answers ------------------------------------------------------------------------------------------------------

    async def _answer(self, received: Received, send: Send) -> None:
        """Have one replica answer, and another if that one goes away before anything was sent, or cannot."""
        if received.path == METRICS and received.method == "GET" and not _wants_json(received):
            await _send_whole(send, 200, METRICS_HEADERS, (await self._merge_metrics(received)).encode())
            return
        is_change = unquote(received.path) in ADMIN_PATHS and received.method == "POST"
        registry = await self._reach_registry() if is_change else None
        wanted = read_wanted(received.path, received.body, self._base_names)
        tried, refusal, deadline = list[str](), None, time.monotonic() + AGAIN_S
        while time.monotonic() < deadline:
            async with self._choose(wanted, tried, received.path) as selection:
                replica, where = selection.replica_id, selection.replica_metadata
                if replica in tried and refusal is not None:
                    break
                if replica in tried:
                    await asyncio.sleep(PAUSE_S)
                try:
                    async with self._upstream.send(f"{where['host']}:{where['port']}", received) as answer:
                        if not tried and _may_another(answer, wanted):
                            refusal = answer
                        else:
                            if registry is not None and answer.status == 200:
                                answer.headers += await self._record(registry, received, replica)
                            await _pass_on(received.path, answer, send)
                            return
                except LostError as error:
                    logger.warning("replica %s did not answer, another is asked: %s", replica, error)
                tried.append(replica)
        if refusal is None:
            raise _lost(f"{len(set(tried))} went away")
        await _send_whole(send, refusal.status, refusal.headers, refusal.body)

    @asynccontextmanager
    async def _choose(self, wanted: Wanted, tried: Sequence[str], path: str) -> AsyncIterator[Any]:
        """Hold a place at a replica, so that Ray knows of the request while it runs."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(PROBE_S if path in PROBES else CHOOSE_S):
                    selection = await stack.enter_async_context(
                        self._servers.choose_replica(tuple(wanted), list(tried))
                    )
            except TimeoutError:
                raise _lost("none took it in time") from None
            except (RayServeException, ray.exceptions.RayError) as error:
                raise _lost(type(error).__name__) from error
            yield selection

    # --- The registry -------------------------------------------------------------------------------------------------

    async def _reach_registry(self) -> ActorHandle:
        """Find the registry before a change is made anywhere."""
        try:
            async with asyncio.timeout(REACH_S):
                registry = await asyncio.to_thread(find_registry, self._app)
                await registry.members.remote()
        except (TimeoutError, ValueError, ray.exceptions.RayError) as error:
            message = "the registry of adapters cannot be reached, so nothing was changed; try again"
            raise RegistryError(message) from error
        return registry

    async def _record(self, registry: ActorHandle, received: Received, replica: str) -> Headers:
        """Have all replicas make a change that one has made. Return headers that say more of it."""
        body = json.loads(received.body)
        try:
            async with asyncio.timeout(CONFIRM_S + REACH_S):
                late = await registry.record.remote(unquote(received.path), body, replica)
        except (TimeoutError, ray.exceptions.RayError) as error:
            message = "the registry of adapters was lost: one replica has made this change, others may not; try again"
            raise RegistryError(message) from error
        if late:
            names = ", ".join(late)
            raise RegistryError(f"these replicas have not confirmed the change, and make it when they can: {names}")
        return [(b"x-lorax-note", TOKEN_NOTE)] if body.get(TOKEN) else []

    async def _merge_metrics(self, received: Received) -> str:
        registry = await self._reach_registry()
        members: dict[str, str] = await registry.members.remote()
        texts = await asyncio.gather(*(self._scrape(address, received) for address in members.values()))
        return merge_metrics({name: text for name, text in zip(members, texts, strict=True) if text})

    async def _scrape(self, address: str, received: Received) -> str:
        try:
            async with asyncio.timeout(SCRAPE_S), self._upstream.send(address, received) as answer:
                return answer.body.decode()
        except (LostError, TimeoutError):
            return ""  # it has died or hangs, and the others are still of use


class _BodyError(Exception):
    """A body that is too large or too slow."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _may_another(answer: Answer, wanted: Wanted) -> bool:
    """Tell whether another replica may give a better answer than this one."""
    if answer.status == DOWN:
        return True
    return bool(wanted.adapter) and (answer.status == ADAPTER_STATUS or _read_code(answer) in ADAPTER_CODES)


def _read_code(answer: Answer) -> str:
    """Return OpenAI's code of an error: of equal statuses it tells an adapter's fault from others."""
    if answer.status not in (403, 404):
        return ""
    try:
        return str(json.loads(answer.body)["error"]["code"])
    except (ValueError, KeyError, TypeError):  # LoRAX's form, which has no code, or not JSON
        return ""


def _lost(reason: str) -> EngineError:
    error = EngineError(f"no replica can answer now: {reason}")
    error.retry_after_s = 1.0
    return error


def _wants_json(received: Received) -> bool:
    return any(name.lower() == b"accept" and b"application/json" in value for name, value in received.headers)


async def _pass_on(path: str, answer: Answer, send: Send) -> None:
    """Send an answer to the client. Nothing is sent before the first event of a stream is there."""
    if not answer.is_stream:
        await _send_whole(send, answer.status, answer.headers, answer.body)
        return
    pieces = answer.pieces()
    first = await anext(pieces, b"")
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    try:
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except LostError:
        error = EngineError("the replica that answered has gone; send the request again")
        error.retry_after_s = 1.0
        await send({"type": "http.response.body", "body": event(describe(error, path).body(path)), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    """Answer Ray's questions of an application's start and end."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
