"""The structure that a request asks for, in the words of OpenAI, LoRAX and vLLM."""

from collections.abc import Callable, Mapping
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.structured_output.grammars import (
    ANY_OBJECT,
    from_choices,
    from_grammar,
    from_json_schema,
    from_json_text,
    from_regex,
)
from lorax_server.types import Structure

GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
# Settings of vLLM that change what is allowed, with the values that ask for nothing.
UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def choose_structure(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None, guided: Mapping[str, Any]
) -> Structure | None:
    """Return what OpenAI's `response_format`, vLLM's `structured_outputs` or one of its `guided_...` asks for."""
    asked: dict[str, Callable[[], Structure]] = {}
    if response_format is not None and read_type(response_format) != "text":
        asked["response_format"] = lambda: read_format(response_format)
    if structured is not None:
        asked |= _read_structured(structured)
    for kind, name in GUIDED.items():
        if (value := guided.get(name)) is not None:
            asked[name] = _reader(kind, name, value)
    _check(len(asked) <= 1, f"{' and '.join(f'`{name}`' for name in asked)} ask for two forms of one answer; give one")
    for name, read in asked.items():
        try:
            return read()
        except NotSupportedError:
            raise
        except InputError as error:
            raise InputError(f"`{name}`: {error}") from error
    return None


def read_type(response_format: Mapping[str, Any]) -> str:
    """Return the type in OpenAI's spelling. LoRAX knows some as `JsonObject` too."""
    kind = response_format.get("type")
    _check(isinstance(kind, str), "`response_format` needs a `type`: text, json_object or json_schema")
    spelt = str(kind).lower().replace("_", "")
    known = {"text": "text", "jsonobject": "json_object", "jsonschema": "json_schema"}
    if spelt not in known:
        raise NotSupportedError(
            f"`response_format` {str(kind)[:32]!r} is not known here; there are text, json_object and json_schema"
        )
    return known[spelt]


def read_format(response_format: Mapping[str, Any]) -> Structure:
    """Read a `response_format` that is not text. OpenAI has the schema in `json_schema`, LoRAX in `schema`."""
    schema = response_format.get("schema")
    nested = response_format.get("json_schema")
    if read_type(response_format) == "json_schema" and nested is not None:
        _check(isinstance(nested, Mapping), "`json_schema` is an object with a `name` and a `schema`")
        schema = nested.get("schema")
    return from_json_schema(ANY_OBJECT if schema is None else schema)


def _read_structured(structured: Mapping[str, Any]) -> dict[str, Callable[[], Structure]]:
    asked: dict[str, Callable[[], Structure]] = {}
    for name, value in structured.items():
        if name in GUIDED and value is not None:
            asked[f"structured_outputs.{name}"] = _reader(name, name, value)
        elif name == "json_object" and value:
            asked[f"structured_outputs.{name}"] = lambda: from_json_schema(ANY_OBJECT)
        elif name in UNSUPPORTED and value:
            raise NotSupportedError(f"`structured_outputs.{name}` is not supported")
    return asked


def _reader(kind: str, name: str, value: Any) -> Callable[[], Structure]:
    if kind == "json":
        return lambda: from_json_text(value) if isinstance(value, str) else from_json_schema(value)
    if kind == "choice":
        _check(isinstance(value, list), f"`{name}` is a list of strings")
        return lambda: from_choices(value)
    _check(isinstance(value, str), f"`{name}` is a string")
    return lambda: from_regex(value) if kind == "regex" else from_grammar(value)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)
