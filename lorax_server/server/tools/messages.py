"""Builds OpenAI chat messages and stream deltas with tool calls, and normalizes tool calls in earlier messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.tools.output_format import OutputFormat, OutputParser
from lorax_server.text.tools.parser import (
    ArgumentsDelta,
    ParsedEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
    ToolCallStart,
)


class MessageWriter:
    """Converts a completion to an OpenAI message or to stream deltas."""

    def __init__(self, output_format: OutputFormat, prompt: str, is_enforced: bool) -> None:
        self._output_format = output_format
        self._parser: OutputParser = output_format.make_parser(prompt, is_enforced)
        self.num_calls = 0

    def write_deltas(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Return the stream deltas for newly generated text in order."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        return [delta for event in events if (delta := self._to_delta(event)) is not None]

    def write_message(self, text: str) -> dict[str, Any]:
        """Return the complete message, merged from its deltas."""
        texts: dict[str, list[str]] = {"content": []}  # joined at the end to avoid quadratic time
        calls: list[dict[str, Any]] = []
        arguments: list[list[str]] = []
        for delta in self.write_deltas(text, is_last=True):
            for name in delta.keys() & {"content", "reasoning_content"}:
                texts.setdefault(name, []).append(delta[name])
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                    arguments.append([])
                arguments[-1].append(call["function"]["arguments"])
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        message |= {name: "".join(pieces) for name, pieces in texts.items()}
        for call, pieces in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _to_delta(self, event: ParsedEvent) -> dict[str, Any] | None:
        match event:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case ToolCallStart(name):
                self.num_calls += 1
                function = {"name": name, "arguments": ""}
                call = {"index": self.num_calls - 1, "id": self._output_format.make_call_id(), "type": "function"}
                return {"tool_calls": [{**call, "function": function}]}
            case ArgumentsDelta(text):
                return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]}
            case ToolCallEnd():
                return None


# --- Tool calls and results in the conversation history ---------------------------------------------------------------


def normalize_tool_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with tool calls and results in the form that chat templates expect.

    Arguments are parsed to objects, because templates serialize them. The function name, which many clients omit, is
    added to tool results.
    """
    names: dict[str, str] = {}
    normalized_messages = []
    for index, message in enumerate(messages):
        normalized = dict(message)
        if "tool_calls" in normalized:
            calls = [
                _normalize_call(f"`messages[{index}].tool_calls[{at}]`", call)
                for at, call in _enumerate_calls(index, normalized)
            ]
            names |= {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
            normalized["tool_calls"] = calls
            if not calls:
                del normalized["tool_calls"]
        if normalized.get("role") == "tool" and "name" not in normalized:
            name = names.get(normalized.get("tool_call_id", ""))
            normalized |= {} if name is None else {"name": name}
        normalized_messages.append(normalized)
    return normalized_messages


def _enumerate_calls(index: int, message: Mapping[str, Any]) -> list[tuple[int, Any]]:
    if message.get("role") != "assistant" and message["tool_calls"]:
        raise InputError(f"`messages[{index}].tool_calls`: only messages with the role 'assistant' may have tool calls")
    return list(enumerate(message["tool_calls"]))


def _normalize_call(field_path: str, call: Mapping[str, Any]) -> dict[str, Any]:
    kind, function = call.get("type", "function"), call.get("function")
    if kind != "function":
        raise NotSupportedError(
            f"{field_path}: tool calls of type {str(kind)[:32]!r} are not supported; use 'function'"
        )
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{field_path} must have a `function` with a `name`")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]  # invalid JSON, so keep the model's text
    return {**call, "type": "function", "function": {**function, "arguments": {} if arguments is None else arguments}}
