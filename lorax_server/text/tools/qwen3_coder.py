"""The format of Qwen3-Coder: `<tool_call>` contains `<function=name>`, which contains `<parameter=name>` tags around
values.

Each call is buffered and parsed at its end tag.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lorax_server.errors import InputError
from lorax_server.text.tools.grammar import (
    ANY_TEXT,
    OPTIONS_KEY,
    Call,
    CallGrammar,
    CallRules,
    FunctionSchema,
    ToolFormat,
    check_strict_keywords,
    escape_regex,
    to_lark_string,
)
from lorax_server.text.tools.json_tool_calls import ParsedToolCall, append_call_events, dump_json
from lorax_server.text.tools.parameter_text import JsonTypeFinder, is_text, to_json
from lorax_server.text.tools.parser import MAX_CALL_CHARACTERS, MalformedCallError, ParsedEvent, ToolCallParser, ToolSet
from lorax_server.text.tools.references import Definitions

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION_START, FUNCTION_END = "<function=", "</function>"
PARAMETER_START, PARAMETER_END = "<parameter=", "</parameter>"
MAX_HEAD_CHARACTERS = 512  # up to the end of the function name
MAX_PARSE_ATTEMPTS = 16  # at end tags within one call; values may contain end tags
NAME_PATTERN = re.compile(r"[^<>\n]{1,256}")
TAG_PATTERN = re.compile(rf"\s*(?:{PARAMETER_START}({NAME_PATTERN.pattern})>|({FUNCTION_END}))")
JSON_VALUE_PATTERN = re.compile(rf'((?:[^"<]++|"(?:[^"\\]++|\\.)*+")*+){PARAMETER_END}', re.DOTALL)
TEXT_VALUE_PATTERN = re.compile(rf"(.*?){PARAMETER_END}", re.DOTALL)


class Qwen3CoderToolCallParser(ToolCallParser):
    """Parses one call. Calls without `<tool_call>` or `</tool_call>` are accepted."""

    def __init__(self, tools: ToolSet, finders: dict[int, JsonTypeFinder]) -> None:
        """Create a parser. `finders` maps schema IDs to type finders, and is shared by all parsers for one format."""
        super().__init__(TOOL_CALL_END)
        self._tools = tools
        self._finders = finders
        self._function = ""
        self._body = ""
        self._num_attempts = 0
        self._has_call = False

    def consume(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        if self._has_call:
            return 1 if text[at].isspace() and not self.closing_prefix else self.consume_closing_marker(text[at])
        return self._consume_body(text, at, events) if self._function else self._consume_head(text[at])

    def _consume_head(self, character: str) -> int:
        """Consume one character of the tag `<function=name>`. The opening marker may include the start of the tag."""
        head = ("".join(self.pending) + character).lstrip()
        name = head.removeprefix(FUNCTION_START)
        if character == ">" and name[:-1].strip() in self._tools.names:
            self._function = name[:-1].strip()
        elif len(self.pending) > MAX_HEAD_CHARACTERS or not (
            FUNCTION_START.startswith(head) or NAME_PATTERN.fullmatch(name)
        ):
            raise MalformedCallError
        return 1

    def _consume_body(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        length = len(self._body)
        body = self._body + text[at : at + MAX_CALL_CHARACTERS - length]
        position = body.find(FUNCTION_END, max(0, length - len(FUNCTION_END) + 1))
        self._body = body if position < 0 else body[: position + len(FUNCTION_END)]
        try:
            if position >= 0:
                self._end_call(events)
            self.is_malformed = len(self._body) == MAX_CALL_CHARACTERS and not self._has_call
        except MalformedCallError:
            self.is_malformed = True
        return len(self._body) - length

    def _end_call(self, events: list[ParsedEvent]) -> None:
        arguments = self._parse(self._body)
        self._num_attempts += 1
        if arguments is not None:
            self._has_call = True
            arguments_text = ", ".join(f"{dump_json(key)}: {value}" for key, value in arguments.items())
            append_call_events(ParsedToolCall(self._function, f"{{{arguments_text}}}"), events)
        elif self._num_attempts == MAX_PARSE_ATTEMPTS:
            raise MalformedCallError

    def _parse(self, body: str) -> dict[str, str] | None:
        """Return a map from argument name to JSON text, or None if the end tag is part of a value."""
        schema = self._tools.schemas[self._function]
        finder = self._finders.setdefault(id(schema), JsonTypeFinder(schema))
        arguments: dict[str, str] = {}
        tag = TAG_PATTERN.match(body)
        while tag is not None and not tag[2]:
            key = tag[1].strip()
            types = finder.find(schema.get("properties", {}).get(key))
            is_json = "string" not in types or (self._tools.is_enforced and not is_text(types))
            value = (JSON_VALUE_PATTERN if is_json else TEXT_VALUE_PATTERN).match(body, tag.end())
            if value is None:
                return None
            if key in arguments:
                raise MalformedCallError
            text = value[1].strip() if is_json else value[1].removeprefix("\n").removesuffix("\n")
            arguments[key] = to_json(text, types, is_json)
            tag = TAG_PATTERN.match(body, value.end())
        if tag is None:
            raise MalformedCallError
        return arguments

    def is_ignorable_tail(self, text: str) -> bool:
        return TOOL_CALL_END.startswith(text.strip())


class Qwen3CoderFormat(ToolFormat):
    opening_markers = (TOOL_CALL_START, FUNCTION_START)
    markers = (TOOL_CALL_START, TOOL_CALL_END)
    has_json_arguments = False

    def __init__(self) -> None:
        self._finders: dict[int, JsonTypeFinder] = {}

    def prepare(self, functions: Sequence[FunctionSchema]) -> None:
        for function in functions:
            finder = self._finders.setdefault(id(function.parameters), JsonTypeFinder(function.parameters))
            for schema in function.parameters.get("properties", {}).values():
                finder.find(schema)

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return Qwen3CoderToolCallParser(tools, self._finders)

    def write_rules(self, rules: CallRules) -> Iterator[str]:
        opening_marker, closing_marker = map(rules.markers.write, (TOOL_CALL_START, TOOL_CALL_END))
        more = rf' ("\n" {opening_marker} tagged)*' if rules.is_parallel else ""
        heads = [to_lark_string(f"\n{FUNCTION_START}{call.name}>\n") for call in rules.calls]
        choices = [f"{head} parameters_{index}" for index, head in enumerate(heads)]
        end = rf'{to_lark_string(FUNCTION_END)} "\n" {closing_marker}'
        yield f"calls: tagged{more}\ntagged: ({' | '.join(choices)}) {end}\n"
        for index, call in enumerate(rules.calls):
            yield from _write_parameters(f"parameters_{index}", call)

    def write_calls(self, calls: Sequence[Call]) -> str:
        return "\n".join(map(_write_call, calls))


def _write_call(call: Call) -> str:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in call.arguments.items()
    }
    parameters = (f"{PARAMETER_START}{name}>\n{text}\n{PARAMETER_END}\n" for name, text in texts.items())
    return f"{TOOL_CALL_START}\n{FUNCTION_START}{call.name}>\n{''.join(parameters)}{FUNCTION_END}\n{TOOL_CALL_END}"


def _write_parameters(rule: str, call: CallGrammar) -> Iterator[str]:
    """Write rules for the parameters in schema order. Optional parameters may be omitted."""
    check_strict_keywords(call)
    properties, required = call.schema.get("properties", {}), frozenset(call.schema.get("required", ()))
    if unknown := required - properties.keys():
        raise InputError(f"`tools`: {call.name!r} requires {min(unknown)[:64]!r}, which is not in its `properties`")
    finder, definitions, names = JsonTypeFinder(call.schema), Definitions(call.schema), []
    for index, (name, schema) in enumerate(properties.items()):
        if NAME_PATTERN.fullmatch(name) is None or name != name.strip():
            raise InputError(f"`tools`: {call.name!r} has a parameter {name[:64]!r}, which cannot be written as a tag")
        given_rule = f"{rule}_given_{index}"
        names.append(given_rule if name in required else f"{given_rule}?")
        yield f'{given_rule}: {to_lark_string(f"{PARAMETER_START}{name}>")} "\\n" {rule}_value_{index} "\\n"\n'
        yield _write_value(f"{rule}_value_{index}", call, name, schema, finder, definitions)
    # One sequence, because llguidance would use stack for each rule of a chain.
    yield f"{rule}: {' '.join(names) or to_lark_string('')}\n"


def _write_value(
    rule: str, call: CallGrammar, name: str, schema: Any, finder: JsonTypeFinder, definitions: Definitions
) -> str:
    """Write the rule for a value and its closing tag."""
    types = finder.find(schema)
    if not is_text(types):
        value = {**definitions.with_definitions(schema), OPTIONS_KEY: call.schema[OPTIONS_KEY]}
        return f"{rule}: %json {json.dumps(value)} {to_lark_string(chr(10) + PARAMETER_END)}\n"
    text_schema = finder.find_text_schema(schema)
    if call.is_strict and text_schema.unknown_keyword:
        raise InputError(
            f"`tools`: the parameter {name[:64]!r} of {call.name!r} has `{text_schema.unknown_keyword}`, which cannot "
            "be enforced for text in this model's tool call format; remove it, or do not set `strict`"
        )
    closing_marker, null = escape_regex("\n" + PARAMETER_END), "|null" if "null" in types else ""
    patterns = [rf"/({text_schema.length}{null}){closing_marker}/"]
    if text_schema.choices is not None:
        patterns.append(rf"/({'|'.join(map(escape_regex, text_schema.choices))}{null}){closing_marker}/")
    return f"{rule}[lazy]: {' & '.join(patterns)} & ~/{ANY_TEXT}{escape_regex(PARAMETER_END)}(.|\\n)+/\n"
