"""Parse untrusted JSON strictly, rejecting input that JSON parsers interpret differently."""

import json
from math import isfinite
from typing import Any

MAX_DEPTH = 32


def parse_json(content: bytes) -> dict[str, Any]:
    """Parse and return a JSON object. Raise ValueError for duplicate keys, non-finite numbers or deep nesting."""
    try:
        parsed = json.loads(
            content.decode(),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_parse_finite,
            parse_float=_parse_finite,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(parsed, dict):
        raise ValueError("it is not a JSON object")
    _check_depth(parsed, MAX_DEPTH)
    return parsed


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON parsers differ in which value of a duplicate key they use.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("it has duplicate keys")
    return unique


def _parse_finite(text: str) -> float:
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
