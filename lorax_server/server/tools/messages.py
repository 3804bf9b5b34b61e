"""Answers with calls, as OpenAI's chats write them: whole, or as the deltas that its clients put together."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.tools.answer_plan import AnswerPlan, AnswerReader
from lorax_server.text.tools.parser import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    ParsedEvent,
    TextPiece,
    ThoughtPiece,
)


class MessageWriter:
    """Writes one answer."""

    def __init__(self, plan: AnswerPlan, prompt: str, is_enforced: bool) -> None:
        self._plan = plan
        self._reader: AnswerReader = plan.make_reader(prompt, is_enforced)
        self.num_calls = 0

    def write_deltas(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Write the deltas of more text, in order."""
        events = self._reader.feed(text)
        if is_last:
            events += self._reader.finish()
        return [delta for event in events if (delta := self._to_delta(event)) is not None]

    def write_message(self, text: str) -> dict[str, Any]:
        """Write a whole answer: its deltas put together."""
        texts: dict[str, list[str]] = {"content": []}  # joined once, or the time would be quadratic
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
            case TextPiece(text):
                return {"content": text}
            case ThoughtPiece(text):
                return {"reasoning_content": text}
            case CallBegins(name):
                self.num_calls += 1
                function = {"name": name, "arguments": ""}
                call = {"index": self.num_calls - 1, "id": self._plan.make_call_id(), "type": "function"}
                return {"tool_calls": [{**call, "function": function}]}
            case ArgumentsPiece(text):
                return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]}
            case CallEnds():
                return None


# --- Calls of earlier answers, and their results ----------------------------------------------------------------------


def prepare_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
