"""Values of parameters that are written as text between tags: strings as they are, all others as JSON."""

from collections.abc import Callable, Mapping, Sequence, Set
from types import NoneType
from typing import Any, NamedTuple

from lorax_server.errors import InputError
from lorax_server.text.tools.grammar import ANNOTATIONS, ANY
from lorax_server.text.tools.json_section import dump, load
from lorax_server.text.tools.parser import MalformedCallError
from lorax_server.text.tools.references import resolve

ALL_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})
WORDS = {"True": True, "False": False, "None": None}  # Python's, which models write as well
TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
MAX_DEPTH = 32  # of a schema


class TypeFinder:
    """Finds the JSON types that parts of one schema allow. Each part is read once, however many parts refer to it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._found: dict[tuple[str, int], tuple[Any, Any]] = {}  # holds the parts, so that their ids stay their own

    def find(self, schema: Any) -> frozenset[str]:
        """Return the types that a part allows, with integers among the numbers; all types if it names none."""
        return self._find(schema, 0) or ALL_TYPES

    def find_text(self, parts: list[Any]) -> Any:
        """Return the only part that allows strings; None if no part does, or several."""

        def find() -> Any:
            texts = [part for part in parts if "string" in self.find(part)]
            return texts[0] if len(texts) == 1 else None

        return self.remember("text", parts, find)

    def remember(self, kind: str, part: Any, find: Callable[[], Any], meanwhile: Any = None) -> Any:
        """Return what `find` has found for a part. `meanwhile` stands for it where the part refers to itself."""
        key = kind, id(part)
        if key not in self._found:
            self._found[key] = part, meanwhile
            self._found[key] = part, find()
        return self._found[key][1]

    def _find(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ALL_TYPES
        types: frozenset[str] = self.remember("types", schema, lambda: self._read(schema, depth), ALL_TYPES)
        return types

    def _read(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        types = ALL_TYPES
        if "$ref" in schema:
            types &= self._find(resolve(schema["$ref"], self.root), depth + 1)
        if (named := schema.get("type")) is not None:
            names = named if isinstance(named, list) else [named]
            types &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
        if "const" in schema:
            types &= {_type_of(schema["const"])}
        if isinstance(values := schema.get("enum"), list):
            types &= _types_of(values)
        for word in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(word), list):
                types &= frozenset().union(*(self._find(part, depth + 1) for part in parts))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                types &= self._find(part, depth + 1) or ALL_TYPES
        return types


def _types_of(values: list[Any]) -> frozenset[str]:
    return frozenset(map(_type_of, {type(value): value for value in values}.values()))


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_text(types: frozenset[str]) -> bool:
    """Tell whether values are texts, or null."""
    return "string" in types and types <= {"string", "null"}


class TextSchema(NamedTuple):
    """The part of a schema that a text can be held to."""

    length: str  # a regular expression
    choices: Sequence[str] | None
    unknown: str = ""  # a keyword that it cannot be held to


def find_text_schema(schema: Mapping[str, Any], finder: TypeFinder) -> TextSchema:
    """Find the schema of a parameter's texts: also behind references, and beside null."""
    outer = ""
    for _ in range(MAX_DEPTH):
        outer = next((word for word in ("$ref", "anyOf") if word in schema), "")
        if not outer:
            found: TextSchema = finder.remember("text", schema, lambda: _read_text_schema(schema))  # noqa: B023
            return found
        inner = _find_inner(schema, finder)
        if _find_unknown(schema, {outer}) or not isinstance(inner, Mapping):
            break
        schema = inner
    return TextSchema(ANY, None, outer)


def _find_inner(schema: Mapping[str, Any], finder: TypeFinder) -> Any:
    """Follow a reference, or find the part that allows texts; None if there is none."""
    reference, parts = schema.get("$ref"), schema.get("anyOf")
    if isinstance(reference, str):
        return resolve(reference, finder.root)
    return finder.find_text(parts) if isinstance(parts, list) else None


def _find_unknown(schema: Mapping[str, Any], known: Set[str]) -> str:
    """Return the first keyword that is neither known nor an annotation; empty if there is none."""
    return next((word for word in schema if word not in known and word not in ANNOTATIONS), "")


def _read_text_schema(schema: Mapping[str, Any]) -> TextSchema:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if type(least) is not int or type(most) not in (int, NoneType) or least < 0 or (most is not None and most < least):
        raise InputError("`tools`: `minLength` and `maxLength` are whole numbers, the second not less than the first")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else None
    return TextSchema(rf"(.|\n){{{least},{'' if most is None else most}}}", texts, _find_unknown(schema, TEXT_KEYWORDS))


def to_json(text: str, types: frozenset[str], is_json: bool) -> str:
    """Return a value as JSON. A text that is not of the types stays a string: its reader may say what is wrong."""
    if is_json or not is_text(types):
        try:
            value = load(text)
            dump(value)  # NaN is not JSON
        except MalformedCallError:
            value = WORDS.get(text.strip(), text)
        if (is_json or not isinstance(value, str)) and _type_of(value) in types:
            return dump(value)
    return "null" if "null" in types and text == "null" else dump(text)
