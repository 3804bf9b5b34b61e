"""Sandbox tasks that replace tokenizer conversion: they record their environment, hang, or write too much."""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from lorax_server.sandbox.task import TaskError
from lorax_server.text import convert_task
from lorax_server.text.convert_task import CONVERT_TASK

PATIENT = CONVERT_TASK._replace(cpu_s=500.0, wall_s=500.0, niceness=0)  # must succeed on a busy machine
RECORD = PATIENT._replace(function="tests.text.conversions:record")
HANG = PATIENT._replace(function="tests.text.conversions:hang")
OVERFILL = PATIENT._replace(function="tests.text.conversions:overfill")


def record(folder: Path, out: Path, config_path: Path | None) -> bytes:
    """Start a conversion, and write its environment and limits to `folder`."""

    def load(folder: Path, config: Any) -> Any:
        limits = {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_FSIZE", "RLIMIT_CORE")}
        seen = {"environment": dict(os.environ), "limits": limits, "out": str(out)}
        (folder / "seen.json").write_text(json.dumps(seen))
        raise TaskError("recorded")

    convert_task._load = load
    return convert_task.convert(folder, out, config_path)


def hang(*_: Any) -> bytes:
    while True:
        time.sleep(1)


def overfill(folder: Path, out: Path, config_path: Path | None) -> bytes:
    """Convert with a file size limit below the size of the result."""
    convert_task.MAX_FILE_BYTES = 1000
    return convert_task.convert(folder, out, config_path)
