"""Messages as chat templates expect them, with the calls of earlier answers and the results of functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.errors import InputError, NotSupportedError

Messages = Sequence[Mapping[str, Any]]


def prepare_calls(messages: Messages) -> list[dict[str, Any]]:
    """Write calls and results in the form that templates read.

    Arguments become objects, since templates write them as JSON themselves, and a result has the name of its function,
    which only some clients send.
    """
    names: dict[str, str] = {}
    prepared = []
    for index, message in enumerate(messages):
        written = dict(message)
        if "tool_calls" in written:
            calls = [_to_call(f"`messages[{index}].tool_calls[{at}]`", call) for at, call in _list(index, written)]
            names |= {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
            written["tool_calls"] = calls
            if not calls:
                del written["tool_calls"]
        if written.get("role") == "tool" and "name" not in written:
            name = names.get(written.get("tool_call_id", ""))
            written |= {} if name is None else {"name": name}
        prepared.append(written)
    return prepared


def _list(index: int, message: Mapping[str, Any]) -> list[tuple[int, Any]]:
    if message.get("role") != "assistant" and message["tool_calls"]:
        raise InputError(f"`messages[{index}].tool_calls`: only messages of the role 'assistant' have calls")
    return list(enumerate(message["tool_calls"]))


def _to_call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    kind, function = call.get("type", "function"), call.get("function")
    if kind != "function":
        raise NotSupportedError(f"{where}: calls of type {str(kind)[:32]!r} are not supported; only functions are")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where} has no `function` with a `name`")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]  # as the model wrote it
    return {**call, "type": "function", "function": {**function, "arguments": {} if arguments is None else arguments}}
