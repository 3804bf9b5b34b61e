"""A hub that is far away: every answer takes a while to begin, and then comes at some bytes per second.

`python benchmarks/slow_hub.py FOLDER SECONDS BYTES_PER_S` serves each folder below FOLDER as the repository
`bench/<its name>`, says its port in one line, and ends when its input does.
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
from typing import Any

INFO = re.compile(r"/api/models/bench/([\w-]+)/revision/\w+")
FILE = re.compile(r"/bench/([\w-]+)/resolve/\w+/([\w.]+)")


@contextmanager
def running_hub(folder: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Run a hub in a process of its own, and yield its address."""
    command = [sys.executable, __file__, str(folder), str(latency_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
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


def make_handler(root: Path, latency_s: float, bytes_per_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            time.sleep(latency_s)
            if asked := INFO.fullmatch(path):
                content = json.dumps(describe(root / asked[1])).encode()
            elif asked := FILE.fullmatch(path):
                content = (root / asked[1] / asked[2]).read_bytes()
            else:
                self.send_error(404)
                return
            time.sleep(len(content) / bytes_per_s)
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


def main(folder: str, latency_s: str, bytes_per_s: str) -> None:
    handler = make_handler(Path(folder), float(latency_s), float(bytes_per_s))
    server = Hub(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
