"""Vocabularies as llguidance needs them, and the ones that are in use."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lorax_server.errors import BusyError, NotSupportedError, OverloadedError
from lorax_server.types import TokenTable

Words = npt.NDArray[np.int32]  # a token mask: one bit per token, lowest bit first
Encode = Callable[[str], list[int]]

# llguidance sorts tokens by these patterns and handles whole groups where a string may continue freely. The lengths
# are for strings with `maxLength`: with the library's own, masks of the last 30 characters take twice as long.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{length}}}" for length in (3, 6, 10, 16, 30)),
    f"{_CHARACTER}+",
)
MAX_VOCABULARIES = 8  # of adapters, besides the base model's; one of 129k tokens takes 60 MB
MAX_TENANT_VOCABULARIES = 2  # of adapters, used by one tenant at the same time
RETRY_S = 60.0  # until a vocabulary that failed to build is tried again


class _Tokens:
    """Token bytes in the form of `TokenizerWrapper`, with one more token: the end of the text.

    The mask bit of that token tells whether the completion may end, whatever tokens end it.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], encode: Callable[[str], list[int]]) -> None:
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.tokens = [*tokens, b"<|end of text|>"]
        self.special_token_ids = [*special_ids, self.eos_token_id]
        self.encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text.decode())


class Vocabulary:
    """The tokens of one tokenizer. Building takes up to a second for 129k tokens, and holds the GIL."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        encode: Encode | None = None,
        slices: Sequence[str] = SLICES,
    ) -> None:
        """`encode` splits forced text into tokens as the model would; None: the longest tokens first."""
        self.table: TokenTable | None = None
        self.encode = encode
        self.num_ids = len(tokens)
        self.num_words = -(-self.num_ids // 32)
        self.mask_bytes = 4 * (self.num_ids // 32 + 1)  # of all tokens and the end
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - an engine can run without it

        self._special_ids = frozenset(special_ids)
        wrapped = _Tokens(tokens, special_ids, self._encode)
        self.tokenizer: LLTokenizer | None = None  # the wrapper calls `_encode` while it is made
        wrapper = TokenizerWrapper(wrapped)
        self.tokenizer = LLTokenizer(wrapper, slices=list(slices))
        wrapper.tokens = wrapped.tokens = []  # the tokenizer has its own copy

    @classmethod
    def of_table(cls, table: TokenTable, encode: Encode | None = None) -> "Vocabulary":
        """Build the vocabulary of a token table."""
        ends = np.cumsum(np.frombuffer(table.lengths, np.int32)).tolist()
        content = table.content
        tokens = [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        vocabulary = cls(tokens, table.special_ids, encode)
        vocabulary.table = table
        return vocabulary

    def build_other(self, table: TokenTable) -> "Vocabulary":
        """Build an adapter's vocabulary, whose own tokenizer is untrusted and not run.

        If it only adds tokens to this vocabulary, forced text is split by this vocabulary's tokenizer.
        """
        own = self.table
        is_extension = (
            own is not None and table.lengths.startswith(own.lengths) and table.content.startswith(own.content)
        )
        return Vocabulary.of_table(table, self.encode if is_extension else None)

    def make_masks(self, count: int) -> Words:
        """Return empty masks of all tokens and the end, [count, words]."""
        return np.zeros((count, self.mask_bytes // 4), np.int32)

    def take_ends(self, masks: Words) -> npt.NDArray[np.bool_]:
        """Clear the bit for the end in each mask. Return where it was set."""
        word, bit = divmod(self.num_ids, 32)
        last = masks[:, word].astype(np.uint32)
        masks[:, word] = (last & np.uint32((1 << bit) - 1)).astype(np.int32)  # also clears bits beyond the vocabulary
        return (last >> np.uint32(bit) & np.uint32(1)).astype(np.bool_)

    def _encode(self, text: str) -> list[int]:
        """Split text as the model would. Text that looks like a special token is still text to a grammar."""
        if self.tokenizer is None:
            return []
        token_ids = [] if self.encode is None else self.encode(text)
        if token_ids and self._special_ids.isdisjoint(token_ids):
            return token_ids
        greedy: list[int] = self.tokenizer.greedy_tokenize(text)
        return greedy


@dataclass
class _KeptVocabulary:
    table: TokenTable | None = None  # None: the base model's
    vocabulary: Vocabulary | None = None
    failure: str = ""  # why it cannot be built
    failed_at: float = 0.0
    users: dict[int, str] = field(default_factory=dict)  # tenants by request


class Vocabularies:
    """Keep the base model's vocabulary, and those of adapters that were used last. The caller holds a lock."""

    def __init__(self) -> None:
        self._entries = {"": _KeptVocabulary()}  # by digest; the base model's is "", adapters used last are at the end

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def acquire(self, table: TokenTable | None, request_id: int, tenant: str) -> str | None:
        """Reserve a vocabulary for a request. Return the digest of one that was evicted for it.

        Raise if the request cannot have it.
        """
        evicted = None
        digest = "" if table is None else table.digest
        entry = self._entries.get(digest)
        if entry is not None:
            _check(entry)
        if table is not None:
            if entry is None or tenant not in entry.users.values():
                self._check_tenant(tenant)
            if entry is None:
                evicted = self._evict()
            self._entries[digest] = self._entries.pop(digest, _KeptVocabulary(table))
        self._entries[digest].users[request_id] = tenant
        return evicted

    def release(self, digest: str, request_id: int) -> None:
        if (entry := self._entries.get(digest)) is not None:
            entry.users.pop(request_id, None)

    def find(self, digest: str) -> Vocabulary | TokenTable | None:
        """Return a vocabulary, or the table to build it from; None if the base model's is not built."""
        entry = self._entries.get(digest)
        if entry is None:  # its request has ended, and another one has evicted it
            raise BusyError("the adapter's vocabulary was evicted; retry")
        _check(entry)
        return entry.vocabulary or entry.table

    def store(self, digest: str, vocabulary: Vocabulary | None, failure: str = "") -> None:
        """Keep a vocabulary, or the reason why it cannot be built."""
        if (entry := self._entries.get(digest)) is not None:
            entry.vocabulary, entry.failure, entry.failed_at = vocabulary, failure, time.monotonic()

    def _check_tenant(self, tenant: str) -> None:
        count = sum(tenant in entry.users.values() for digest, entry in self._entries.items() if digest)
        if tenant and count >= MAX_TENANT_VOCABULARIES:  # a script has no tenant
            raise OverloadedError(
                f"structured output is running for {count} adapters with tokenizers of their own, the most for one "
                "client; retry later",
                1.0,
            )

    def _evict(self) -> str | None:
        adapters = [digest for digest in self._entries if digest]
        if len(adapters) < MAX_VOCABULARIES:
            return None
        idle = next((digest for digest in adapters if not self._entries[digest].users), None)
        if idle is None:
            raise BusyError(
                f"structured output is running for {len(adapters)} adapters with tokenizers of their own; retry later"
            )
        del self._entries[idle]
        return idle


def _check(entry: _KeptVocabulary) -> None:
    if entry.failure and time.monotonic() < entry.failed_at + RETRY_S:
        raise NotSupportedError(entry.failure)
