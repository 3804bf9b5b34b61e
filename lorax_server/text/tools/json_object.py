"""A call written as a JSON object, read as it grows."""

import json
import re
from typing import Any, NamedTuple, NoReturn

from lorax_server.text.tools.parser import MalformedCallError

OUTSIDE = re.compile(r'["{}\[\]]')
INSIDE = re.compile(r'["\\]')  # of a string
ARGUMENTS = ("arguments", "parameters")  # Llama's word is the second
_STRING = r'"(?:[^"\\]|\\.)*"'
HEAD = re.compile(rf'\{{\s*(?:"type"\s*:\s*{_STRING}\s*,\s*)?"name"\s*:\s*({_STRING})\s*,\s*"\w+"\s*:\s*', re.DOTALL)
MAX_HEAD = 1000  # characters before the arguments: the name of a function is short


class ObjectReader:
    """Finds the end of one object, and the text of its arguments where it begins as calls usually do.

    With a `name` the object itself is the arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name  # None until the arguments begin
        self.new_arguments = ""  # that the last text brought
        self.is_done = False
        self._is_bare = name is not None
        self._parts: list[str] = []
        self._length = 0
        self._depth = 0
        self._pattern = OUTSIDE
        self._skips = False  # the next character, after a backslash
        self._first: int | None = None  # place of the first object within, or of the object itself if it is bare
        self._last: int | None = None  # place of its end

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def read(self, text: str, at: int) -> int:
        """Read text from `at` on, up to the object's end; return the place of the first character after it."""
        start, begins = at, self._length
        while at < len(text) and not self.is_done:
            if self._skips:
                self._skips = False
                at += 1
                continue
            found = self._pattern.search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            self._note(found[0], begins + at - start)
        self._parts.append(text[start:at])
        self._length = begins + at - start
        self._find_arguments(text[start:at], begins)
        return at

    def _note(self, mark: str, end: int) -> None:
        if mark == '"':
            self._pattern = OUTSIDE if self._pattern is INSIDE else INSIDE
        elif mark == "\\":
            self._skips = True
        elif mark in "{[":
            self._depth += 1
            if mark == "{" and self._first is None and self._depth == 2 - self._is_bare:
                self._first = end - 1
        else:
            self._depth -= 1
            if self._first is not None and self._last is None and self._depth == 1 - self._is_bare:
                self._last = end
            self.is_done = self._depth <= 0

    def _find_arguments(self, text: str, begins: int) -> None:
        self.new_arguments = ""
        if self._first is None:
            return
        if self.name is None and self._first >= begins:
            head = HEAD.fullmatch(self.text[: self._first]) if self._first <= MAX_HEAD else None
            self.name = _to_name(head[1]) if head is not None else None
        if self.name is not None:
            end = self._length if self._last is None else self._last
            self.new_arguments = text[max(0, self._first - begins) : max(0, end - begins)]

    def to_call(self) -> "Call":
        """Return the call, once the object is done."""
        value = load(self.text)
        if self._is_bare:
            assert self.name is not None
            return Call(self.name, _to_arguments(value, self.text))
        has_head = self.name is not None and self._first is not None and self._last is not None
        return make_call(value, self.text[self._first : self._last] if has_head else None)


class Call(NamedTuple):
    """A function's name, and its arguments as a JSON text."""

    name: str
    arguments: str


def make_call(value: Any, text: str | None = None) -> Call:
    """Make a call of an object; `text` is how the arguments were written, if that is known."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise MalformedCallError
    arguments: Any = next((value[word] for word in ARGUMENTS if value.get(word) is not None), {})
    if isinstance(arguments, str):  # some models write them as a text that is JSON
        arguments, text = load(arguments), arguments
    return Call(name, _to_arguments(arguments, text))


def load(text: str) -> Any:
    """Read JSON. Line breaks within strings are let through: models write them."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def _to_arguments(value: Any, text: str | None) -> str:
    if not isinstance(value, dict):
        raise MalformedCallError
    return dump(value) if text is None else keep_or_dump(value, text)


def keep_or_dump(value: Any, text: str) -> str:
    """Return how a value was written, or, if that is not quite JSON, how it should be."""
    try:
        json.loads(text, parse_constant=_refuse)
        text.encode()
    except (ValueError, RecursionError):
        return dump(value)
    return text


def dump(value: Any) -> str:
    """Write JSON that can be encoded: lone surrogates, for which JSON and Python have escapes, stay escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_encodable(text) else json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _to_name(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None
