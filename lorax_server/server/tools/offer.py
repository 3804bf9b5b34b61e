"""The functions that a request offers, checked, and what it wants of them."""

import json
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.checks import check
from lorax_server.text.tools.grammar import OPTIONS, FunctionSchema

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ToolOffer:
    """The functions of a request, of which the model may call some."""

    rendered: list[dict[str, Any]]  # all of them, as the template sees them
    functions: tuple[FunctionSchema, ...]  # those that may be called
    is_required: bool  # the answer must be calls
    is_parallel: bool  # of any number

    @property
    def needs_grammar(self) -> bool:
        is_strict = any(function.is_strict for function in self.functions)
        return self.is_required or is_strict or not self.is_parallel


def make_offer(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None, is_parallel: bool
) -> ToolOffer | None:
    """Check the tool fields of a request; return None if the model may not call anything.

    This reads whole schemas: call it on a thread, once the request is admitted.
    """
    choice = tool_choice or "auto"
    if choice == "none" or (not tools and choice == "auto"):
        return None
    check(bool(tools), "`tool_choice` needs `tools` to choose from")
    tools = tools or ()
    check(len(tools) <= MAX_TOOLS, f"`tools`: at most {MAX_TOOLS} are possible, not {len(tools)}")
    functions = [_to_function(index, tool) for index, tool in enumerate(tools)]
    names = Counter(function.name for function in functions)
    (name, count), *_ = names.most_common(1)
    check(count == 1, f"`tools` has two functions of the name {name!r}")
    allowed, is_required, is_single = _choose(choice, names)
    chosen = tuple(function for function in functions if function.name in allowed)
    rendered = [{"type": "function", "function": _without_strict(tool["function"])} for tool in tools]
    return ToolOffer(rendered, chosen, is_required, is_parallel and not is_single)


def _to_function(index: int, tool: Mapping[str, Any]) -> FunctionSchema:
    where, kind = f"`tools[{index}]`", tool.get("type", "function")
    if kind != "function":
        raise NotSupportedError(f"{where}: tools of type {str(kind)[:32]!r} are not supported; only functions are")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InputError(f"{where} has no `function`")
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise InputError(f"{where}: the `name` of a function has 1 to 64 letters, digits, dots, dashes or underscores")
    check(parameters is None or isinstance(parameters, Mapping), f"{where}: `parameters` is a JSON schema, an object")
    check(strict is None or isinstance(strict, bool), f"{where}: `strict` is true or false")
    schema = dict(parameters or NO_PARAMETERS)
    check(OPTIONS not in schema, f"{where}: `parameters` has `{OPTIONS}`, which is not a keyword of JSON Schema")
    check(schema.get("type", "object") == "object", f"{where}: `parameters` must describe an object")
    _check_properties(where, schema)
    try:
        json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: `parameters` cannot be written as JSON") from None
    return FunctionSchema(name, {"type": "object", **schema}, bool(strict))


def _check_properties(where: str, schema: Mapping[str, Any]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_right = isinstance(properties, Mapping) and all(isinstance(each, Mapping | bool) for each in properties.values())
    check(is_right, f"{where}: `properties` of `parameters` is an object of JSON schemas")
    is_right = isinstance(required, list) and all(isinstance(each, str) for each in required)
    check(is_right, f"{where}: `required` of `parameters` is a list of names")


def _without_strict(function: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is for the server, and what says nothing: templates write all of it into the prompt."""
    return {name: value for name, value in function.items() if name != "strict" and value is not None}


def _choose(choice: str | Mapping[str, Any], names: Container[str]) -> tuple[Container[str], bool, bool]:
    """Return the functions that may be called, whether one must be, and whether only one may be."""
    if isinstance(choice, str):
        if choice in ("auto", "required"):
            return names, choice == "required", False
        return [_check_name(choice, names)], True, True  # as TGI has it
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if not isinstance(listed, list) or not listed:
            raise InputError("`tool_choice` of type 'allowed_tools' has a list of `tools`")
        mode = allowed.get("mode", "auto")
        check(mode in ("auto", "required"), "`tool_choice.mode` is auto or required")
        return {_check_name(_name_of(tool), names) for tool in listed}, mode == "required", False
    kind = choice.get("type", "function")
    if kind != "function":
        raise NotSupportedError(f"`tool_choice` of type {str(kind)[:32]!r} is not supported; only functions are")
    return [_check_name(_name_of(choice), names)], True, True


def _name_of(tool: Any) -> Any:
    """Return the name of a function, as chats or as responses write it."""
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None


def _check_name(name: Any, names: Container[str]) -> str:
    if not isinstance(name, str) or name not in names:
        raise InputError(f"`tool_choice` names the function {str(name)[:64]!r}, which is not one of `tools`")
    return name
