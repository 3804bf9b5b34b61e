"""The format of Llama 3.2 and 4: a list of calls in Python syntax, for example `[weather(city="Oslo", days=2)]`."""

import ast
import json
import keyword
import re
from collections.abc import Iterator, Sequence

from lorax_server.errors import InputError
from lorax_server.text.tools.grammar import (
    OPTIONS_KEY,
    Call,
    CallGrammar,
    CallRules,
    ToolFormat,
    check_strict_keywords,
    to_lark_string,
)
from lorax_server.text.tools.json_tool_calls import BracketScanner, ParsedToolCall, append_call_events, dump_json
from lorax_server.text.tools.parser import MAX_CALL_CHARACTERS, MalformedCallError, ParsedEvent, ToolCallParser, ToolSet
from lorax_server.text.tools.references import Definitions

PYTHON_START = "<|python_start|>"
ESCAPE_PATTERN = re.compile(r"\\(.)", re.DOTALL)
PYTHON_ESCAPES = frozenset("\n\\'\"abfnrtvxuUN01234567")
JSON_CONSTANTS = {"true": True, "false": False, "null": None}  # models also write JSON constants


class PythonicToolCallParser(ToolCallParser):
    """Buffers the text up to the end of the list, and then parses all calls."""

    def __init__(self, tools: ToolSet) -> None:
        super().__init__()
        self._tools = tools
        self._scanner = BracketScanner("\"'", "{}[]()")
        self._length = 0

    def consume(self, text: str, at: int, events: list[ParsedEvent]) -> int:
        if not self._length and text[at] != "[":
            if text[at].isspace():
                return 1
            raise MalformedCallError
        count = self._scanner.scan(text[at : at + MAX_CALL_CHARACTERS - self._length], 0)
        self._length += count
        self.is_finished = self._scanner.is_done
        self.is_malformed = self._length == MAX_CALL_CHARACTERS and not self.is_finished
        if self.is_finished:
            calls = read_calls("".join(self.pending) + text[at : at + count])
            self.is_malformed = not calls or any(call.name not in self._tools.names for call in calls)
            for call in () if self.is_malformed else calls:
                append_call_events(call, events)
        return count


def read_calls(text: str) -> list[ParsedToolCall]:
    """Parse a list of calls with literal arguments without executing code. Return an empty list if it is invalid."""
    try:
        tree = ast.parse(ESCAPE_PATTERN.sub(_escape, text.strip()), mode="eval").body
        return [_read_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
    except (MalformedCallError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return []


def _escape(match: re.Match[str]) -> str:
    """Double a backslash that does not start an escape sequence, because Python's parser warns about it."""
    return match[0] if match[1] in PYTHON_ESCAPES else "\\" + match[0]


def _read_call(node: ast.expr) -> ParsedToolCall:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise MalformedCallError
    arguments = {each.arg: ast.literal_eval(_JsonConstants().visit(each.value)) for each in node.keywords}
    return ParsedToolCall(ast.unparse(node.func), dump_json(arguments))


class _JsonConstants(ast.NodeTransformer):
    """AST transformer that replaces the names `true`, `false` and `null` with Python constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_CONSTANTS[node.id]) if node.id in JSON_CONSTANTS else node


class PythonicFormat(ToolFormat):
    opening_markers = (PYTHON_START,)
    start_characters = "["
    start_pattern = r"\[[ \n]*[a-zA-Z_][a-zA-Z0-9_.]*\("
    markers = (PYTHON_START,)
    has_json_arguments = False

    def make_call_parser(self, tools: ToolSet) -> ToolCallParser:
        return PythonicToolCallParser(tools)

    def write_rules(self, rules: CallRules) -> Iterator[str]:
        calls, more = rules.calls, ' (", " call)*' if rules.is_parallel else ""
        yield f'calls: first{more} "]"\n'
        for rule, before in (("first", "["), ("call", "")):
            heads = [to_lark_string(f"{before}{call.name}(") for call in calls]
            choices = [f'{head} keywords_{index} ")"' for index, head in enumerate(heads)]
            yield f"{rule}: {' | '.join(choices)}\n"
        for index, call in enumerate(calls):
            yield from _write_keywords(f"keywords_{index}", call)

    def write_calls(self, calls: Sequence[Call]) -> str:
        return f"[{', '.join(map(_write_call, calls))}]"


def _write_call(call: Call) -> str:
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _write_keywords(rule: str, call: CallGrammar) -> Iterator[str]:
    """Write rules for the arguments in schema order. Optional arguments may be omitted.

    The rules form a binary tree, because llguidance recurses into rules and a chain would use stack for each argument.
    For each range of arguments, `first` starts with an argument, and `more` has a comma before every argument.
    """
    check_strict_keywords(call)
    properties, required = call.schema.get("properties", {}), frozenset(call.schema.get("required", ()))
    definitions, optional = Definitions(call.schema), [name not in required for name in properties]
    for index, (name, schema) in enumerate(properties.items()):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"`tools`: {call.name!r} has a parameter {name[:64]!r}, which is not a Python identifier")
        suffix, value = (
            f"{index}_{index + 1}",
            {**definitions.with_definitions(schema), OPTIONS_KEY: call.schema[OPTIONS_KEY]},
        )
        yield f"{rule}_first_{suffix}: {to_lark_string(name + '=')} %json {json.dumps(value)}\n"
        yield f'{rule}_more_{suffix}: (", " {rule}_first_{suffix}){"?" if optional[index] else ""}\n'
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
