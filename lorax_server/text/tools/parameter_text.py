"""Converts parameter values that are written between tags. Strings are written verbatim, all other types as JSON."""

from collections.abc import Mapping, Sequence, Set
from types import NoneType
from typing import Any, NamedTuple

from lorax_server.errors import InputError
from lorax_server.text.tools.grammar import ANNOTATION_KEYWORDS, ANY_TEXT
from lorax_server.text.tools.json_tool_calls import dump_json, parse_json
from lorax_server.text.tools.parser import MalformedCallError
from lorax_server.text.tools.references import resolve

TYPE_NAMES = {NoneType: "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
ALL_TYPES = frozenset({*TYPE_NAMES.values(), "object"})
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # models also write Python constants
TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
MAX_DEPTH = 32  # schema levels


class TextSchema(NamedTuple):
    """Constraints on a text parameter that a grammar can enforce."""

    length: str  # regular expression
    choices: Sequence[str] | None
    unknown_keyword: str = ""  # keyword that cannot be enforced


class JsonTypeFinder:
    """Finds the JSON types that subschemas of one schema allow. Each subschema is analyzed once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}  # by subschema id
        self._texts: dict[int, TextSchema] = {}
        self._parts: list[Any] = []  # keeps the subschemas alive, so that ids stay unique

    def find(self, schema: Any) -> frozenset[str]:
        """Return the types that a subschema allows. Integers count as numbers."""
        return self._find_types(schema, 0) or ALL_TYPES

    def find_text_schema(self, schema: Mapping[str, Any], depth: int = 0) -> TextSchema:
        """Return the constraints on a text parameter. Follow references and `anyOf` with null."""
        if id(schema) not in self._texts:
            self._parts.append(schema)
            outer = next((word for word in ("$ref", "anyOf") if word in schema), "")
            self._texts[id(schema)] = TextSchema(ANY_TEXT, None, outer)  # for recursive references
            if not outer:
                self._texts[id(schema)] = _read_text_schema(schema)
            elif depth < MAX_DEPTH and not _find_unknown_keyword(schema, {outer}):
                inner = self._find_subschema(schema[outer])
                if isinstance(inner, Mapping):
                    self._texts[id(schema)] = self.find_text_schema(inner, depth + 1)
        return self._texts[id(schema)]

    def _find_subschema(self, value: Any) -> Any:
        """Return a reference's target, or the only alternative that allows text, or None if there is no such schema."""
        if not isinstance(value, list):
            return resolve(value, self._root)
        texts = [subschema for subschema in value if "string" in self.find(subschema)]
        return texts[0] if len(texts) == 1 else None

    def _find_types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ALL_TYPES
        if id(schema) not in self._types:
            self._parts.append(schema)
            self._types[id(schema)] = ALL_TYPES  # for recursive references
            self._types[id(schema)] = self._read_types(schema, depth)
        return self._types[id(schema)]

    def _read_types(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        types = ALL_TYPES
        if "$ref" in schema:
            types &= self._find_types(resolve(schema["$ref"], self._root), depth + 1)
        if (type_names := schema.get("type")) is not None:
            names = type_names if isinstance(type_names, list) else [type_names]
            types &= {"number" if name == "integer" else name for name in names if isinstance(name, str)}
        if "const" in schema:
            types &= {_json_type_of(schema["const"])}
        if isinstance(values := schema.get("enum"), list):
            types &= set(map(_json_type_of, values))
        for word in ("anyOf", "oneOf"):
            if isinstance(subschemas := schema.get(word), list):
                types &= frozenset().union(*(self._find_types(subschema, depth + 1) for subschema in subschemas))
        if isinstance(subschemas := schema.get("allOf"), list):
            for subschema in subschemas:
                types &= self._find_types(subschema, depth + 1) or ALL_TYPES
        return types


def _json_type_of(value: Any) -> str:
    return TYPE_NAMES.get(type(value), "object")


def is_text(types: frozenset[str]) -> bool:
    """Return True if a parameter with these JSON types can only be text or null."""
    return "string" in types and types <= {"string", "null"}


def _find_unknown_keyword(schema: Mapping[str, Any], known_keywords: Set[str]) -> str:
    """Return the first keyword that is neither known nor an annotation, or an empty string."""
    return next((word for word in schema if word not in known_keywords and word not in ANNOTATION_KEYWORDS), "")


def _read_text_schema(schema: Mapping[str, Any]) -> TextSchema:
    min_length, max_length = schema.get("minLength", 0), schema.get("maxLength")
    is_valid = type(min_length) is int and min_length >= 0
    if not is_valid or not (max_length is None or (type(max_length) is int and max_length >= min_length)):
        raise InputError("`tools`: `minLength` and `maxLength` must be integers with `minLength` <= `maxLength`")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else None
    pattern = rf"(.|\n){{{min_length},{'' if max_length is None else max_length}}}"
    return TextSchema(pattern, texts, _find_unknown_keyword(schema, TEXT_KEYWORDS))


def to_json(text: str, types: frozenset[str], is_json: bool) -> str:
    """Return a value as JSON. Text that does not match the types stays a string, so the tool can report the error."""
    if is_json or not is_text(types):
        try:
            value = parse_json(text)
            dump_json(value)  # NaN is not JSON
        except MalformedCallError:
            value = PYTHON_CONSTANTS.get(text.strip(), text)
        if (is_json or not isinstance(value, str)) and _json_type_of(value) in types:
            return dump_json(value)
    return "null" if "null" in types and text == "null" else dump_json(text)
