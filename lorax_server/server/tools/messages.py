"""Answers with calls, as OpenAI's chats write them: whole, or as the deltas that its clients put together."""

from collections.abc import Sequence
from typing import Any

from lorax_server.server.adapter_lookup import ResolvedModel
from lorax_server.server.generations import RemoteGeneration
from lorax_server.server.tools.answer_plan import AnswerPlan, AnswerReader
from lorax_server.text.tools.parser import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    ParsedEvent,
    TextPiece,
    ThoughtPiece,
)


def show_markers(model: ResolvedModel, plan: AnswerPlan) -> ResolvedModel:
    """Return a model in whose answers the marks of calls and of reasoning are text, also if they are special tokens."""
    return model._replace(tokenizer=model.tokenizer.showing(plan.markers))


def make_writers(
    plan: AnswerPlan | None, prompt: str, generations: Sequence[RemoteGeneration]
) -> "list[MessageWriter]":
    """Make a writer for each answer; none where answers are nothing but text."""
    if plan is None:
        return []
    return [MessageWriter(plan, prompt, generation.request.structure is not None) for generation in generations]


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
