"""The tutorials work: their commands run in order against a real server, and print the documented output.

A code block with a title is a file. Two titles are special: `server` starts the server, and `output` is the output of
the block before it. In outputs, `...` stands for any text.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.commands import PATH, Block, read_blocks, run
from tests.e2e.http_server import import_path

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
READY = re.compile(r"^(?:\S+ INFO \S+ )?ready: http://(\S+)")  # not in the logs of replicas, which have a prefix
ADDRESS = re.compile(r"localhost:(?:3000|8000)")


@contextmanager
def serving(start: str, folder: Path) -> Iterator[str]:
    """Start the server of a tutorial on a free port. Yield its address."""
    script = re.sub(r"^(?=lorax|LORAX_)", "exec env ", f"{start.rstrip()} --port 0", flags=re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        environ = {**os.environ, "PATH": PATH, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
        environ |= {"RAY_TMPDIR": temporary, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        command = ["bash", "-c", script]
        with subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            log: list[str] = []
            reader = threading.Thread(target=log.extend, args=(process.stdout,))  # a full pipe would block the server
            try:
                for line in process.stdout:
                    log.append(line)
                    if READY.match(line):
                        break
                result = READY.match(log[-1])
                assert result, "".join(log)
                reader.start()
                yield result[1]
            finally:
                process.terminate()
                if reader.ident:
                    reader.join()


def check_output(output: str, expected: str) -> None:
    pattern = ".*".join(map(re.escape, expected.strip().split("...")))
    assert re.fullmatch(pattern, output.strip(), flags=re.DOTALL), f"{output!r} is not {expected!r}"


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_commands_print_documented_output(page: Path, tmp_path: Path) -> None:
    blocks = read_blocks(page.read_text())
    start = next(index for index, block in enumerate(blocks) if block.title == "server")
    run_blocks(blocks[:start], tmp_path, "")
    with serving(blocks[start].text, tmp_path) as address:
        run_blocks(blocks[start + 1 :], tmp_path, address)


def run_blocks(blocks: list[Block], folder: Path, address: str) -> None:
    output = ""
    for language, title, text in blocks:
        if title == "output":
            check_output(output, text)
        elif title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(text)
            if language == "yaml":
                assert isinstance(yaml.safe_load(text), dict)
        elif language in ("sh", "python"):
            command = ADDRESS.sub(address, text)
            url = f"http://{address}" if address else ""
            output = run(command if language == "sh" else [sys.executable, "-c", command], folder, url)


def test_every_tutorial_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in TUTORIALS:
        assert f"- tutorials/{page.name}" in navigation
