"""Hostile clients against a real server: bad requests are rejected, and later requests succeed."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from tests.e2e.hostile_cases import (
    ALIVE,
    BODIES,
    CHAT,
    COMPLETIONS,
    CONTENT_TYPES,
    FIELDS,
    GET_PATHS,
    GOOD,
    INPUTS,
    MAX_BODY,
    MESSAGES,
    NATIVE,
    OTHERS,
    POST_PATHS,
    PROMPT,
    RAW,
    SCHEMAS,
    SLOW,
    STREAM,
    VALUES,
    keep_alive_request,
    with_field,
)
from tests.e2e.hostile_client import TIMEOUT_S, HttpResponse, connect, exchange, post, read, request
from tests.e2e.http_server import Server, serving, write_model
from tests.grids import some_fast
from tests.processes import has_role

BODY_TIMEOUT_S = 6.0
MAX_MEMORY_GROWTH_BYTES = 300 * 2**20  # over all processes; allocators retain some memory after large requests


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run one server for all tests, with a short timeout for bodies. It must survive all tests."""
    folder = tmp_path_factory.mktemp("hostile")
    write_model(folder)
    outside = folder / "adapters" / "first"
    outside.rename(folder / "outside")
    (folder / "adapters" / "out").symlink_to(folder / "outside")
    with serving(folder, from_scratch=True, body_timeout_s=BODY_TIMEOUT_S) as running:
        for body in (json.dumps(INPUTS).encode(), b'{"inputs": "' + b"a" * (MAX_BODY - 20) + b'"}'):
            exchange(running.port, post(NATIVE, body))  # the first and large requests allocate memory once
        process = psutil.Process(running.process.pid)
        before, files = _memory_bytes(process), process.num_fds()
        children = _permanent_children(process)
        yield running
        assert running.process.poll() is None
        assert _permanent_children(process) == children
        assert exchange(running.port, ALIVE)[0].status == 200
        assert _memory_bytes(process) - before < MAX_MEMORY_GROWTH_BYTES
        assert process.num_fds() <= files + 4  # tolerance for threads and late closing
        log = "".join(running.log)
        assert "Traceback" not in log
        assert "failed with an internal error" not in log


def _memory_bytes(process: psutil.Process) -> int:
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def _permanent_children(process: psutil.Process) -> list[psutil.Process]:
    """Return child processes, except sandboxes, which start on demand."""
    children = process.children(recursive=True)
    return [child for child in children if not has_role(child, "sandbox")]


@pytest.fixture(autouse=True)
def _server_still_responds(server: Server) -> Iterator[None]:
    yield
    (response,) = exchange(server.port, post(NATIVE, INPUTS))
    assert response.status == 200
    assert "generated_text" in response.json()


def check(responses: list[HttpResponse], path: str, *statuses: int) -> None:
    """Check for one response with an expected status, in the format of the route."""
    assert len(responses) == 1, [(response.status, response.body[:200]) for response in responses]
    (response,) = responses
    assert response.is_complete
    assert response.status in statuses, (response.status, response.body[:500])
    if response.status >= 400:
        assert response.headers["content-type"] == "application/json"
        check_style(response, path)


def check_style(response: HttpResponse, path: str) -> None:
    error = response.json()["error"]
    if path.startswith("/v1/"):
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    else:
        assert set(response.json()) == {"error", "error_type"}
        assert error
    assert len(response.body) < 10_000  # the response does not repeat a large request


# --- Bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
def test_invalid_bodies_are_rejected(server: Server, name: str) -> None:
    body, status = BODIES[name]
    check(exchange(server.port, post(NATIVE, body)), NATIVE, status)


