"""Read the output format of a request from OpenAI's, LoRAX's and vLLM's fields."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.structured_output import grammars
from lorax_server.types import Structure

GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
FIELDS = ("response_format", "structured_outputs", *GUIDED.values())
# vLLM settings that change what is allowed.
UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def choose_structure(fields: Mapping[str, Any]) -> Structure | None:
    """Return the output format in `FIELDS` of a request, or None.

    This analyzes schemas: call it on a thread, once the request is admitted.
    """
    asked = list(_list_formats(fields))
    names = " and ".join(f"`{name}`" for name, _, _ in asked)
    _check(len(asked) <= 1, f"{names} ask for two forms of one answer; give one")
    for name, read, value in asked:
        try:
            return read(value)
        except NotSupportedError:
            raise
        except InputError as error:
            raise InputError(f"`{name}`: {error}") from error
    return None


def _list_formats(fields: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Any], Structure], Any]]:
    """List each format with its name and the function that reads it."""
    response_format = fields.get("response_format")
    if response_format is not None and _read_type(response_format) != "text":
        yield "response_format", _read_response_format, response_format
    for word, value in (fields.get("structured_outputs") or {}).items():
        name = f"structured_outputs.{word}"
        if word in GUIDED and value is not None:
            yield name, _find_reader(word, word, value), value
        elif word == "json_object" and value:
            yield name, grammars.from_json_schema, grammars.ANY_OBJECT
        elif word in UNSUPPORTED and value:
            raise NotSupportedError(f"`{name}` is not supported")
    for word, name in GUIDED.items():
        if (value := fields.get(name)) is not None:
            yield name, _find_reader(word, name, value), value


def _read_type(response_format: Mapping[str, Any]) -> str:
    """Return the type in OpenAI's spelling; LoRAX also has `JsonObject`."""
    kind = response_format.get("type")
    _check(isinstance(kind, str), "`response_format` needs a `type`: text, json_object or json_schema")
    known = {"text": "text", "jsonobject": "json_object", "jsonschema": "json_schema"}
    found = known.get(str(kind)[:32].lower().replace("_", ""))
    if found is None:
        raise NotSupportedError(
            f"`response_format` {str(kind)[:32]!r} is not known here; there are text, json_object and json_schema"
        )
    return found


def _read_response_format(response_format: Mapping[str, Any]) -> Structure:
    """Read a `response_format` other than text. The schema is in OpenAI's `json_schema`, or in LoRAX's `schema`."""
    schema, nested = response_format.get("schema"), response_format.get("json_schema")
    if _read_type(response_format) == "json_schema" and nested is not None:
        _check(isinstance(nested, Mapping), "`json_schema` is an object with a `name` and a `schema`")
        schema = nested.get("schema")
    return grammars.from_json_schema(grammars.ANY_OBJECT if schema is None else schema)


def _find_reader(kind: str, name: str, value: Any) -> Callable[[Any], Structure]:
    if kind == "json":
        return grammars.from_json_text if isinstance(value, str) else grammars.from_json_schema
    if kind == "choice":
        _check(isinstance(value, list), f"`{name}` is a list of strings")
        return grammars.from_choices
    _check(isinstance(value, str), f"`{name}` is a string")
    return grammars.from_regex if kind == "regex" else grammars.from_grammar


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)
