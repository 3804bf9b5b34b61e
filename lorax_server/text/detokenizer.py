"""From token ids to text, token by token.

The text of a request continues its prompt: it is what decoding prompt and tokens together adds to decoding the prompt.
So a leading space is kept, and a character whose first bytes end the prompt is completed. Special tokens are skipped. A
request's position in its tokens is two numbers: the text of all tokens before `read_offset`
is out, and decoding continues from the tokens from `prefix_offset` on.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence, Set
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are no character
CONTEXT_TOKENS = 6  # before the prompt's end, for a decoder that needs its neighbours
LONGEST_INCOMPLETE = 3  # bytes of a character that is not complete
MAX_HELD_TOKENS = LONGEST_INCOMPLETE  # a token is at least a byte: text before the last three never changes


class Progress(NamedTuple):
    """The text that a token added, and the new position of its request."""

    text: str
    prefix_offset: int
    read_offset: int


class Detokenizer(Protocol):
    """Decodes the ids of one tokenizer."""

    _special: frozenset[int]

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Return the offsets of a request that has generated nothing."""

    def advance(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> Progress:
        """Decode the text that the ids from `read_offset` on complete. `ids` begins with the prompt."""

    def pending(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> str:
        """Decode the rest where no token follows. An incomplete character becomes U+FFFD."""

    def showing(self, token_ids: Set[int]) -> "Detokenizer":
        """Return a detokenizer to which these special tokens are text."""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        """Decode one token by itself, also a special one."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be only part of a character."""
        return self.token_text(token_id).encode()


def make_detokenizer(tokenizer: Any) -> Detokenizer:
    """Make a detokenizer for a tokenizer of `tokenizers` or of transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    special = frozenset(special_tokens(tokenizer).values())
    if not isinstance(backend, Tokenizer):
        return WindowDetokenizer(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
            special,
            frozenset(tokenizer.get_vocab().values()),
        )
    # Only the decoder's part of tokenizer.json: all of a large vocabulary takes half a second.
    scheme = _recognise(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
    if scheme is None:
        vocabulary = frozenset(backend.get_vocab().values())
        return WindowDetokenizer(lambda ids: backend.decode(ids, skip_special_tokens=False), special, vocabulary)
    return ByteDetokenizer(backend.id_to_token, scheme, special)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that are no text, by name."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = backend.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


# --- Tokenizers whose tokens are bytes -------------------------------------------------------------------------------


class Scheme(NamedTuple):
    """The rules by which the names of tokens become bytes."""

    to_bytes: Callable[[str], bytes]
    first: Callable[[bytes], bytes] = bytes  # removes the space that the encoder put before the text


class ByteDetokenizer(Detokenizer):
    """Byte-level and sentencepiece tokenizers: tokens are bytes, text is their UTF-8.

    Whether bytes end within a character depends on the last three only, so decoding can continue from any token.
    """

    def __init__(self, name_of: Callable[[int], str | None], scheme: Scheme, special: frozenset[int]) -> None:
        self._name_of = name_of
        self._scheme = scheme
        self._special = special
        self._bytes_of = cache(self._read_bytes)
        self._text_of = cache(self._read_text)

    def showing(self, token_ids: Set[int]) -> "ByteDetokenizer":
        return ByteDetokenizer(self._name_of, self._scheme, self._special - token_ids)

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        return self._context(prompt_ids, len(prompt_ids)), len(prompt_ids)

    def advance(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> Progress:
        end = len(ids)
        if prefix_offset < read_offset == end - 1 and self._text_of(ids[read_offset - 1]):
            whole = self._text_of(ids[read_offset])
            if whole:  # whole characters after whole characters: nothing is incomplete between and after them
                return Progress(whole, read_offset, end)
        added = [text for token_id in ids[read_offset:] if (text := self._bytes_of(token_id))]
        if not added:  # looking back over a long run of special tokens once per token would be quadratic
            return Progress("", prefix_offset, len(ids))
        decoder, begun = self._resume(ids, prefix_offset, read_offset)
        if not begun:
            added[0] = self._scheme.first(added[0])
        return Progress(decoder.decode(b"".join(added)), self._context(ids, len(ids)), len(ids))

    def pending(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> str:
        decoder, _ = self._resume(ids, prefix_offset, read_offset)
        return decoder.decode(b"", final=True)

    def token_text(self, token_id: int) -> str:
        if self.is_special(token_id):
            return self._name_of(token_id) or ""
        return self._bytes_of(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id) if self.is_special(token_id) else self._bytes_of(token_id)

    def _resume(self, ids: Sequence[int], prefix: int, read: int) -> tuple[codecs.IncrementalDecoder, bool]:
        """Return a decoder that has read the end of the tokens before `read`, and whether they have any text."""
        before = b"".join([self._bytes_of(token_id) for token_id in ids[prefix:read]])
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(before[-LONGEST_INCOMPLETE:])
        return decoder, bool(before)

    def _context(self, ids: Sequence[int], end: int) -> int:
        """Return the position of the first token before `end` whose bytes can be part of an incomplete character."""
        count = 0
        while end > 0 and count < LONGEST_INCOMPLETE:
            end -= 1
            count += len(self._bytes_of(ids[end]))
        return end

    def _read_text(self, token_id: int) -> str:
        """Return the text of a token that is whole characters, and of any other an empty one."""
        try:
            return self._read_bytes(token_id).decode()
        except UnicodeDecodeError:
            return ""

    def _read_bytes(self, token_id: int) -> bytes:
        name = None if token_id in self._special else self._name_of(token_id)
        return b"" if name is None else self._scheme.to_bytes(name)


def _recognise(decoder: Any) -> Scheme | None:
    """Return the scheme of a decoder of `tokenizer.json`; None if its tokens are not bytes."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    types = [step and step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return Scheme(_byte_level)
    if types == ["Metaspace"]:
        mark = steps[0]["replacement"]
        first = bytes if steps[0].get("prepend_scheme") == "never" else lambda text: text.replace(b" ", b"")
        return Scheme(lambda name: name.replace(mark, " ").encode(), first)
    if types[:3] == ["Replace", "ByteFallback", "Fuse"] and len(steps) <= 4 and all(map(_strips_a_space, steps[3:])):
        mark, content = steps[0]["pattern"].get("String"), steps[0]["content"]
        if mark:
            first = (lambda text: text.removeprefix(b" ")) if len(steps) == 4 else bytes
            return Scheme(lambda name: _sentencepiece(name.replace(mark, content)), first)
    return None


def _strips_a_space(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0)


def _byte_level(name: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in name])
    except KeyError:  # an added token, which is stored as it reads
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)  # int() alone would also take "<0x 1>"
    return bytes([int(byte[1], 16)]) if byte else name.encode()


