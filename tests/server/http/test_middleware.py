"""The request middleware over a socket: keys, hosts, origins and the audit log."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from lorax_server.errors import AdapterError
from lorax_server.server.http import middleware
from lorax_server.server.routes import info
from lorax_server.server.telemetry import audit
from lorax_server.server.telemetry.audit import MAX_LINES_PER_MINUTE
from lorax_server.server.telemetry.logs import EXTRA_KEY
from lorax_server.types import FinishReason
from tests.e2e.hostile_client import post, request
from tests.server.socket_server import GOOD, HEALTH, SharedServer, SocketServer, head, parse_error, with_key

POST_PATHS = [
    "/generate", "/generate_stream", "/", "/invocations", "/v1/completions", "/v1/chat/completions", "/tokenize",
    "/detokenize", "/v1/adapters/load", "/v1/adapters/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/embed",
]  # fmt: skip
SECRET, GUESS = "s3cret-that-nobody-knows", "a-guess-that-may-be-somebody-elses"


@pytest.fixture(scope="module")
def server_with_keys() -> Iterator[SharedServer]:
    """Start a server that requires a key."""
    with pytest.MonkeyPatch.context() as patch, closing(SharedServer(api_keys=("good",), admin_key=SECRET)) as shared:
        patch.setattr(middleware, "DISCARD_TIMEOUT_S", 0.01)
        patch.setattr(info, "STATUS_TIMEOUT_S", 0.01)  # the engine never reports its status
        yield shared


@pytest.fixture(scope="module")
def server_with_timeouts() -> Iterator[SharedServer]:
    """Start a server with short header and body timeouts."""
    with closing(SharedServer(api_keys=("good",), body_timeout_s=1.0)) as shared:
        yield shared


@pytest.fixture(scope="module")
def server_without_keys() -> Iterator[SharedServer]:
    """Start a server without keys."""
    with closing(SharedServer()) as shared:
        yield shared


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Return a function that returns the fields of log lines with a given message."""
    with caplog.at_level(logging.INFO):
        yield lambda message: [getattr(each, EXTRA_KEY) for each in caplog.records if each.message == message]


Lines = Callable[[str], list[dict[str, Any]]]


# --- Keys come before bodies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("content-length", "1000000000000"),),
        (("content-type", "text/plain"),),
        (("content-encoding", "gzip"),),
        (("transfer-encoding", "chunked"),),
        (("expect", "100-continue"),),
        (("x-request-timeout", "nan"),),
        (("authorization", "Bearer wrong"),),
    ],
    ids=lambda headers: headers[0][0] if headers else "nothing else",
)
def test_body_is_not_read_without_key(headers: tuple[tuple[str, str], ...], server_with_keys: SharedServer) -> None:
    """The server responds although the body never arrives."""
    given = {name for name, _ in headers}
    length = () if given & {"content-length", "transfer-encoding"} else (("content-length", "1000"),)

    async def check(server: SocketServer) -> None:
        for path in POST_PATHS if len(headers) == 0 else POST_PATHS[:1]:
            answer = await server.fetch(post(path, b"", *headers, *length))
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["connection"] == "close"

    server_with_keys.run(check)


