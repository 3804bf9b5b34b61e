"""The vocabulary of a tokenizer, as llguidance wants it."""

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from lorax_server.errors import NotSupportedError
from lorax_server.text.detokenizer import ByteDetokenizer
from lorax_server.text.tokenizer import TextTokenizer

Words = npt.NDArray[np.int32]


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
        self.tokens = LLTokenizer(TokenizerWrapper(_Bytes(tokenizer)))

    def read_mask(self, mask: bytes) -> tuple[Words, bool]:
        """Return [words] the allowed tokens of the model, and whether the answer may end."""
        words = np.frombuffer(mask, np.int32).copy()
        word, bit = divmod(self.num_ids, 32)
        may_end = bool(words[word] >> bit & 1)
        if bit:
            words[word] &= (1 << bit) - 1  # bits beyond the model's tokens
        return words[: self.num_words], may_end
