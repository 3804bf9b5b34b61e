"""Reads a request's output format from the fields of OpenAI, LoRAX and vLLM."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.structured_output.grammars import from_choices, from_grammar, from_json_schema, from_regex
from lorax_server.types import Structure

FORMAT_READERS: Mapping[str, Callable[[Any], Structure]] = {
    "json": from_json_schema,
    "regex": from_regex,
    "choice": from_choices,
    "grammar": from_grammar,
}
GUIDED_FIELDS = {f"guided_{kind}": kind for kind in FORMAT_READERS}
FORMAT_FIELDS = ("response_format", "structured_outputs", *GUIDED_FIELDS)
ANY_OBJECT_SCHEMA: Mapping[str, Any] = {"type": "object"}
# vLLM settings that would change which text matches.
UNSUPPORTED_SETTINGS = ("structural_tag", "disable_any_whitespace", "disable_additional_properties")


def read_structure(fields: Mapping[str, Any]) -> Structure | None:
    """Return the output format in a request's `FORMAT_FIELDS`, or None.

    This analyzes schemas, so call it on a thread, after the request is admitted.
    """
    formats = list(_list_formats(fields))
    if len(formats) > 1:
        names = " and ".join(f"`{name}`" for name, _, _ in formats)
        raise InputError(f"{names} set two formats for one completion; set only one")
    for name, read, value in formats:
        try:
            return read(value)
        except NotSupportedError:
            raise
        except InputError as error:
            raise InputError(f"`{name}`: {error}") from error
    return None


def _list_formats(fields: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Any], Structure], Any]]:
    """Yield the field name, reader and value of each format that is set."""
    response_format = fields.get("response_format")
    if response_format is not None and (schema := _find_schema(response_format)) is not None:
        yield "response_format", from_json_schema, schema
    options = fields.get("structured_outputs") or {}
    whitespace = options.get("whitespace_pattern")
    read_json = from_json_schema if whitespace is None else partial(from_json_schema, whitespace=whitespace)
    for kind, value in options.items():
        name = f"structured_outputs.{kind}"
        if kind in FORMAT_READERS and value is not None:
            yield name, read_json if kind == "json" else FORMAT_READERS[kind], value
        elif kind == "json_object" and value:
            yield name, read_json, ANY_OBJECT_SCHEMA
        elif kind in UNSUPPORTED_SETTINGS and value:
            raise NotSupportedError(f"`{name}` is not supported")
    for name, kind in GUIDED_FIELDS.items():
        if (value := fields.get(name)) is not None:
            yield name, FORMAT_READERS[kind], value


def _find_schema(response_format: Mapping[str, Any]) -> Any:
    """Return the schema in OpenAI's `json_schema` or LoRAX's `schema`, or None if the type is text.

    LoRAX also spells the types `JsonObject` and `JsonSchema`.
    """
    kind = response_format["type"]
    name = kind[:32].lower().replace("_", "")
    if name == "text":
        return None
    if name not in ("jsonobject", "jsonschema"):
        raise NotSupportedError(
            f"`response_format.type` must be 'text', 'json_object' or 'json_schema' (got {kind[:32]!r})"
        )
    nested = response_format.get("json_schema") if name == "jsonschema" else None
    schema = (response_format if nested is None else nested).get("schema")
    if isinstance(schema, str):
        raise InputError("`response_format`: the JSON schema must be an object (got str)")
    return ANY_OBJECT_SCHEMA if schema is None else schema
