"""Sections whose calls are JSON objects: one, a list, or several with a mark between them."""

from enum import Enum, auto

from lorax_server.text.tools.json_object import Call, ObjectReader
from lorax_server.text.tools.parser import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    MalformedCallError,
    ParsedEvent,
    Section,
    ToolSet,
)


class _Awaited(Enum):
    """The part of a section that comes next."""

    OBJECT = auto()  # `{`, or `[` where nothing came before
    NEXT = auto()  # a further object of a list
    WITHIN = auto()  # the rest of an object
    AFTER = auto()  # what follows an object


class JsonSection(Section):
    """Reads `{...}`, `[{...}, {...}]`, or `{...}; {...}` where a `separator` is given, up to the `closer` if any.

    Calls count also where the `closer` does not come.
    """

    def __init__(self, tools: ToolSet, closer: str = "", separator: str = "") -> None:
        super().__init__()
        self._tools = tools
        self._closer = closer
        self._separator = separator
        self._awaited = _Awaited.OBJECT
        self._is_list = False
        self._has_separator = False  # after the last object
        self._num_closed = 0  # characters of the closer
        self._reader = ObjectReader()

    def take(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        if self._awaited is _Awaited.WITHIN:
            return self._take_object(text, at, events)
        character = text[at]
        if character.isspace() and not self._num_closed:
            return 1
        if self._awaited is _Awaited.AFTER:
            return self._take_after(character)
        if character == "{":
            self._begin(None)
            return self._take_object(text, at, events)
        if character == "[" and self._awaited is _Awaited.OBJECT and not self._is_list:
            self._is_list = True
            return 1
        raise MalformedCallError

    def forgives(self, text: str) -> bool:
        left = text.strip().removeprefix("]").lstrip()
        return not left or self._closer.startswith(left) or left == self._separator

    def _begin(self, name: str | None) -> None:
        self._reader, self._awaited = ObjectReader(name), _Awaited.WITHIN

    def _take_object(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        reader = self._reader
        count = reader.read(text, at) - at
        if self._tools.is_enforced and reader.name in self._tools.names:
            if not self.is_open:
                events.append(CallBegins(str(reader.name)))
                self.is_open = True
            if reader.new_arguments:
                events.append(ArgumentsPiece(reader.new_arguments))
        if reader.is_done:
            self._end_object(events, count)
        return count

    def _end_object(self, events: list[ParsedEvent], count: int) -> None:
        self._awaited = _Awaited.AFTER
        if self.is_open:
            events.append(CallEnds())
            self.is_open = False
            return
        try:
            call = self._reader.to_call()
        except MalformedCallError:
            raise MalformedCallError(count) from None
        if call.name not in self._tools.names:
            raise MalformedCallError(count)
        add_call(call, events)

    def _take_after(self, character: str) -> int:
        if self._is_list:
            if character not in ",]":
                raise MalformedCallError
            if character == ",":
                self._awaited = _Awaited.NEXT
            else:
                self._is_list, self.has_ended = False, not self._closer
            return 1
        if self._closer:
            return self._take_closer(character)
        if self._separator and character == self._separator and not self._has_separator:
            self._has_separator = True
            return 1
        if self._separator and character == "{":
            self._has_separator = False
            self._begin(None)
            return 0
        if self._has_separator:
            raise MalformedCallError
        self.has_ended = True
        return 0

    def _take_closer(self, character: str) -> int:
        if character != self._closer[self._num_closed]:
            self.unread, self.has_ended = self._closer[: self._num_closed], True
            return 0
        self._num_closed += 1
        self.has_ended = self._num_closed == len(self._closer)
        return 1


def add_call(call: Call, events: list[ParsedEvent]) -> None:
    """Add the events of a whole call."""
    events += [CallBegins(call.name), ArgumentsPiece(call.arguments), CallEnds()]
