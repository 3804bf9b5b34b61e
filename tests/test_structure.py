"""Package structure: every folder has a docstring, and class names are unique."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lorax_server

PACKAGE = Path(lorax_server.__file__).parent
GENERATED = "pb"
# Allowed duplicates: the `CausalLM` contract, and names in the OpenAPI document.
TWO_MEANINGS = {"ErrorResponse", "Generation", "Model"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if GENERATED not in path.relative_to(PACKAGE).parts)


@cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in FILES}


def test_every_package_has_docstring() -> None:
    assert [
        name for name, tree in trees().items() if name.endswith("__init__.py") and not ast.get_docstring(tree)
    ] == []


def test_class_names_are_unique() -> None:
    names = Counter(node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == TWO_MEANINGS


@pytest.mark.parametrize("words", [("what", "who", "whoever", "whether", "how", "where", "which", "whose")])
def test_docstrings_do_not_start_with_vague_words(words: tuple[str, ...]) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        f"{name}:{getattr(node, 'name', 'module')}": ast.get_docstring(node) or ""
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, documented)
    }
    assert [place for place, text in docstrings.items() if text.split(" ")[0].lower().strip(".,:;'") in words] == []
