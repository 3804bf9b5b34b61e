"""From text as it grows to events: text, and calls of functions. Any cut of the text gives the same events in sum.

A call that is not well formed, or names a function that was not offered, comes back as text: nothing is lost.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

WINDOW = 4096  # characters read together: each section copies the rest, so a whole answer would take quadratic time
MAX_CALL = 2**16  # characters of a call that is buffered and parsed as a whole, on the event loop
MAX_DROPPED = 64  # blanks before a call that are no text of the answer; more are, or a stream would wait for them


class TextPiece(NamedTuple):
    """More text of the answer."""

    text: str


class ThoughtPiece(NamedTuple):
    """More text of the model's reasoning."""

    text: str


class CallBegins(NamedTuple):
    """A call whose function is known. All `ArgumentsPiece`s up to `CallEnds` are its own."""

    name: str


class ArgumentsPiece(NamedTuple):
    """More of the JSON text of a call's arguments."""

    text: str


class CallEnds(NamedTuple):
    """The arguments of the call are complete, or cut off by the end of the answer."""


ParsedEvent = TextPiece | ThoughtPiece | CallBegins | ArgumentsPiece | CallEnds


class MalformedCallError(Exception):
    """Text that cannot be a call."""


class ToolSet(NamedTuple):
    """The functions that an answer may call."""

    schemas: Mapping[str, Mapping[str, Any]]
    """The JSON schema of each function's arguments, by its name."""
    is_enforced: bool = False
    """A grammar vouches for all calls, so that arguments need not wait until they are known to be right."""

    @property
    def names(self) -> Set[str]:
        return self.schemas.keys()


class Section(ABC):
    """The text from an opener on: one call or several."""

    def __init__(self, closer: str = "") -> None:
        self.closer = closer  # that ends the section after its last call
        self.closed = ""  # the part of it that was read
        self.taken: list[str] = []  # text since the last call ended
        self.has_ended = False
        self.is_malformed = False  # the text since the last call is not a call
        self.is_open = False  # a call has begun whose arguments are sent as they come
        self.unread = ""  # text that was taken and is not the section's

    def read(self, text: str, events: list[ParsedEvent]) -> str:
        """Read text up to the section's end, or up to a character that cannot be there; return what is left."""
        at = 0
        while at < len(text) and not self.has_ended and not self.is_malformed:
            num_events = len(events)
            try:
                count = self.take(text, at, events)
            except MalformedCallError:
                count, self.is_malformed = 0, True
            self.taken.append(text[at : at + count])
            at += count
            if len(events) > num_events and isinstance(events[-1], CallEnds):
                self.taken = []
        return self.unread + text[at:]

    @abstractmethod
    def take(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        """Take at least one character from `at` on, or end the section; return how many.

        A call that proves to be malformed sets `is_malformed`. If not even the first character can belong to a call,
        this raises `MalformedCallError`.
        """

    def take_closer(self, character: str) -> int:
        """Take a character after the last call. The section ends with the closer, or before any other text."""
        closed = self.closed + character
        if not self.closer.startswith(closed):
            self.unread, self.has_ended = self.closed, True
            return 0
        self.closed, self.has_ended = closed, closed == self.closer
        return 1

    def forgives(self, text: str) -> bool:
        """Tell whether text after the last call says nothing where the answer ends."""
        return not text.strip()


class CallFormat(ABC):
    """The form of calls that models of a family write."""

    openers: tuple[str, ...] = ()
    """Texts that begin a section wherever they are."""
    starts: str = ""
    """Characters that begin a section as the first of an answer."""
    markers: tuple[str, ...] = ()
    """Texts that may be special tokens, which are not shown otherwise."""
    has_short_ids: bool = False
    """Templates want ids of calls with nine letters and digits."""

    @abstractmethod
    def make_section(self, tools: ToolSet) -> Section:
        """Begin to read what follows an opener, or the start of an answer."""


class ToolParser:
    """Reads one answer."""

    def __init__(self, form: CallFormat, tools: ToolSet) -> None:
        self._form = form
        self._tools = tools
        self._held = ""  # text that may belong to an opener, or to blanks before one
        self._section: Section | None = None
        self._opener = ""  # of the section, with the blanks before it
        self._is_start = bool(form.starts)
        self._is_after_call = False

    def feed(self, text: str) -> list[ParsedEvent]:
        """Take more text; return what is certain."""
        events: list[ParsedEvent] = []
        for start in range(0, len(text), WINDOW):
            left = text[start : start + WINDOW]
            while left:
                left = self._read_text(left, events) if self._section is None else self._read_section(left, events)
        return events

    def finish(self) -> list[ParsedEvent]:
        """Return what was held back, at the end of the answer."""
        events: list[ParsedEvent] = []
        section = self._section
        if section is None:
            self._add_text(self._held, events)
        elif section.is_open:
            events.append(CallEnds())
        else:
            text = "".join(section.taken)
            if self._opener or not section.forgives(text):
                self._add_text(self._opener + text, events)
        self._held, self._section = "", None
        return events

    # --- Text ---------------------------------------------------------------------------------------------------------

    def _read_text(self, text: str, events: list[ParsedEvent]) -> str:
        """Read up to the next section; return the text from there on."""
        text, self._held = self._held + text, ""
        if self._is_start:
            first = text.lstrip()
            blanks = find_blanks(text, len(text) - len(first))
            self._add_text(text[:blanks], events)
            text = text[blanks:]
            if not first:
                self._held = text
                return ""
            self._is_start = False
            if first[0] in self._form.starts:
                self._open(text[: len(text) - len(first)])
                return first
        openers = self._form.openers
        found = min((place for opener in openers if (place := text.find(opener)) >= 0), default=-1)
        if found < 0:
            self._held = text[find_held(text, openers) :]
            self._add_text(text[: len(text) - len(self._held)], events)
            return ""
        opener = next(opener for opener in openers if text.startswith(opener, found))
        start, end = find_blanks(text, found), found + len(opener)
        self._add_text(text[:start], events)
        self._open(text[start:end])
        return text[end:]

    def _add_text(self, text: str, events: list[ParsedEvent]) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._is_after_call = False
            events.append(TextPiece(text))

    # --- Sections -----------------------------------------------------------------------------------------------------

    def _open(self, text: str) -> None:
        self._opener = text
        self._section = self._form.make_section(self._tools)

    def _read_section(self, text: str, events: list[ParsedEvent]) -> str:
        """Read more of the section; return the text after it."""
        section, count = self._section, len(events)
        assert section is not None
        left = section.read(text, events)
        if any(isinstance(event, CallEnds) for event in events[count:]):
            self._opener, self._is_after_call = "", True
        if section.is_malformed and section.is_open:  # parts of the call are out already
            self._is_after_call = True
            events.append(CallEnds())
        elif section.is_malformed:
            self._add_text(self._opener + "".join(section.taken), events)
        if section.is_malformed or section.has_ended:
            self._section = None
        return left


def find_blanks(text: str, end: int) -> int:
    """Find the start of the blanks before `end`, of which at most `MAX_DROPPED` count."""
    start = end
    while start > max(0, end - MAX_DROPPED) and text[start - 1].isspace():
        start -= 1
    return start


def find_held(text: str, marks: Sequence[str]) -> int:
    """Find the start of text that may belong to a mark whose end is missing, and of the blanks before it."""
    if not marks:
        return len(text)
    for start in range(max(0, len(text) - max(map(len, marks)) + 1), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return find_blanks(text, start)
    return find_blanks(text, len(text))
