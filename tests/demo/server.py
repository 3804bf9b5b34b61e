"""Run `lorax serve` with the bundled demo model."""

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

FOLDER = demo.DEMO_FOLDER
SCREENSHOT = FOLDER.parent.parent / "docs" / "images" / "playground.png"
READY = re.compile(r"ready: (http://\S+)")


def read_examples() -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = json.loads(demo.EXAMPLES_PATH.read_text())
    return examples


class Demo(NamedTuple):
    """The URL of a demo server, and its output."""

    url: str
    greeting: str
    process_id: int


@contextmanager
def serving_demo(*flags: str) -> Iterator[Demo]:
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, env=environ) as process,
    ):
        assert process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=(process.stderr,))  # a full pipe would block the server
        try:
            for line in process.stderr:
                log.append(line)
                if READY.search(line):
                    break
            result = READY.search("".join(log))
            assert result, f"the demo did not start:\n{''.join(log)}"
            reader.start()
            urlopen(f"{result[1]}/health", timeout=60).close()  # the output is complete
            output.seek(0)
            yield Demo(result[1], output.read(), process.pid)
        finally:
            process.terminate()
            if reader.ident:
                reader.join()
