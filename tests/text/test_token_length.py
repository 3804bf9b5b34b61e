"""Tests for the lower bound on a text's token count that does not require tokenizing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

import lorax_server
from lorax_server.text.token_length import max_token_characters
from lorax_server.text.tokenizer import TextTokenizer, load_tokenizer
from tests.text.tokenizers import (
    BYTE_KINDS,
    byte_level,
    metaspace,
    random_texts,
    sentencepiece,
    word_ends,
    word_piece,
    words,
)

DEMO = Path(lorax_server.__file__).parent / "demo" / "model"
UNUSUAL_TEXTS = ["", "\u03b1\u0313\u0300\u0345" * 500, "\u1100\u1161\u11a8" * 500, " " * 3000, "dog" * 1000, "\0" * 999]
ENDS = ("</s>", 536), ("<s>", 535)
BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: byte_level().tokenizer,
    "sentencepiece": lambda: sentencepiece().tokenizer,
    "composed": lambda: with_components(byte_level().tokenizer, normalizer=normalizers.NFC()),
    "composed-sentencepiece": lambda: with_components(
        sentencepiece().tokenizer,
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")]),
    ),
    "split": lambda: with_components(
        byte_level().tokenizer,
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(" ", "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
    ),
    "template": lambda: with_components(byte_level().tokenizer, post_processor=make_template("<s> $A </s>")),
    "roberta-template": lambda: with_components(
        byte_level().tokenizer, post_processor=processors.RobertaProcessing(*ENDS)
    ),
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "unigram": lambda: metaspace().tokenizer,
    "word-piece": word_piece,
    "word-ends": word_ends,
    "words": words,
    "empty": lambda: Tokenizer(models.BPE()),
    "strip": lambda: with_components(byte_level().tokenizer, normalizer=normalizers.Strip()),
    "shorten": lambda: with_components(byte_level().tokenizer, normalizer=normalizers.Replace("  ", " ")),
    "accents": lambda: with_components(
        byte_level().tokenizer, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
    ),
    "whitespace": lambda: with_components(byte_level().tokenizer, pre_tokenizer=pre_tokenizers.Whitespace()),
    "removed": lambda: with_components(
        byte_level().tokenizer,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
    ),
    "takes-spaces": lambda: with_components(byte_level().tokenizer, added=[AddedToken("<mask>", lstrip=True)]),
    "no-text": lambda: with_components(byte_level().tokenizer, post_processor=make_template("<s>")),
    "no-space": lambda: without_byte_token(byte_level().tokenizer, "Ġ"),
    "no-fallback": lambda: without_byte_token(sentencepiece().tokenizer, "<0xF0>"),
}
UNUSUAL_ADDED_TOKENS = [AddedToken("<mask>", lstrip=True, normalized=False), AddedToken("Dog", normalized=True)]
ALL_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    **{name: lambda make=make: make().tokenizer for name, make in BYTE_KINDS.items()},  # type: ignore[misc]
    **BOUNDED,
    **UNBOUNDED,
    "odd": lambda: with_components(
        byte_level().tokenizer, added=UNUSUAL_ADDED_TOKENS, normalizer=normalizers.Lowercase()
    ),
    "other-names": lambda: with_components(
        byte_level().tokenizer, post_processor=make_template("<other> $A", ("<other>", 9999))
    ),
}


def make_template(single: str, *others: tuple[str, int]) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 535), ("</s>", 536), *others])


def with_components(tokenizer: Tokenizer, added: list[AddedToken] | None = None, **parts: Any) -> Tokenizer:
    """Return a copy with replaced components."""
    copied = Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(copied, name, part)
    copied.add_tokens(added or [])
    return copied


def without_byte_token(tokenizer: Tokenizer, name: str) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary[f"no longer {name}"] = vocabulary.pop(name)
    state["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("name", BOUNDED)
def test_min_token_count_is_a_lower_bound(name: str) -> None:
    backend = BOUNDED[name]()
    tokenizer = TextTokenizer(backend, {}, {})
    assert max_token_characters(backend) is not None
    for text in (*UNUSUAL_TEXTS, *random_texts(200, seed=1)):
        assert tokenizer.min_token_count(text) <= len(backend.encode(text, add_special_tokens=False).ids)


def test_min_token_count_of_long_text_uses_longest_token() -> None:
    tokenizer = load_tokenizer(DEMO)
    assert tokenizer.min_token_count("word " * 380_000) == -(-1_900_000 // 13)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_min_token_count_is_zero_for_unsupported_tokenizers(name: str) -> None:
    backend = UNBOUNDED[name]()
    assert max_token_characters(backend) is None
    assert TextTokenizer(backend, {}, {}).min_token_count("word " * 10_000) == 0


@pytest.mark.parametrize("name", ALL_TOKENIZERS)
def test_token_spans_match_backend_encoding(name: str) -> None:
    backend = ALL_TOKENIZERS[name]()
    tokenizer = TextTokenizer(backend, {}, {})
    for text in ("  <mask> a dog, a Dog <s> <tool_call> \U0001f9ff", "", *random_texts(50, seed=2)):
        for special in (True, False):
            whole = backend.encode(text, add_special_tokens=special)
            parts = zip(whole.ids, whole.offsets, strict=True)
            expected = [(token_id, backend.id_to_token(token_id) or "", *place) for token_id, place in parts]
            assert [tuple(piece) for piece in tokenizer.tokenize_with_spans(text, special)] == expected
