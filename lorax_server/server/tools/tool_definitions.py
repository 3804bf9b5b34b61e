"""Validates the request fields `tools` and `tool_choice`."""

import json
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.checks import check
from lorax_server.text.tools.grammar import OPTIONS_KEY, FunctionSchema

NAME_PATTERN = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
EMPTY_PARAMETERS_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolDefinitions:
    """The request's tools, and which of them the model may or must call."""

    rendered: list[dict[str, Any]]  # all tools, as chat template input
    functions: tuple[FunctionSchema, ...]  # the functions that `tool_choice` allows
    is_required: bool  # the completion must be a tool call
    is_parallel: bool  # a completion may contain several calls

    @property
    def needs_grammar(self) -> bool:
        is_strict = any(function.is_strict for function in self.functions)
        return self.is_required or is_strict or not self.is_parallel


def parse_tool_definitions(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None, is_parallel: bool
) -> ToolDefinitions | None:
    """Validate and return the request's tools. Return None if the model may not call tools.

    Call this on a thread after the request is admitted, because it reads whole schemas.
    """
    choice = tool_choice or "auto"
    if choice == "none" or (not tools and choice == "auto"):
        return None
    check(bool(tools), "`tool_choice` requires `tools`")
    tools = tools or ()
    functions = [_parse_function(index, tool) for index, tool in enumerate(tools)]
    names = Counter(function.name for function in functions)
    (name, count), *_ = names.most_common(1)
    check(count == 1, f"`tools` has two functions with the name {name!r}")
    allowed, is_required, is_single = _parse_tool_choice(choice, names)
    chosen = tuple(function for function in functions if function.name in allowed)
    rendered = [{"type": "function", "function": _without_strict(tool["function"])} for tool in tools]
    return ToolDefinitions(rendered, chosen, is_required, is_parallel and not is_single)


def _parse_function(index: int, tool: Mapping[str, Any]) -> FunctionSchema:
    where, kind = f"`tools[{index}]`", tool.get("type", "function")
    if kind != "function":
        raise NotSupportedError(f"{where}: tools of type {str(kind)[:32]!r} are not supported; use 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InputError(f"{where} must have a `function`")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
        raise InputError(f"{where}: `name` must have 1 to 64 letters, digits, dots, dashes or underscores")
    check(parameters is None or isinstance(parameters, Mapping), f"{where}: `parameters` must be a JSON Schema object")
    check(strict is None or isinstance(strict, bool), f"{where}: `strict` must be true or false")
    schema = dict(parameters or EMPTY_PARAMETERS_SCHEMA)
    check(OPTIONS_KEY not in schema, f"{where}: `parameters` has `{OPTIONS_KEY}`, which is not a JSON Schema keyword")
    check(schema.get("type", "object") == "object", f"{where}: `parameters` must describe an object")
    _check_properties(where, schema)
    try:
        json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: `parameters` cannot be encoded as JSON") from None
    return FunctionSchema(name, {"type": "object", **schema}, bool(strict))


def _check_properties(location: str, schema: Mapping[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_valid = isinstance(properties, Mapping) and all(isinstance(each, Mapping | bool) for each in properties.values())
    check(is_valid, f"{location}: `properties` of `parameters` must be an object of JSON Schemas")
    is_valid = isinstance(required, list) and all(isinstance(each, str) for each in required)
    check(is_valid, f"{location}: `required` of `parameters` must be a list of names")


def _without_strict(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without `strict` and null fields, because templates write all fields into the prompt."""
    return {name: value for name, value in function.items() if name != "strict" and value is not None}


def _parse_tool_choice(choice: str | Mapping[str, Any], names: Container[str]) -> tuple[Container[str], bool, bool]:
    """Return the allowed function names, whether a call is required, and whether only one call is allowed."""
    if isinstance(choice, str):
        if choice in ("auto", "required"):
            return names, choice == "required", False
        return [_check_name(choice, names)], True, True  # TGI accepts a bare function name
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if not isinstance(listed, list) or not listed:
            raise InputError("`tool_choice` of type 'allowed_tools' must have a list of `tools`")
        mode = allowed.get("mode", "auto")
        check(mode in ("auto", "required"), "`tool_choice.mode` must be auto or required")
        return {_check_name(_function_name(tool), names) for tool in listed}, mode == "required", False
    kind = choice.get("type", "function")
    if kind != "function":
        raise NotSupportedError(f"`tool_choice` of type {str(kind)[:32]!r} is not supported; use 'function'")
    return [_check_name(_function_name(choice), names)], True, True


def _function_name(tool: Any) -> Any:
    """Return the function name from a chat (nested) or Responses (flat) tool."""
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None


def _check_name(name: Any, names: Container[str]) -> str:
    if not isinstance(name, str) or name not in names:
        raise InputError(f"`tool_choice` names the function {str(name)[:64]!r}, which is not one of `tools`")
    return name
