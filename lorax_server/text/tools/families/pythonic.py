"""Llama 3.2 and 4: an answer that is a list of calls as Python writes them, `[weather(city="Oslo", days=2)]`."""

import ast
import json
import keyword
import re
from collections.abc import Iterator
from typing import Any

from lorax_server.errors import InputError
from lorax_server.text.tools.grammar import OPTIONS, CallGrammar, CallRules, ToolFormat, check_keywords, write_text
from lorax_server.text.tools.json_object import Call, dump
from lorax_server.text.tools.json_section import add_call
from lorax_server.text.tools.parser import MalformedCallError, ParsedEvent, Section, ToolSet
from lorax_server.text.tools.references import Definitions

OPENER = "<|python_start|>"
MARKS = {False: re.compile(r"""["'{}\[\]()]"""), True: re.compile(r"""["'\\]""")}  # by whether within a string
ESCAPES = re.compile(r"\\(.)", re.DOTALL)
KNOWN_ESCAPES = frozenset("\n\\'\"abfnrtvxuUN01234567")
CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's words, which models write as well
MAX_LENGTH = 2**20  # characters: Python's parser takes hundreds of bytes for each


class PythonicSection(Section):
    """Reads up to the bracket that closes the list; then all calls are known."""

    def __init__(self, tools: ToolSet) -> None:
        super().__init__()
        self._tools = tools
        self._depth = 0
        self._quote = ""  # of the string that the text is in
        self._skips = False
        self._length = 0

    def take(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        if not self._depth and (text[at].isspace() or text[at] != "["):
            if text[at].isspace():
                return 1
            raise MalformedCallError
        end = self._find_end(text, at)
        self._length += end - at
        if self._length > MAX_LENGTH:
            raise MalformedCallError(end - at)
        if self.has_ended:
            self._add_calls("".join(self.taken) + text[at:end], events, end - at)
        return end - at

    def _find_end(self, text: str, at: int) -> int:
        while at < len(text) and not self.has_ended:
            if self._skips:
                self._skips = False
                at += 1
                continue
            found = MARKS[bool(self._quote)].search(text, at)
            if found is None:
                return len(text)
            at, mark = found.end(), found[0]
            if mark == "\\":
                self._skips = True
            elif mark in "\"'":
                self._quote = "" if mark == self._quote else self._quote or mark
            else:
                self._depth += 1 if mark in "{[(" else -1
                self.has_ended = not self._depth
        return at

    def _add_calls(self, text: str, events: list[ParsedEvent], count: int) -> None:
        try:
            calls = read_calls(text)
        except MalformedCallError:
            raise MalformedCallError(count) from None
        if not calls or any(call.name not in self._tools.names for call in calls):
            raise MalformedCallError(count)
        for call in calls:
            add_call(call, events)


def read_calls(text: str) -> list[Call]:
    """Read a list of calls with literal arguments. Nothing is run."""
    try:
        tree = ast.parse(ESCAPES.sub(_escape, text.strip()), mode="eval").body
        if not isinstance(tree, ast.List):
            raise MalformedCallError
        return [_read_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise MalformedCallError from None


def _escape(found: re.Match[str]) -> str:
    """Double the backslash of what is no escape, about which Python's parser would complain."""
    return found[0] if found[1] in KNOWN_ESCAPES else "\\" + found[0]


def _read_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedCallError
    arguments = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise MalformedCallError
        arguments[argument.arg] = _read_value(argument.value)
    return Call(_read_name(node.func), dump(arguments))


def _read_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_read_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise MalformedCallError


def _read_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value) if isinstance(value, str | int | float | None):
            return value
        case ast.Name(name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_read_value(item) for item in items]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            if all(isinstance(name, str) for name in names):
                return dict(zip(map(str, names), map(_read_value, values), strict=True))
    raise MalformedCallError


class PythonicFormat(ToolFormat):
    openers = (OPENER,)
    starts = "["
    start_pattern = r"\[[ \n]*[a-zA-Z_][a-zA-Z0-9_.]*\("
    markers = (OPENER,)
    has_json_arguments = False

    def make_section(self, tools: ToolSet) -> Section:
        return PythonicSection(tools)

    def write_rules(self, rules: CallRules) -> Iterator[str]:
        calls, more = rules.calls, ' (", " call)*' if rules.is_parallel else ""
        yield f'calls: first{more} "]"\n'
        for rule, before in (("first", "["), ("call", "")):
            heads = [write_text(f"{before}{call.name}(") for call in calls]
            choices = [f'{head} keywords_{index} ")"' for index, head in enumerate(heads)]
            yield f"{rule}: {' | '.join(choices)}\n"
        for index, call in enumerate(calls):
            yield from _write_keywords(f"keywords_{index}", call)


def _write_keywords(rule: str, call: CallGrammar) -> Iterator[str]:
    """Write rules for the arguments in the schema's order; optional arguments may be left out.

    The rules form a binary tree: llguidance recurses into rules, and a chain would take stack for each argument. For
    each range of arguments, `first` begins with an argument, and `more` has a comma before every argument.
    """
    check_keywords(call)
    properties, required = call.schema.get("properties", {}), frozenset(call.schema.get("required", ()))
    definitions, optional = Definitions(call.schema), [name not in required for name in properties]
    for index, (name, schema) in enumerate(properties.items()):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"`tools`: {call.name!r} has a parameter {name[:64]!r}, which Python cannot name")
        own, place = schema if isinstance(schema, dict) else {}, f"{index}_{index + 1}"
        value = {**own, **definitions.select(own), OPTIONS: call.schema[OPTIONS]}
        yield f"{rule}_first_{place}: {write_text(name + '=')} %json {json.dumps(value)}\n"
        yield f'{rule}_more_{place}: (", " {rule}_first_{place}){"?" if optional[index] else ""}\n'
    count = len(optional)
    ranges = [(0, count)]
    while ranges:
        start, end = ranges.pop()
        if end - start > 1:
            middle = (start + end) // 2
            left, right = f"{start}_{middle}", f"{middle}_{end}"
            skipped = f" | {rule}_first_{right}" if all(optional[start:middle]) else ""
            yield f"{rule}_first_{start}_{end}: {rule}_first_{left} {rule}_more_{right}{skipped}\n"
            yield f"{rule}_more_{start}_{end}: {rule}_more_{left} {rule}_more_{right}\n"
            ranges += [(start, middle), (middle, end)]
    arguments = f"{rule}_first_0_{count}{'?' if all(optional) else ''}" if count else '""'
    yield f"{rule}: {arguments}\n"
