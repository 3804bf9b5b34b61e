"""Hostile clients against a real server: each gets a clean refusal, and the next request its answer."""

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
    FIELDS,
    GET_PATHS,
    GOOD,
    INPUTS,
    KINDS,
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
    loose,
    with_field,
)
from tests.e2e.hostile_client import TIMEOUT_S, Answer, connect, exchange, post, read, request
from tests.e2e.http_server import Server, serving, write_model
from tests.grids import some_fast

BODY_TIMEOUT_S = 6.0
MAX_GROWTH = 300 * 2**20  # of all processes together: memory that allocators keep after large requests, no leak


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run one server for all tests, with a short timeout for bodies. It must survive all tests unharmed."""
    folder = tmp_path_factory.mktemp("hostile")
    write_model(folder)
    outside = folder / "adapters" / "first"
    outside.rename(folder / "outside")
    (folder / "adapters" / "out").symlink_to(folder / "outside")
    with serving(folder, from_scratch=True, body_timeout_s=BODY_TIMEOUT_S) as running:
        for body in (json.dumps(INPUTS).encode(), b'{"inputs": "' + b"a" * (MAX_BODY - 20) + b'"}'):
            exchange(running.port, post(NATIVE, body))  # memory of a first and of a large request stays
        process = psutil.Process(running.process.pid)
        before, files = _memory(process), process.num_fds()
        children = _lasting_children(process)
        yield running
        assert running.process.poll() is None
        assert _lasting_children(process) == children
        assert exchange(running.port, ALIVE)[0].status == 200
        assert _memory(process) - before < MAX_GROWTH
        assert process.num_fds() <= files + 4  # threads and late closing may hold some
        log = "".join(running.log)
        assert "Traceback" not in log
        assert "mistake of the server" not in log


def _memory(process: psutil.Process) -> int:
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def _lasting_children(process: psutil.Process) -> list[psutil.Process]:
    """Return the children except sandbox workers, which start when they are needed."""
    children = process.children(recursive=True)
    return [child for child in children if "lorax_server.sandbox.worker" not in child.cmdline()]


@pytest.fixture(autouse=True)
def _the_next_one_is_answered(server: Server) -> Iterator[None]:
    yield
    (answer,) = exchange(server.port, post(NATIVE, INPUTS))
    assert answer.status == 200
    assert "generated_text" in answer.json()


def check(answers: list[Answer], path: str, *statuses: int) -> None:
    """Check for one answer, which is either the expected one or an error in the style of the route."""
    assert len(answers) == 1, [(answer.status, answer.body[:200]) for answer in answers]
    (answer,) = answers
    assert answer.is_complete
    assert answer.status in statuses, (answer.status, answer.body[:500])
    if answer.status >= 400:
        assert answer.headers["content-type"] == "application/json"
        check_style(answer, path)


def check_style(answer: Answer, path: str) -> None:
    error = answer.json()["error"]
    if path.startswith("/v1/"):
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    else:
        assert set(answer.json()) == {"error", "error_type"}
        assert error
    assert len(answer.body) < 10_000  # a large request is not repeated in its answer


# --- Bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
def test_bodies(server: Server, name: str) -> None:
    body, status = BODIES[name]
    check(exchange(server.port, post(NATIVE, body)), NATIVE, status)


@pytest.mark.parametrize("kind", KINDS)
def test_content_types(server: Server, kind: str | None) -> None:
    check(exchange(server.port, post(NATIVE, INPUTS, kind=kind)), NATIVE, KINDS[kind])


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x"])
def test_an_encoded_body_is_refused(server: Server, encoding: str) -> None:
    check(exchange(server.port, post(COMPLETIONS, PROMPT, ("content-encoding", encoding))), COMPLETIONS, 415)


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "field"), some_fast(FIELDS))
def test_wrong_types(server: Server, path: str, field: str) -> None:
    """Send each field with a value of each type that it does not have."""
    schema = SCHEMAS[path].model_json_schema()["properties"][field]
    branches = schema.get("anyOf", [schema])
    allowed = {branch.get("type", "object" if "$ref" in branch else None) for branch in branches}
    if None in allowed:
        return  # it takes anything
    allowed |= {"integer"} if "number" in allowed else set()
    for kind, value in OTHERS.items():
        if kind not in allowed:
            check(exchange(server.port, with_field(path, field, value)), path, 422 if path == NATIVE else 400)


def _named(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) else json.dumps(value)
    return text[:40] if isinstance(value, int | str | float | list | dict) else ""


@pytest.mark.parametrize(("path", "field", "value", "status"), some_fast(VALUES), ids=_named)
def test_values(server: Server, path: str, field: str, value: Any, status: int) -> None:
    answers = exchange(server.port, with_field(path, field, value))
    check(answers, path, status)
    assert "x-evil" not in answers[0].headers


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_however_much_is_wrong_little_is_said(path: str, field: str) -> None:
    """Finding and naming a million mistakes would take half a minute, in which no other request is served."""
    whole = {NATIVE: {}, COMPLETIONS: PROMPT, CHAT: MESSAGES}[path]
    for value in ([None] * 1000, [[None]] * 1000, [{"role": "x", "content": [None] * 1000}], {"ids": [None] * 1000}):
        found = 0
        try:
            SCHEMAS[path].model_validate({**whole, field: value})
        except ValidationError as error:
            found = error.error_count()
        assert found < 10


@pytest.mark.parametrize("source", ["hub", "s3", "pbase", "file", "\r\n", "\0", "x" * 100_000])
def test_unknown_sources(server: Server, source: str) -> None:
    body = {"inputs": "x", "parameters": {"adapter_id": "second", "adapter_source": source}}
    check(exchange(server.port, post(NATIVE, body)), NATIVE, 424)


@pytest.mark.parametrize("text", ["\0" * 10, "\u202e\u200b\ufeff", "\U0001f600" * 10, "\r\ndata: x\r\n\r\n"])
def test_odd_text_is_text(server: Server, text: str) -> None:
    check(exchange(server.port, post(STREAM, {**INPUTS, "inputs": text})), STREAM, 200)


# --- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RAW)
def test_http(server: Server, name: str) -> None:
    data, statuses, path = RAW[name]
    answers = exchange(server.port, data)
    check(answers, path, *statuses)
    assert "set-cookie" not in answers[0].headers
    assert answers[0].headers.get("x-request-id", "x").isascii()


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "PROPFIND", "M-SEARCH"])
def test_methods(server: Server, method: str) -> None:
    """A method that a route lacks is answered by 405 with the methods that it has, and does nothing."""
    for path in (*GET_PATHS, *POST_PATHS):
        (answer,) = exchange(server.port, request(method, path))
        if method == "HEAD" and path in GET_PATHS:
            assert answer.status == (404 if path == "/v1/models/x" else 200)
            assert answer.body == b""
            continue
        assert answer.status == 405, path
        expected = {"GET", "HEAD"} if path in GET_PATHS else set()
        expected |= {"POST"} if path in (*POST_PATHS, "/") else set()
        assert set(answer.headers["allow"].split(", ")) == expected
        if method != "HEAD":
            check_style(answer, path)


@pytest.mark.parametrize("path", GET_PATHS[1:])
def test_nothing_can_be_posted_where_there_is_nothing_to_post(server: Server, path: str) -> None:
    check(exchange(server.port, post(path, b"x" * 100_000, kind="text/plain")), path, 405)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_preflight_of_another_origin_is_refused(server: Server, method: str) -> None:
    headers = (("origin", "http://evil"), ("access-control-request-method", method))
    (answer,) = exchange(server.port, request("OPTIONS", NATIVE, headers))
    assert answer.status == 400
    assert "access-control-allow-origin" not in answer.headers


# --- Connections ------------------------------------------------------------------------------------------------------


def test_many_requests_at_once_on_one_connection(server: Server) -> None:
    answers = exchange(server.port, loose("GET", "/health") * 1000 + ALIVE)
    assert [answer.status for answer in answers] == [200] * 1001


def test_garbage_after_a_request(server: Server) -> None:
    answers = exchange(server.port, loose("GET", "/health"), b"\0\1\2garbage\r\n\r\n")
    assert [answer.status for answer in answers] in ([200, 400], [400])


def test_garbage_is_not_answered_within_a_stream(server: Server) -> None:
    """The stream ends, and contains nothing but its own events."""
    body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 100, "ignore_eos_token": True}}).encode()
    headers = (("content-type", "application/json"), ("content-length", str(len(body))))
    with connect(server.port) as connection:
        connection.sendall(loose("POST", STREAM, *headers, body=body))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        with server.paused():  # so that there is more to come
            connection.sendall(b"\0\1\2garbage\r\n\r\n")
            rest = b""
            with suppress(ConnectionResetError):
                while data := connection.recv(2**16):
                    rest += data
    assert b"HTTP/1.1" not in rest.partition(b"\r\n0\r\n\r\n")[0]


def test_a_large_body_does_not_count_as_the_next_headers(server: Server) -> None:
    body = GOOD + b" " * 500_000
    first = loose("POST", NATIVE, ("content-type", "application/json"), ("content-length", str(len(body))), body=body)
    with connect(server.port) as connection:
        connection.sendall(first)
        assert read(connection, 1)[0].status == 200
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        assert exchange(server.port, ALIVE)[0].status == 200
        connection.sendall(b"\r\n")
        assert read(connection, 1)[0].status == 200


def test_who_waits_to_be_told_to_go_on_is_told(server: Server) -> None:
    head, _, _ = post(NATIVE, GOOD, ("expect", "100-continue")).partition(GOOD)
    with connect(server.port) as connection:
        connection.sendall(head)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(GOOD)
        (answer,) = read(connection, 1)
    assert answer.status == 200


def test_who_says_no_more_and_waits_is_let_go(server: Server) -> None:
    """A client that closes its side of a connection before its request is complete has left."""
    for data in (b"", ALIVE[:10], post(NATIVE, GOOD, ("content-length", "1000"))):
        answers = exchange(server.port, data, half_close=True)
        assert [answer.status for answer in answers] in ([], [400])


def test_who_connects_and_leaves(server: Server) -> None:
    for number in range(500):
        with connect(server.port) as connection:
            if number % 2:  # with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall((b"", b"GET", post(STREAM, INPUTS), post(NATIVE, GOOD)[:-5])[number % 4])


def test_slow_ones_are_told_that_they_took_too_long(server: Server) -> None:
    """Send all slow requests at once, a byte at a time; meanwhile the server answers others."""
    with ExitStack() as stack:
        connections = {name: stack.enter_context(connect(server.port)) for name in SLOW}
        pieces = {name: make() for name, make in SLOW.items()}
        ended: set[str] = set()
        while len(ended) < len(SLOW):
            for name in SLOW.keys() - ended:
                with suppress(ConnectionResetError, BrokenPipeError):
                    connections[name].sendall(next(pieces[name], b""))
                if _has_news(connections[name]):
                    ended.add(name)
            assert exchange(server.port, ALIVE)[0].status == 200
            time.sleep(0.05)  # as slow as they are
        for name, connection in connections.items():
            path = {"chunks": COMPLETIONS, "a body that never comes": CHAT}.get(name, "/")
            check(read(connection), path, 408)


def _has_news(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) is not None
    except (BlockingIOError, ConnectionResetError) as error:
        return not isinstance(error, BlockingIOError)
    finally:
        connection.settimeout(TIMEOUT_S)
