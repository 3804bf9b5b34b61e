"""Parse a streamed completion into text and tool calls. The result does not depend on how the text is chunked.

A malformed call, or a call to an unknown function, is returned as text.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

PARSE_WINDOW_CHARACTERS = 4096  # parsers copy the rest of the window, so larger windows take quadratic time
MAX_CALL_CHARACTERS = 2**16  # limit for buffered calls, which are parsed in one step on the event loop
MAX_DROPPED_WHITESPACE = 64  # characters before a call that are not content; more would delay the stream


class TextDelta(NamedTuple):
    """The next part of the content."""

    text: str


class ReasoningDelta(NamedTuple):
    """The next part of the reasoning."""

    text: str


class ToolCallStart(NamedTuple):
    """The start of a tool call. All `ArgumentsDelta` events up to `ToolCallEnd` belong to this call."""

    name: str


class ArgumentsDelta(NamedTuple):
    """The next part of the call's arguments, as JSON text."""

    text: str


class ToolCallEnd(NamedTuple):
    """The end of a tool call. The arguments are complete, or truncated by the end of the completion."""


ParsedEvent = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


class MalformedCallError(Exception):
    """Raised if the text is not a valid call."""


class ToolSet(NamedTuple):
    """The functions that a completion may call."""

    schemas: Mapping[str, Mapping[str, Any]]
    """Argument schemas by function name."""
    is_enforced: bool = False
    """A grammar guarantees valid calls, so arguments are streamed before the call is complete."""

    @property
    def names(self) -> Set[str]:
        return self.schemas.keys()


