"""`lorax serve` as a new user runs it: with the demo model that comes with the package."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.request import urlopen

from lorax_server.cli import demo

FOLDER = demo.FOLDER
SCREENSHOT = FOLDER.parent.parent / "docs" / "images" / "playground.png"
READY = re.compile(r"ready: (http://\S+)")


def read_examples() -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = json.loads(demo.EXAMPLES.read_text())
    return examples


class Demo(NamedTuple):
    """The address of a server with the demo, and its output."""

    url: str
    greeting: str
    process_id: int


@contextmanager
def serving_demo(*flags: str) -> Iterator[Demo]:
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=said, stderr=subprocess.PIPE, text=True, env=environ) as process,
    ):
        assert process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=(process.stderr,))  # or it would wait for a reader of its log
        try:
            for line in process.stderr:
                log.append(line)
                if READY.search(line):
                    break
            found = READY.search("".join(log))
            assert found, f"the demo did not start:\n{''.join(log)}"
            reader.start()
            urlopen(f"{found[1]}/health", timeout=60).close()  # its output is complete
            said.seek(0)
            yield Demo(found[1], said.read(), process.pid)
        finally:
            process.terminate()
            if reader.ident:
                reader.join()
