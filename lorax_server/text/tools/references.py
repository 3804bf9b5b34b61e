"""References within a JSON schema (`$ref`): resolve references, limit schema depth, and copy definitions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lorax_server.errors import InputError

MAX_REFERENCE_CHARACTERS = 256
# JSON levels, counted through references. llguidance compiles schemas by recursion, with up to 5 KB of stack per level,
# so the deepest schema needs a third of the trial compile's 4 MiB stack.
MAX_LEVELS = 256
DEFINITION_KEYWORDS = ("$defs", "definitions")


def split_reference(reference: Any) -> list[str] | None:
    """Return the path from the schema root, or None if the reference is too long or points outside the schema."""
    if not isinstance(reference, str) or len(reference) > MAX_REFERENCE_CHARACTERS:
        return None
    start, *names = reference.split("/")
    return [name.replace("~1", "/").replace("~0", "~") for name in names] if start == "#" else None


def follow_path(names: Sequence[str], root: Mapping[str, Any]) -> Any:
    """Return the value at a path, or None if it does not exist."""
    value: Any = root
    for name in names:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within a schema, or None if it does not exist."""
    names = split_reference(reference)
    return None if names is None else follow_path(names, root)


def check_depth(schema: Mapping[str, Any]) -> None:
    """Raise InputError if a schema is nested too deeply. References count as nesting."""
    _DepthMeter(schema).measure(schema, 0)


class _DepthMeter:
    """Measures schema depth, visiting each subschema only once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._levels: dict[int, int] = {}  # by subschema id

    def measure(self, subschema: Any, depth: int) -> int:
        """Return the number of levels in a subschema that is `depth` levels below the root."""
        if not isinstance(subschema, Mapping | list | tuple):
            return 0
        levels = self._levels.get(id(subschema))
        if levels is None and depth < MAX_LEVELS:
            self._levels[id(subschema)] = 0  # used where a recursive schema refers to this subschema
            children: Iterable[Any] = subschema
            if isinstance(subschema, Mapping):
                children = (*subschema.values(), resolve(subschema.get("$ref"), self._root))
            levels = 0
            for child in children:
                levels = max(levels, self.measure(child, depth + 1))
            self._levels[id(subschema)] = levels = levels + 1
        if levels is None or depth + levels > MAX_LEVELS:
            raise InputError(f"the JSON schema has more than {MAX_LEVELS} levels, counted through `$ref`; flatten it")
        return levels


class Definitions:
    """Selects the definitions that a subschema needs to become a separate schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._all = {word: root[word] for word in DEFINITION_KEYWORDS if isinstance(root.get(word), Mapping)}
        self._references: dict[tuple[str, str], list[str]] = {}  # by definition

    def with_definitions(self, subschema: Any) -> dict[str, Any]:
        """Return a subschema with the definitions that it uses.

        All definitions are included if a reference does not point to a definition.
        """
        own_definitions = subschema if isinstance(subschema, dict) else {}
        return {**own_definitions, **self._select_definitions(own_definitions)}

    def _select_definitions(self, subschema: Mapping[str, Any]) -> Mapping[str, Any]:
        selected: dict[str, dict[str, Any]] = {}
        waiting = find_references(subschema)
        while waiting:
            names = split_reference(waiting.pop())
            if names is None or len(names) < 2 or names[0] not in DEFINITION_KEYWORDS:
                return self._all
            word, name = names[:2]
            if name in self._all.get(word, {}) and name not in selected.get(word, {}):
                definition = selected.setdefault(word, {})[name] = self._all[word][name]
                if (word, name) not in self._references:
                    self._references[word, name] = find_references(definition)
                waiting += self._references[word, name]
        return selected


def find_references(schema: Any) -> list[str]:
    """Return the distinct references in a schema."""
    references: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        subschema = waiting.pop()
        if isinstance(subschema, Mapping):
            if isinstance(reference := subschema.get("$ref"), str):
                references[reference] = None
            waiting += subschema.values()
        elif isinstance(subschema, list | tuple):
            waiting += subschema
    return list(references)
