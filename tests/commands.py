"""Extracts and runs the commands of documentation pages."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.e2e.http_server import import_path

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
BLOCK = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block of a Markdown page."""

    language: str
    title: str
    text: str


def read_blocks(page: str) -> list[Block]:
    return [Block(*groups) for groups in BLOCK.findall(page)]


def run(command: str | list[str], folder: Path, url: str = "") -> str:
    """Run a command with this environment's programs. Return its output."""
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env={**os.environ, "PATH": PATH, "PYTHONPATH": import_path(), "LORAX_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
