"""Writes the grammars for all output formats in llguidance's Lark dialect, without compiling them.

All functions run in time linear in their input size.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.errors import InputError
from lorax_server.structured_output.one_of import rewrite_one_of
from lorax_server.text.tools.grammar import MAX_GRAMMAR_CHARACTERS, OPTIONS_KEY, WHITESPACE
from lorax_server.text.tools.references import check_depth
from lorax_server.types import Structure

MAX_GBNF_CHARACTERS = 2**14  # the converter takes 25 us per character
MAX_GBNF_STEPS = 2**20  # characters times rules: the converter's second pass, which takes up to a second
MIN_ONE_OF_STEPS = 1000  # plus one per character of the schema
MAX_CHOICES = 1000
# A regex that matches only JSON whitespace: its characters, groups, classes, alternatives and quantifiers.
WHITESPACE_PATTERN = re.compile(r"([ \n\r\t\[\]()|*+?]|\\[nrt]|\{\d+(,\d*)?\})*", re.ASCII)


def from_json_schema(schema: Mapping[str, Any] | bool | str, whitespace: object = WHITESPACE) -> Structure:
    """Return a grammar for JSON that matches a draft 2020-12 schema. The compiler rejects unsupported keywords.

    `whitespace` is a regex for the optional whitespace between JSON tokens.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the JSON schema is not valid JSON: {error}") from error
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise InputError(f"the JSON schema must be an object (got {type(schema).__name__})")
    if OPTIONS_KEY in schema:
        raise InputError(f"the JSON schema has `{OPTIONS_KEY}`, which is not a JSON Schema keyword")
    if not isinstance(whitespace, str) or WHITESPACE_PATTERN.fullmatch(whitespace) is None:
        raise InputError(
            "`whitespace_pattern` must be a regex of spaces, \\n, \\r, \\t, character classes, groups, alternatives "
            f"and quantifiers (got {str(whitespace)[:64]!r})"
        )
    options = {"whitespace_pattern": whitespace}
    return _make_structure(f"start: %json {json.dumps({**prepare_schema(schema), OPTIONS_KEY: options})}")


def prepare_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Check the schema's size and depth, and replace `oneOf` with `anyOf` where both are equivalent.

    Schemas with `$id` are not changed, because references depend on it.
    """
    try:
        text = json.dumps({**schema}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema cannot be written as JSON: {error}") from error
    _check_grammar_size(text)
    check_depth(schema)
    # References in a subschema with its own `$id` do not start at the root.
    has_one_root = text.count('"$id"') == ("$id" in schema)
    return rewrite_one_of(schema, MIN_ONE_OF_STEPS + len(text)) if has_one_root else {**schema}


def from_regex(pattern: str) -> Structure:
    r"""Return a grammar for text that fully matches a regex in Rust syntax, with ASCII-only \d, \w and \s.

    llguidance rejects more than 250 nested groups.
    """
    _check_grammar_size(pattern)
    if not pattern:
        raise InputError("the regular expression is empty")
    from llguidance import regex_to_lark  # noqa: PLC0415 - only requests with a regex need the library in this process

    return _make_structure(f"start: /{regex_to_lark(pattern, use_ascii='dws')}/")


def from_choices(choices: Sequence[str]) -> Structure:
    """Return a grammar that matches any one of several texts."""
    if not choices or not isinstance(choices, list | tuple) or not all(isinstance(choice, str) for choice in choices):
        raise InputError("choices must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise InputError(f"there may be at most {MAX_CHOICES} choices (got {len(choices)})")
    return _make_structure("start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


def from_grammar(text: str) -> Structure:
    """Return a user's grammar in llguidance's Lark dialect, or convert it from llama.cpp's GBNF (with `::=`)."""
    _check_grammar_size(text)
    if not text.strip():
        raise InputError("the grammar is empty")
    return _make_structure(_convert_gbnf(text) if "::=" in text else text)


def _convert_gbnf(text: str) -> str:
    if len(text) > MAX_GBNF_CHARACTERS:
        raise InputError(
            f"a GBNF grammar may have at most {MAX_GBNF_CHARACTERS} characters (got {len(text)}); write it in Lark"
        )
    if re.search(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", text):
        return text  # Lark with `::=` in a string or a comment
    if re.search(r"(?m)^[ \t]*start[ \t]*::=", text):
        raise InputError("a GBNF rule may not be named `start`; rename it (`root` is the first rule)")
    if len(text) * text.count("::=") > MAX_GBNF_STEPS:
        raise InputError(f"the GBNF grammar has too many rules for its {len(text)} characters; write it in Lark")
    from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415 - as above

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the converter raises many types of errors
        raise InputError(f"the GBNF grammar cannot be parsed: {str(error)[:500] or type(error).__name__}") from error


def _make_structure(grammar: str) -> Structure:
    _check_grammar_size(grammar)
    return Structure(grammar)


def _check_grammar_size(text: str) -> None:
    if not isinstance(text, str):
        raise InputError(f"a pattern or grammar must be a string (got {type(text).__name__})")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InputError(
            f"a schema, pattern or grammar may have at most {MAX_GRAMMAR_CHARACTERS} characters (got {len(text)})"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("a schema, pattern or grammar may not contain lone surrogates") from None
