"""Every attack in docs/security.md names an existing test that runs in CI."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NEVER_RUN = {"skip", "skipif", "xfail", "gpu"}


def rows() -> list[list[str]]:
    """Return the cells of all table rows with a test name."""
    lines = (ROOT / "docs" / "security.md").read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "`tests/" in line and "::" in line
    ]


ROWS = rows()


@functools.cache
def functions_in(path: str) -> dict[str, set[str]]:
    """Return the test functions in a file with their pytest marks."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name: marks_of(function) for function in functions}


def marks_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    nodes = [node for decorator in function.decorator_list for node in ast.walk(decorator)]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_there_are_at_least_60_distinct_attacks() -> None:
    assert len(ROWS) >= 60
    attacks = [row[0] for row in ROWS]
    assert len(set(attacks)) == len(attacks)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_every_attack_names_existing_test(row: list[str]) -> None:
    _, happens, named = row
    assert happens
    result = TEST.findall(named)
    assert result, named
    for path, name in result:
        marks = functions_in(path).get(name)
        assert marks is not None, f"{path} has no {name}"
        assert not marks & NEVER_RUN
