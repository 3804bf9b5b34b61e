"""Separate a model's reasoning, between `<think>` and `</think>`, from the rest of the completion."""

from typing import NamedTuple

from lorax_server.text.tools.parser import find_partial_marker, find_whitespace_start

THINK_START, THINK_END = "<think>", "</think>"


class CompletionPart(NamedTuple):
    """The next part of the reasoning or content. `raw` also contains the tags and the whitespace around them."""

    text: str
    raw_text: str
    is_reasoning: bool


class ReasoningParser:
    """Splits a completion that may start with reasoning. The result does not depend on how the text is chunked.

    `is_open` means that the prompt already ends with the opening tag.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._buffer = ""
        self._is_at_start = not is_open
        self.is_reasoning = is_open
        self._drops_whitespace = is_open

    def feed(self, text: str) -> list[CompletionPart]:
        parts: list[CompletionPart] = []
        text, self._buffer = self._buffer + text, ""
        if self._is_at_start:
            text = self._parse_start(text, parts)
        if self.is_reasoning and text:
            text = self._parse_reasoning(text, parts)
        if text:
            self._add(text, text, parts)
        return parts

    def finish(self) -> list[CompletionPart]:
        """Return the buffered text at the end of the completion."""
        pending_text, self._buffer = self._buffer, ""
        return (
            [
                CompletionPart(
                    pending_text.rstrip() if self.is_reasoning else pending_text, pending_text, self.is_reasoning
                )
            ]
            if pending_text
            else []
        )

    def _parse_start(self, text: str, parts: list[CompletionPart]) -> str:
        """Parse the opening tag if there is one. Return the text after it."""
        first = text.lstrip()
        start = len(text) - len(first)
        whitespace_start, end = find_whitespace_start(text, start), start + len(THINK_START)
        self._add(text[:whitespace_start], text[:whitespace_start], parts)
        if first != THINK_START and THINK_START.startswith(first):  # not decided yet
            self._buffer = text[whitespace_start:]
            return ""
        self._is_at_start = False
        if not first.startswith(THINK_START):
            return text[whitespace_start:]
        self.is_reasoning = self._drops_whitespace = True
        parts.append(CompletionPart("", text[whitespace_start:end], True))
        return text[end:]

    def _parse_reasoning(self, text: str, parts: list[CompletionPart]) -> str:
        """Parse reasoning. Return the text after the closing tag."""
        position = text.find(THINK_END)
        if position < 0:
            start = find_partial_marker(text, (THINK_END,))
            self._buffer = text[start:]
            self._add(text[:start], text[:start], parts)
            return ""
        end = position + len(THINK_END)
        self._add(text[: find_whitespace_start(text, position)], text[:end], parts)
        self.is_reasoning, self._drops_whitespace = False, True
        return text[end:]

    def _add(self, text: str, raw: str, parts: list[CompletionPart]) -> None:
        if self._drops_whitespace:
            text = text.lstrip()
            self._drops_whitespace = not text
        if raw:
            parts.append(CompletionPart(text, raw, self.is_reasoning))
