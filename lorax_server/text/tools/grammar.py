"""Grammars for tool calls, written in llguidance's Lark dialect."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from lorax_server.errors import InputError
from lorax_server.text.tools.parser import CallFormat
from lorax_server.text.tools.references import DEFINITIONS

ANY = r"(.|\n)*"
BLANK = r"[ \n]*"
OBJECT_START = rf'(\[{BLANK})?\{{{BLANK}"(name|type)"'  # of an answer that is a call as JSON
OPTIONS = "x-guidance"  # a keyword of llguidance's own
# A new line and its indentation, or a blank or two. Without a limit, a model can fill all of its answer with blanks.
WHITESPACE = r"\r?\n[ \t]{0,32}|[ \t]{1,2}"

MAX_GRAMMAR = 2**18  # characters
KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITIONS, OPTIONS})
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})

TokenId = Callable[[str], int | None]
"""Finds the token of a name."""


class Marks:
    """Writes markers: as text, or as the token that the vocabulary has for it.

    Such a token is no text to a grammar. Whether it counts as special is for the reader of the grammar to say, so both
    are written.
    """

    def __init__(self, token_to_id: TokenId) -> None:
        self._token_to_id = token_to_id

    def has_token(self, text: str) -> bool:
        return self._token_to_id(text) is not None

    def token(self, text: str) -> str:
        return f"<[{self._token_to_id(text)}]>"

    def write(self, text: str) -> str:
        return f"({self.token(text)} | {write_text(text)})" if self.has_token(text) else write_text(text)


class FunctionSchema(NamedTuple):
    """A function and the schema of its arguments."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool  # keywords of the schema that cannot be enforced are refused, and not left out


class CallGrammar(NamedTuple):
    """A function, and the rule that its arguments follow."""

    name: str
    rule: str
    schema: dict[str, Any]

    @property
    def is_strict(self) -> bool:
        return "lenient" not in self.schema[OPTIONS]


class CallRules(NamedTuple):
    """Parts that the rules of calls are made of."""

    calls: Sequence[CallGrammar]
    is_parallel: bool  # several calls are possible
    marks: Marks


class ToolFormat(CallFormat):
    """A format whose calls can also be asked for."""

    start_pattern: str = ""
    """Matches the start of an answer that is a call without an opener; empty if there is none such."""
    has_json_arguments: bool = True
    """The rules use `CallGrammar.rule`, all arguments as one JSON object."""

    @abstractmethod
    def write_rules(self, rules: CallRules) -> Iterable[str]:
        """Write the lines of the rule `calls`, which follows the first opener if there is one, and of rules it needs.

        The rules of JSON arguments are written elsewhere.
        """

    def prepare(self, functions: Sequence[FunctionSchema]) -> None:
        """Analyze schemas for sections made later, which read answers on the event loop."""


class Thought(NamedTuple):
    """The reasoning that may come before calls."""

    opener: str
    closer: str
    has_begun: bool  # in the prompt


def write_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write_objects(calls: Sequence[CallGrammar], word: str, rule: str = "object", before: str = "") -> str:
    """Write a rule: a call as a JSON object, whose arguments are named `word`, with a text before it.

    What begins an answer has to be one text with what follows: a grammar's lexer takes the longest, which may be that
    of free text.
    """
    heads = [before + json.dumps({"name": call.name}, ensure_ascii=False)[:-1] + f', "{word}": ' for call in calls]
    choices = [f'{write_text(head)} {call.rule} "}}"' for head, call in zip(heads, calls, strict=True)]
    return f"{rule}: {' | '.join(choices)}\n"


def write_list(rules: CallRules, word: str) -> list[str]:
    """Write the rules `list` and `object`."""
    calls, more = rules.calls, ' (", " object)*' if rules.is_parallel else ""
    return [f'list: first{more} "]"\n', write_objects(calls, word, "first", "["), write_objects(calls, word)]


