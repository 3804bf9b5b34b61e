"""Finds the address of a server that a benchmark has started, in its log."""

import re
import subprocess
import time
from pathlib import Path

READY = re.compile(r"ready: (http://\S+)\s")
START_S = 120.0


def wait_for_url(process: "subprocess.Popen[bytes]", log: Path, start_s: float = START_S) -> str:
    """Wait until the server is ready, and return its address."""
    deadline = time.monotonic() + start_s
    while process.poll() is None and time.monotonic() < deadline:
        found = READY.search(log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")
