"""Sections whose calls are JSON objects, read as they grow: one, a list, or several with a separator between them."""

import json
import re
from typing import Any, NamedTuple

from lorax_server.text.tools.parser import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    MalformedCallError,
    ParsedEvent,
    Section,
    ToolSet,
)

ARGUMENTS = ("arguments", "parameters")  # Llama's word is the second
HEAD = re.compile(r'\{\s*(?:"type"\s*:\s*"\w*"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"\w+"\s*:\s*')
MAX_HEAD = 1000  # characters before the arguments: the name of a function is short


class BracketScanner:
    """Finds the bracket that closes the first one, outside of strings, in text that comes in pieces."""

    def __init__(self, quotes: str, brackets: str) -> None:
        self.depth = 0
        self.is_done = False
        self._outside, self._inside = re.compile(f"[{quotes}{re.escape(brackets)}]"), re.compile(rf"[{quotes}\\]")
        self._quote = ""  # of the current string
        self._skips = False  # the next character, after a backslash

    def scan(self, text: str, at: int) -> int:
        """Scan from `at` on; return the place after the closing bracket, or the end of the text."""
        while at < len(text) and not self.is_done:
            if self._skips:
                self._skips = False
                at += 1
                continue
            found = (self._inside if self._quote else self._outside).search(text, at)
            if found is None:
                return len(text)
            at, mark = found.end(), found[0]
            if mark == "\\":
                self._skips = True
            elif mark in "\"'":
                self._quote = "" if mark == self._quote else self._quote or mark
            else:
                self.depth += 1 if mark in "{[(" else -1
                self.is_done = self.depth <= 0
                self.note(mark, at)
        return at

    def note(self, mark: str, end: int) -> None:
        """Called for each bracket outside of strings, with the place after it."""


class ObjectReader(BracketScanner):
    """Reads one object, and finds the text of its arguments where it starts as calls usually do.

    With a `name` the object itself is the arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__('"', "{}[]")
        self.name = name  # None until the arguments start
        self.new_arguments = ""  # of the last text
        self._arguments_depth = 2 if name is None else 1
        self._parts: list[str] = []
        self._length = 0
        self._offset = 0  # from places in the last text to places in the object
        self._start: int | None = None  # of the arguments
        self._end: int | None = None

    def read(self, text: str, at: int) -> int:
        """Read from `at` on, up to the end of the object; return the place after it."""
        before, self._offset = self._length, self._length - at
        end = self.scan(text, at)
        self._parts.append(text[at:end])
        self._length = end + self._offset
        self.new_arguments = ""
        if self._start is not None:
            if self.name is None and before <= self._start <= MAX_HEAD:
                head = HEAD.fullmatch("".join(self._parts)[: self._start])
                self.name = None if head is None else head[1]
            if self.name is not None:
                last = self._length if self._end is None else self._end
                self.new_arguments = text[max(at, self._start - self._offset) : max(at, last - self._offset)]
        return end

    def note(self, mark: str, end: int) -> None:
        if mark == "{" and self._start is None and self.depth == self._arguments_depth:
            self._start = end - 1 + self._offset
        elif self._start is not None and self._end is None and self.depth == self._arguments_depth - 1:
            self._end = end + self._offset

    def to_call(self) -> "Call":
        """Return the call, once the object is complete."""
        value = load("".join(self._parts))
        if self._arguments_depth == 1:
            value = {"name": self.name, "arguments": value}
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            raise MalformedCallError
        arguments: Any = next((value[word] for word in ARGUMENTS if value.get(word) is not None), {})
        if isinstance(arguments, str):  # some models write the arguments as a string of JSON
            arguments = load(arguments)
        if not isinstance(arguments, dict):
            raise MalformedCallError
        return Call(name, dump(arguments))


class Call(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


def load(text: str) -> Any:
    """Parse JSON. Line breaks within strings are accepted: models write them."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def dump(value: Any) -> str:
    """Write JSON that can be encoded as UTF-8: lone surrogates stay escaped. NaN is not JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except (ValueError, RecursionError):
        raise MalformedCallError from None
    return text


class JsonSection(Section):
    """Reads `{...}`, `[{...}, {...}]`, or `{...}; {...}` where a `separator` is given, up to the `closer` if any.

    Calls count also where the `closer` is missing.
    """

    def __init__(self, tools: ToolSet, closer: str = "", separator: str = "") -> None:
        super().__init__(closer)
        self._tools = tools
        self._separator = separator
        self._reader: ObjectReader | None = None  # of the current object
        self._is_list = False
        self._has_object = False
        self._has_separator = False  # after the last object

    def take(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        if self._reader is not None:
            return self._take_object(self._reader, text, at, events)
        character = text[at]
        if character.isspace() and not self.closed:
            return 1
        is_next = self._has_separator or (bool(self._separator) and not self._is_list)
        if character == "{" and (is_next or not self._has_object):
            return self._take_object(ObjectReader(), text, at, events)
        if character == "[" and not self._has_object and not self._is_list:
            self._is_list = True
            return 1
        return self._take_after(character)

    def _take_after(self, character: str) -> int:
        """Take a character after an object."""
        if not self._has_object or self._has_separator:
            raise MalformedCallError
        if character == ("," if self._is_list else self._separator):
            self._has_separator = True
            return 1
        if self._is_list:
            if character != "]":
                raise MalformedCallError
            self._is_list, self.has_ended = False, not self.closer
            return 1
        return self.take_closer(character)

    def _take_object(self, reader: ObjectReader, text: str, at: int, events: list[ParsedEvent]) -> int:
        self._reader, self._has_separator = reader, False
        count = reader.read(text, at) - at
        if self._tools.is_enforced and reader.name in self._tools.names:
            if not self.is_open:
                events.append(CallBegins(str(reader.name)))
                self.is_open = True
            if reader.new_arguments:
                events.append(ArgumentsPiece(reader.new_arguments))
        if reader.is_done:
            self._reader, self._has_object = None, True
            if self.is_open:
                events.append(CallEnds())
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
            add_call(call, events)

    def forgives(self, text: str) -> bool:
        left = text.strip().removeprefix("]").lstrip()
        return self.closer.startswith(left) or left == self._separator


def add_call(call: Call, events: list[ParsedEvent]) -> None:
    """Add the events of a whole call."""
    events += [CallBegins(call.name), ArgumentsPiece(call.arguments), CallEnds()]
