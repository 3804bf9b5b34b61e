"""Tests for tool call parsers: all formats, any chunking, and no lost text."""

import json
from itertools import pairwise
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorax_server.config import TOOL_PARSERS
from lorax_server.text.tools.formats import FORMAT_CLASSES
from lorax_server.text.tools.grammar import Call
from lorax_server.text.tools.parser import (
    MAX_CALL_CHARACTERS,
    MAX_DROPPED_WHITESPACE,
    PARSE_WINDOW_CHARACTERS,
    ArgumentsDelta,
    CallFormat,
    MalformedCallError,
    ParsedEvent,
    TextDelta,
    ToolCallParser,
    ToolCallStart,
    ToolOutputParser,
    ToolSet,
)
from tests.text.tools.tool_completions import CALLS, CODER, NO_CALLS, OSLO, SCHEMAS, Example, read

PIECES = [
    *("<tool_call>", "</tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool", "_call>"),
    *(
        '{"name": "now", "arguments": {}}',
        '{"name": "now"',
        ', "arguments": ',
        "{}",
        "}",
        "{",
        "[",
        "]",
        '"',
        "\\",
        ";",
    ),
    *("<function=now>", "</function>", "<function=", "<parameter=text>", "<parameter=list>", "</parameter>", "</para"),
    *("now", "now()", "[now()]", "weather(city='Oslo')", " ", "\n", ",", "text", "ä", "👍", "<", "("),
]
completions = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def split_at(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def test_config_lists_all_tool_parsers() -> None:
    assert tuple(FORMAT_CLASSES) == TOOL_PARSERS


@pytest.mark.parametrize("example", CALLS, ids=lambda example: example.text[:40])
def test_tool_calls_are_parsed(example: Example) -> None:
    assert read(example.tool_format, [example.text]) == example.meaning
    assert read(example.tool_format, example.text) == example.meaning  # character by character


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("tool_format", FORMAT_CLASSES)
def test_written_tool_calls_round_trip(tool_format: str, count: int) -> None:
    calls = [Call("weather", {"city": "Øslo", "days": 2}), Call("now", {})][:count]
    text = FORMAT_CLASSES[tool_format]().write_calls(calls)
    assert read(tool_format, [text]) == [(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls]


@pytest.mark.parametrize(("tool_format", "text"), NO_CALLS, ids=lambda value: str(value)[:40])
def test_invalid_tool_calls_are_returned_as_text(tool_format: str, text: str) -> None:
    expected = [text] if text else []
    assert read(tool_format, [text]) == expected
    assert read(tool_format, text) == expected


@settings(deadline=None, max_examples=300)
@given(
    tool_format=st.sampled_from(list(FORMAT_CLASSES)),
    text=completions,
    places=st.lists(st.integers(0, 1000), max_size=8),
    is_enforced=...,
)
def test_result_does_not_depend_on_chunking(tool_format: str, text: str, places: list[int], is_enforced: bool) -> None:
    whole = read(tool_format, [text], is_enforced)
    assert read(tool_format, split_at(text, places), is_enforced) == whole
    assert read(tool_format, text, is_enforced) == whole


@settings(deadline=None, max_examples=300)
@given(tool_format=st.sampled_from(list(FORMAT_CLASSES)), text=completions)
def test_completion_without_calls_is_unchanged(tool_format: str, text: str) -> None:
    meaning = read(tool_format, [text])
    if all(isinstance(each, str) for each in meaning):
        assert meaning == ([text] if text else [])


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(CALLS), st.lists(st.integers(0, 1000), max_size=8))
def test_tool_calls_are_parsed_with_any_chunking(example: Example, places: list[int]) -> None:
    assert read(example.tool_format, split_at(example.text, places)) == example.meaning


def test_enforced_arguments_are_streamed() -> None:
    text = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
    sent = {}
    for is_enforced in (True, False):
        parser = ToolOutputParser(FORMAT_CLASSES["hermes"](), ToolSet(SCHEMAS, is_enforced))
        events = [parser.feed(character) for character in text]
        start_index = next(
            i for i, each in enumerate(events) if any(isinstance(event, ToolCallStart) for event in each)
        )
        pieces = [event for each in events for event in each if isinstance(event, ArgumentsDelta)]
        assert "".join(piece.text for piece in pieces) == OSLO
        sent[is_enforced] = (start_index, len(pieces))
    assert sent == {True: (text.index(OSLO), len(OSLO)), False: (text.index("}}") + 1, 1)}


@pytest.mark.parametrize(
    ("tool_format", "text"), [("qwen3_coder", CODER), ("pythonic", '[weather(city="Oslo", days=2)]')]
)
@pytest.mark.parametrize("is_enforced", [True, False])
def test_buffered_formats_send_arguments_as_one_delta(tool_format: str, text: str, is_enforced: bool) -> None:
    parser = ToolOutputParser(FORMAT_CLASSES[tool_format](), ToolSet(SCHEMAS, is_enforced))
    events = [event for character in text for event in parser.feed(character)]
    assert [event.text for event in events if isinstance(event, ArgumentsDelta)] == [OSLO]


@pytest.mark.parametrize(
    ("tool_format", "start", "end"),
    [
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>", "</parameter></function></tool_call>"),
        ("pythonic", '[weather(city="', '")]'),
    ],
)
def test_oversized_buffered_call_is_text(tool_format: str, start: str, end: str) -> None:
    for length, num_calls in ((MAX_CALL_CHARACTERS - 200, 1), (MAX_CALL_CHARACTERS, 0)):
        text = start + "x" * length + end
        for pieces in ([text], [text[at : at + 999] for at in range(0, len(text), 999)]):
            meaning = read(tool_format, pieces)
            assert sum(isinstance(each, tuple) for each in meaning) == num_calls
            if not num_calls:
                assert meaning == [text]


def test_end_tags_in_values_are_parsed_up_to_limit() -> None:
    for count, num_calls in ((3, 1), (100, 0)):
        value = "</function>" * count
        text = f"<tool_call><function=weather><parameter=city>{value}</parameter></function></tool_call>"
        expected = [("weather", json.dumps({"city": value}))] if num_calls else [text]
        assert read("qwen3_coder", [text]) == read("qwen3_coder", text) == expected


@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "mistral", "json"])
def test_truncated_call_keeps_streamed_arguments(tool_format: str) -> None:
    text = next(
        example.text for example in CALLS if example.tool_format == tool_format and example.text.count(OSLO) == 1
    )
    assert read(tool_format, text[: text.index("Oslo") + 4], True) == [("weather", '{"city": "Oslo')]