class ToolCallParser(ABC):
    """Parses the tool calls that follow an opening marker such as `<tool_call>`."""

    def __init__(self, closing_marker: str = "") -> None:
        self.closing_marker = closing_marker  # text after the last call
        self.closing_prefix = ""  # consumed part of the closing marker
        self.pending: list[str] = []  # text since the end of the last call
        self.is_finished = False
        self.is_malformed = False  # `pending` is not a call
        self.is_open = False  # the arguments of the current call are being streamed
        self.unconsumed = ""  # text that was consumed as part of the closing marker, but is content

    def read(self, text: str, events: list[ParsedEvent]) -> str:
        """Parse text up to the end of the calls or the first invalid character. Return the remaining text."""
        at = 0
        while at < len(text) and not self.is_finished and not self.is_malformed:
            num_events = len(events)
            try:
                count = self.consume(text, at, events)
            except MalformedCallError:
                count, self.is_malformed = 0, True
            self.pending.append(text[at : at + count])
            at += count
            if len(events) > num_events and isinstance(events[-1], ToolCallEnd):
                self.pending = []
        return self.unconsumed + text[at:]

    @abstractmethod
    def consume(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        """Consume at least one character at `at`, or finish. Return the number of consumed characters.

        If the call is malformed, set `is_malformed`. Raise `MalformedCallError` if the first character is already
        invalid.
        """

    def consume_closing_marker(self, character: str) -> int:
        """Consume a character after the last call. Finish at the end of the closing marker or before other text."""
        closing_prefix = self.closing_prefix + character
        if not self.closing_marker.startswith(closing_prefix):
            self.unconsumed, self.is_finished = self.closing_prefix, True
            return 0
        self.closing_prefix, self.is_finished = closing_prefix, closing_prefix == self.closing_marker
        return 1

    def is_ignorable_tail(self, text: str) -> bool:
        """Return True if `text` after the last call can be dropped at the end of the completion."""
        return not text.strip()


class CallFormat(ABC):
    """A model family's tool call format."""

    opening_markers: tuple[str, ...] = ()
    """Texts that start a call anywhere in a completion."""
    start_characters: str = ""
    """Characters that start a call at the start of a completion."""
    markers: tuple[str, ...] = ()
    """Texts that may be special tokens. The detokenizer must keep them."""
    has_short_ids: bool = False
    """Templates require call IDs of nine letters and digits."""

    @abstractmethod
    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        """Return a parser for tool calls that follow an opening marker or start the completion."""


class ToolOutputParser:
    """Parses one streamed completion into text and tool calls."""

    def __init__(self, tool_format: CallFormat, tools: ToolSet) -> None:
        self._tool_format = tool_format
        self._tools = tools
        self._buffer = ""  # a possible start of an opening marker, and the whitespace before it
        self._call_parser: ToolCallParser | None = None
        self._opening_marker = ""  # the current one, with the whitespace before it
        self._is_at_start = bool(tool_format.start_characters)
        self._is_after_call = False

    def feed(self, text: str) -> list[ParsedEvent]:
        """Parse more text. Return the events that later text cannot change."""
        events: list[ParsedEvent] = []
        for start in range(0, len(text), PARSE_WINDOW_CHARACTERS):
            left = text[start : start + PARSE_WINDOW_CHARACTERS]
            while left:
                left = self._parse_text(left, events) if self._call_parser is None else self._parse_calls(left, events)
        return events

    def finish(self) -> list[ParsedEvent]:
        """Return the events for the buffered text at the end of the completion."""
        events: list[ParsedEvent] = []
        call_parser = self._call_parser
        if call_parser is None:
            self._add_text(self._buffer, events)
        elif call_parser.is_open:
            events.append(ToolCallEnd())
        else:
            text = "".join(call_parser.pending)
            if self._opening_marker or not call_parser.is_ignorable_tail(text):
                self._add_text(self._opening_marker + text, events)
        self._buffer, self._call_parser = "", None
        return events

    # --- Text ---------------------------------------------------------------------------------------------------------

    def _parse_text(self, text: str, events: list[ParsedEvent]) -> str:
        """Parse content up to the next call. Return the remaining text."""
        text, self._buffer = self._buffer + text, ""
        if self._is_at_start:
            first = text.lstrip()
            whitespace_start = find_whitespace_start(text, len(text) - len(first))
            self._add_text(text[:whitespace_start], events)
            text = text[whitespace_start:]
            if not first:
                self._buffer = text
                return ""
            self._is_at_start = False
            if first[0] in self._tool_format.start_characters:
                self._open(text[: len(text) - len(first)])
                return first
        opening_markers = self._tool_format.opening_markers
        marker_start = min((position for marker in opening_markers if (position := text.find(marker)) >= 0), default=-1)
        if marker_start < 0:
            self._buffer = text[find_partial_marker(text, opening_markers) :]
            self._add_text(text[: len(text) - len(self._buffer)], events)
            return ""
        marker = next(marker for marker in opening_markers if text.startswith(marker, marker_start))
        start, end = find_whitespace_start(text, marker_start), marker_start + len(marker)
        self._add_text(text[:start], events)
        self._open(text[start:end])
        return text[end:]

    def _add_text(self, text: str, events: list[ParsedEvent]) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._is_after_call = False
            events.append(TextDelta(text))

    # --- Tool calls ---------------------------------------------------------------------------------------------------

    def _open(self, text: str) -> None:
        self._opening_marker = text
        self._call_parser = self._tool_format.make_call_parser(self._tools)

    def _parse_calls(self, text: str, events: list[ParsedEvent]) -> str:
        """Parse calls. Return the text after the last call."""
        call_parser, count = self._call_parser, len(events)
        assert call_parser is not None
        left = call_parser.read(text, events)
        if any(isinstance(event, ToolCallEnd) for event in events[count:]):
            self._opening_marker, self._is_after_call = "", True
        if call_parser.is_malformed and call_parser.is_open:  # the start of the call was already streamed
            self._is_after_call = True
            events.append(ToolCallEnd())
        elif call_parser.is_malformed:
            self._add_text(self._opening_marker + "".join(call_parser.pending), events)
        if call_parser.is_malformed or call_parser.is_finished:
            self._call_parser = None
        return left


def find_whitespace_start(text: str, end: int) -> int:
    """Return the start of the whitespace before `end`, at most `MAX_DROPPED_WHITESPACE` characters before it."""
    start = end
    while start > max(0, end - MAX_DROPPED_WHITESPACE) and text[start - 1].isspace():
        start -= 1
    return start


def find_partial_marker(text: str, markers: Sequence[str]) -> int:
    """Return the start of an incomplete marker at the end of the text, including the whitespace before it."""
    if not markers:
        return len(text)
    for start in range(max(0, len(text) - max(map(len, markers)) + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return find_whitespace_start(text, start)
    return find_whitespace_start(text, len(text))
