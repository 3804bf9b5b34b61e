"""The reach of a tokenizer: the most characters that one of its tokens can stand for.

A text is refused by its length only where the reach is sure, so every component of a tokenizer is checked. Some shorten
a text before it is cut, some leave out unknown characters, and some make one token of a word of any length. A tokenizer
with an unknown component has no reach.
"""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

LONGEST_DECOMPOSITION = 4  # characters that become one when a text is composed, as in U+1F82
COMPOSED = ("NFC", "NFKC")
KEEPING_NORMALIZERS = ("Prepend", "ByteLevel")
KEEPING_SPLITTERS = ("ByteLevel", "Digits", "Metaspace")
KEEPING_PROCESSORS = ("ByteLevel", "RobertaProcessing", "BertProcessing")
BYTE_LEVEL = "ByteLevel"


def max_token_characters(backend: Tokenizer) -> int | None:
    """Return the most characters of a text that one token can stand for; None where there may be no limit."""
    normalizers, splitters = list(_steps(backend.normalizer)), list(_steps(backend.pre_tokenizer))
    shrinkage = 1
    for step in normalizers:
        if step["type"] in COMPOSED:
            shrinkage *= LONGEST_DECOMPOSITION
        elif not _keeps_length(step):
            return None
    is_sure = (
        all(map(_keeps_all, splitters))
        and all(map(_keeps_text, _steps(backend.post_processor)))
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        and _knows_every_byte(backend.model, any(step["type"] == BYTE_LEVEL for step in (*normalizers, *splitters)))
    )
    return shrinkage * max(map(len, backend.get_vocab()), default=1) if is_sure else None


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a tokenizer's component, as `tokenizer.json` describes them."""
    return _flatten(json.loads(component.__getstate__())) if component is not None else iter(())


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for inner in next(value for key, value in step.items() if key != "type"):
        yield from _flatten(inner)


def _keeps_length(step: dict[str, Any]) -> bool:
    """Tell whether a normalizer never makes a text shorter."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(replaced) <= len(step["content"])
    return step["type"] in KEEPING_NORMALIZERS


def _keeps_all(step: dict[str, Any]) -> bool:
    """Tell whether a splitter keeps all of a text."""
    return step["type"] in KEEPING_SPLITTERS or (step["type"] == "Split" and step["behavior"] != "Removed")


def _keeps_text(step: dict[str, Any]) -> bool:
    """Tell whether a post-processor keeps the tokens of a text."""
    if step["type"] == "TemplateProcessing":
        return any("Sequence" in piece for piece in step["single"])
    return step["type"] in KEEPING_PROCESSORS


def _knows_every_byte(model: Any, is_byte_level: bool) -> bool:
    """Tell whether every byte has a token, so that no unknown characters are left out or become one token."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if is_byte_level:
        return all(model.token_to_id(name) is not None for name in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
