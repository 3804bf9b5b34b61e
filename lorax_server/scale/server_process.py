"""Starts, stops and controls a replica's server process."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

import aiohttp

from lorax_server.errors import LoraxError
from lorax_server.server.http.replica_protocol import SECRET_HEADER, AdapterChange

MAX_LOG_LINES = 20  # log lines shown if the server stops
POLL_S = 0.1
STOP_TIMEOUT_S = 15.0  # between SIGTERM and SIGKILL
REQUEST_TIMEOUT_S = 30.0


class ReplicaError(LoraxError):
    """Raised if the server process could not start, has stopped, or rejected a request."""


class ServerProcess:
    """A running server process and a client for its control routes."""

    def __init__(self, flags: Sequence[str], host: str, secret: str) -> None:
        self.port = find_port(host)
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._log_lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lorax_server.scale.server_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        flags = [*flags, f"--hostname={host}", f"--port={self.port}"]  # these override earlier flags
        self._process.stdin.write(json.dumps({"flags": flags, "secret": secret}) + "\n")
        self._process.stdin.flush()
        threading.Thread(target=self._copy_log, args=(self._process.stderr,), daemon=True).start()
        self._headers = {SECRET_HEADER: secret, "host": "localhost"}

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _copy_log(self, log: IO[str]) -> None:
        with log:
            for line in log:
                self._log_lines.append(line)
                sys.stderr.write(line)

    async def wait_until_ready(self) -> None:
        """Wait until the server is healthy. There is no timeout, because loading a model may take minutes."""
        while True:
            if not self.is_running:
                await asyncio.sleep(POLL_S)  # let the log thread read the last lines
                raise ReplicaError(f"the replica's server could not start: {self.last_log_lines()}")
            try:
                await self._request("GET", "/health")
                return
            except (aiohttp.ClientError, ReplicaError):
                await asyncio.sleep(POLL_S)

    def last_log_lines(self) -> str:
        return "".join(self._log_lines).strip()[-2000:] or f"exit code {self._process.returncode}, without a message"

    async def stop(self) -> None:
        """Stop the server. Running requests have `STOP_TIMEOUT_S` to finish."""
        self._process.send_signal(signal.SIGTERM)  # no effect if the process has exited
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def read_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(await self._request("GET", "/replica/state"))
        return state

    async def apply(self, change: AdapterChange, is_own: bool) -> None:
        """Send an adapter change to the server. `is_own` is True if this server processed the client's request."""
        await self._request("POST", "/replica/changes", {"change": change._asdict(), "is_own": is_own})

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(f"http://{self.address}", headers=self._headers, timeout=timeout) as session,
            session.request(method, path, json=body) as response,
        ):
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                raise ReplicaError(f"the replica's server responded with status {response.status}: {text}")
            return await response.read()


def find_port(host: str) -> int:
    """Return a free port. If another process binds it first, the server fails to start and Ray restarts the replica."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
