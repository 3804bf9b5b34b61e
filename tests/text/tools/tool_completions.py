"""Completions with tool calls in each model family's format, and the expected parse results."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lorax_server.text.tools.formats import FORMAT_CLASSES
from lorax_server.text.tools.parser import (
    ArgumentsDelta,
    ParsedEvent,
    TextDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolOutputParser,
    ToolSet,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {
        "type": "object",
        "properties": {
            "text": {"$ref": "#/$defs/text"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "either": {"type": ["string", "number"]},
        },
        "$defs": {"text": {"enum": ["1", "x"]}},
    },
}
OSLO = '{"city": "Oslo", "days": 2}'
Meaning = Sequence[str | tuple[str, str]]  # text and (function name, arguments)


class Example(NamedTuple):
    """A completion in a tool call format, and its parse result."""

    tool_format: str
    text: str
    meaning: Meaning


def read(
    example_form: str, pieces: Iterable[str], is_enforced: bool = False, schemas: Mapping[str, Any] = SCHEMAS
) -> Meaning:
    """Parse a chunked completion, and check the order of its events."""
    parser = ToolOutputParser(FORMAT_CLASSES[example_form](), ToolSet(schemas, is_enforced))
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return to_meaning(events)


def to_meaning(events: Sequence[ParsedEvent]) -> Meaning:
    meaning: list[str | tuple[str, str]] = []
    is_open = False
    for event in events:
        match event:
            case TextDelta(text):
                assert text
                assert not is_open
                if meaning and isinstance(meaning[-1], str):
                    meaning[-1] += text
                else:
                    meaning.append(text)
            case ToolCallStart(name):
                assert not is_open
                is_open = True
                meaning.append((name, ""))
            case ArgumentsDelta(text):
                assert is_open
                last = meaning[-1]
                assert isinstance(last, tuple)
                meaning[-1] = (last[0], last[1] + text)
            case ToolCallEnd():
                assert is_open
                is_open = False
    assert not is_open
    return meaning


WEATHER, NOW = ("weather", OSLO), ("now", "{}")
TAGGED = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
CITY, DAYS = "<parameter=city>\nOslo\n</parameter>\n", "<parameter=days>\n2\n</parameter>\n"
CODER = f"<tool_call>\n<function=weather>\n{CITY}{DAYS}</function>\n</tool_call>"


def coder(name: str, value: str) -> str:
    """Write a call to `now` with one parameter."""
    return f"<tool_call>\n<function=now>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"


CALLS = [
    Example("hermes", TAGGED, [WEATHER]),
    Example(
        "hermes",
        f'Let me see.\n\n{TAGGED}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\nDone.',
        ["Let me see.", WEATHER, NOW, "Done."],
    ),
    Example("hermes", '<tool_call>{"arguments": {"a": "}\\"{"}, "name": "now"}', [("now", '{"a": "}\\"{"}')]),
    Example("hermes", '<tool_call>{"name": "now"}<tool_call>{"name": "now"}', [NOW, NOW]),
    Example("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_c', [NOW]),
    Example("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b\nc"}}', [("now", '{"a": "b\\nc"}')]),
    Example("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1.50}"}', [("now", '{"a": 1.5}')]),
    Example("llama3_json", f'{{"name": "weather", "parameters": {OSLO}}}', [WEATHER]),
    Example("llama3_json", '\n{"type": "function", "name": "now", "parameters": {}}', [NOW]),
    Example("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {OSLO}}}', [WEATHER]),
    Example("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [NOW, NOW]),
    Example("llama3_json", '{"name": "now", "parameters": {}}\n{"name": "now"}; more', [NOW, NOW, "; more"]),
    Example("pythonic", '[weather(city="Oslo", days=2), now()]', [WEATHER, NOW]),
    Example("pythonic", "<|python_start|>[now()]", [NOW]),
    Example(
        "pythonic",
        "[now(a='it\\'s [', b=-1.5, c=[True, null, (1, 2)], d={'k': \"\\d\"}, e=None)] yes",
        [("now", '{"a": "it\'s [", "b": -1.5, "c": [true, null, [1, 2]], "d": {"k": "\\\\d"}, "e": null}'), "yes"],
    ),
    Example("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}]', [WEATHER]),
    Example("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now"}]', [NOW, NOW]),
    Example("mistral", f"Well. [TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[ARGS]{{}}", ["Well.", WEATHER, NOW]),
    Example("mistral", '[TOOL_CALLS]now[CALL_ID]abc123456[ARGS]{"a": {}}', [("now", '{"a": {}}')]),
    Example("mistral", "[TOOL_CALLS]now{}", [NOW]),
    Example("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {OSLO}}}]', [WEATHER]),
    Example("json", r'{"name": "now", "arguments": "{\"a\": \"\ud800\"}"}', [("now", r'{"a": "\ud800"}')]),
    Example("json", r'{"arguments": {"a": "\ud800"}, "name": "now"}', [("now", r'{"a": "\ud800"}')]),
    Example("pythonic", r'[now(a="\ud800")]', [("now", r'{"a": "\ud800"}')]),
    Example("granite", '<|tool_call|>[{"name": "now"}]<|/tool_call|>', [NOW]),
    Example("granite", '<function_call> {"name": "now", "arguments": {}}', [NOW]),
    Example("qwen3_coder", CODER, [WEATHER]),
    Example(
        "qwen3_coder",
        f"Let me see.\n\n{CODER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>\nDone.",
        ["Let me see.", WEATHER, NOW, "Done."],
    ),
    Example("qwen3_coder", CODER.replace("\n", ""), [WEATHER]),
    Example("qwen3_coder", "Well: <function=now></function> then", ["Well:", NOW, "then"]),
    Example("qwen3_coder", "<tool_call><function=now></function><function=now></function></tool", [NOW, NOW]),
    Example("qwen3_coder", "<tool_call><function=now></function></tool is", [NOW, "</tool is"]),
    Example("qwen3_coder", coder("text", "1"), [("now", '{"text": "1"}')]),
    Example("qwen3_coder", coder("text", '\n a "b"\\n</p>\n\n'), [("now", r'{"text": "\n a \"b\"\\n</p>\n\n"}')]),
    Example("qwen3_coder", coder("text", ""), [("now", '{"text": ""}')]),
    Example("qwen3_coder", coder("maybe", "null"), [("now", '{"maybe": null}')]),
    Example("qwen3_coder", coder("maybe", "nul"), [("now", '{"maybe": "nul"}')]),
    Example("qwen3_coder", coder("flag", "True"), [("now", '{"flag": true}')]),
    Example("qwen3_coder", coder("flag", "maybe"), [("now", '{"flag": "maybe"}')]),
    Example(
        "qwen3_coder",
        coder("list", '[1.50, "</parameter>\\""]\n'),
        [("now", r'{"list": [1.5, "</parameter>\""]}')],
    ),
    Example("qwen3_coder", coder("either", "1.0"), [("now", '{"either": 1.0}')]),
    Example("qwen3_coder", coder("either", '"1"'), [("now", r'{"either": "\"1\""}')]),
    Example("qwen3_coder", coder("other", "[1]"), [("now", '{"other": [1]}')]),
    Example("qwen3_coder", coder("other", "<b>"), [("now", '{"other": "<b>"}')]),
    Example("json", f'{{"name": "weather", "arguments": {OSLO}}}', [WEATHER]),
    Example("json", '[{"name": "now", "arguments": {}}, {"name": "now", "parameters": {}}]', [NOW, NOW]),
]
# Completions without valid calls, which are returned unchanged as text.
NO_CALLS = [
    *(
        (tool_format, text)
        for tool_format in FORMAT_CLASSES
        for text in ("", " ", "Hello.", "  two\n\nlines\n", "a < b, [c] and {d}", "<")
    ),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "argum'),
    ("hermes", "Use <tool_call> and </tool_call> for that. <tool_ca"),
    ("hermes", "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", 'The call is {"name": "now", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[a link](https://example.com)"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(**{})]"),
    ("pythonic", "[now(a=__import__('os'))]"),
    ("pythonic", "[now(a=1e999)]"),
    ("pythonic", "[" * 1000 + "]" * 1000),
    ("pythonic", "[now(a=" + "-" * 20000 + "1)]"),
    ("pythonic", "[now(), nobody()]"),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 600 + "{}"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),
    ("granite", "<|tool_call|>[]"),
    ("qwen3_coder", "<tool_call>\n<function=nobody>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=text>\n1\n</parameter>\n"),
    ("qwen3_coder", "<tool_call><function=now><parameter=text>1</parameter><parameter=text>1</parameter></function>"),
    ("qwen3_coder", "<tool_call><function=now>1</function></tool_call>"),
    ("qwen3_coder", coder("list", "[1 < 2]")),
    ("qwen3_coder", "<function=" + "x" * 300 + "></function>"),
    ("qwen3_coder", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "Write <function=now and <parameter=a></parameter>."),
    ("json", "[1, 2]"),
    ("json", '{"name": "Bob", "arguments": {}}'),
]