def test_long_whitespace_before_call_is_text() -> None:
    blanks = "\n" * 1000
    expected = ["x" + blanks[MAX_DROPPED_WHITESPACE:], ("now", "{}")]
    text = f'x{blanks}<tool_call>{{"name": "now"}}</tool_call>'
    assert read("hermes", [text]) == expected
    assert read("hermes", text) == expected


@pytest.mark.parametrize("tool_format", FORMAT_CLASSES)
@pytest.mark.parametrize(
    "piece",
    [
        *("<tool_call>{", '<tool_call>{"', "[TOOL_CALLS]now", "[now(", "{[", "\n", '{"name": "', "<function=now>"),
        *("<function=now><parameter=text>", "<function=now><parameter=list>[", "<parameter=text></parameter>"),
    ],
)
def test_hostile_completions_keep_parser_buffer_small(tool_format: str, piece: str) -> None:
    """Buffered text is scanned again with each chunk, so the buffer must stay short."""
    count = 2000
    parser = ToolOutputParser(FORMAT_CLASSES[tool_format](), ToolSet(SCHEMAS))
    most = 0
    for _ in range(count):
        parser.feed(piece)
        most = max(most, len(parser._buffer))
    parser.finish()
    assert most <= 2 * MAX_DROPPED_WHITESPACE


class RejectingParser(ToolCallParser):
    """Rejects each call, and records the length of the text that it receives."""

    lengths: ClassVar[list[int]] = []

    def consume(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        self.lengths.append(len(text))
        raise MalformedCallError


class MarkerFormat(CallFormat):
    opening_markers = ("<tool_call>",)

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return RejectingParser()


def test_repeated_opening_markers_are_parsed_in_linear_time() -> None:
    """Each call parser gets a window of the text, not all remaining text."""
    text = "<tool_call>" * 10_000
    parser = ToolOutputParser(MarkerFormat(), ToolSet({}))
    events = [*parser.feed(text), *parser.finish()]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text
    assert len(RejectingParser.lengths) > 9_000
    assert max(RejectingParser.lengths) <= PARSE_WINDOW_CHARACTERS
