"""The ingress with replica servers that fail in different ways. Uses sockets and the real router, but not Ray."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from lorax_server.errors import (
    AdapterAccessError,
    AdapterError,
    AdapterNotFoundError,
    AuthenticationError,
    BusyError,
    ForbiddenError,
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.scale import ingress as module
from lorax_server.scale.change_registry import ChangeRegistry
from lorax_server.scale.ingress import Ingress
from lorax_server.scale.placement import ReplicaChooser, RoutingKey, hash_name
from lorax_server.scale.replica import check_version
from lorax_server.scale.server_process import ReplicaError
from lorax_server.server.http.error_responses import make_error_response
from lorax_server.server.http.replica_protocol import CHANGE_HEADER, AdapterChange

ReplicaHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = "HTTP/1.1 {} X\r\ncontent-type: {}\r\nx-from: {}\r\ndate: now\r\nx-request-id: r\r\n"
BODY = json.dumps({"inputs": "x", "parameters": {"adapter_id": "poet"}}).encode()


@pytest.fixture(autouse=True)
def fake_ray_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(module, "get_or_create_secret", lambda app: f"the secret of {app}")  # normally in Ray's store
    monkeypatch.setattr(module, "get_or_create_registry", lambda app: FakeRegistryHandle())  # noqa: ARG005


class FakeHandle:
    """A Ray deployment handle that calls the router directly."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports, self.placement = ports, ReplicaChooser()
        self.placement.set_replicas(ports)
        self.loads = dict.fromkeys(ports, 0)

    @asynccontextmanager
    async def choose_replica(self, key: tuple[int, int], tried: list[str]) -> AsyncIterator[Any]:
        if not self._ports:
            await asyncio.sleep(60)
        name = self.placement.choose(RoutingKey(*key), 0, tried)
        self.loads[name] += 1
        try:
            yield SimpleNamespace(replica_id=name, replica_metadata={"address": f"127.0.0.1:{self._ports[name]}"})
        finally:
            self.loads[name] -= 1


def respond_whole(status: int, name: str, body: str, more_headers: str = "") -> ReplicaHandler:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = HEAD.format(status, "application/json", name) + more_headers
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())

    return answer


def respond_stream(name: str, *pieces: str, ends: bool = True) -> ReplicaHandler:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{HEAD.format(200, 'text/event-stream', name)}transfer-encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
        if ends:
            writer.write(b"0\r\n\r\n")

    return answer


async def abort_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def send_to_ingress(
    answers: Mapping[str, ReplicaHandler],
    path: str = "/generate",
    body: bytes = BODY,
    limit: int = 1000,
    headers: Sequence[tuple[bytes, bytes]] = (),
    request_heads: list[str] | None = None,
) -> Any:
    """Send a request to an ingress. Return status, headers, body, and the tried replicas."""
    ports, servers, asked = {}, [], list[str]()
    for name, answer in answers.items():

        async def serve(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            name: str = name,
            answer: ReplicaHandler = answer,
        ) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(name)
            if request_heads is not None:
                request_heads.append(head.decode())
            await answer(reader, writer)
            writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        ports[name] = servers[-1].sockets[0].getsockname()[1]
    handle = FakeHandle(ports)
    ingress = Ingress(handle, "app", ["base"], limit, body_timeout_s=30.0)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "client": ("1.2.3.4", 5),
    }
    await ingress.serve(scope, receive, send)
    await ingress._session.close()
    for server in servers:
        server.close()
    assert not any(handle.loads.values())
    returned = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], returned, b"".join(each.get("body", b"") for each in sent[1:]).decode(), asked


def rank_replicas(*names: str) -> list[str]:
    placement = ReplicaChooser()
    placement.set_replicas(names)
    return placement.rank(hash_name("poet"))


FIRST, SECOND = rank_replicas("a", "b")


def test_response_is_forwarded_unchanged() -> None:
    status, headers, body, asked = asyncio.run(
        send_to_ingress({FIRST: respond_whole(418, "one", "{}"), SECOND: abort_connection})
    )
    assert (status, body, asked) == (418, "{}", [FIRST])
    assert headers == {"content-type": "application/json", "x-from": "one", "content-length": "2"}


def test_disconnect_before_response_is_retried() -> None:
    for lost in (abort_connection, respond_stream("one", ends=False), respond_stream("one", 'data: {"cut', ends=False)):
        status, headers, body, asked = asyncio.run(
            send_to_ingress({FIRST: lost, SECOND: respond_whole(200, "two", "{}")})
        )
        assert (status, headers["x-from"], body, asked) == (200, "two", "{}", [FIRST, SECOND])


def test_broken_stream_ends_with_error_event() -> None:
    event = 'data: {"token": 1}\n\n'
    for path, is_openai in (("/generate_stream", False), ("/v1/completions", True)):
        lost = respond_stream("one", event, event, 'data: {"tok', ends=False)
        status, _, body, asked = asyncio.run(
            send_to_ingress({FIRST: lost, SECOND: respond_whole(200, "two", "{}")}, path)
        )
        assert (status, asked) == (200, [FIRST])
        assert body.startswith(event * 2)
        last = json.loads(body.removeprefix(event * 2).removeprefix("data: "))
        assert "disconnected; send the request again" in str(last["error"])
        assert (last["error"]["type"] == "server_error") if is_openai else (last["error_type"] == "generation")


