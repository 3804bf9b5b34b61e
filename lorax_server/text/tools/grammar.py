"""Write tool call grammars in llguidance's Lark dialect."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from lorax_server.errors import InputError
from lorax_server.text.tools.parser import CallFormat
from lorax_server.text.tools.references import DEFINITION_KEYWORDS

ANY_TEXT = r"(.|\n)*"
OPTIONAL_WHITESPACE = r"[ \n]*"
OBJECT_START = rf'(\[{OPTIONAL_WHITESPACE})?\{{{OPTIONAL_WHITESPACE}"(name|type)"'  # how a call in plain JSON starts
OPTIONS_KEY = "x-guidance"  # llguidance's options keyword
WHITESPACE = " "  # optional between JSON tokens; models may pad arrays with any whitespace that the grammar allows

MAX_GRAMMAR_CHARACTERS = 2**18
STRICT_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", *DEFINITION_KEYWORDS, OPTIONS_KEY}
)
ANNOTATION_KEYWORDS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
)

FindTokenId = Callable[[str], int | None]
"""Returns the token ID of a text, or None."""


class MarkerWriter:
    """Writes markers as text, or as a choice between a special token and text.

    A special token does not match as text. Whether llguidance treats the token as special depends on the vocabulary,
    so the grammar allows both.
    """

    def __init__(self, token_to_id: FindTokenId) -> None:
        self._token_to_id = token_to_id

    def has_token(self, text: str) -> bool:
        return self._token_to_id(text) is not None

    def token(self, text: str) -> str:
        return f"<[{self._token_to_id(text)}]>"

    def write(self, text: str) -> str:
        return f"({self.token(text)} | {to_lark_string(text)})" if self.has_token(text) else to_lark_string(text)


class FunctionSchema(NamedTuple):
    """A function and its argument schema."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool  # reject schema keywords that cannot be enforced instead of ignoring them


class CallGrammar(NamedTuple):
    """A function, and the grammar rule for its arguments."""

    name: str
    rule: str
    schema: dict[str, Any]

    @property
    def is_strict(self) -> bool:
        return "lenient" not in self.schema[OPTIONS_KEY]


class CallRules(NamedTuple):
    """The inputs for a tool call format's grammar rules."""

    calls: Sequence[CallGrammar]
    is_parallel: bool  # allow several calls
    markers: MarkerWriter


class Call(NamedTuple):
    """A function call."""

    name: str
    arguments: Mapping[str, Any]

    def to_json(self, arguments_key: str) -> str:
        return json.dumps({"name": self.name, arguments_key: self.arguments}, ensure_ascii=False)


class ToolFormat(CallFormat):
    """A tool call format that grammars can enforce."""

    start_pattern: str = ""
    """Regex for the start of a call without an opening marker, or empty if calls always have an opening marker."""
    has_json_arguments: bool = True
    """The arguments are one JSON object, so the rules use `CallGrammar.rule`."""

    @abstractmethod
    def write_rules(self, rules: CallRules) -> Iterable[str]:
        """Write the rule `calls`, which follows the first opening marker, and the rules that it uses.

        Rules for JSON arguments are written by the caller.
        """

    @abstractmethod
    def write_calls(self, calls: Sequence[Call]) -> str:
        """Return tool calls in the format in which the model writes them."""

    def prepare(self, functions: Sequence[FunctionSchema]) -> None:
        """Analyze schemas in advance, because parsers run on the event loop."""


class ReasoningTags(NamedTuple):
    """The tags around the reasoning that precedes calls."""

    opening_tag: str
    closing_tag: str
    is_open: bool  # the prompt ends with the opening tag


def to_lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write_json_calls(calls: Sequence[Call], arguments_key: str) -> str:
    """Return a JSON list of calls."""
    return f"[{', '.join(call.to_json(arguments_key) for call in calls)}]"


def write_call_objects(calls: Sequence[CallGrammar], arguments_key: str, rule: str = "object", before: str = "") -> str:
    """Return a rule for a call as a JSON object with the arguments in `arguments_key`, preceded by `before`.

    `before` and the start of the object must be one terminal: the lexer prefers the longest terminal, which may be
    free text.
    """
    names = [json.dumps({"name": call.name}, ensure_ascii=False)[:-1] for call in calls]
    heads = [f'{before}{name}, "{arguments_key}": ' for name in names]
    choices = [f'{to_lark_string(head)} {call.rule} "}}"' for head, call in zip(heads, calls, strict=True)]
    return f"{rule}: {' | '.join(choices)}\n"


def write_call_list(rules: CallRules, arguments_key: str) -> list[str]:
    """Return the rule `list`, which matches a JSON list of calls, and the rules that it uses."""
    calls, more = rules.calls, ' (", " object)*' if rules.is_parallel else ""
    first = write_call_objects(calls, arguments_key, "first", "[")
    return [f'list: first{more} "]"\n', first, write_call_objects(calls, arguments_key)]


