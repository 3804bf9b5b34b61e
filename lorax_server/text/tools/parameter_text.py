"""Values of parameters that are written as text between tags: strings as they are, all others as JSON."""

from collections.abc import Mapping, Sequence, Set
from types import NoneType
from typing import Any, NamedTuple

from lorax_server.errors import InputError
from lorax_server.text.tools.grammar import ANNOTATIONS, ANY
from lorax_server.text.tools.json_section import dump, load
from lorax_server.text.tools.parser import MalformedCallError
from lorax_server.text.tools.references import resolve

TYPE_NAMES = {NoneType: "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
ALL_TYPES = frozenset({*TYPE_NAMES.values(), "object"})
WORDS = {"True": True, "False": False, "None": None}  # Python's, which models write as well
TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
MAX_DEPTH = 32  # of a schema


class TextSchema(NamedTuple):
    """The part of a schema that a text can be held to."""

    length: str  # a regular expression
    choices: Sequence[str] | None
    unknown: str = ""  # a keyword that it cannot be held to


class TypeFinder:
    """Finds the JSON types that parts of one schema allow. Each part is read once, however many parts refer to it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}  # by id of the part
        self._texts: dict[int, TextSchema] = {}
        self._parts: list[Any] = []  # the parts above, so that their ids stay their own

    def find(self, schema: Any) -> frozenset[str]:
        """Return the types that a part allows, with integers among the numbers; all types if it names none."""
        return self._find(schema, 0) or ALL_TYPES

    def find_text(self, schema: Mapping[str, Any], depth: int = 0) -> TextSchema:
        """Find the schema of a parameter's texts: also behind references, and beside null."""
        if id(schema) not in self._texts:
            self._parts.append(schema)
            outer = next((word for word in ("$ref", "anyOf") if word in schema), "")
            self._texts[id(schema)] = TextSchema(ANY, None, outer)  # where the part refers to itself
            if not outer:
                self._texts[id(schema)] = _read_text_schema(schema)
            elif depth < MAX_DEPTH and not _find_unknown(schema, {outer}):
                inner = self._find_inner(schema[outer])
                if isinstance(inner, Mapping):
                    self._texts[id(schema)] = self.find_text(inner, depth + 1)
        return self._texts[id(schema)]

    def _find_inner(self, value: Any) -> Any:
        """Follow a reference, or find the only part that allows texts; None if there is none, or several."""
        if not isinstance(value, list):
            return resolve(value, self._root)
        texts = [part for part in value if "string" in self.find(part)]
        return texts[0] if len(texts) == 1 else None

    def _find(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ALL_TYPES
        if id(schema) not in self._types:
            self._parts.append(schema)
            self._types[id(schema)] = ALL_TYPES  # where the part refers to itself
            self._types[id(schema)] = self._read(schema, depth)
        return self._types[id(schema)]

    def _read(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        types = ALL_TYPES
        if "$ref" in schema:
            types &= self._find(resolve(schema["$ref"], self._root), depth + 1)
        if (named := schema.get("type")) is not None:
            names = named if isinstance(named, list) else [named]
            types &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
        if "const" in schema:
            types &= {_type_of(schema["const"])}
        if isinstance(values := schema.get("enum"), list):
            types &= set(map(_type_of, values))
        for word in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(word), list):
                types &= frozenset().union(*(self._find(part, depth + 1) for part in parts))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                types &= self._find(part, depth + 1) or ALL_TYPES
        return types


def _type_of(value: Any) -> str:
    return TYPE_NAMES.get(type(value), "object")


def is_text(types: frozenset[str]) -> bool:
    """Tell whether values are texts, or null."""
    return "string" in types and types <= {"string", "null"}


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
