"""Decode token IDs to text incrementally.

The text continues the prompt: a leading space is kept, and a character that starts in the prompt is completed. Special
tokens are skipped. `read_offset` is the number of decoded tokens; decoding resumes at `prefix_offset` for context.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence, Set
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"  # replaces invalid bytes
CONTEXT_TOKENS = 6  # at the end of the prompt, for decoders that depend on adjacent tokens
MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 character
MAX_HELD_TOKENS = MAX_INCOMPLETE_BYTES  # a token has at least one byte, so earlier text never changes


class Progress(NamedTuple):
    """The text that a token added, and the new offsets."""

    text: str
    prefix_offset: int
    read_offset: int


class Detokenizer(Protocol):
    """Decodes the token IDs of one tokenizer."""

    _special_ids: frozenset[int]

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Return the initial offsets for a prompt."""

    def advance(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> Progress:
        """Return the text of the IDs starting at `read_offset`, and the new offsets. `ids` includes the prompt.

        An incomplete character at the end is not decoded yet.
        """

    def pending(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> str:
        """Return the remaining text, assuming that no more tokens follow. An incomplete character becomes U+FFFD."""

    def with_visible_tokens(self, token_ids: Set[int]) -> "Detokenizer":
        """Return a detokenizer that decodes these special tokens as text."""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, which may be a special token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return a single token's bytes, which may be part of a character."""
        return self.token_text(token_id).encode()


def make_detokenizer(tokenizer: Any) -> Detokenizer:
    """Return a detokenizer for a tokenizer from the `tokenizers` library or from transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    special = frozenset(special_tokens(tokenizer).values())
    if not isinstance(backend, Tokenizer):
        return WindowDetokenizer(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
            special,
            frozenset(tokenizer.get_vocab().values()),
        )
    # Serialize only the decoder: the whole tokenizer takes half a second with a large vocabulary.
    scheme = _detect_scheme(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
    if scheme is None:
        vocabulary = frozenset(backend.get_vocab().values())
        return WindowDetokenizer(lambda ids: backend.decode(ids, skip_special_tokens=False), special, vocabulary)
    return ByteDetokenizer(backend.id_to_token, scheme, special)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return a map from special token name to ID."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = backend.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


# --- Tokenizers whose tokens are bytes -------------------------------------------------------------------------------


class ByteScheme(NamedTuple):
    """Rules to convert token names to bytes."""

    to_bytes: Callable[[str], bytes]
    decode_first: Callable[[bytes], bytes] = bytes  # removes the space that the encoder prepends


class ByteDetokenizer(Detokenizer):
    """A detokenizer for byte-level and SentencePiece tokenizers, whose tokens are UTF-8 bytes.

    Only the last three bytes decide whether a character is incomplete, so decoding can resume at any token.
    """

    def __init__(self, name_of: Callable[[int], str | None], scheme: ByteScheme, special: frozenset[int]) -> None:
        self._name_of = name_of
        self._scheme = scheme
        self._special_ids = special
        self._bytes_of = cache(self._read_bytes)
        self._text_of = cache(self._read_text)

    def with_visible_tokens(self, token_ids: Set[int]) -> "ByteDetokenizer":
        return ByteDetokenizer(self._name_of, self._scheme, self._special_ids - token_ids)

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        return self._find_context_start(prompt_ids, len(prompt_ids)), len(prompt_ids)

    def advance(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> Progress:
        end = len(ids)
        if prefix_offset < read_offset == end - 1 and self._text_of(ids[read_offset - 1]):
            whole = self._text_of(ids[read_offset])
            if whole:  # complete characters after complete characters
                return Progress(whole, read_offset, end)
        added = [text for token_id in ids[read_offset:] if (text := self._bytes_of(token_id))]
        if not added:  # scanning back over special tokens for each token would be quadratic
            return Progress("", prefix_offset, len(ids))
        decoder, has_text = self._resume_decoder(ids, prefix_offset, read_offset)
        if not has_text:
            added[0] = self._scheme.decode_first(added[0])
        return Progress(decoder.decode(b"".join(added)), self._find_context_start(ids, len(ids)), len(ids))

    def pending(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> str:
        decoder, _ = self._resume_decoder(ids, prefix_offset, read_offset)
        return decoder.decode(b"", final=True)

    def token_text(self, token_id: int) -> str:
        if self.is_special(token_id):
            return self._name_of(token_id) or ""
        return self._bytes_of(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id) if self.is_special(token_id) else self._bytes_of(token_id)

    def _resume_decoder(self, ids: Sequence[int], prefix: int, read: int) -> tuple[codecs.IncrementalDecoder, bool]:
        """Return a decoder that has read the tokens before `read`, and True if these tokens contain text."""
        before = b"".join([self._bytes_of(token_id) for token_id in ids[prefix:read]])
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(before[-MAX_INCOMPLETE_BYTES:])
        return decoder, bool(before)

    def _find_context_start(self, ids: Sequence[int], end: int) -> int:
        """Return the position of the first token that can be part of an incomplete character at `end`."""
        count = 0
        while end > 0 and count < MAX_INCOMPLETE_BYTES:
            end -= 1
            count += len(self._bytes_of(ids[end]))
        return end

    def _read_text(self, token_id: int) -> str:
        """Return the token text, or an empty string if the token contains an incomplete character."""
        try:
            return self._read_bytes(token_id).decode()
        except UnicodeDecodeError:
            return ""

    def _read_bytes(self, token_id: int) -> bytes:
        name = None if token_id in self._special_ids else self._name_of(token_id)
        return b"" if name is None else self._scheme.to_bytes(name)


def _detect_scheme(decoder: Any) -> ByteScheme | None:
    """Return the token-to-bytes scheme for a `tokenizer.json` decoder, or None if the decoder is not supported."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    types = [step and step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return ByteScheme(_decode_byte_level)
    if types == ["Metaspace"]:
        mark = steps[0]["replacement"]
        first = bytes if steps[0].get("prepend_scheme") == "never" else lambda text: text.replace(b" ", b"")
        return ByteScheme(lambda name: name.replace(mark, " ").encode(), first)
    if types[:3] == ["Replace", "ByteFallback", "Fuse"] and len(steps) <= 4 and all(map(_strips_space, steps[3:])):
        mark, content = steps[0]["pattern"].get("String"), steps[0]["content"]
        if mark:
            first = (lambda text: text.removeprefix(b" ")) if len(steps) == 4 else bytes
            return ByteScheme(lambda name: _decode_sentencepiece(name.replace(mark, content)), first)
    return None


def _strips_space(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0)


def _decode_byte_level(name: str) -> bytes:
    try:
        return bytes([_BYTE_BY_CHARACTER[character] for character in name])
    except KeyError:  # an added token, which is stored as text
        return name.encode()


def _decode_sentencepiece(name: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)  # int() would also accept "<0x 1>"
    return bytes([int(byte[1], 16)]) if byte else name.encode()


def _make_byte_names() -> dict[str, int]:
    """Return the mapping from characters to bytes that byte-level tokenizers use in their token names."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_BY_CHARACTER = _make_byte_names()


# --- Other tokenizers -------------------------------------------------------------------------------------------------


class WindowDetokenizer(Detokenizer):
    """A detokenizer for all other tokenizers. It compares the decoded text with and without the new tokens."""

    def __init__(self, decode: Callable[[list[int]], str], special: frozenset[int], vocabulary: frozenset[int]) -> None:
        self._decode = decode
        self._special_ids = special
        self._vocabulary = vocabulary
        self._text_ids = vocabulary - special  # padded embedding rows have IDs that are in neither set

    def with_visible_tokens(self, token_ids: Set[int]) -> "WindowDetokenizer":
        return WindowDetokenizer(self._decode, self._special_ids - token_ids, self._vocabulary)

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        end = len(prompt_ids)
        text_at = (at for at in reversed(range(end)) if prompt_ids[at] in self._text_ids)
        return min(islice(text_at, CONTEXT_TOKENS), default=end), end

    def advance(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> Progress:
        text_at = [at for at in range(read_offset, len(ids)) if ids[at] in self._text_ids]
        if not text_at:  # scanning back over special tokens for each token would be quadratic
            return Progress("", prefix_offset, len(ids))
        for end in (len(ids), *reversed(text_at[-MAX_HELD_TOKENS:])):
            text = self._decode_added_text(ids[prefix_offset:end], read_offset - prefix_offset)
            if not text.endswith(REPLACEMENT_CHARACTER):
                break
        return Progress(text, read_offset if text else prefix_offset, end)

    def pending(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> str:
        return self._decode_added_text(ids[prefix_offset:], read_offset - prefix_offset)

    def token_text(self, token_id: int) -> str:
        return self._decode([token_id]) if token_id in self._vocabulary else ""

    def _decode_added_text(self, window: Sequence[int], num_read: int) -> str:
        """Return the text that the tokens in `window` add after the first `num_read` tokens."""
        before = self._decode([token_id for token_id in window[:num_read] if token_id in self._text_ids])
        after = self._decode([token_id for token_id in window if token_id in self._text_ids])
        if before.endswith(REPLACEMENT_CHARACTER):  # the prompt ended with an incomplete character
            while not after.startswith(before):
                before = before[:-1]
        return after[len(before) :]