@pytest.mark.parametrize("kind", CONTENT_TYPES)
def test_invalid_content_types_are_rejected(server: Server, kind: str | None) -> None:
    check(exchange(server.port, post(NATIVE, INPUTS, kind=kind)), NATIVE, CONTENT_TYPES[kind])


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x"])
def test_encoded_body_is_rejected(server: Server, encoding: str) -> None:
    check(exchange(server.port, post(COMPLETIONS, PROMPT, ("content-encoding", encoding))), COMPLETIONS, 415)


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "field"), some_fast(FIELDS))
def test_wrong_field_types_are_rejected(server: Server, path: str, field: str) -> None:
    """Send each field with values of all wrong types."""
    schema = SCHEMAS[path].model_json_schema()["properties"][field]
    branches = schema.get("anyOf", [schema])
    allowed = {branch.get("type", "object" if "$ref" in branch else None) for branch in branches}
    if None in allowed:
        return  # accepts any type
    allowed |= {"integer"} if "number" in allowed else set()
    for kind, value in OTHERS.items():
        if kind not in allowed:
            check(exchange(server.port, with_field(path, field, value)), path, 422 if path == NATIVE else 400)


def _parameter_id(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) else json.dumps(value)
    return text[:40] if isinstance(value, int | str | float | list | dict) else ""


@pytest.mark.parametrize(("path", "field", "value", "status"), some_fast(VALUES), ids=_parameter_id)
def test_invalid_field_values_are_rejected(server: Server, path: str, field: str, value: Any, status: int) -> None:
    responses = exchange(server.port, with_field(path, field, value))
    check(responses, path, status)
    assert "x-evil" not in responses[0].headers


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_error_response_size_is_bounded(path: str, field: str) -> None:
    """Reporting a million errors would block the server for half a minute."""
    whole = {NATIVE: {}, COMPLETIONS: PROMPT, CHAT: MESSAGES}[path]
    for value in ([None] * 1000, [[None]] * 1000, [{"role": "x", "content": [None] * 1000}], {"ids": [None] * 1000}):
        result = 0
        try:
            SCHEMAS[path].model_validate({**whole, field: value})
        except ValidationError as error:
            result = error.error_count()
        assert result < 10


@pytest.mark.parametrize("source", ["hub", "s3", "pbase", "file", "\r\n", "\0", "x" * 100_000])
def test_unknown_adapter_sources_are_rejected(server: Server, source: str) -> None:
    body = {"inputs": "x", "parameters": {"adapter_id": "second", "adapter_source": source}}
    check(exchange(server.port, post(NATIVE, body)), NATIVE, 424)


@pytest.mark.parametrize("text", ["\0" * 10, "\u202e\u200b\ufeff", "\U0001f600" * 10, "\r\ndata: x\r\n\r\n"])
def test_unusual_characters_are_accepted(server: Server, text: str) -> None:
    check(exchange(server.port, post(STREAM, {**INPUTS, "inputs": text})), STREAM, 200)


# --- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RAW)
def test_malformed_http_is_rejected(server: Server, name: str) -> None:
    data, statuses, path = RAW[name]
    responses = exchange(server.port, data)
    check(responses, path, *statuses)
    assert "set-cookie" not in responses[0].headers
    assert responses[0].headers.get("x-request-id", "x").isascii()


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "PROPFIND", "M-SEARCH"])
def test_unsupported_methods_are_rejected(server: Server, method: str) -> None:
    """Unsupported methods get 405 with the supported methods, and have no effect."""
    for path in (*GET_PATHS, *POST_PATHS):
        (response,) = exchange(server.port, request(method, path))
        if method == "HEAD" and path in GET_PATHS:
            assert response.status == (404 if path == "/v1/models/x" else 200)
            assert response.body == b""
            continue
        assert response.status == 405, path
        expected = {"GET", "HEAD"} if path in GET_PATHS else set()
        expected |= {"POST"} if path in (*POST_PATHS, "/") else set()
        assert set(response.headers["allow"].split(", ")) == expected
        if method != "HEAD":
            check_style(response, path)


@pytest.mark.parametrize("path", GET_PATHS[1:])
def test_post_to_get_route_is_rejected(server: Server, path: str) -> None:
    check(exchange(server.port, post(path, b"x" * 100_000, kind="text/plain")), path, 405)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_cross_origin_preflight_is_rejected(server: Server, method: str) -> None:
    headers = (("origin", "http://evil"), ("access-control-request-method", method))
    (response,) = exchange(server.port, request("OPTIONS", NATIVE, headers))
    assert response.status == 400
    assert "access-control-allow-origin" not in response.headers


