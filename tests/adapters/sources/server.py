"""HTTP test servers that record requests and inject faults."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]  # lowercase names

    @property
    def file(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]


@dataclass(frozen=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Fault:
    """A fault to inject into the next `times` requests."""

    times: float = float("inf")
    reply: Reply | None = None  # replaces the response
    body: bytes | None = None  # replaces the body and its length
    cut_after: int | None = None  # close the connection after this many body bytes
    hangs: bool = False  # send no response
    drips: bool = False  # send the body slowly, byte by byte


def _do_nothing(request: Request) -> None:
    pass


class Server:
    """An HTTP server on a free port that responds with `answer(request)` until it is closed."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.faults: dict[str, Fault] = {}
        self.before: Callable[[Request], None] = _do_nothing
        self.closed = threading.Event()
        self._http = _Http(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def respond(self, request: Request) -> Reply:
        raise NotImplementedError

    def key(self, request: Request) -> str:
        """Return the name by which faults select this request."""
        return request.file

    def requests(self, key: str) -> list[Request]:
        return [request for request in self.seen if self.key(request) == key]

    def take_fault(self, request: Request) -> Fault:
        fault = self.faults.get(self.key(request))
        if fault is None or fault.times <= 0:
            return Fault()
        fault.times -= 1
        return fault

    def reset(self) -> None:
        """Clear recorded requests and faults."""
        self.seen.clear()
        self.faults.clear()
        self.before = _do_nothing

    def close(self) -> None:
        self.closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def running(server: Server) -> Iterator[Any]:
    try:
        yield server
    finally:
        server.close()


class _Http(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Do not log errors: these tests close connections on purpose."""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body are two packets. Without this option, the body is delayed until the client's ACK.
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers)
            server.seen.append(request)
            server.before(request)
            fault = server.take_fault(request)
            if fault.hangs:
                server.closed.wait(30)
                self.close_connection = True
                return
            self.send(fault.reply or server.respond(request), fault)

        do_GET = do_HEAD = handle_any

        def send(self, reply: Reply, fault: Fault) -> None:
            body = reply.body if fault.body is None else fault.body
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            length = reply.headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.send_body(body, fault)

        def send_body(self, body: bytes, fault: Fault) -> None:
            if fault.drips:
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    if server.closed.wait(0.05):
                        return
                return
            self.wfile.write(body[: fault.cut_after])
            if fault.cut_after is not None:
                self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    return Handler