def write_required_call_grammar(
    tool_format: ToolFormat,
    functions: Sequence[FunctionSchema],
    is_parallel: bool,
    markers: MarkerWriter,
    reasoning: ReasoningTags | None,
    text: str = "",
) -> str:
    """Return a grammar that requires tool calls or, if `text` is set, text that matches the grammar `text`.

    The completion may start with reasoning.
    """
    before, rules = _write_reasoning(reasoning, markers, " BLANKS?")
    calls = "calls" if tool_format.start_pattern else f"{markers.write(tool_format.opening_markers[0])} calls"
    if text:
        calls, rules = f"(text | {calls})", f"{rules}text: %lark {{\n{text}\n}}\n"
    return _write_grammar(f"start: {before}{calls}\n{rules}", tool_format, functions, is_parallel, markers)


def write_optional_call_grammar(
    tool_format: ToolFormat,
    functions: Sequence[FunctionSchema],
    is_parallel: bool,
    markers: MarkerWriter,
    reasoning: ReasoningTags | None,
) -> str:
    """Return a grammar that allows free text and valid tool calls."""
    before, rules = _write_reasoning(reasoning, markers)
    wrong = [f"{ANY_TEXT}{escape_regex(marker)}{ANY_TEXT}" for marker in tool_format.opening_markers]
    if tool_format.start_pattern:
        free, first = "BLANKS? (TEXT | calls)?", r"[^ \n]"
        wrong.append(f"{tool_format.start_pattern}{ANY_TEXT}")
    else:
        marker, first = tool_format.opening_markers[0], r"(.|\n)"
        by_token = f" | TEXT? {markers.token(marker)} calls" if markers.has_token(marker) else ""
        free = f"(TEXT | trigger calls{by_token})?"
        rules += f"trigger[lazy]: /{ANY_TEXT}{escape_regex(marker)}/\n"
    text = " & ".join([f"/{first}{ANY_TEXT}/", *(f"~/{pattern}/" for pattern in wrong)])
    return _write_grammar(f"start: {before}{free}\nTEXT: {text}\n{rules}", tool_format, functions, is_parallel, markers)


def _write_grammar(
    head: str, tool_format: ToolFormat, functions: Sequence[FunctionSchema], is_parallel: bool, markers: MarkerWriter
) -> str:
    """Return the grammar: `head`, followed by the rules for calls. Raise InputError if the grammar is too large."""
    calls = []
    for index, function in enumerate(functions):
        options = {"whitespace_pattern": WHITESPACE} | ({} if function.is_strict else {"lenient": True})
        calls.append(CallGrammar(function.name, f"arguments_{index}", {**function.parameters, OPTIONS_KEY: options}))
    rules = tool_format.write_rules(CallRules(calls, is_parallel, markers))
    arguments = (f"{call.rule}: %json {json.dumps(call.schema)}\n" for call in calls if tool_format.has_json_arguments)
    lines, num_characters = list[str](), 0
    for line in chain((head, "BLANKS: /[ \\n]+/\n"), rules, arguments):
        num_characters += len(line)
        check_size(num_characters)
        lines.append(line)
    return "".join(lines)


def check_size(num_characters: int) -> None:
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise InputError(
            f"`tools`: the grammar for all functions has at least {num_characters} characters, more than the maximum "
            f"of {MAX_GRAMMAR_CHARACTERS}; use fewer functions or smaller schemas"
        )


def _write_reasoning(reasoning: ReasoningTags | None, markers: MarkerWriter, after: str = "") -> tuple[str, str]:
    """Return a grammar expression for optional reasoning followed by `after`, and the rules for this expression."""
    if reasoning is None:
        return "", ""
    closing_tag = escape_regex(reasoning.closing_tag)
    opening_tag = "" if reasoning.is_open else markers.write(reasoning.opening_tag)
    rest, rules = "reasons", f"reasons[lazy]: /{ANY_TEXT}{closing_tag}/\n"
    if markers.has_token(reasoning.closing_tag):
        rest = f"(reasons | REASONS? {markers.token(reasoning.closing_tag)})"
        rules += f"REASONS: /(.|\\n)+/ & ~/{ANY_TEXT}{closing_tag}{ANY_TEXT}/\n"
    return (f"{rest}{after} " if reasoning.is_open else f"({opening_tag} {rest}{after})? "), rules


def escape_regex(text: str) -> str:
    """Escape text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")  # `re.escape` has added the backslash


def check_strict_keywords(call: CallGrammar) -> None:
    """Raise InputError if a strict schema has keywords that a grammar for single arguments cannot enforce."""
    unknown = min(call.schema.keys() - STRICT_KEYWORDS - ANNOTATION_KEYWORDS, default="")
    if call.is_strict and unknown:
        raise InputError(
            f"`tools`: `parameters` of {call.name!r} has `{unknown[:64]}`, which cannot be enforced "
            "in this model's tool call format; remove it, or do not set `strict`"
        )
