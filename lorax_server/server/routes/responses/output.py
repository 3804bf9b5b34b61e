"""An answer as a response: its items, and the events of a stream that tell how they come to be."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.server.tools.answer_plan import AnswerPlan, AnswerReader
from lorax_server.text.tools.parser import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    ParsedEvent,
    TextPiece,
    ThoughtPiece,
)

Event = dict[str, Any]
KINDS: Mapping[type, str] = {TextPiece: "message", ThoughtPiece: "reasoning", CallBegins: "function_call"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """Writes one response. Events come in order; between them `response` is what the client knows so far."""

    def __init__(self, frame: Mapping[str, Any], plan: AnswerPlan | None, reader: AnswerReader | None) -> None:
        self.response: dict[str, Any] = {**frame, "status": "in_progress", "output": []}
        self._plan = plan
        self._reader = reader
        self._num_events = 0
        self._item: dict[str, Any] | None = None
        self._pieces: list[str] = []  # of the item's text or arguments, joined when it ends: adding would be quadratic
        self._logprobs: list[Mapping[str, Any]] = []  # of text that the reader holds back
        self.num_thought_tokens = 0

    def begin(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._snapshot()) for kind in kinds]

    def feed(self, text: str, num_tokens: int, logprobs: Sequence[Mapping[str, Any]] = ()) -> list[Event]:
        """Take more text of the answer."""
        self._logprobs += logprobs
        if self._reader is None:
            return self._write([TextPiece(text)] if text or logprobs else [])
        was_thinking, parsed = self._reader.is_thinking, self._reader.feed(text)
        written = self._write(parsed)
        self.num_thought_tokens += num_tokens * self._reader.is_thinking
        if parsed or was_thinking or self._reader.is_thinking:
            self._logprobs = []  # what is left of them is not of the message's text
        return written

    def end(self, is_cut: bool, usage: Mapping[str, Any]) -> list[Event]:
        """End the answer; `is_cut` if it is too long."""
        status = "incomplete" if is_cut else "completed"
        events = self._write([] if self._reader is None else self._reader.finish(), status)
        if self._logprobs and self._item is not None and self._item["type"] == "message":
            events += self._write([TextPiece("")])  # of the token that ended it
        if not self.response["output"]:
            events += self._open("message")  # an answer without text is one
        events += self._close(status)
        self.response |= {"status": status, "usage": usage, "completed_at": None if is_cut else int(time.time())}
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def fail(self, message: str) -> list[Event]:
        """End a response that cannot be completed. Clients want it to have begun."""
        if self._item is not None:
            self._join_pieces(self._item)
        begun = [] if self._num_events else self.begin()
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return [*begun, self._event("response.failed", response=self._snapshot())]

    # --- Items --------------------------------------------------------------------------------------------------------

    def _write(self, parsed: Sequence[ParsedEvent], status: str = "completed") -> list[Event]:
        """Write what was read. `status` is that of a call which ends here."""
        events: list[Event] = []
        for each in parsed:
            kind = KINDS.get(type(each))
            if kind is not None and (self._item is None or self._item["type"] != kind or kind == "function_call"):
                events += self._close("completed")
                events += self._open(kind, each.name if isinstance(each, CallBegins) else "")
            match each:
                case TextPiece(text):
                    events.append(self._add_text("response.output_text.delta", text, self._logprobs))
                    self._logprobs = []
                case ThoughtPiece(text):
                    events.append(self._add_text("response.reasoning_text.delta", text))
                case ArgumentsPiece(text):
                    assert self._item is not None
                    self._pieces.append(text)
                    events.append(self._item_event("response.function_call_arguments.delta", delta=text))
                case CallEnds():
                    events += self._close(status)
        return events

    def _open(self, kind: str, name: str = "") -> list[Event]:
        item: dict[str, Any] = {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            assert self._plan is not None
            item |= {"call_id": self._plan.make_call_id(), "name": name, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._item = item
        self.response["output"].append(item)
        added = self._event("response.output_item.added", output_index=self._place, item=_copy(item))
        if kind == "function_call":
            return [added]
        part: dict[str, Any] = {"type": PARTS[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        item["content"].append(part)
        return [added, self._item_event("response.content_part.added", content_index=0, part=_copy(part))]

    def _add_text(self, kind: str, text: str, logprobs: list[Mapping[str, Any]] | None = None) -> Event:
        assert self._item is not None
        self._pieces.append(text)
        if logprobs is None:
            return self._item_event(kind, content_index=0, delta=text)
        self._item["content"][0]["logprobs"] += logprobs
        return self._item_event(kind, content_index=0, delta=text, logprobs=logprobs)

    def _close(self, status: str) -> list[Event]:
        item = self._item
        if item is None:
            return []
        item["status"] = status
        self._join_pieces(item)
        if item["type"] == "function_call":
            done = [self._item_event("response.function_call_arguments.done", **_pick(item, "arguments", "name"))]
        else:
            part = item["content"][0]
            kind = f"response.{PARTS[item['type']]}.done"
            told = _pick(part, "text", "logprobs") if item["type"] == "message" else _pick(part, "text")
            done = [self._item_event(kind, content_index=0, **told)]
            done.append(self._item_event("response.content_part.done", content_index=0, part=_copy(part)))
        done.append(self._event("response.output_item.done", output_index=self._place, item=_copy(item)))
        self._item = None
        return done

    def _join_pieces(self, item: dict[str, Any]) -> None:
        owner, name = (item, "arguments") if item["type"] == "function_call" else (item["content"][0], "text")
        owner[name] += "".join(self._pieces)
        self._pieces = []

    # --- Events -------------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> int:
        return len(self.response["output"]) - 1

    def _item_event(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._place, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [_copy(item) for item in self.response["output"]]}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an item with its parts, which still grow."""
    copied = dict(item)
    if "content" in copied:
        copied["content"] = [dict(part) for part in copied["content"]]
    return copied


def _pick(item: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: item[name] for name in names}
