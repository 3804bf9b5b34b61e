"""Runs a local Ray cluster with replicas of the demo model, for tests."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lorax_server.scale.command import NICENESS_VARIABLE
from lorax_server.server.http.replica_protocol import SECRET_HEADER
from tests.demo.server import FOLDER
from tests.e2e.http_server import Server, import_path
from tests.e2e.streaming_client import children, num_unfinished, parse_metrics, wait_for
from tests.processes import has_role

ADMIN = "the-admins"
SECRET = "the-deployments-secret"
ADAPTERS = ("answer", "json", "pirate", "redact", "sentiment", "sql")


@dataclass(frozen=True)
class Replica:
    """The processes of one replica."""

    port: int  # of its server
    server: psutil.Process
    actor: psutil.Process

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @contextmanager
    def paused(self) -> Iterator[Callable[[], None]]:
        """Pause the engine, so that its streams cannot finish. Yield a function that resumes the engine early."""
        engine = psutil.Process(children(self.server.pid)["engine"])

        def resume() -> None:
            with suppress(psutil.NoSuchProcess):
                engine.resume()

        engine.suspend()
        try:
            yield resume
        finally:
            resume()

    def num_unfinished(self) -> float:
        return num_unfinished(parse_metrics(send(self.port, "GET", "/metrics")[2]))


class Cluster:
    """A running driver. `port` is the port of Ray's proxy."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, adapters: Path) -> None:
        self._process = process
        self.port = port
        self.adapters = adapters
        self._deployed: dict[str, Any] = {}
        self.read()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def server(self) -> Server:
        """The ingress as a server, for HTTP clients."""
        return Server(self._process, self.url, [])

    def call(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self.read()
        assert not (isinstance(answer, dict) and "error" in answer), answer["error"]
        return answer

    def read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer: "):
                return json.loads(line.removeprefix("answer: "))
        raise AssertionError("the driver has ended")

    def scale(self, replicas: int | None, /, **arguments: Any) -> None:
        """Deploy with a number of replicas (None: set by the arguments), unless already deployed."""
        settings = {"device": "cpu", "adapters_dir": str(self.adapters), "admin_key": ADMIN, "drain_s": 20}
        settings |= {"host": "127.0.0.1", **arguments}
        if self._deployed != {**settings, "servers": replicas}:
            self._deployed = {}
            self.call("deploy", settings, replicas)
            self._deployed = {**settings, "servers": replicas}

    def replicas(self) -> list[Replica]:
        """List the replicas with listening servers."""
        result = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):
                if has_role(process, "server"):
                    ports = [each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"]
                    result += [Replica(port, process, process.parent()) for port in ports]
        return [each for each in result if self._process.pid in (parent.pid for parent in each.actor.parents())]

    def processes(self, mark: str) -> list[psutil.Process]:
        return [each for each in psutil.Process(self._process.pid).children(recursive=True) if mark in each.name()]


def send(port: int, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any, Any]:
    """Send a request, and return status, headers and body. Replicas need the secret; the ingress replaces it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", SECRET_HEADER: SECRET}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    is_json = response.headers.get("content-type") == "application/json"
    return response.status, response.headers, json.loads(content) if is_json else content.decode()


def generate(
    port: int, adapter: str = "", prompt: str = "Hello there, my friend", count: int = 8, **more: Any
) -> tuple[str, Any]:
    """Return the greedy completion and the response headers. `more` are request parameters."""
    parameters = {"max_new_tokens": count, **({"adapter_id": adapter} if adapter else {}), **more}
    status, headers, body = send(port, "POST", "/generate", {"inputs": prompt, "parameters": parameters})
    assert status == 200, body
    return body["generated_text"], headers


@contextmanager
def starting() -> Iterator[Cluster]:
    """Start a driver with copies of the demo adapters, which tests can change."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port = result.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        for name in ADAPTERS:
            shutil.copytree(FOLDER / "adapters" / name, Path(folder, "adapters", name))
        environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        environ |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # other tests keep the machine busy
        environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", NICENESS_VARIABLE: "0"}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.scale.driver", folder, str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        started: list[psutil.Process] = []
        try:
            cluster = Cluster(process, port, Path(folder, "adapters"))
            yield cluster
            started = psutil.Process(process.pid).children(recursive=True)
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
        wait_for(lambda: not any(map(psutil.Process.is_running, started)), "no process stays")
