"""References within a JSON schema (`$ref`), which others write: each is short, or leads nowhere."""

from collections.abc import Mapping, Sequence
from typing import Any

MAX_REFERENCE = 256  # characters


def split_reference(reference: Any) -> list[str] | None:
    """Return the names on the way from a schema's root; None if the reference is too long, or leads elsewhere."""
    if not isinstance(reference, str) or len(reference) > MAX_REFERENCE:
        return None
    start, *names = reference.split("/")
    return [name.replace("~1", "/").replace("~0", "~") for name in names] if start == "#" else None


def follow_names(names: Sequence[str], root: Mapping[str, Any]) -> Any:
    """Return what is at the end of the way; None if there is nothing."""
    found: Any = root
    for name in names:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """Follow a reference within a schema; None if it leads elsewhere, or nowhere."""
    names = split_reference(reference)
    return None if names is None else follow_names(names, root)
