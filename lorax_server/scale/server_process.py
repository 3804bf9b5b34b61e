"""The server of a replica: a process of its own, started, watched and ended by the replica."""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import aiohttp

from lorax_server.errors import LoraxError

KEPT_LINES = 20  # of the log, to say why it could not start
POLL_S = 0.1
END_S = 15.0  # after which it is killed
TIMEOUT = aiohttp.ClientTimeout(total=30)
UNLIMITED = aiohttp.ClientTimeout()


class ReplicaError(LoraxError):
    """A replica that cannot start, or that has lost its server."""


class UnavailableServerError(ReplicaError):
    """A server that cannot answer now, and may later."""


class Order(NamedTuple):
    """A server to start, as the application's builder describes it."""

    flags: Sequence[str]  # of `lorax serve`
    folder: str = ""  # of the command, on one machine
    allowed_hosts: Sequence[str] = ()


class ServerProcess:
    """A server's process, and the routes that only its replica may use."""

    def __init__(self, order: Order, host: str, ingress_key: str) -> None:
        self.host, self.port = host, find_port(host)
        self._key = secrets.token_urlsafe(32)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        program = [sys.executable, "-m", "lorax_server.scale.program"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._lifeline: IO[str] = self._process.stdin
        own = {"host": host, "port": self.port, "key": self._key, "ingress_key": ingress_key}
        self._lifeline.write(json.dumps({**order._asdict(), **own}) + "\n")
        self._lifeline.flush()
        threading.Thread(target=self._pass_on, args=(self._process.stderr,), daemon=True).start()
        self._session: aiohttp.ClientSession | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _pass_on(self, log: IO[str]) -> None:
        with log:
            for line in log:
                self._lines.append(line)
                sys.stderr.write(line)

    # --- Its life -----------------------------------------------------------------------------------------------------

    async def wait_until_ready(self) -> None:
        """Wait until it answers. A model may take minutes to fetch and load, so that only its end is an error."""
        while True:
            if not self.is_running:
                await asyncio.sleep(POLL_S)  # for the last lines of its log
                raise ReplicaError(f"the replica's server could not start: {self._last_words()}")
            try:
                async with self._client().get("/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        if not self.is_running:
            raise ReplicaError(f"the replica's server has ended: {self._last_words()}")

    def _last_words(self) -> str:
        return "".join(self._lines).strip()[-2000:] or f"exit code {self._process.returncode}, without a word"

    async def stop(self) -> None:
        """End it. Whoever calls this has waited for its requests."""
        if self._session is not None:
            await self._session.close()
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._process.wait, END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
        self._lifeline.close()

    # --- Its routes ---------------------------------------------------------------------------------------------------

    async def read_state(self) -> dict[str, Any]:
        async with self._client().get("/replica/state") as response:
            state: dict[str, Any] = await self._content(response)
            return state

    async def follow(
        self, path: str, body: dict[str, Any], meant: tuple[str, str] | None, forgets: bool
    ) -> dict[str, Any]:
        """Have the server make a change of names. `meant` is what the name of an unload has stood for; a load may
        forget what its name means there."""
        change = {"path": path, "body": body, "meant": meant, "forgets": forgets}
        followed: dict[str, Any] = await self._post("/replica/follow", change)
        return followed

    async def load(self, name: tuple[str, str]) -> str:
        """Have the server load an adapter, however long that takes, and return its identity."""
        source, label = name
        loaded = await self._post("/replica/load", {"source": source, "name": label}, UNLIMITED)
        return str(loaded["identity"])

    async def pin(self, name: tuple[str, str], identity: str, pin: bool) -> None:
        source, label = name
        await self._post("/replica/pin", {"source": source, "name": label, "identity": identity, "pin": pin})

    async def _post(self, path: str, body: dict[str, Any], timeout: aiohttp.ClientTimeout = TIMEOUT) -> Any:
        async with self._client().post(path, json=body, timeout=timeout) as response:
            return await self._content(response)

    async def _content(self, response: aiohttp.ClientResponse) -> Any:
        if response.status != 200:
            kind = UnavailableServerError if response.status >= 500 else ReplicaError
            raise kind(f"the replica's server answered {response.status}: {(await response.text())[:500]}")
        return await response.json() if response.content_type == "application/json" else None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"authorization": f"Bearer {self._key}", "host": "localhost"}
            base = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
            self._session = aiohttp.ClientSession(base, headers=headers, timeout=TIMEOUT)
        return self._session


def find_port(host: str) -> int:
    """Find a port that is free. If another takes it first, the server says so, and Ray starts the replica again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