def test_rejected_body_is_discarded(server_with_keys: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that keeps sending after the response is disconnected."""
    monkeypatch.setattr(middleware, "MAX_DISCARDED_BYTES", 2**16)
    monkeypatch.setattr(middleware, "DISCARD_TIMEOUT_S", 1000.0)

    async def check(server: SocketServer) -> None:
        connection = await server.connect()
        await connection.send(post("/generate", b"", ("content-length", str(10**12))))
        (answer,) = await connection.read_responses(1)
        assert answer.status == 401
        with suppress(ConnectionError):
            while True:
                await connection.send(b"x" * 2**16)

    server_with_keys.run(check)


OPEN_PATHS = (
    "/", "/health", "/ping", "/metrics", "/openapi.json", "/api-doc/openapi.json", "/docs", "/ui", "/ui/",
    "/ui/index.html",
)  # fmt: skip


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_public_paths_need_no_key(path: str, server_with_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        for method in ("GET", "HEAD"):
            assert (await server.fetch(request(method, path))).status in (200, 307)

    server_with_keys.run(check)


def test_all_other_routes_need_key(server_with_keys: SharedServer) -> None:
    """Test all routes in the OpenAPI schema, including routes added later."""
    paths = server_with_keys.app.openapi()["paths"]
    asked = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    run_program = [(method, path) for method, path in asked if method != "GET" or path not in (*OPEN_PATHS, "/startup")]
    assert ("GET", "/info") in run_program

    async def check(server: SocketServer) -> None:
        for method, path in run_program:
            assert (await server.fetch(request(method, path))).status == 401, (method, path)

    server_with_keys.run(check)


@pytest.mark.parametrize("path", ["/v1/adapters?limit=0", "/v1/adapters?after=%00", "/v1/models/x", "/info"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_query_is_not_validated_without_key(method: str, path: str, server_with_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        answer = await server.fetch(request(method, path))
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")

    server_with_keys.run(check)


def test_startup_probes_share_one_token(server_without_keys: SharedServer) -> None:
    """Concurrent and later probes share one token unless the engine is lost."""
    engine, probe = server_without_keys.harness.engine, request("GET", "/startup")

    async def check(server: SocketServer) -> None:
        asking = [asyncio.create_task(server.fetch(probe)) for _ in range(3)]
        while not engine.added:
            await asyncio.sleep(0.001)
        engine.emit_tokens(engine.added[0].request_id, 42, end=FinishReason.LENGTH)
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * 3
        assert [(await server.fetch(probe)).status for _ in range(3)] == [200] * 3
        assert len(engine.added) == 1
        engine.is_healthy = False
        try:
            assert (await server.fetch(probe)).status == 503
        finally:
            engine.is_healthy = True

    server_without_keys.run(check)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/generate", ["authorization: Bearer good"], 200),
        ("/generate", ["authorization: bearer   good "], 200),
        ("/generate", [], 401),
        ("/generate?api_key=good&key=good&token=good", [], 401),
        ("/generate", ["x-api-key: good"], 401),
        ("/generate", ["cookie: authorization=Bearer good"], 401),
        ("/generate", ["proxy-authorization: Bearer good"], 401),
        ("/generate", ["authorization: good"], 401),
        ("/generate", ["authorization: Basic Z29vZDpnb29k"], 401),
        ("/generate", ["authorization: Digest good"], 401),
        ("/generate", ["authorization: Bearer good good"], 401),
        ("/generate", ["authorization: Bearer good,Bearer good"], 401),
        ("/generate", ["authorization: Bearer GOOD"], 401),
        ("/generate", ["authorization: Bearer goo"], 401),
        ("/generate", ["authorization: Bearer \u00a0good"], 401),
        ("/generate", ["authorization: Bearer g\u00f6\u00f6d"], 401),
        ("/generate", ["authorization: Bearer " + "x" * 60_000], 401),
        ("/generate", ["authorization: Bearer good", "authorization: Bearer wrong"], 400),
        ("/generate", ["authorization: Bearer wrong", "authorization: Bearer good"], 400),
        ("/generate", ["authorization: Bearer good", "content-type: text/plain"], 400),
    ],
    ids=lambda value: str(value)[:50],
)
def test_repeated_authorization_header_is_rejected(
    path: str, headers: list[str], status: int, server_with_keys: SharedServer
) -> None:
    async def check(server: SocketServer) -> None:
        given = [header.partition(": ")[::2] for header in headers]
        data = request("POST", path, [("content-type", "application/json"), ("content-length", "2"), *given], b"{}")
        answer = await server.fetch(data)
        wrong = 400 if path.startswith("/v1/") else 422
        assert answer.status == (wrong if status == 200 else status)  # `{}` is an invalid body

    server_with_keys.run(check)


# --- Hosts and origins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/metrics", "/ui/", "/v1/models", "/docs", "/nowhere"])
def test_dns_rebinding_is_rejected(path: str, server_without_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        for method in ("GET", "POST"):
            answer = await server.fetch(head(method, path, [b"host: evil.example:3000", b"content-length: 0"]))
            assert answer.status == 403
            assert "--allowed-host" in str(parse_error(answer))

    server_without_keys.run(check)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([b"host: localhost"], 200),
        ([b"host: 127.0.0.1:3000"], 200),
        ([b"host: evil"], 403),
        ([b"host: "], 403),
        ([b"host: evil", b"host: localhost"], 400),
        ([b"host: localhost", b"host: evil"], 400),
        ([b"host: evil", b"x-forwarded-host: localhost"], 403),
        ([b"host: evil", b"forwarded: host=localhost"], 403),
        ([], 200),  # browsers always send it
    ],
    ids=str,
)
def test_host_header_must_be_unique_and_allowed(
    headers: list[bytes], status: int, server_without_keys: SharedServer
) -> None:
    async def check(server: SocketServer) -> None:
        assert (await server.fetch(head("GET", "/health", headers))).status == status

    server_without_keys.run(check)


ORIGIN = ("origin", "http://evil.example")


def test_cross_origin_requests_are_rejected(server_without_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        for headers in ((), (("access-control-request-headers", "authorization,content-type"),)):
            asked = [ORIGIN, ("access-control-request-method", "POST"), *headers]
            answer = await server.fetch(request("OPTIONS", "/generate", asked))
            assert answer.status == 400
            assert "access-control-allow-origin" not in answer.headers
        answer = await server.fetch(request("GET", "/v1/models", [ORIGIN]))
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers, "a page cannot read it"
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):  # need no preflight
            assert (await server.fetch(post("/generate", GOOD, ORIGIN, kind=kind))).status == 415
        assert server_without_keys.harness.engine.added == []

    server_without_keys.run(check)


def test_playground_uses_same_origin(server_without_keys: SharedServer) -> None:
    own = ("origin", "http://localhost:3000")

    async def check(server: SocketServer) -> None:
        asking = asyncio.create_task(server.fetch(post("/generate", GOOD, own)))
        await server_without_keys.complete_all_requests()
        assert (await asking).status == 200

    server_without_keys.run(check)


# --- Counts and logs of refusals --------------------------------------------------------------------------------------

OVERSIZED_LENGTH = ("content-length", str(10**9))


@pytest.mark.parametrize(
    ("data", "status", "kind", "route"),
    [
        (with_key("/generate", b"{"), 400, "validation", "/generate"),
        (with_key("/generate", b"\xff"), 400, "validation", "/generate"),
        (post("/generate?key=s3cret", GOOD), 401, "authentication", "/generate"),
        (with_key("/generate", b"", "good", OVERSIZED_LENGTH), 413, "validation", "/generate"),
        (
            with_key("/v1/completions", b"", "good", ("content-type", "text/plain")),
            415,
            "validation",
            "/v1/completions",
        ),
        (with_key("/generate", {"inputs": 5}), 422, "validation", "/generate"),
        (with_key("/v1/chat/completions", {}), 400, "validation", "/v1/chat/completions"),
        (with_key("/generate", b"{", "good", ("content-length", "9")), 408, "timeout", "/generate"),
        (b"GET /x?key=s3cret HTTP/1.1\r\nhost: local", 408, "timeout", "/x"),
        (b"GET /x?key=s3cret HTTP/1.1\r\nhost : x\r\n\r\n", 400, "validation", "/x"),
        (head("GET", "/x?key=s3cret", [b"x: " + b"y" * 70_000]), 431, "validation", "/x"),
        (head("GET", "/health", [b"host: evil"]), 403, "forbidden", "/health"),
        (request("GET", "/info"), 401, "authentication", "/info"),
        (with_key("/tokenize", {"inputs": "x" * (info.MAX_TOKENIZE_CHARACTERS + 1)}), 422, "validation", "/tokenize"),
        (with_key("/embed", {}), 422, "validation", "/embed"),
        (request("GET", "/nowhere?key=s3cret"), 404, "bad_request", "/nowhere"),
        (request("DELETE", "/generate"), 405, "bad_request", "/generate"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rejection_is_counted_and_logged_once(
    data: bytes,
    status: int,
    kind: str,
    route: str,
    lines: Lines,
    server_with_keys: SharedServer,
    server_with_timeouts: SharedServer,
) -> None:
    async def check(server: SocketServer) -> None:
        of_kind = f'err="{kind}"'
        names = (("lorax_request_count", ""), ("lorax_request_failure", of_kind), ("lorax_key_requests_total", ""))
        before = [server.count(*name) for name in names]
        assert (await server.fetch(data)).status == status
        after = [server.count(*name) for name in names]
        assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 0]  # no key is charged

    (server_with_timeouts if status == 408 else server_with_keys).run(check)
    (line,) = lines("request")
    assert (line["status"], line["route"], line["address"]) == (status, route, "127.0.0.1")
    assert line["key"] == ("key-1" if b"Bearer good" in data else "")
    assert "s3cret" not in str(line)


def test_idle_connection_is_not_counted_as_request(lines: Lines, server_with_timeouts: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        before = server.count("lorax_request_count")
        connection = await server.connect()
        (answer,) = await connection.read_responses()
        assert answer.status == 408
        assert server.count("lorax_request_count") == before

    server_with_timeouts.run(check)
    assert lines("request") == []


def test_unused_body_does_not_break_next_request(server_with_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        connection = await server.connect()
        await connection.send(head("GET", "/health", [b"host: localhost", b"content-length: 3"]))
        assert [answer.status for answer in await connection.read_responses(1)] == [200]
        await connection.send(b"xxx" + HEALTH)
        assert [answer.status for answer in await connection.read_responses(1)] == [200]

    server_with_keys.run(check)


# --- Audit ------------------------------------------------------------------------------------------------------------


def test_admin_actions_are_logged(lines: Lines, server_with_keys: SharedServer) -> None:
    poet, nobody = {"adapter_id": "poet"}, {"adapter_id": "nobody"}

    async def check(server: SocketServer) -> None:
        for key, path, body, status in (
            (SECRET, "/v1/adapters/unload", nobody, 404),
            ("good", "/v1/adapters/load", poet, 403),
            (SECRET, "/v1/unload_lora_adapter", {"lora_name": "nobody"}, 404),
        ):
            assert (await server.fetch(with_key(path, body, key))).status == status
        connection = await server.connect()
        await connection.send(with_key("/v1/adapters/load", poet, SECRET, ("x-request-id", "it")))
        while not server_with_keys.harness.engine.sent:
            await asyncio.sleep(0.001)
        for call in list(server_with_keys.harness.engine._queries.values()):
            call.set_exception(AdapterError("it is broken"))
        await connection.read_responses(1)

    server_with_keys.run(check)
    result = [(each["action"], each["adapter"], each["key"], each["status"]) for each in lines("audit")]
    assert result == [
        ("unload", "nobody", "admin", 404),
        ("load", "poet", "", 403),
        ("unload", "nobody", "admin", 404),
        ("load", "poet", "admin", 400),
    ]
    assert {each["address"] for each in lines("audit")} == {"127.0.0.1"}
    assert lines("audit")[-1]["request_id"] == "it"
    assert SECRET not in str(lines("audit") + lines("request"))


@pytest.mark.parametrize(("method", "path"), [("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/info")])
def test_rejected_key_is_logged(method: str, path: str, lines: Lines, server_with_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        answer = await server.fetch(request(method, path, [("authorization", f"Bearer {GUESS}")]))
        assert answer.status == 401

    server_with_keys.run(check)
    (line,) = lines("audit")
    assert (line["action"], line["status"], line["route"], line["address"]) == ("authenticate", 401, path, "127.0.0.1")
    assert GUESS not in str(lines("audit") + lines("request"))


def test_log_lines_for_invalid_keys_are_limited(lines: Lines, server_with_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        before = server.count("lorax_request_failure", 'err="authentication"')
        for number in range(MAX_LINES_PER_MINUTE + 20):
            assert (await server.fetch(with_key("/generate", GOOD, f"guess-{number}"))).status == 401
        after = server.count("lorax_request_failure", 'err="authentication"')
        assert after - before == MAX_LINES_PER_MINUTE + 20

    server_with_keys.run(check)
    assert len(lines("audit")) == len(lines("request")) == MAX_LINES_PER_MINUTE


@pytest.mark.parametrize(
    ("data", "status", "messages"),
    [
        (request("GET", "/v1/adapters?limit=0"), 400, ["request"]),
        (post("/generate", GOOD, kind="text/plain"), 415, ["request"]),
        (request("GET", "/nowhere"), 404, ["request"]),
        (
            post("/v1/adapters/unload", {"adapter_id": "poet"}, ("x-forwarded-for", "1.2.3.4")),
            403,
            ["request", "audit"],
        ),
    ],
    ids=["schema", "kind", "nowhere", "admin"],
)
def test_log_lines_for_anonymous_callers_are_limited(
    data: bytes,
    status: int,
    messages: list[str],
    lines: Lines,
    server_without_keys: SharedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log lines are also limited on a server without keys."""
    monkeypatch.setattr(audit, "MAX_LINES_PER_MINUTE", 3)

    async def check(server: SocketServer) -> None:
        for _ in range(6):
            assert (await server.fetch(data)).status == status

    server_without_keys.run(check)
    assert {message: len(lines(message)) for message in messages} == dict.fromkeys(messages, 3)


# --- Sharing of cached prompts ----------------------------------------------------------------------------------------


def test_prefix_cache_is_shared_without_keys(server_without_keys: SharedServer) -> None:
    async def check(server: SocketServer) -> None:
        for bearer in ("", "one", "other"):
            asking = asyncio.create_task(server.fetch(with_key("/generate", GOOD, bearer)))
            await server_without_keys.complete_all_requests()
            assert (await asking).status == 200
        assert {each.salt for each in server_without_keys.harness.engine.added} == {""}

    server_without_keys.run(check)
