"""`lorax serve` as who has just installed it runs it: with the demo model that comes with the package."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lorax_server

FOLDER = Path(lorax_server.__file__).parent / "demo"
SCREENSHOT = FOLDER.parent.parent / "docs" / "images" / "playground.png"
READY = re.compile(r"ready: (http://\S+)")


def is_there() -> bool:
    return (FOLDER / "examples.json").is_file() and (FOLDER / "model").is_dir()


def read_examples() -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = json.loads((FOLDER / "examples.json").read_text())
    return examples


@contextmanager
def serving_demo() -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        log = []
        try:
            for line in process.stderr:
                log.append(line)
                if READY.search(line):
                    break
            found = READY.search("".join(log))
            assert found, f"the demo did not start:\n{''.join(log)}"
            reader = threading.Thread(target=process.stderr.read)  # or it would wait for who reads its log
            reader.start()
            yield found[1]
        finally:
            process.terminate()
    reader.join()
