"""Run `lorax serve` for a benchmark, send it load, and read the resource usage of its processes."""

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).parent.parent.parent
CLIENT = Path(__file__).with_name("http_client.py")
READY = re.compile(r"ready: (http://\S+)\s")
START_S, STOP_S, RUN_S = 300.0, 60.0, 1200.0
LETTERS = "abcdefghijklmnopqrstuvwxyz     "
Flags = Mapping[str, object]


@dataclass(frozen=True)
class LoadRequest:
    """A request. `answer` is the number of tokens to generate."""

    prompt: str
    adapter: str | None
    answer: int

    @property
    def body(self) -> dict[str, Any]:
        adapter = {} if self.adapter is None else {"adapter_id": self.adapter}
        parameters = {"max_new_tokens": self.answer, "ignore_eos_token": True, **adapter}
        return {"inputs": self.prompt, "parameters": parameters}


@dataclass(frozen=True)
class Usage:
    """A process's memory, file descriptors and threads."""

    rss: int
    files: int
    threads: int


class Server:
    """A running server and its processes."""

    def __init__(self, url: str, process_id: int, log: Path) -> None:
        parsed = urlsplit(url)
        self.url, self.log = url, log
        self.host, self.port = parsed.hostname or "", parsed.port
        self.process = psutil.Process(process_id)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            lines = response.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def api_cpu_s(self) -> float:
        """Return the CPU seconds of the API process."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def usage(self) -> dict[str, Usage]:
        """Return the resource usage, keyed by the kind of process. If several processes have the same kind, return the
        largest.
        """
        usage: dict[str, Usage] = {}
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess), process.oneshot():  # sandbox workers start and stop
                name = _kind_of(process)
                found = Usage(process.memory_info().rss, process.num_fds(), process.num_threads())
                usage[name] = max(found, usage.get(name, found), key=lambda each: each.rss)
        return usage

    def send(
        self, load: Sequence[LoadRequest], max_concurrency: int, path: str = "/generate_stream", num_clients: int = 1
    ) -> list[dict[str, Any]]:
        """Divide the load among client processes. Return the result of each client."""
        with tempfile.TemporaryDirectory() as folder:
            clients, results = [], []
            for number in range(num_clients):
                bodies, result = Path(folder, f"bodies-{number}.json"), Path(folder, f"result-{number}.json")
                bodies.write_text(json.dumps([request.body for request in load[number::num_clients]]))
                command = [sys.executable, CLIENT, self.url, bodies, result, "--path", path]
                clients.append(subprocess.Popen([*command, "--max-concurrency", str(max_concurrency // num_clients)]))
                results.append(result)
            for client in clients:
                assert client.wait(RUN_S) == 0, "a client failed"
            return [json.loads(result.read_text()) for result in results]


def check_complete(load: Sequence[LoadRequest], results: Sequence[dict[str, Any]]) -> None:
    """Raise AssertionError unless every request in `Server.send` received all its tokens."""
    for number, result in enumerate(results):
        for sample, request in zip(result["samples"], load[number :: len(results)], strict=True):
            assert sample["tokens"] == request.answer, sample["error"] or "tokens are missing"


def local_flags(folder: Path) -> dict[str, object]:
    """Return the flags that serve `folder/model` and `folder/adapters` without network access."""
    names = {"model-id": "model", "adapters-dir": "adapters", "huggingface-hub-cache": "cache"}
    return {"hub": "false", **{flag: folder / name for flag, name in names.items()}}


@contextmanager
def serving(log: Path, flags: Flags) -> Iterator[Server]:
    """Run `lorax serve` on a free port. `flags` have no leading dashes."""
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0"]
    command += [f"--{flag}={value}" for flag, value in flags.items()]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT) as process:
        try:
            yield Server(_wait_for_url(process, log), process.pid, log)
        except BaseException:
            print(log.read_text()[-3000:])
            raise
        finally:
            process.terminate()
            process.wait(STOP_S)


def _wait_for_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        found = READY.search(log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def _kind_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    kinds = {"resource_tracker": "resource tracker", "lorax: engine": "engine", "lorax: sandbox": "sandbox worker"}
    return next((name for sign, name in kinds.items() if sign in words), "API")
