"""The vocabulary of a tokenizer, as llguidance wants it."""

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from lorax_server.errors import NotSupportedError
from lorax_server.structured_output.slots import Words
from lorax_server.text.detokenizer import ByteDetokenizer
from lorax_server.text.tokenizer import TextTokenizer

# Tokens are sorted by these patterns. Where a text may go on with whatever has a pattern, its tokens are not looked at
# one by one. The lengths are for strings with a `maxLength`: with the library's own, 10 and 30, masks of the last 30
# characters take twice as long.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{length}}}" for length in (3, 6, 10, 16, 30)),
    f"{_CHARACTER}+",
]


class _Bytes:
    """Tokens as bytes, the way our detokenizer reads them, and a last one that is not in the model: the end.

    So a mask says in one bit whether an answer may end here, whatever tokens end it.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        detokenizer, count = tokenizer.detokenizer, tokenizer.num_ids
        self._tokenizer = tokenizer
        self.tokens = [detokenizer.token_bytes(token_id) for token_id in range(count)] + [b"<|end of structure|>"]
        self.special_token_ids = [i for i in range(count) if detokenizer.is_special(i)] + [count]
        self.eos_token_id = count
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)


class Vocabulary:
    """The tokens of one tokenizer. To make it takes up to seconds, and holds Python's lock."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        if not isinstance(tokenizer.detokenizer, ByteDetokenizer):
            raise NotSupportedError(
                "structured output is not supported with this model's tokenizer: its tokens are not bytes of the text"
            )
        self.num_ids = tokenizer.num_ids
        self.num_words = -(-self.num_ids // 32)
        self.tokens = LLTokenizer(TokenizerWrapper(_Bytes(tokenizer)), slices=SLICES)

    @property
    def num_words_and_end(self) -> int:
        """The words of a mask of all tokens and of the end."""
        return self.num_ids // 32 + 1

    def make_masks(self, count: int) -> Words:
        """Return memory for masks of all tokens and of the end."""
        return np.zeros((count, self.num_words_and_end), np.int32)

    def take_end(self, mask: Words) -> bool:
        """Take the end out of a mask. Return whether the answer may end."""
        word, bit = divmod(self.num_ids, 32)
        last = int(mask[word])
        mask[word] = last & (1 << bit) - 1  # without bits beyond the model's tokens
        return bool(last >> bit & 1)