def test_split_events_are_joined() -> None:
    whole_stream = respond_stream("one", "data: 1\n", "\ndata: 2\n\nda", "ta: 3\n\n")
    body = asyncio.run(send_to_ingress({FIRST: whole_stream, SECOND: abort_connection}))[2]
    assert body == "data: 1\n\ndata: 2\n\ndata: 3\n\n"


def make_error_handler(error: LoraxError, name: str, path: str) -> tuple[int, str, ReplicaHandler]:
    """Return status, body and handler for a server error on a path."""
    problem = make_error_response(error, path)
    body = json.dumps(problem.body(path))
    return problem.status, body, respond_whole(problem.status, name, body)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("kind", [AdapterAccessError, AdapterNotFoundError, AdapterError, SourceError, BusyError])
def test_adapter_error_is_retried_on_another_replica(kind: type[LoraxError], path: str) -> None:
    status, body, answer = make_error_handler(kind("no"), "one", path)
    answered, headers, _, asked = asyncio.run(
        send_to_ingress({FIRST: answer, SECOND: respond_whole(200, "two", "{}")}, path)
    )
    assert (answered, headers["x-from"], asked) == (200, "two", [FIRST, SECOND])
    answered, _, _, asked = asyncio.run(send_to_ingress({FIRST: answer, SECOND: answer}, path))
    assert (answered, len(asked)) == (status, 2)
    alone = asyncio.run(send_to_ingress({FIRST: answer}, path))
    assert (alone[0], alone[2]) == (status, body)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("kind", [ForbiddenError, AuthenticationError, InputError, OverloadedError])
def test_non_adapter_errors_are_not_retried(kind: type[LoraxError], path: str) -> None:
    """A retry is useless, because key permissions are the same on all replicas."""
    status, _, answer = make_error_handler(kind("no"), "one", path)
    assert asyncio.run(send_to_ingress({FIRST: answer, SECOND: respond_whole(200, "two", "{}")}, path))[::3] == (
        status,
        [FIRST],
    )


@pytest.mark.parametrize("body", ["", "{", "[]", '{"error": 1}', '{"error": {}}', '{"error": {"code": ["x"]}}'])
def test_unknown_error_formats_are_forwarded(body: str) -> None:
    answers = {FIRST: respond_whole(404, "one", body), SECOND: respond_whole(200, "two", "{}")}
    assert asyncio.run(send_to_ingress(answers))[::3] == (404, [FIRST])


def test_base_model_error_is_not_retried() -> None:
    base = json.dumps({"inputs": "x"}).encode()
    assert (
        asyncio.run(
            send_to_ingress({"a": respond_whole(404, "a", "{}"), "b": respond_whole(404, "b", "{}")}, body=base)
        )[0]
        == 404
    )


def test_no_available_replica_returns_503_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(module, "CHOOSE_TIMEOUT_S", 0.1)
    for answers, reason in (({FIRST: abort_connection, SECOND: abort_connection}, "2 disconnected"), ({}, "timeout")):
        status, headers, body, _ = asyncio.run(send_to_ingress(answers))
        assert (status, headers["retry-after"]) == (503, "1")
        assert f"no replica is available: {reason}" in body


def test_too_large_body_is_not_forwarded() -> None:
    status, _, body, asked = asyncio.run(send_to_ingress({FIRST: respond_whole(200, "one", "{}")}, limit=10))
    assert (status, asked) == (413, [])
    assert "at most 10 bytes" in body


SCOPE = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
Sent = list[Any]


async def post(ingress: Ingress, *messages: Any, then: Awaitable[Any]) -> Sent:
    """Send request messages to an ingress, followed by the result of `then`. Return the response messages."""
    waiting, sent = list(messages), Sent()

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await then

    async def send(message: Any) -> None:
        sent.append(message)

    await ingress.serve(SCOPE, receive, send)
    return sent


