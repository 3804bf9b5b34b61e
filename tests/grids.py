"""Test grids: `make test` runs a representative part, `make test-all` and CI run all cases."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values as test parameters. Values outside `quick` are marked as slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]


def some_fast(rows: Iterable[tuple[Any, ...]], every: int = 5) -> list[Any]:
    """Return the rows as test parameters. All but one in `every` are marked as slow."""
    return [pytest.param(*row, marks=pytest.mark.slow if index % every else ()) for index, row in enumerate(rows)]