def _byte_names() -> dict[str, int]:
    """Return the bytes by their names in byte-level tokenizers: the visible character itself, or one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_names()


# --- Other tokenizers -------------------------------------------------------------------------------------------------


class WindowDetokenizer(Detokenizer):
    """Any other tokenizer: the text is what the new tokens add to the decoding of those just before."""

    def __init__(self, decode: Callable[[list[int]], str], special: frozenset[int], vocabulary: frozenset[int]) -> None:
        self._decode = decode
        self._special = special
        self._vocabulary = vocabulary
        self._text_ids = vocabulary - special  # an id may be neither: the rows that pad an embedding have one too

    def showing(self, token_ids: Set[int]) -> "WindowDetokenizer":
        return WindowDetokenizer(self._decode, self._special - token_ids, self._vocabulary)

    def start(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        end = len(prompt_ids)
        text_at = (at for at in reversed(range(end)) if prompt_ids[at] in self._text_ids)
        return min(islice(text_at, CONTEXT_TOKENS), default=end), end

    def advance(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> Progress:
        text_at = [at for at in range(read_offset, len(ids)) if ids[at] in self._text_ids]
        if not text_at:  # looking back over a long run of special tokens once per token would be quadratic
            return Progress("", prefix_offset, len(ids))
        for end in (len(ids), *reversed(text_at[-MAX_HELD_TOKENS:])):
            text = self._added(ids[prefix_offset:end], read_offset - prefix_offset)
            if not text.endswith(REPLACEMENT):
                break
        return Progress(text, read_offset if text else prefix_offset, end)

    def pending(self, ids: Sequence[int], prefix_offset: int, read_offset: int) -> str:
        return self._added(ids[prefix_offset:], read_offset - prefix_offset)

    def token_text(self, token_id: int) -> str:
        return self._decode([token_id]) if token_id in self._vocabulary else ""

    def _added(self, window: Sequence[int], num_read: int) -> str:
        """Return the text that the tokens of `window` after the first `num_read` add to those."""
        before = self._decode([token_id for token_id in window[:num_read] if token_id in self._text_ids])
        after = self._decode([token_id for token_id in window if token_id in self._text_ids])
        if before.endswith(REPLACEMENT):  # the prompt ended within a character, which may now be complete
            while not after.startswith(before):
                before = before[:-1]
        return after[len(before) :]
