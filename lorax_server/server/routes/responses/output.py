"""Converts a completion to a Responses API response: output items and stream events."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.server.tools.output_format import OutputFormat, OutputParser
from lorax_server.text.tools.parser import (
    ArgumentsDelta,
    ParsedEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
    ToolCallStart,
)

Event = dict[str, Any]
ITEM_TYPES: Mapping[type, str] = {TextDelta: "message", ReasoningDelta: "reasoning", ToolCallStart: "function_call"}
ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
CONTENT_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """Builds a response and its stream events. `response` always matches the events that were returned so far."""

    def __init__(
        self, envelope: Mapping[str, Any], output_format: OutputFormat | None, parser: OutputParser | None
    ) -> None:
        self.response: dict[str, Any] = {**envelope, "status": "in_progress", "output": []}
        self._output_format = output_format
        self._parser = parser
        self._num_events = 0
        self._item: dict[str, Any] | None = None
        self._pieces: list[str] = []  # the item's text or arguments, joined at the end to avoid quadratic time
        self._logprobs: list[Mapping[str, Any]] = []  # log probabilities of text that the parser still buffers
        self.num_reasoning_tokens = 0

    def start(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return [self._make_event(kind, response=self._snapshot()) for kind in kinds]

    def feed(self, text: str, num_tokens: int, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        """Add generated text and return the new events."""
        self._logprobs += logprobs
        if self._parser is None:
            return self._write_parsed([TextDelta(text)] if text or logprobs else [])
        was_reasoning, parsed = self._parser.is_reasoning, self._parser.feed(text)
        written = self._write_parsed(parsed)
        self.num_reasoning_tokens += num_tokens * self._parser.is_reasoning
        if parsed or was_reasoning or self._parser.is_reasoning:
            self._logprobs = []  # the remaining log probabilities do not belong to message text
        return written

    def finish(self, is_truncated: bool, usage: Mapping[str, Any]) -> list[Event]:
        """Finish the response and return the last events. `is_truncated` is True if the token limit was reached."""
        status = "incomplete" if is_truncated else "completed"
        events = self._write_parsed([] if self._parser is None else self._parser.finish(), status)
        if self._logprobs and self._item is not None and self._item["type"] == "message":
            events += self._write_parsed([TextDelta("")])  # carries the log probability of the last token
        if not self.response["output"]:
            events += self._open_item("message")  # a response has at least one item
        events += self._close_item(status)
        self.response |= {"status": status, "usage": usage, "completed_at": None if is_truncated else int(time.time())}
        if is_truncated:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._make_event(f"response.{status}", response=self._snapshot())]

    def fail(self, message: str) -> list[Event]:
        """Mark the response as failed and return the last events. Clients expect `response.created` first."""
        if self._item is not None:
            self._join_pieces(self._item)
        events = [] if self._num_events else self.start()
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return [*events, self._make_event("response.failed", response=self._snapshot())]

    # --- Items --------------------------------------------------------------------------------------------------------

    def _write_parsed(self, parsed: Sequence[ParsedEvent], status: str = "completed") -> list[Event]:
        """Return the stream events for parser events. `status` applies to tool calls that finish in these events."""
        events: list[Event] = []
        for parsed_event in parsed:
            kind = ITEM_TYPES.get(type(parsed_event))
            if kind is not None and (self._item is None or self._item["type"] != kind or kind == "function_call"):
                events += self._close_item("completed")
                events += self._open_item(kind, parsed_event.name if isinstance(parsed_event, ToolCallStart) else "")
            match parsed_event:
                case TextDelta(text):
                    events.append(self._add_text("response.output_text.delta", text, self._logprobs))
                    self._logprobs = []
                case ReasoningDelta(text):
                    events.append(self._add_text("response.reasoning_text.delta", text))
                case ArgumentsDelta(text):
                    assert self._item is not None
                    self._pieces.append(text)
                    events.append(self._make_item_event("response.function_call_arguments.delta", delta=text))
                case ToolCallEnd():
                    events += self._close_item(status)
        return events

    def _open_item(self, kind: str, name: str = "") -> list[Event]:
        item: dict[str, Any] = {"id": f"{ID_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            assert self._output_format is not None
            item |= {"call_id": self._output_format.make_call_id(), "name": name, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._item = item
        self.response["output"].append(item)
        added = self._make_event("response.output_item.added", output_index=self._output_index, item=_copy(item))
        if kind == "function_call":
            return [added]
        part: dict[str, Any] = {"type": CONTENT_TYPES[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        item["content"].append(part)
        return [added, self._make_item_event("response.content_part.added", content_index=0, part=_copy(part))]

    def _add_text(self, kind: str, text: str, logprobs: list[Mapping[str, Any]] | None = None) -> Event:
        assert self._item is not None
        self._pieces.append(text)
        if logprobs is None:
            return self._make_item_event(kind, content_index=0, delta=text)
        self._item["content"][0]["logprobs"] += logprobs
        return self._make_item_event(kind, content_index=0, delta=text, logprobs=logprobs)

    def _close_item(self, status: str) -> list[Event]:
        item = self._item
        if item is None:
            return []
        item["status"] = status
        self._join_pieces(item)
        if item["type"] == "function_call":
            done = [
                self._make_item_event(
                    "response.function_call_arguments.done", **_select_fields(item, "arguments", "name")
                )
            ]
        else:
            part = item["content"][0]
            kind = f"response.{CONTENT_TYPES[item['type']]}.done"
            fields = (
                _select_fields(part, "text", "logprobs") if item["type"] == "message" else _select_fields(part, "text")
            )
            done = [self._make_item_event(kind, content_index=0, **fields)]
            done.append(self._make_item_event("response.content_part.done", content_index=0, part=_copy(part)))
        done.append(self._make_event("response.output_item.done", output_index=self._output_index, item=_copy(item)))
        self._item = None
        return done

    def _join_pieces(self, item: dict[str, Any]) -> None:
        owner, name = (item, "arguments") if item["type"] == "function_call" else (item["content"][0], "text")
        owner[name] += "".join(self._pieces)
        self._pieces = []

    # --- Events -------------------------------------------------------------------------------------------------------

    @property
    def _output_index(self) -> int:
        return len(self.response["output"]) - 1

    def _make_item_event(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return self._make_event(kind, item_id=self._item["id"], output_index=self._output_index, **fields)

    def _make_event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [_copy(item) for item in self.response["output"]]}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an item with its content parts, because text is still appended to the originals."""
    copied = dict(item)
    if "content" in copied:
        copied["content"] = [dict(part) for part in copied["content"]]
    return copied


def _select_fields(item: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: item[name] for name in names}
