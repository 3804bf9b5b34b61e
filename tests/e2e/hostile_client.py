"""A client that sends arbitrary bytes and parses the responses."""

import json
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import httptools

TIMEOUT_S = 60  # shorter than the server's idle timeout of 75 s
HOST = "127.0.0.1"


class HttpResponse:
    """A raw HTTP response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.header_names: list[str] = []
        self.body = b""
        self.is_complete = False

    def json(self) -> Any:
        return json.loads(self.body)


class _Reader:
    """httptools callbacks that collect consecutive responses."""

    def __init__(self) -> None:
        self.responses: list[HttpResponse] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.responses.append(HttpResponse())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.responses[-1].headers[name.decode().lower()] = value.decode("latin-1")
        self.responses[-1].header_names.append(name.decode().lower())

    def on_headers_complete(self) -> None:
        self.responses[-1].status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.responses[-1].body += body

    def on_message_complete(self) -> None:
        self.responses[-1].is_complete = True


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), TIMEOUT_S)


def read(connection: socket.socket, count: int | None = None) -> list[HttpResponse]:
    """Read `count` responses, or all responses until the server closes the connection."""
    reader = _Reader()
    while count is None or sum(response.is_complete for response in reader.responses) < count:
        try:
            data = connection.recv(2**16)
        except (ConnectionResetError, BrokenPipeError):
            break
        if not data:
            break
        reader.parser.feed_data(data)
    return reader.responses


def exchange(port: int, *pieces: bytes, count: int | None = None, half_close: bool = False) -> list[HttpResponse]:
    """Send data until the server stops reading, and read the responses."""
    with connect(port) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            for piece in pieces:
                connection.sendall(piece)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        return read(connection, count)


def request(
    method: str, target: str, headers: Iterable[tuple[str, str]] = (), body: bytes = b"", version: str = "1.1"
) -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "host: localhost", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def post(target: str, body: Any = b"", *headers: tuple[str, str], kind: str | None = "application/json") -> bytes:
    """Return a POST request. A body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name for name, _ in headers}
    plain = [("content-type", kind)] if kind is not None and "content-type" not in given else []
    if not given & {"content-length", "transfer-encoding"}:
        plain.append(("content-length", str(len(data))))
    return request("POST", target, [*plain, *headers], data)


def chunked(target: str, raw: bytes) -> bytes:
    return post(target, raw, ("transfer-encoding", "chunked"))
