"""Untrusted JSON: whatever readers disagree on is refused."""

import json
from math import isfinite
from typing import Any

MAX_DEPTH = 32


def parse_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object without repeated keys, infinite numbers or deep nesting; anything else is a ValueError."""
    try:
        parsed = json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(parsed, dict):
        raise ValueError("it is not a JSON object")
    _check_depth(parsed, MAX_DEPTH)
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers differ in which of two values they take, and an adapter must mean one thing.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key is given twice")
    return unique


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:32]} is not a finite number")
    return number


def _check_depth(value: object, depth_left: int) -> None:
    if depth_left == 0:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_depth(child, depth_left - 1)
