"""The reasoning of a model before its answer, between `<think>` and `</think>`."""

from typing import NamedTuple

from lorax_server.text.tools.parser import find_blanks, find_held

OPENER, CLOSER = "<think>", "</think>"


class Part(NamedTuple):
    """More text, of the reasoning or of the answer. `raw` has also the marks and blanks between the two."""

    text: str
    raw: str
    is_thought: bool


class ThoughtSplitter:
    """Divides an answer that may begin with a thought. Any cut of the text gives the same parts in sum.

    `has_begun` tells that the prompt has the opener already.
    """

    def __init__(self, has_begun: bool = False) -> None:
        self._held = ""
        self._is_start = not has_begun
        self.is_thought = has_begun
        self._drops_blanks = has_begun

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        if self._is_start:
            text = self._open(text, parts)
        if self.is_thought and text:
            text = self._think(text, parts)
        if text:
            self._add(text, text, parts)
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return [Part(held.rstrip() if self.is_thought else held, held, self.is_thought)] if held else []

    def _open(self, text: str, parts: list[Part]) -> str:
        """Read the opener if there is one; return the text after it."""
        first = text.lstrip()
        start = len(text) - len(first)
        blanks, end = find_blanks(text, start), start + len(OPENER)
        self._add(text[:blanks], text[:blanks], parts)
        if first != OPENER and OPENER.startswith(first):  # not decided yet
            self._held = text[blanks:]
            return ""
        self._is_start = False
        if not first.startswith(OPENER):
            return text[blanks:]
        self.is_thought = self._drops_blanks = True
        parts.append(Part("", text[blanks:end], True))
        return text[end:]

    def _think(self, text: str, parts: list[Part]) -> str:
        """Read a thought; return the text after it."""
        place = text.find(CLOSER)
        if place < 0:
            start = find_held(text, (CLOSER,))
            self._held = text[start:]
            self._add(text[:start], text[:start], parts)
            return ""
        end = place + len(CLOSER)
        self._add(text[: find_blanks(text, place)], text[:end], parts)
        self.is_thought, self._drops_blanks = False, True
        return text[end:]

    def _add(self, text: str, raw: str, parts: list[Part]) -> None:
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        if raw:
            parts.append(Part(text, raw, self.is_thought))
