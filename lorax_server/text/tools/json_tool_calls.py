"""A streaming parser for tool calls that are written as JSON: an object, a list, or objects with a separator."""

import json
import re
from typing import Any, NamedTuple

from lorax_server.text.tools.parser import (
    ArgumentsDelta,
    MalformedCallError,
    ParsedEvent,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
    ToolSet,
)

ARGUMENTS_KEYS = ("arguments", "parameters")  # Llama uses the second
CALL_HEAD_PATTERN = re.compile(r'\{\s*(?:"type"\s*:\s*"\w*"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"\w+"\s*:\s*(?=\{)')
MAX_HEAD_CHARACTERS = 1000  # before the arguments; function names are short


class BracketScanner:
    """Finds the bracket that matches the first bracket in streamed text. Brackets in strings are ignored."""

    def __init__(self, quotes: str, brackets: str) -> None:
        self.depth = 0
        self.is_done = False
        self._outside, self._inside = re.compile(f"[{quotes}{re.escape(brackets)}]"), re.compile(rf"[{quotes}\\]")
        self._quote = ""  # quote of the current string
        self._is_escaped = False  # the next character follows a backslash

    def scan(self, text: str, at: int) -> int:
        """Scan from `at`. Return the position after the closing bracket, or the end of the text."""
        while at < len(text) and not self.is_done:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (self._inside if self._quote else self._outside).search(text, at)
            if match is None:
                return len(text)
            at, character = match.end(), match[0]
            if character == "\\":
                self._is_escaped = True
            elif character in "\"'":
                self._quote = "" if character == self._quote else self._quote or character
            else:
                self.depth += 1 if character in "{[(" else -1
                self.is_done = self.depth <= 0
        return at


class ObjectReader(BracketScanner):
    """Reads one JSON object and extracts the text of its arguments while it is streamed.

    If `name` is set, the object itself contains the arguments. Otherwise the arguments are its last value.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__('"', "{}[]")
        self.name = name  # None until the arguments start
        self.new_arguments = ""  # arguments in the last chunk
        self._is_arguments = name is not None
        self._parts: list[str] = []
        self._length = 0

    def read(self, text: str, at: int) -> int:
        """Read from `at` to the end of the object. Return the position after the object."""
        start, end = at, self.scan(text, at)
        self._parts.append(text[at:end])
        if self.name is None and self._length <= MAX_HEAD_CHARACTERS:
            head = CALL_HEAD_PATTERN.match("".join(self._parts))
            if head is not None:
                self.name, start = head[1], at + head.end() - self._length
        self._length += end - at
        stop = end - 1 if self.is_done and not self._is_arguments else end  # without the object's own bracket
        self.new_arguments = "" if self.name is None else text[start:stop]
        return end

    def to_call(self) -> "ParsedToolCall":
        """Return the call. The object must be complete."""
        value = parse_json("".join(self._parts))
        if self._is_arguments:
            value = {"name": self.name, "arguments": value}
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            raise MalformedCallError
        arguments: Any = next((value[key] for key in ARGUMENTS_KEYS if value.get(key) is not None), {})
        if isinstance(arguments, str):  # some models write the arguments as a JSON string
            arguments = parse_json(arguments)
        if not isinstance(arguments, dict):
            raise MalformedCallError
        return ParsedToolCall(name, dump_json(arguments))


class ParsedToolCall(NamedTuple):
    """A function name, and arguments as JSON text."""

    name: str
    arguments: str


def parse_json(text: str) -> Any:
    """Parse JSON. Allow line breaks in strings, because models write them."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def dump_json(value: Any) -> str:
    """Write JSON that can be encoded as UTF-8. Lone surrogates stay escaped, and NaN is rejected."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except (ValueError, RecursionError):
        raise MalformedCallError from None
    return text


class JsonToolCallParser(ToolCallParser):
    """Parses `{...}`, `[{...}, {...}]`, or, with a `separator`, `{...}; {...}`, up to `closing_marker`.

    Calls without the closing marker are accepted.
    """

    def __init__(self, tools: ToolSet, closing_marker: str = "", separator: str = "") -> None:
        super().__init__(closing_marker)
        self._tools = tools
        self._separator = separator
        self._reader: ObjectReader | None = None  # reader of the current object
        self._is_list = False
        self._has_object = False
        self._has_separator = False  # a separator follows the last object

    def consume(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        if self._reader is not None:
            return self._consume_object(self._reader, text, at, events)
        character = text[at]
        if character.isspace() and not self.closing_prefix:
            return 1
        is_next = self._has_separator or (bool(self._separator) and not self._is_list)
        if character == "{" and (is_next or not self._has_object):
            return self._consume_object(ObjectReader(), text, at, events)
        if character == "[" and not self._has_object and not self._is_list:
            self._is_list = True
            return 1
        return self._consume_separator(character)

    def _consume_separator(self, character: str) -> int:
        """Consume a character after an object: a separator, the end of the list, or part of the closing marker."""
        if not self._has_object or self._has_separator:
            raise MalformedCallError
        if character == ("," if self._is_list else self._separator):
            self._has_separator = True
            return 1
        if self._is_list:
            if character != "]":
                raise MalformedCallError
            self._is_list, self.is_finished = False, not self.closing_marker
            return 1
        return self.consume_closing_marker(character)

    def _consume_object(self, reader: ObjectReader, text: str, at: int, events: list[ParsedEvent]) -> int:
        self._reader, self._has_separator = reader, False
        count = reader.read(text, at) - at
        if self._tools.is_enforced and reader.name in self._tools.names:
            if not self.is_open:
                events.append(ToolCallStart(str(reader.name)))
                self.is_open = True
            if reader.new_arguments:
                events.append(ArgumentsDelta(reader.new_arguments))
        if reader.is_done:
            self._reader, self._has_object = None, True
            if self.is_open:
                events.append(ToolCallEnd())
                self.is_open = False
            else:
                self._add_call(reader, events)
        return count

    def _add_call(self, reader: ObjectReader, events: list[ParsedEvent]) -> None:
        try:
            call = reader.to_call()
        except MalformedCallError:
            self.is_malformed = True
            return
        self.is_malformed = call.name not in self._tools.names
        if not self.is_malformed:
            append_call_events(call, events)

    def is_ignorable_tail(self, text: str) -> bool:
        left = text.strip().removeprefix("]").lstrip()
        return self.closing_marker.startswith(left) or left == self._separator


def append_call_events(call: ParsedToolCall, events: list[ParsedEvent]) -> None:
    """Append the events for a complete call."""
    events += [ToolCallStart(call.name), ArgumentsDelta(call.arguments), ToolCallEnd()]
