"""Grammars for all output formats a request can ask for, written in llguidance's Lark dialect.

Everything here takes time linear in the size of its input, and does not compile anything.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.errors import InputError
from lorax_server.structured_output.one_of import join_disjoint
from lorax_server.text.tools.grammar import MAX_GRAMMAR, OPTIONS, WHITESPACE
from lorax_server.text.tools.references import check_depth
from lorax_server.types import Structure

MAX_GBNF = 2**14  # characters of a GBNF grammar: the converter takes 25 us for each
MAX_GBNF_STEPS = 2**20  # characters times rules: the converter's second pass, which takes up to a second
MIN_STEPS = 1000  # and one per character of the schema, to tell the parts of `oneOf` apart
MAX_CHOICES = 1000
# Rules and groups of a user's grammar. llguidance compiles both by recursion, with up to 3.2 KB of stack for each, so
# a chain of all of them that ends in the deepest JSON schema fits the 4 MiB stack of a trial compile.
MAX_RULES = 800
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

# Strings, regexes, comments and special tokens hide rules and groups. They match also where their end is missing: such
# a grammar does not compile, and a search for the end from each start would take quadratic time.
LARK = re.compile(
    r'(?P<hidden>"(?:\\.|[^"\\])*"?|(?:#|//)[^\n]*|/(?:\\.|[^/\\])*/?|<[^<>\s]+>)'
    r"|(?P<json>%json\s*)"
    r"|(?P<level>^[ \t]*[!?_]*[A-Za-z][\w-]*[ \t]*[:\[{.]|[(\[])",
    re.DOTALL | re.MULTILINE,
)
DECODER = json.JSONDecoder()


def from_json_schema(schema: Mapping[str, Any] | bool) -> Structure:
    """Return a grammar for JSON that a draft 2020-12 schema accepts. Compiling rejects unsupported keywords."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise InputError(f"a JSON schema is an object, not {type(schema).__name__}")
    if OPTIONS in schema:
        raise InputError(f"the JSON schema has `{OPTIONS}`, which is not a keyword of JSON Schema")
    options = {"whitespace_pattern": WHITESPACE}
    return _make(f"start: %json {json.dumps({**prepare_schema(schema), OPTIONS: options})}")


def prepare_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Check the size and depth of a schema, and return it with `anyOf` for `oneOf` where both mean the same."""
    try:
        text = json.dumps({**schema}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema cannot be written as JSON: {error}") from error
    _check_size(text)
    check_depth(schema)
    # With an `$id` in some part, references in that part do not start at the root.
    has_one_root = text.count('"$id"') == ("$id" in schema)
    return join_disjoint(schema, MIN_STEPS + len(text)) if has_one_root else {**schema}


def from_json_text(text: str) -> Structure:
    """Return a grammar for a JSON schema given as text."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema is not JSON: {error}") from error
    return from_json_schema(schema)


def from_regex(pattern: str) -> Structure:
    r"""Return a grammar for text that matches a regex in full. The syntax is Rust's, with ASCII-only \d, \w and \s.

    llguidance itself rejects more than 250 nested groups.
    """
    _check_size(pattern)
    if not pattern:
        raise InputError("the regular expression is empty")
    from llguidance import regex_to_lark  # noqa: PLC0415 - only requests with a regex need the library in this process

    return _make(f"start: /{regex_to_lark(pattern, use_ascii='dws')}/")


def from_choices(choices: Sequence[str]) -> Structure:
    """Return a grammar for one of several texts."""
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise InputError("choices are a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise InputError(f"there may be {MAX_CHOICES} choices at most, not {len(choices)}")
    return _make("start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


def from_grammar(text: str) -> Structure:
    """Return a user's grammar, written in llguidance's Lark dialect, or in llama.cpp's GBNF (with `::=`)."""
    _check_size(text)
    if not text.strip():
        raise InputError("the grammar is empty")
    grammar = _convert(text) if "::=" in text else text
    _check_rules(grammar)
    return _make(grammar)


def _convert(text: str) -> str:
    if len(text) > MAX_GBNF:
        raise InputError(f"a GBNF grammar may have {MAX_GBNF} characters, not {len(text)}; write it in Lark")
    if re.search(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", text):
        return text  # Lark, with `::=` in a string or a comment
    if re.search(r"(?m)^[ \t]*start[ \t]*::=", text):
        raise InputError("a rule of a GBNF grammar may not be named `start`: give it another name; `root` is the first")
    if len(text) * text.count("::=") > MAX_GBNF_STEPS:
        raise InputError(f"the GBNF grammar has too many rules for its {len(text)} characters; write it in Lark")
    from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 - as above

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the converter raises errors of many types
        raise InputError(f"the GBNF grammar cannot be read: {str(error)[:500] or type(error).__name__}") from error


def _check_rules(grammar: str) -> None:
    """Reject a Lark grammar with too many rules and groups, or with a JSON schema that is too deep."""
    num_levels, at = 0, 0
    while (found := LARK.search(grammar, at)) is not None:
        at = found.end()
        num_levels += found.lastgroup == "level"
        if num_levels > MAX_RULES:
            raise InputError(f"the grammar has more than {MAX_RULES} rules and groups; make it smaller")
        if found.lastgroup == "json":
            try:
                schema, at = DECODER.raw_decode(grammar, at)
            except (ValueError, RecursionError) as error:
                raise InputError(f"the JSON schema in the grammar is not JSON: {error}") from error
            check_depth(schema if isinstance(schema, Mapping) else {})


def _make(grammar: str) -> Structure:
    _check_size(grammar)
    return Structure(grammar)


def _check_size(text: str) -> None:
    if len(text) > MAX_GRAMMAR:
        raise InputError(f"a schema, pattern or grammar may have {MAX_GRAMMAR} characters, not {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("a schema, pattern or grammar is text; it may not have lone surrogates") from None