def chunk(content: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": content, "more_body": True}


def test_slow_body_times_out() -> None:
    async def run() -> None:
        ingress = Ingress(FakeHandle({}), "app", ["base"], 1000, body_timeout_s=0.01)
        sent = await post(ingress, chunk(b"{"), then=asyncio.Future())
        assert sent[0]["status"] == 408
        assert b"did not arrive within 0.01 s" in sent[1]["body"]

    asyncio.run(run())


def test_buffered_bodies_share_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BUFFERED_BYTES", 1000)

    async def run() -> None:
        ingress = Ingress(FakeHandle({}), "app", ["base"], 1000, body_timeout_s=30.0)
        rest = asyncio.Future[Any]()
        slow = asyncio.create_task(post(ingress, chunk(bytes(600)), then=rest))
        await asyncio.sleep(0)
        rejected = await post(ingress, chunk(bytes(600)), then=asyncio.Future())
        assert rejected[0]["status"] == 503
        assert b"try again" in rejected[1]["body"]
        assert (b"retry-after", b"1") in rejected[0]["headers"]
        rest.set_result({"type": "http.disconnect"})
        assert await slow == []
        left = asyncio.Future[Any]()
        left.set_result({"type": "http.disconnect"})
        assert await post(ingress, chunk(bytes(1000)), then=left) == []  # its bytes were released

    asyncio.run(run())


def test_version_mismatch_is_rejected() -> None:
    with pytest.raises(ReplicaError, match=r"was built with 0\.0\.1; install the same version"):
        check_version("0.0.1")


# --- Changes by API ---------------------------------------------------------------------------------------------------

LOAD = "/v1/adapters/load"
CHANGE = AdapterChange(True, "local", "poet", "mine")
LOADED = respond_whole(200, "one", "{}", f"{CHANGE_HEADER}: {json.dumps(CHANGE._asdict())}\r\n")
LOAD_BODY = json.dumps({"adapter_id": "poet", "name": "mine"}).encode()


class FakeRegistryHandle:
    """A registry with the interface of an actor handle."""

    def __init__(self, fails_at: str = "") -> None:
        self.stored = b""
        self._registry, self._fails_at = ChangeRegistry(None, self._save, lambda: 0.0), fails_at

    def _save(self, content: bytes) -> None:
        self.stored = content

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    async def _call(self, method: str, *arguments: Any) -> Any:
        if method == self._fails_at:
            raise ray.exceptions.RayActorError
        return await getattr(self._registry, method)(*arguments)


def use_registry(monkeypatch: pytest.MonkeyPatch, registry: FakeRegistryHandle) -> None:
    monkeypatch.setattr(module, "get_or_create_registry", lambda app: registry)  # noqa: ARG005


def test_load_with_token_warns_in_note_header(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = FakeRegistryHandle()
    use_registry(monkeypatch, registry)
    for token, has_note in (({"api_token": "hf_secret"}, True), ({"api_token": None}, False), ({}, False)):
        load = {"adapter_id": "poet", "name": "mine", **token}
        status, headers, _, _ = asyncio.run(send_to_ingress({FIRST: LOADED}, LOAD, json.dumps(load).encode()))
        assert status == 200
        assert ("the other replicas need a token" in headers.get("x-lorax-note", "")) == has_note
        assert CHANGE_HEADER not in headers
        assert b'"mine"' in registry.stored
        assert b"hf_secret" not in registry.stored


def test_load_completes_after_all_replicas_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, rank_replicas = FakeRegistryHandle(), list[str]()
    use_registry(monkeypatch, registry)

    async def follow() -> None:
        (entry,) = await registry.poll.remote("another", 0, "another:1")
        assert (entry.change, entry.served_by) == (CHANGE, FIRST)
        rank_replicas.append("applied")
        await registry.poll.remote("another", entry.version, "another:1")

    async def run() -> None:
        await registry.join.remote("another", 0, "another:1")
        following = asyncio.create_task(follow())
        status, *_ = await send_to_ingress({FIRST: LOADED}, LOAD, LOAD_BODY)
        rank_replicas.append("responded")
        await following
        assert (status, rank_replicas) == (200, ["applied", "responded"])

    asyncio.run(run())


def test_load_without_registry_changes_no_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_registry(monkeypatch, FakeRegistryHandle(fails_at="members"))
    status, headers, body, asked = asyncio.run(send_to_ingress({FIRST: LOADED}, LOAD, LOAD_BODY))
    assert (status, headers["retry-after"], asked) == (503, "1", [])
    assert "no adapter was changed" in body
    assert asyncio.run(send_to_ingress({FIRST: respond_whole(200, "one", "{}")}))[0] == 200


def test_registry_failure_during_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    use_registry(monkeypatch, FakeRegistryHandle(fails_at="record"))
    status, _, body, asked = asyncio.run(send_to_ingress({FIRST: LOADED}, LOAD, LOAD_BODY))
    assert (status, asked) == (503, [FIRST])
    assert "may not have applied it; try again" in body


def test_failed_load_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = FakeRegistryHandle()
    use_registry(monkeypatch, registry)
    assert asyncio.run(send_to_ingress({FIRST: respond_whole(401, "one", "{}")}, LOAD, LOAD_BODY))[0] == 401
    assert not registry.stored


def test_ingress_overrides_secret_and_client_headers() -> None:
    request_heads = list[str]()

    claimed = [(b"X-Lorax-Client", b"6.6.6.6"), (b"x-lorax-secret", b"guessed")]
    asyncio.run(send_to_ingress({FIRST: respond_whole(200, "one", "{}")}, headers=claimed, request_heads=request_heads))
    (head,) = request_heads
    assert re.findall(r"x-lorax-client: (.*)\r", head, re.IGNORECASE) == ["1.2.3.4"]
    assert re.findall(r"x-lorax-secret: (.*)\r", head, re.IGNORECASE) == ["the secret of app"]
