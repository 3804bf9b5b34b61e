"""Grammars of the forms that can be asked for: all become texts of llguidance's dialect of Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.errors import InputError
from lorax_server.structured_output.one_of import join_disjoint
from lorax_server.text.tools.grammar import MAX_GRAMMAR, OPTIONS, WHITESPACE
from lorax_server.types import Structure

MAX_CONVERTED = 2**14  # characters of a GBNF grammar, which are converted while other requests wait
MAX_CHOICES = 1000
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def from_json_schema(schema: Mapping[str, Any] | bool) -> Structure:
    """Ask for JSON that a schema of draft 2020-12 accepts. The engine refuses keywords that cannot be enforced."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise InputError(f"a JSON schema is an object, not {type(schema).__name__}")
    if OPTIONS in schema:
        raise InputError(f"the JSON schema has `{OPTIONS}`, which is not a keyword of JSON Schema")
    try:
        text = json.dumps({**schema}, allow_nan=False)
        _check_size(text)
        if text.count('"$id"') == ("$id" in schema):  # else references in some part are of that part
            schema = join_disjoint(schema)
        text = json.dumps({**schema, OPTIONS: {"whitespace_pattern": WHITESPACE}}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema cannot be written as JSON: {error}") from error
    return _make(f"start: %json {text}")


def from_json_text(text: str) -> Structure:
    """Ask for JSON by a schema that is given as text."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema is not JSON: {error}") from error
    return from_json_schema(schema)


def from_regex(pattern: str) -> Structure:
    r"""Ask for text that a regular expression matches as a whole. Rust's syntax, with \d, \w and \s of ASCII."""
    _check_size(pattern)
    if not pattern:
        raise InputError("the regular expression is empty")
    from llguidance import regex_to_lark  # noqa: PLC0415 - only who asks for a regex needs the library here

    return _make(f"start: /{regex_to_lark(pattern, use_ascii='dws')}/")


def from_choices(choices: Sequence[str]) -> Structure:
    """Ask for one of several texts."""
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise InputError("choices are a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise InputError(f"there may be {MAX_CHOICES} choices at most, not {len(choices)}")
    return _make("start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


def from_grammar(text: str) -> Structure:
    """Ask for text of a grammar, in llguidance's dialect of Lark, or in llama.cpp's GBNF, which has `::=`."""
    _check_size(text)
    if not text.strip():
        raise InputError("the grammar is empty")
    return _make(_convert(text) if "::=" in text else text)


def _convert(text: str) -> str:
    if len(text) > MAX_CONVERTED:
        raise InputError(f"a GBNF grammar may have {MAX_CONVERTED} characters, not {len(text)}; write it in Lark")
    if re.search(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", text):
        return text  # it is Lark, with `::=` in a text or a comment
    if re.search(r"(?m)^[ \t]*start[ \t]*::=", text):
        raise InputError("a rule of a GBNF grammar may not be named `start`: give it another name; `root` is the first")
    from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 - as above

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the converter raises whatever it stumbles over
        raise InputError(f"the GBNF grammar cannot be read: {str(error)[:500] or type(error).__name__}") from error


def _make(grammar: str) -> Structure:
    _check_size(grammar)
    return Structure(grammar)


def _check_size(text: str) -> None:
    if len(text) > MAX_GRAMMAR:
        raise InputError(f"a schema, pattern or grammar may have {MAX_GRAMMAR} characters, not {len(text)}")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError("a schema, pattern or grammar is text; it may not have lone surrogates")
