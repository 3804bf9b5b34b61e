"""Rewrites `oneOf` as `anyOf` in JSON schemas if a tag property distinguishes all alternatives.

llguidance does this only for string and boolean tags, and not in recursive schemas. Pydantic unions can also have
integer tags and be recursive.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from lorax_server.text.tools.references import follow_path, split_reference

# Keywords whose values are schemas by name.
SUBSCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
VALUE_KEYWORDS = ("const", "enum", "default", "examples", "required")  # not schemas
INCOMPARABLE_TAG = ""  # a tag that cannot be compared
MAX_STEPS = 10_000
MAX_TAG_NAMES = 8  # properties that are tried as the tag


def rewrite_one_of(schema: Mapping[str, Any], max_steps: int = MAX_STEPS) -> dict[str, Any]:
    """Return an equivalent schema with `anyOf` in place of each `oneOf` whose alternatives cannot overlap.

    Reading an alternative, tag value, required name or reference name counts as one step. After `max_steps`, the
    remaining `oneOf` keywords are left unchanged, and the grammar compiler rejects them.
    """
    rewritten: dict[str, Any] = _Rewriter(schema, max_steps).rewrite(schema)
    return rewritten


class _Rewriter:
    """Rewrites one schema. Each subschema is visited once, and all other work counts as steps."""

    def __init__(self, root: Mapping[str, Any], max_steps: int) -> None:
        self._root = root
        self._steps_left = max_steps

    def rewrite(self, part: Any, is_schema: bool = True) -> Any:
        """Rewrite a schema, a list of schemas, or (with `is_schema=False`) a mapping of names to schemas."""
        if isinstance(part, list):
            return [self.rewrite(each) for each in part]
        if not isinstance(part, Mapping):
            return part
        if not is_schema:
            return {name: self.rewrite(each) for name, each in part.items()}
        result = {
            word: value if word in VALUE_KEYWORDS else self.rewrite(value, word not in SUBSCHEMA_MAP_KEYWORDS)
            for word, value in part.items()
        }
        if "oneOf" in part and "anyOf" not in part and self._is_disjoint(part):
            result["anyOf"] = result.pop("oneOf")
            result.pop("discriminator", None)  # not a JSON Schema keyword; llguidance rejects it in recursive schemas
        return result

    def _is_disjoint(self, schema: Mapping[str, Any]) -> bool:
        alternatives = schema["oneOf"]
        if not isinstance(alternatives, list) or not alternatives:
            return False
        return any(self._is_tag(name, alternatives) for name in self._find_tag_names(schema, alternatives[0]))

    def _find_tag_names(self, schema: Mapping[str, Any], first: Any) -> Iterable[str]:
        """Return the names of properties that may be tags: the discriminator, or the first alternative's properties."""
        discriminator = schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        if isinstance(name, str):
            return [name]
        properties = (self._resolve(first) or {}).get("properties")
        return islice(properties, MAX_TAG_NAMES) if isinstance(properties, Mapping) else ()

    def _is_tag(self, name: str, alternatives: list[Any]) -> bool:
        """Return True if the property has different values in all alternatives."""
        known: set[str] = set()
        for alternative in alternatives:
            tags: set[str] = set()
            if not self._add_tags(name, alternative, tags, set()) or not tags or not known.isdisjoint(tags):
                return False
            known |= tags
        return True

    def _add_tags(self, name: str, schema: Any, tags: set[str], visited_ids: set[int]) -> bool:
        """Add all values that a schema allows for a property. Return False if they are not known."""
        resolved = self._resolve(schema)
        if resolved is None or id(resolved) in visited_ids:
            return False
        visited_ids.add(id(resolved))
        inner = next((resolved[word] for word in ("anyOf", "oneOf") if isinstance(resolved.get(word), list)), None)
        if inner is not None:
            return all(self._add_tags(name, each, tags, visited_ids) for each in inner)
        properties, required = resolved.get("properties"), resolved.get("required")
        if resolved.get("type") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
            return False
        tag = self._resolve(properties.get(name)) or {}
        values = [tag["const"]] if "const" in tag else tag.get("enum")
        if not isinstance(values, list) or not self._count_steps(len(values) + len(required)) or name not in required:
            return False
        tags |= {json.dumps(value) if isinstance(value, str | int | None) else INCOMPARABLE_TAG for value in values}
        return INCOMPARABLE_TAG not in tags

    def _resolve(self, schema: Any) -> Mapping[str, Any] | None:
        """Follow references within the schema. Return None if the target does not exist or the step limit is
        exceeded.
        """
        is_allowed = self._count_steps(1)
        while is_allowed and isinstance(schema, Mapping) and "$ref" in schema:
            names = split_reference(schema["$ref"])
            is_allowed = names is not None and self._count_steps(1 + len(names))
            schema = follow_path(names or (), self._root)
        return schema if is_allowed and isinstance(schema, Mapping) else None

    def _count_steps(self, count: int) -> bool:
        """Add `count` steps. Return False if the maximum number of steps is exceeded."""
        self._steps_left -= count
        return self._steps_left >= 0