def write_required(
    form: ToolFormat,
    functions: Sequence[FunctionSchema],
    is_parallel: bool,
    marks: Marks,
    thought: Thought | None,
    text: str = "",
) -> str:
    """Write the grammar of an answer that must be calls, or text that follows the grammar `text` if there is one.

    Reasoning may come first.
    """
    before, rules = _write_thought(thought, marks, " BLANKS?")
    calls = "calls" if form.start_pattern else f"{marks.write(form.openers[0])} calls"
    if text:
        calls, rules = f"(text | {calls})", f"{rules}text: %lark {{\n{text}\n}}\n"
    return _write_grammar(f"start: {before}{calls}\n{rules}", form, functions, is_parallel, marks)


def write_optional(
    form: ToolFormat, functions: Sequence[FunctionSchema], is_parallel: bool, marks: Marks, thought: Thought | None
) -> str:
    """Write the grammar of an answer that is free except for its calls."""
    before, rules = _write_thought(thought, marks)
    wrong = [f"{ANY}{escape(opener)}{ANY}" for opener in form.openers]
    if form.start_pattern:
        free, first = "BLANKS? (TEXT | calls)?", r"[^ \n]"
        wrong.append(f"{form.start_pattern}{ANY}")
    else:
        opener, first = form.openers[0], r"(.|\n)"
        free = f"(TEXT | trigger calls{f' | TEXT? {marks.token(opener)} calls' if marks.has_token(opener) else ''})?"
        rules += f"trigger[lazy]: /{ANY}{escape(opener)}/\n"
    text = " & ".join([f"/{first}{ANY}/", *(f"~/{pattern}/" for pattern in wrong)])
    return _write_grammar(f"start: {before}{free}\nTEXT: {text}\n{rules}", form, functions, is_parallel, marks)


def _write_grammar(
    head: str, form: ToolFormat, functions: Sequence[FunctionSchema], is_parallel: bool, marks: Marks
) -> str:
    """Add the rules of calls. Raise InputError as soon as the grammar is too large, before more rules are written."""
    calls = []
    for index, function in enumerate(functions):
        options = {"whitespace_pattern": WHITESPACE} | ({} if function.is_strict else {"lenient": True})
        calls.append(CallGrammar(function.name, f"arguments_{index}", {**function.parameters, OPTIONS: options}))
    rules = form.write_rules(CallRules(calls, is_parallel, marks))
    arguments = (f"{call.rule}: %json {json.dumps(call.schema)}\n" for call in calls if form.has_json_arguments)
    lines, num_characters = list[str](), 0
    for line in chain((head, "BLANKS: /[ \\n]+/\n"), rules, arguments):
        num_characters += len(line)
        check_size(num_characters)
        lines.append(line)
    return "".join(lines)


def check_size(num_characters: int) -> None:
    if num_characters > MAX_GRAMMAR:
        raise InputError(
            f"`tools`: the schemas of all functions make a grammar of {num_characters} characters or more, "
            f"of {MAX_GRAMMAR} at most; offer fewer, or smaller ones"
        )


def _write_thought(thought: Thought | None, marks: Marks, after: str = "") -> tuple[str, str]:
    """Write the reference to a thought, with what follows it, and its rules."""
    if thought is None:
        return "", ""
    closer, opener = escape(thought.closer), "" if thought.has_begun else marks.write(thought.opener)
    rest, rules = "reasons", f"reasons[lazy]: /{ANY}{closer}/\n"
    if marks.has_token(thought.closer):
        rest = f"(reasons | REASONS? {marks.token(thought.closer)})"
        rules += f"REASONS: /(.|\\n)+/ & ~/{ANY}{closer}{ANY}/\n"
    return (f"{rest}{after} " if thought.has_begun else f"({opener} {rest}{after})? "), rules


def escape(text: str) -> str:
    """Write text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")  # the backslash is there


def check_keywords(call: CallGrammar) -> None:
    """Refuse a strict schema with keywords for all arguments together, where they are written one by one."""
    unknown = min(call.schema.keys() - KEYWORDS - ANNOTATIONS, default="")
    if call.is_strict and unknown:
        raise InputError(
            f"`tools`: `parameters` of {call.name!r} has `{unknown[:64]}`, which cannot be enforced in the form that "
            "this model writes calls in; leave it out, or let the function not be `strict`"
        )