# --- Connections ------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_served_in_order(server: Server) -> None:
    responses = exchange(server.port, keep_alive_request("GET", "/health") * 1000 + ALIVE)
    assert [response.status for response in responses] == [200] * 1001


def test_garbage_after_request_is_rejected(server: Server) -> None:
    responses = exchange(server.port, keep_alive_request("GET", "/health"), b"\0\1\2garbage\r\n\r\n")
    assert [response.status for response in responses] in ([200, 400], [400])


def test_garbage_during_stream_does_not_corrupt_stream(server: Server) -> None:
    """The stream contains only valid events."""
    body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 100, "ignore_eos_token": True}}).encode()
    headers = (("content-type", "application/json"), ("content-length", str(len(body))))
    with connect(server.port) as connection:
        connection.sendall(keep_alive_request("POST", STREAM, *headers, body=body))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        with server.paused():  # so that the stream continues
            connection.sendall(b"\0\1\2garbage\r\n\r\n")
            rest = b""
            with suppress(ConnectionResetError):
                while data := connection.recv(2**16):
                    rest += data
    assert b"HTTP/1.1" not in rest.partition(b"\r\n0\r\n\r\n")[0]


def test_body_size_does_not_count_towards_header_limit(server: Server) -> None:
    body = GOOD + b" " * 500_000
    first = keep_alive_request(
        "POST", NATIVE, ("content-type", "application/json"), ("content-length", str(len(body))), body=body
    )
    with connect(server.port) as connection:
        connection.sendall(first)
        assert read(connection, 1)[0].status == 200
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        assert exchange(server.port, ALIVE)[0].status == 200
        connection.sendall(b"\r\n")
        assert read(connection, 1)[0].status == 200


def test_expect_continue_is_supported(server: Server) -> None:
    head, _, _ = post(NATIVE, GOOD, ("expect", "100-continue")).partition(GOOD)
    with connect(server.port) as connection:
        connection.sendall(head)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(GOOD)
        (response,) = read(connection, 1)
    assert response.status == 200


def test_half_closed_incomplete_request_is_closed(server: Server) -> None:
    """A client that half-closes the connection before its request is complete has disconnected."""
    for data in (b"", ALIVE[:10], post(NATIVE, GOOD, ("content-length", "1000"))):
        responses = exchange(server.port, data, half_close=True)
        assert [response.status for response in responses] in ([], [400])


def test_disconnect_without_request_does_not_affect_server(server: Server) -> None:
    for number in range(500):
        with connect(server.port) as connection:
            if number % 2:  # with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall((b"", b"GET", post(STREAM, INPUTS), post(NATIVE, GOOD)[:-5])[number % 4])


@pytest.mark.slow
def test_slow_clients_get_timeout_response(server: Server) -> None:
    """Send slow requests byte by byte. The server responds to other requests in the meantime."""
    with ExitStack() as stack:
        connections = {name: stack.enter_context(connect(server.port)) for name in SLOW}
        pieces = {name: make() for name, make in SLOW.items()}
        ended: set[str] = set()
        while len(ended) < len(SLOW):
            for name in SLOW.keys() - ended:
                with suppress(ConnectionResetError, BrokenPipeError):
                    connections[name].sendall(next(pieces[name], b""))
                if _is_readable(connections[name]):
                    ended.add(name)
            assert exchange(server.port, ALIVE)[0].status == 200
            time.sleep(0.05)  # slow clients
        for name, connection in connections.items():
            path = {"chunks": COMPLETIONS, "a body that never comes": CHAT}.get(name, "/")
            check(read(connection), path, 408)


def _is_readable(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) is not None
    except (BlockingIOError, ConnectionResetError) as error:
        return not isinstance(error, BlockingIOError)
    finally:
        connection.settimeout(TIMEOUT_S)
