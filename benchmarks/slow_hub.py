"""A hub that is far away: every answer takes a while to begin, and then comes at some bytes per second.

`python benchmarks/slow_hub.py FOLDER` serves each folder below FOLDER as the repository `bench/<its name>`, and says
its port in one line. Each line of its input is a speed, seconds and bytes per second; it ends when its input does.
"""

import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

INFO = re.compile(r"/api/models/bench/([\w-]+)/revision/\w+")
FILE = re.compile(r"/bench/([\w-]+)/resolve/\w+/([\w.]+)")


class Speed(NamedTuple):
    """The seconds until an answer begins, and the bytes per second of each connection from then on."""

    latency_s: float = 0.0
    bytes_per_s: float = 1e12


class RunningHub:
    """A hub in a process of its own, as quick as the machine until it is told otherwise."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders = process.stdin
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def set_speed(self, speed: Speed) -> None:
        self._orders.write(f"{speed.latency_s} {speed.bytes_per_s}\n")
        self._orders.flush()


@contextmanager
def running_hub(folder: Path) -> Iterator[RunningHub]:
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            yield RunningHub(process)
        finally:
            process.stdin.close()


@cache
def describe(folder: Path) -> dict[str, Any]:
    """Describe a repository as a hub does."""
    listed = []
    for file in sorted(folder.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        size = file.stat().st_size
        listed.append({"rfilename": file.name, "size": size, "lfs": {"sha256": digest, "size": size}})
    commit = hashlib.sha1(repr(listed).encode()).hexdigest()
    return {"id": f"bench/{folder.name}", "sha": commit, "siblings": listed}


def make_handler(root: Path, speeds: list[Speed]) -> type[BaseHTTPRequestHandler]:
    """Make a handler that takes the last speed of a list."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            speed = speeds[-1]
            time.sleep(speed.latency_s)
            if asked := INFO.fullmatch(path):
                content = json.dumps(describe(root / asked[1])).encode()
            elif asked := FILE.fullmatch(path):
                content = (root / asked[1] / asked[2]).read_bytes()
            else:
                self.send_error(404)
                return
            time.sleep(len(content) / speed.bytes_per_s)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


class Hub(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hang up; anything else is an error of this program."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def main(folder: str) -> None:
    speeds = [Speed()]
    server = Hub(("127.0.0.1", 0), make_handler(Path(folder), speeds))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    for line in sys.stdin:
        speeds.append(Speed(*map(float, line.split())))


if __name__ == "__main__":
    main(*sys.argv[1:])
