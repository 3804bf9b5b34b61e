"""Qwen3-Coder: `<tool_call>` with `<function=name>` in it, and in that `<parameter=name>` around each value."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from lorax_server.errors import InputError
from lorax_server.text.tools.grammar import (
    ANY,
    OPTIONS,
    CallGrammar,
    CallRules,
    FunctionSchema,
    ToolFormat,
    check_keywords,
    escape,
    write_text,
)
from lorax_server.text.tools.json_object import Call, dump
from lorax_server.text.tools.json_section import add_call
from lorax_server.text.tools.parameter_text import (
    JsonValue,
    TextValue,
    TypeFinder,
    find_text_schema,
    is_text,
    to_json,
    to_piece,
)
from lorax_server.text.tools.parser import (
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    MalformedCallError,
    ParsedEvent,
    Section,
    ToolSet,
)
from lorax_server.text.tools.references import Definitions

OPENER, CLOSER = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME = 256  # characters
NAME = re.compile(rf"[^<>\n]{{1,{MAX_NAME}}}")


class _NextPart(Enum):
    """The part of a section that comes next."""

    FUNCTION = auto()
    NAME = auto()  # of the function
    PARAMETER = auto()  # or the function's end
    KEY = auto()  # the parameter's name
    VALUE = auto()
    AFTER = auto()  # the end, or another function


TAGS = {
    _NextPart.FUNCTION: (FUNCTION,),
    _NextPart.PARAMETER: (PARAMETER, FUNCTION_END),
    _NextPart.AFTER: (CLOSER, FUNCTION),
}


class Qwen3CoderSection(Section):
    """Reads functions with their parameters. Calls count also where `<tool_call>` or `</tool_call>` does not come."""

    def __init__(self, tools: ToolSet, finders: dict[str, TypeFinder]) -> None:
        """`finders` by function name are shared by all sections, and get those that are missing."""
        super().__init__()
        self._tools = tools
        self._finders = finders
        self._next = _NextPart.FUNCTION
        self._tag = ""  # or name, as far as it has come
        self._function, self._key = "", ""
        self._finder = TypeFinder({})  # of the function's parameters
        self._types: frozenset[str] = frozenset()  # of the value
        self._value: TextValue | JsonValue | None = None
        self._parts: list[str] = []  # of the value
        self._arguments: dict[str, str] = {}  # of the call, as JSON

    def take(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        if self._next is _NextPart.VALUE:
            return self._take_value(text, at, events)
        character = text[at]
        if self._next is _NextPart.FUNCTION and not self.taken and not character.isspace() and character != "<":
            self._next = _NextPart.NAME  # the opener was `<function=`
        if self._next in (_NextPart.NAME, _NextPart.KEY):
            return self._take_name(character, events)
        if character.isspace() and not self._tag:
            return 1
        return self._take_tag(character, events)

    def _take_tag(self, character: str, events: list[ParsedEvent]) -> int:
        tag, tags = self._tag + character, TAGS[self._next]
        if not any(each.startswith(tag) for each in tags):
            if self._next is not _NextPart.AFTER:
                raise MalformedCallError
            self.unread, self.has_ended = self._tag, True
            return 0
        self._tag = "" if tag in tags else tag
        match tag:
            case "<function=":
                self._next = _NextPart.NAME
            case "<parameter=":
                self._next = _NextPart.KEY
            case "</function>":
                self._end_call(events)
            case "</tool_call>":
                self.has_ended = True
        return 1

    def _take_name(self, character: str, events: list[ParsedEvent]) -> int:
        if character != ">":
            if len(self._tag) == MAX_NAME or character in "<\n":
                raise MalformedCallError
            self._tag += character
            return 1
        name, self._tag = self._tag.strip(), ""
        if self._next is _NextPart.KEY:
            self._begin_value(name, events)
        elif name in self._tools.names:
            self._begin_call(name, events)
        else:
            self._tag = name
            raise MalformedCallError
        return 1

    def _begin_call(self, name: str, events: list[ParsedEvent]) -> None:
        self._function, self._arguments, self._next = name, {}, _NextPart.PARAMETER
        self._finder = _get_finder(self._finders, name, self._tools.schemas[name])
        if self._tools.is_enforced:
            events.append(CallBegins(name))
            self.is_open = True

    def _begin_value(self, key: str, events: list[ParsedEvent]) -> None:
        if key in self._arguments:
            raise MalformedCallError
        self._key, self._parts, self._next = key, [], _NextPart.VALUE
        self._types = self._finder.find(self._finder.root.get("properties", {}).get(key))
        is_json = "string" not in self._types or (self._tools.is_enforced and not is_text(self._types))
        self._value = JsonValue(PARAMETER_END) if is_json else TextValue(PARAMETER_END)
        quote = '"' if self._is_streamed else ""
        self._send(f"{', ' if self._arguments else '{'}{dump(key)}: {quote}", events)

    def _take_value(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        value = self._value
        assert value is not None
        end = value.read(text, at)
        if self._is_streamed:
            self._send(to_piece(value.text), events)
        else:
            self._parts.append(value.text)
        if value.is_done:
            self._next = _NextPart.PARAMETER
            is_json = isinstance(value, JsonValue)
            read = "".join(self._parts)
            written = to_json(read.strip() if is_json else read, self._types, is_json)
            self._arguments[self._key] = written
            self._send('"' if self._is_streamed else written, events)
        return end - at

    def _end_call(self, events: list[ParsedEvent]) -> None:
        self._next = _NextPart.AFTER
        if self.is_open:
            self._send("}" if self._arguments else "{}", events)
            events.append(CallEnds())
            self.is_open = False
            return
        arguments = ", ".join(f"{dump(key)}: {value}" for key, value in self._arguments.items())
        add_call(Call(self._function, f"{{{arguments}}}"), events)

    @property
    def _is_streamed(self) -> bool:
        """Tell whether a text is sent as it comes; one that may be null has to be complete."""
        return self.is_open and self._types == {"string"}

    def _send(self, text: str, events: list[ParsedEvent]) -> None:
        if self.is_open and text:
            events.append(ArgumentsPiece(text))

    def forgives(self, text: str) -> bool:
        return CLOSER.startswith(text.strip())


class Qwen3CoderFormat(ToolFormat):
    openers = (OPENER, FUNCTION)
    markers = (OPENER, CLOSER)
    has_json_arguments = False

    def __init__(self) -> None:
        self._finders: dict[str, TypeFinder] = {}

    def prepare(self, functions: Sequence[FunctionSchema]) -> None:
        for function in functions:
            finder = _get_finder(self._finders, function.name, function.parameters)
            for schema in function.parameters.get("properties", {}).values():
                finder.find(schema)

    def make_section(self, tools: ToolSet) -> Section:
        return Qwen3CoderSection(tools, self._finders)

    def write_rules(self, rules: CallRules) -> Iterator[str]:
        opener, closer = map(rules.marks.write, (OPENER, CLOSER))
        more = rf' ("\n" {opener} tagged)*' if rules.is_parallel else ""
        heads = [write_text(f"\n{FUNCTION}{call.name}>\n") for call in rules.calls]
        choices = [f"{head} parameters_{index}" for index, head in enumerate(heads)]
        yield f'calls: tagged{more}\ntagged: ({" | ".join(choices)}) {write_text(FUNCTION_END)} "\\n" {closer}\n'
        for index, call in enumerate(rules.calls):
            yield from _write_parameters(f"parameters_{index}", call)


def _get_finder(finders: dict[str, TypeFinder], name: str, schema: Mapping[str, Any]) -> TypeFinder:
    if name not in finders or finders[name].root is not schema:
        finders[name] = TypeFinder(schema)
    return finders[name]


def _write_parameters(rule: str, call: CallGrammar) -> Iterator[str]:
    """Write rules for the parameters in the schema's order; optional parameters may be left out."""
    check_keywords(call)
    properties, required = call.schema.get("properties", {}), frozenset(call.schema.get("required", ()))
    if unknown := required - properties.keys():
        raise InputError(f"`tools`: {call.name!r} requires {min(unknown)[:64]!r}, which its `properties` have not")
    finder, definitions, names = TypeFinder(call.schema), Definitions(call.schema), []
    for index, (name, schema) in enumerate(properties.items()):
        if NAME.fullmatch(name) is None or name != name.strip():
            raise InputError(f"`tools`: {call.name!r} has a parameter {name[:64]!r}, which no tag can name")
        given = f"{rule}_given_{index}"
        names.append(given if name in required else f"{given}?")
        yield f'{given}: {write_text(f"{PARAMETER}{name}>")} "\\n" {rule}_value_{index} "\\n"\n'
        yield _write_value(f"{rule}_value_{index}", call, name, schema, finder, definitions)
    yield f"{rule}: {' '.join(names) or write_text('')}\n"  # one sequence: a chain of rules would take stack for each


def _write_value(
    rule: str, call: CallGrammar, name: str, schema: Any, finder: TypeFinder, definitions: Definitions
) -> str:
    """Write the rule of a value with its closer."""
    types = finder.find(schema)
    if not is_text(types):
        own = schema if isinstance(schema, dict) else {}
        value = {**own, **definitions.select(own), OPTIONS: call.schema[OPTIONS]}
        return f"{rule}: %json {json.dumps(value)} {write_text(chr(10) + PARAMETER_END)}\n"
    found = find_text_schema(schema, finder)
    if call.is_strict and found.unknown:
        raise InputError(
            f"`tools`: the parameter {name[:64]!r} of {call.name!r} has `{found.unknown}`, which cannot be enforced "
            "where a model writes texts as they are; leave it out, or let the function not be `strict`"
        )
    closer, null = escape("\n" + PARAMETER_END), "|null" if "null" in types else ""
    patterns = [rf"/({found.length}{null}){closer}/"]
    if found.choices is not None:
        patterns.append(rf"/({'|'.join(map(escape, found.choices))}{null}){closer}/")
    return f"{rule}[lazy]: {' & '.join(patterns)} & ~/{ANY}{escape(PARAMETER_END)}(.|\\n)+/\n"
