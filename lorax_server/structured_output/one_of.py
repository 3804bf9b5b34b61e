"""Rewrite `oneOf` as `anyOf` in a JSON schema where a property tells all parts apart, so that both mean the same.

llguidance recognizes such a `oneOf` only if the tags are strings and no part is recursive. Pydantic writes others, too.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from lorax_server.text.tools.references import follow_names, split_reference

PARTS = ("anyOf", "oneOf")
LISTS = ("allOf", "prefixItems", *PARTS)
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
MAX_STEPS = 10_000
MAX_NAMES = 8  # properties tried as the tag

Tag = tuple[str, Any]  # a kind and a value: in Python, 1 == True


def join_disjoint(schema: Mapping[str, Any], max_steps: int = MAX_STEPS) -> dict[str, Any]:
    """Return an equivalent schema, with `anyOf` in place of each `oneOf` whose parts cannot overlap.

    Each part, tag value, required name and reference name that is looked at to compare parts is a step. After
    `max_steps`, each further `oneOf` stays, and is rejected when the schema is compiled.
    """
    joined: dict[str, Any] = _Joiner(schema, max_steps).join(schema)
    return joined


class _Joiner:
    """Rewrites one schema. It visits each part once; everything else counts as a step."""

    def __init__(self, root: Mapping[str, Any], max_steps: int) -> None:
        self._root = root
        self._steps_left = max_steps

    def join(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        joined: dict[str, Any] = {}
        for word, value in schema.items():
            if word in LISTS and isinstance(value, list):
                joined[word] = [self.join(part) for part in value]
            elif word in MAPS and isinstance(value, Mapping):
                joined[word] = {name: self.join(part) for name, part in value.items()}
            else:
                joined[word] = self.join(value) if word in SINGLE else value
        if "oneOf" in schema and "anyOf" not in schema and self._is_disjoint(schema):
            joined["anyOf"] = joined.pop("oneOf")
            joined.pop("discriminator", None)  # not a JSON Schema keyword; llguidance rejects it in recursive schemas
        return joined

    def _is_disjoint(self, schema: Mapping[str, Any]) -> bool:
        parts = schema["oneOf"]
        if not isinstance(parts, list) or not parts:
            return False
        return any(self._tells_apart(name, parts) for name in self._find_names(schema, parts[0]))

    def _find_names(self, schema: Mapping[str, Any], first: Any) -> Iterable[str]:
        """Return the properties that may be the tag: the discriminator, or the first part's properties."""
        discriminator = schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        if isinstance(name, str):
            return [name]
        properties = (self._resolve(first) or {}).get("properties")
        return islice(properties, MAX_NAMES) if isinstance(properties, Mapping) else ()

    def _tells_apart(self, name: str, parts: list[Any]) -> bool:
        known: set[Tag] = set()
        for part in parts:
            tags: set[Tag] = set()
            if not self._add_tags(name, part, tags, set()) or not tags or not known.isdisjoint(tags):
                return False
            known |= tags
        return True

    def _add_tags(self, name: str, part: Any, tags: set[Tag], seen: set[int]) -> bool:
        """Add all values that a part allows for a property. Return False if the property may have others, or none."""
        found = self._resolve(part)
        if found is None or id(found) in seen:
            return False
        seen.add(id(found))
        inner = next((found[word] for word in PARTS if isinstance(found.get(word), list)), None)
        if inner is not None:
            return all(self._add_tags(name, each, tags, seen) for each in inner)
        properties, required = found.get("properties"), found.get("required")
        if found.get("type") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
            return False
        tag = self._resolve(properties.get(name)) or {}
        values = [tag["const"]] if "const" in tag else tag.get("enum")
        if not isinstance(values, list) or not self._step(len(values) + len(required)) or name not in required:
            return False
        tags.update(map(_to_tag, values))
        return UNKNOWN not in tags

    def _resolve(self, schema: Any) -> Mapping[str, Any] | None:
        """Follow references within the schema. Return None if the target does not exist, or after too many steps."""
        is_allowed = self._step(1)
        while is_allowed and isinstance(schema, Mapping) and "$ref" in schema:
            names = split_reference(schema["$ref"])
            is_allowed = names is not None and self._step(1 + len(names))
            schema = follow_names(names or (), self._root)
        return schema if is_allowed and isinstance(schema, Mapping) else None

    def _step(self, count: int) -> bool:
        """Count steps before they are taken; return False if there are too many."""
        self._steps_left -= count
        return self._steps_left >= 0


UNKNOWN: Tag = ("", None)


def _to_tag(value: Any) -> Tag:
    """Return a hashable tag; `UNKNOWN` for a list or an object."""
    if isinstance(value, str | bool | None):
        return (type(value).__name__, value)
    return ("number", value) if isinstance(value, int | float) else UNKNOWN
