"""`oneOf` as `anyOf` in a JSON schema, where both mean the same: a property tells all parts apart.

The library that compiles schemas sees this of tags that are texts, without recursion. Unions of pydantic have more.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lorax_server.text.tools.references import follow_names, split_reference

PARTS = ("anyOf", "oneOf")
LISTS = ("allOf", "prefixItems", *PARTS)
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
MAX_STEPS = 10_000  # for all parts of a schema: what is larger stays as it is, and is refused
MAX_NAMES = 8  # of properties that are tried

Tag = tuple[str, Any]  # a kind and a value, since Python takes 1 and true for the same


def join_disjoint(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that accepts the same."""
    return _Joiner(schema).join(schema)


class _Joiner:
    """Looks at every part of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = 0

    def join(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        joined = {word: self._join_value(word, value) for word, value in schema.items()}
        if "oneOf" in schema and "anyOf" not in schema and self._is_disjoint(schema):
            joined["anyOf"] = joined.pop("oneOf")
            joined.pop("discriminator", None)  # not JSON Schema's: it says nothing more, and hinders recursion
        return joined

    def _join_value(self, word: str, value: Any) -> Any:
        if word in LISTS and isinstance(value, list):
            return [self._join_part(part) for part in value]
        if word in MAPS and isinstance(value, Mapping):
            return {name: self._join_part(part) for name, part in value.items()}
        return self._join_part(value) if word in SINGLE else value

    def _join_part(self, part: Any) -> Any:
        return self.join(part) if isinstance(part, Mapping) else part

    def _is_disjoint(self, schema: Mapping[str, Any]) -> bool:
        parts = schema["oneOf"]
        if not isinstance(parts, list) or not parts:
            return False
        return any(self._tells_apart(name, parts) for name in self._find_names(schema, parts[0]))

    def _find_names(self, schema: Mapping[str, Any], first: Any) -> list[str]:
        """Find the properties that may be tags: the one that the schema says, or those of the first part."""
        discriminator = schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        if isinstance(name, str):
            return [name]
        properties = (self._resolve(first) or {}).get("properties")
        return [*properties][:MAX_NAMES] if isinstance(properties, Mapping) else []

    def _tells_apart(self, name: str, parts: list[Any]) -> bool:
        known: set[Tag] = set()
        for part in parts:
            tags = set(self._find_tags(name, part, set()))
            if not tags or None in tags or tags & known:
                return False
            known |= {tag for tag in tags if tag is not None}
        return True

    def _find_tags(self, name: str, part: Any, seen: set[int]) -> Iterator[Tag | None]:
        """Find the values of a property that a part wants; None among them if it may have others, or be left out."""
        self._steps += 1
        found = self._resolve(part)
        if found is None or id(found) in seen or self._steps > MAX_STEPS:
            yield None
            return
        seen.add(id(found))
        inner = next((found[word] for word in PARTS if isinstance(found.get(word), list)), None)
        if inner is not None:
            for each in inner:
                yield from self._find_tags(name, each, seen)
            return
        properties, required = found.get("properties"), found.get("required")
        is_sure = found.get("type") == "object" and isinstance(required, list) and name in required
        tag = self._resolve(properties.get(name)) if is_sure and isinstance(properties, Mapping) else None
        yield from map(_to_tag, _find_values(tag or {}))

    def _resolve(self, schema: Any) -> Mapping[str, Any] | None:
        """Follow references within the schema; None if they lead nowhere."""
        while isinstance(schema, Mapping) and "$ref" in schema:
            names = split_reference(schema["$ref"])
            self._steps += 1 + len(names or ())
            if names is None or self._steps > MAX_STEPS:
                return None
            schema = follow_names(names, self._root)
        return schema if isinstance(schema, Mapping) else None


def _find_values(tag: Mapping[str, Any]) -> list[Any]:
    values = [tag["const"]] if "const" in tag else tag.get("enum")
    return values if isinstance(values, list) and values else [{}]


def _to_tag(value: Any) -> Tag | None:
    """Return a tag; none for a list or an object."""
    if isinstance(value, str | bool | None):
        return (type(value).__name__, value)
    return ("number", value) if isinstance(value, int | float) else None
