"""Tests for separating reasoning from content, with any chunking."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorax_server.text.tools.reasoning_parser import ReasoningParser

CASES = [
    (False, "Hello.", "", "Hello."),
    (False, "<think>\nI see.\n</think>\n\nHello.", "I see.", "Hello."),
    (False, " <think></think>x", "", "x"),
    (False, "a <think>b</think>", "", "a <think>b</think>"),
    (False, "<thinking> about it", "", "<thinking> about it"),
    (False, "<think>no end </thin", "no end </thin", ""),
    (False, "<thi", "", "<thi"),
    (False, "\n\nx\n", "", "\n\nx\n"),
    (True, "\nI see.\n\nSo: a < b\n</think>\n\nHello.\n", "I see.\n\nSo: a < b", "Hello.\n"),
    (True, "no end", "no end", ""),
    (True, "</think>", "", ""),
    (True, "a" + " " * 70 + "</think>b", "a" + " " * 6, "b"),  # at most 64 whitespace characters are buffered
    (True, "a" + "\n" * 70 + "</thin", "a" + "\n" * 70 + "</thin", ""),
    (True, " " * 70 + "a" + " " * 70, "a" + " " * 6, ""),
    (False, " " * 70 + "<think>a</think>b", "a", " " * 6 + "b"),
    (False, " " * 70 + "<thin", "", " " * 70 + "<thin"),
]


def split(is_open: bool, pieces: list[str]) -> tuple[str, str, str]:
    splitter = ReasoningParser(is_open)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    reasoning = "".join(part.text for part in parts if part.is_reasoning)
    text = "".join(part.text for part in parts if not part.is_reasoning)
    return reasoning, text, "".join(part.raw_text for part in parts)


@pytest.mark.parametrize(("is_open", "completion", "reasoning", "text"), CASES)
def test_reasoning_is_separated_from_content(is_open: bool, completion: str, reasoning: str, text: str) -> None:
    assert split(is_open, [completion]) == (reasoning, text, completion)
    assert split(is_open, list(completion)) == (reasoning, text, completion)


@settings(deadline=None)
@given(
    st.booleans(),
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "x", "\n" * 64]), max_size=9),
)
def test_result_does_not_depend_on_chunking(is_open: bool, pieces: list[str]) -> None:
    assert split(is_open, pieces) == split(is_open, ["".join(pieces)])
