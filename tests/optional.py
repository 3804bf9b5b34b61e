"""Helper for optional values that are always set in a test."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return `value`, which must not be None."""
    assert value is not None
    return value
