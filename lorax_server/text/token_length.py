"""Finds the maximum number of characters per token, so that long prompts can be rejected without tokenizing them.

All components of the tokenizer are checked, because some shorten the text, drop unknown characters or map a word of any
length to one token. A tokenizer with an unknown component has no maximum.
"""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

MAX_COMPOSED_CHARACTERS = 4  # characters that NFC composes into one, for example U+1F82
COMPOSING_NORMALIZERS = ("NFC", "NFKC")
LENGTH_PRESERVING_NORMALIZERS = ("Prepend", "ByteLevel")
LENGTH_PRESERVING_SPLITTERS = ("ByteLevel", "Digits", "Metaspace")
LENGTH_PRESERVING_PROCESSORS = ("ByteLevel", "RobertaProcessing", "BertProcessing")
BYTE_LEVEL_TYPE = "ByteLevel"


def max_token_characters(backend: Tokenizer) -> int | None:
    """Return the maximum number of text characters per token, or None if it is not known."""
    normalizers, splitters = list(_list_steps(backend.normalizer)), list(_list_steps(backend.pre_tokenizer))
    shrinkage = 1
    for step in normalizers:
        if step["type"] in COMPOSING_NORMALIZERS:
            shrinkage *= MAX_COMPOSED_CHARACTERS
        elif not _keeps_length(step):
            return None
    is_bounded = (
        all(map(_keeps_characters, splitters))
        and all(map(_keeps_text, _list_steps(backend.post_processor)))
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        and _has_all_bytes(backend.model, any(step["type"] == BYTE_LEVEL_TYPE for step in (*normalizers, *splitters)))
    )
    return shrinkage * max(map(len, backend.get_vocab()), default=1) if is_bounded else None


def _list_steps(component: Any) -> Iterator[dict[str, Any]]:
    """Yield a tokenizer component's steps, in `tokenizer.json` format."""
    return _flatten_step(json.loads(component.__getstate__())) if component is not None else iter(())


def _flatten_step(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for inner in next(value for key, value in step.items() if key != "type"):
        yield from _flatten_step(inner)


def _keeps_length(step: dict[str, Any]) -> bool:
    """Return True if a normalizer never shortens text."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(replaced) <= len(step["content"])
    return step["type"] in LENGTH_PRESERVING_NORMALIZERS


def _keeps_characters(step: dict[str, Any]) -> bool:
    """Return True if a pre-tokenizer keeps all characters."""
    return step["type"] in LENGTH_PRESERVING_SPLITTERS or (step["type"] == "Split" and step["behavior"] != "Removed")


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return True if a post-processor keeps all tokens."""
    if step["type"] == "TemplateProcessing":
        return any("Sequence" in piece for piece in step["single"])
    return step["type"] in LENGTH_PRESERVING_PROCESSORS


def _has_all_bytes(model: Any, is_byte_level: bool) -> bool:
    """Return True if every byte has a token, so that unknown characters are neither dropped nor merged."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return all(model.token_to_id(name) is not None for name in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
