"""Low-level HTTP clients, and helpers for server processes and metrics."""

import http.client
import json
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.http_server import Server
from tests.processes import has_role

WAIT_TIMEOUT_S = 240  # maximum wait before a test fails
NATIVE, COMPLETIONS, CHAT = "/generate_stream", "/v1/completions", "/v1/chat/completions"
RST = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Client:
    """One request on a new connection."""

    def __init__(self, server: Server, path: str, body: Any, *, is_slow: bool = False, **headers: str) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(WAIT_TIMEOUT_S)
        if is_slow:  # small socket buffers
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        try:
            self._socket.connect(("127.0.0.1", server.port))
        except OSError:
            self._socket.close()
            raise
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port)
        self._connection.sock = self._socket
        method = "GET" if body is None else "POST"
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, json.dumps(body), {"content-type": "application/json", **headers})
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    @property
    def status(self) -> int:
        return self.response.status

    def text(self) -> str:
        return self.response.read().decode()

    def json(self) -> Any:
        return json.loads(self.response.read())

    def events(self) -> Iterator[Any]:
        """Yield events until the end of the body."""
        assert self.status == 200, self.text()
        for line in self.response:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                yield data.decode() if data == b"[DONE]" else json.loads(data)

    def close(self, linger: bytes | None = None) -> None:
        if self._socket.fileno() < 0:
            return
        if linger is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        os.close(self._socket.detach())
        self._connection.close()


@contextmanager
def close_all(*clients: Client) -> Iterator[tuple[Client, ...]]:
    """Close all clients on exit."""
    with ExitStack() as stack:
        for client in clients:
            stack.callback(client.close)
        yield clients


def native(count: int, prompt: str = "hello there", **parameters: Any) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": count, "ignore_eos_token": True, **parameters}}


def openai(count: int, **more: Any) -> dict[str, Any]:
    return {"model": "", "prompt": "hello", "max_tokens": count, "ignore_eos": True, "stream": True, **more}


def tokens_of(events: Iterator[Any]) -> list[int]:
    return [event["token"]["id"] for event in events]


def get(server: Server, path: str) -> tuple[int, str]:
    with closing(Client(server, path, None)) as client:
        return client.status, client.text()


def metrics(server: Server) -> dict[str, float]:
    return parse_metrics(get(server, "/metrics")[1])


def parse_metrics(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def engine_metrics(server: Server) -> dict[str, float]:
    """Return metrics that include the engine status. If the engine is late, its gauges are 0, so retry."""
    result: dict[str, float] = {}

    def has_status() -> bool:
        result.update(metrics(server))
        return result["lorax_kv_blocks"] > 0

    wait_for(has_status, "the engine reports its status")
    return result


def num_unfinished(metrics: Mapping[str, float]) -> float:
    """Return the number of unfinished requests in the API process."""
    finished = [name for name in metrics if name.startswith(("lorax_request_success", "lorax_request_failure"))]
    return metrics["lorax_request_count"] - sum(metrics[name] for name in finished)


def wait_for(holds: Callable[[], object], what: str) -> None:
    until, pause_s = time.monotonic() + WAIT_TIMEOUT_S, 0.01
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.25)  # frequent polling would slow down the server


def is_successful(server: Server, path: str, body: Any) -> bool:
    with closing(Client(server, path, body)) as client:
        return client.status == 200


def is_idle(server: Server) -> bool:
    now = engine_metrics(server)
    return now["lorax_batch_current_size"] == now["lorax_queue_length"] == 0


def count_logged(server: Server, request_id: str) -> int:
    return sum(f"request_id={request_id} " in line for line in server.log)


# --- Processes --------------------------------------------------------------------------------------------------------


def children(pid: int) -> dict[str, int]:
    """Return the child process IDs by name: engine, sandbox, resource tracker."""
    result: dict[str, int] = {}
    for child in psutil.Process(pid).children():
        result |= {role: child.pid for role in ("engine", "sandbox", "tracker") if has_role(child, role)}
    return result


def usage(pid: int) -> tuple[int, int]:
    """Return the numbers of open files and threads."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
