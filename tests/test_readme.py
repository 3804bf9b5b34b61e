"""The README: its commands and code run, its flags exist, its links work."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from lorax_server.cli.settings import parse
from tests.commands import read_blocks, run
from tests.demo.server import Demo

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ADDRESS = "localhost:3000"
FIELDS = {"person": "Klonny Bardwell", "town": "Spigford", "item": "kites", "colour": "pink", "count": 12}
QUERY = "SELECT count FROM orders WHERE person = 'Klonny Bardwell' AND item = 'kites'"


def blocks(language: str) -> list[str]:
    return [block.text for block in read_blocks(README) if block.language == language]


def lines(language: str) -> list[str]:
    return [line for block in blocks(language) for line in block.splitlines()]


def test_readme_requests_work(demo: Demo) -> None:
    activate, *questions = lines("bash")
    assert activate == ". .venv/bin/activate"  # this one is active
    sentiment, fields, query = (run(line.replace(ADDRESS, demo.url), ROOT, demo.url).strip() for line in questions)
    assert sentiment == "positive"
    assert FIELDS.items() <= json.loads(json.loads(fields)["choices"][0]["message"]["content"]).items()
    assert json.loads(query)["generated_text"] == QUERY


def test_readme_client_works(demo: Demo) -> None:
    (block,) = blocks("python")
    output = run([sys.executable, "-c", block.replace(f"http://{ADDRESS}", demo.url)], ROOT)
    assert output.startswith("[NAME] of [TOWN] bought 12 pink kites")


@pytest.mark.parametrize("command", lines("sh"))
def test_make_targets_exist(command: str) -> None:
    """Check that each target exists in the Makefile. Running `make test` inside a test would not terminate."""
    program, target = command.split("#", maxsplit=1)[0].split()
    assert program == "make"
    assert run([program, "-n", target], ROOT)


@pytest.mark.parametrize("command", lines("shell"))
def test_readme_flags_exist(command: str) -> None:
    """Parse and check the flags, without downloading models."""
    words = shlex.split(command)
    environ = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    program, *flags = words[len(environ) :]
    kind = "launcher" if program == "lorax-launcher" else flags.pop(0)
    assert kind in ("serve", "launcher")
    parse(flags, environ, kind).make_config(None)


def test_relative_links_exist() -> None:
    links = re.findall(r"\]\((?!https)(.*?)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
