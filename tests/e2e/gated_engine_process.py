"""Starts and stops servers with an engine that tests control (`gated_engine_server.py`)."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.http_server import import_path, read_log
from tests.e2e.streaming_client import WAIT_TIMEOUT_S, wait_for


@contextmanager
def starting(
    model: Path, gate: Path, drain_s: float = 600
) -> Iterator[tuple["subprocess.Popen[str]", list[str], list[str]]]:
    """Start a server. Yield its process, log and address (if any). Fail if processes or files remain."""
    with tempfile.TemporaryDirectory(prefix="gated-") as scratch:  # socket paths must be short
        arguments = [str(model), str(gate), str(drain_s)]
        environ = {**os.environ, "PYTHONPATH": import_path(), "TMPDIR": scratch}
        command = [sys.executable, "-m", "tests.e2e.gated_engine_server", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        log, url, has_answer = list[str](), list[str](), threading.Event()
        reader = threading.Thread(target=read_log, args=(process, log, url, has_answer))
        reader.start()
        try:
            assert has_answer.wait(WAIT_TIMEOUT_S)
            started = psutil.Process(process.pid).children(recursive=True) if url else []
            yield process, log, url
            process.wait(WAIT_TIMEOUT_S)
            wait_for(lambda: not any(map(psutil.Process.is_running, started)), "no process stays")
            wait_for(lambda: not os.listdir(scratch), "no file stays")
        finally:
            process.kill()
            process.wait()
            reader.join()
            assert process.stderr is not None
            process.stderr.close()
