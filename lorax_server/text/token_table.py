"""Token tables, which are vocabularies as bytes for structured output."""

import hashlib
from array import array

from lorax_server.errors import NotSupportedError
from lorax_server.text.detokenizer import ByteDetokenizer, Detokenizer
from lorax_server.types import TokenTable

MAX_TOKEN_IDS = 2**20  # adapter token ids can be sparse
MAX_TABLE_BYTES = 2**23  # all tokens; the table is sent to the engine with each adapter request


def make_token_table(detokenizer: Detokenizer, num_ids: int) -> TokenTable:
    """Return the tokens as bytes. This takes about 0.4 s for 129k tokens.

    Raise `NotSupportedError` if the tokens are not bytes of the text.
    """
    if not isinstance(detokenizer, ByteDetokenizer):
        raise NotSupportedError(
            "structured output is not supported with this model's tokenizer: its tokens are not bytes of the text"
        )
    if num_ids > MAX_TOKEN_IDS:
        raise NotSupportedError(
            f"structured output supports token ids below {MAX_TOKEN_IDS}; this vocabulary has {num_ids - 1}"
        )
    tokens = [detokenizer.token_bytes(token_id) for token_id in range(num_ids)]
    content = b"".join(tokens)
    if len(content) > MAX_TABLE_BYTES:
        raise NotSupportedError(
            f"structured output supports vocabularies of up to {MAX_TABLE_BYTES} bytes; this one has {len(content)}"
        )
    lengths = array("i", map(len, tokens)).tobytes()
    special_ids = [token_id for token_id in range(num_ids) if detokenizer.is_special(token_id)]
    digest = hashlib.sha256(lengths + content + repr(special_ids).encode()).hexdigest()
    return TokenTable(digest, lengths, content, special_ids, [tokens[token_id] for token_id in special_ids])
