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
AWKWARD = ["", "\u03b1\u0313\u0300\u0345" * 500, "\u1100\u1161\u11a8" * 500, " " * 3000, "dog" * 1000, "\0" * 999]
ENDS = ("</s>", 536), ("<s>", 535)
SURE: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: byte_level().tokenizer,
    "sentencepiece": lambda: sentencepiece().tokenizer,
    "composed": lambda: changed(byte_level().tokenizer, normalizer=normalizers.NFC()),
    "composed-sentencepiece": lambda: changed(
        sentencepiece().tokenizer,
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")]),
    ),
    "split": lambda: changed(
        byte_level().tokenizer,
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(" ", "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
    ),
    "framed": lambda: changed(byte_level().tokenizer, post_processor=framed("<s> $A </s>")),
    "framed-otherwise": lambda: changed(byte_level().tokenizer, post_processor=processors.RobertaProcessing(*ENDS)),
}
UNSURE: dict[str, Callable[[], Tokenizer]] = {
    "unigram": lambda: metaspace().tokenizer,
    "word-piece": word_piece,
    "word-ends": word_ends,
    "words": words,
    "empty": lambda: Tokenizer(models.BPE()),
    "strip": lambda: changed(byte_level().tokenizer, normalizer=normalizers.Strip()),
    "shorten": lambda: changed(byte_level().tokenizer, normalizer=normalizers.Replace("  ", " ")),
    "accents": lambda: changed(
        byte_level().tokenizer, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
    ),
    "whitespace": lambda: changed(byte_level().tokenizer, pre_tokenizer=pre_tokenizers.Whitespace()),
    "removed": lambda: changed(
        byte_level().tokenizer,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
    ),
    "takes-spaces": lambda: changed(byte_level().tokenizer, added=[AddedToken("<mask>", lstrip=True)]),
    "no-text": lambda: changed(byte_level().tokenizer, post_processor=framed("<s>")),
    "no-space": lambda: without_a_byte(byte_level().tokenizer, "Ġ"),
    "no-fallback": lambda: without_a_byte(sentencepiece().tokenizer, "<0xF0>"),
}
ODD = [AddedToken("<mask>", lstrip=True, normalized=False), AddedToken("Dog", normalized=True)]
NAMED: dict[str, Callable[[], Tokenizer]] = {
    **{name: lambda make=make: make().tokenizer for name, make in BYTE_KINDS.items()},  # type: ignore[misc]
    **SURE,
    **UNSURE,
    "odd": lambda: changed(byte_level().tokenizer, added=ODD, normalizer=normalizers.Lowercase()),
    "other-names": lambda: changed(byte_level().tokenizer, post_processor=framed("<other> $A", ("<other>", 9999))),
}


def framed(single: str, *others: tuple[str, int]) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 535), ("</s>", 536), *others])


def changed(tokenizer: Tokenizer, added: list[AddedToken] | None = None, **parts: Any) -> Tokenizer:
    """Return a copy with replaced components."""
    copied = Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(copied, name, part)
    copied.add_tokens(added or [])
    return copied


def without_a_byte(tokenizer: Tokenizer, name: str) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary[f"no longer {name}"] = vocabulary.pop(name)
    state["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("name", SURE)
def test_min_token_count_is_a_lower_bound(name: str) -> None:
    backend = SURE[name]()
    tokenizer = TextTokenizer(backend, {}, {})
    assert max_token_characters(backend) is not None
    for text in (*AWKWARD, *random_texts(200, seed=1)):
        assert tokenizer.min_token_count(text) <= len(backend.encode(text, add_special_tokens=False).ids)


def test_min_token_count_for_long_text() -> None:
    tokenizer = load_tokenizer(DEMO)
    assert tokenizer.min_token_count("word " * 380_000) == -(-1_900_000 // 13)


@pytest.mark.parametrize("name", UNSURE)
def test_min_token_count_is_zero_for_unsupported_tokenizers(name: str) -> None:
    backend = UNSURE[name]()
    assert max_token_characters(backend) is None
    assert TextTokenizer(backend, {}, {}).min_token_count("word " * 10_000) == 0


@pytest.mark.parametrize("name", NAMED)
def test_pieces_match_backend_encoding(name: str) -> None:
    backend = NAMED[name]()
    tokenizer = TextTokenizer(backend, {}, {})
    for text in ("  <mask> a dog, a Dog <s> <tool_call> \U0001f9ff", "", *random_texts(50, seed=2)):
        for special in (True, False):
            whole = backend.encode(text, add_special_tokens=special)
            parts = zip(whole.ids, whole.offsets, strict=True)
            expected = [(token_id, backend.id_to_token(token_id) or "", *place) for token_id, place in parts]
            assert [tuple(piece) for piece in tokenizer.pieces(text, special)] == expected
