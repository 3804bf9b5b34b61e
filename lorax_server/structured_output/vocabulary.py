"""Vocabularies in the form that llguidance needs, and a cache for vocabularies in use."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cache
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt
from cachetools import TTLCache

from lorax_server.errors import BusyError, LoraxError, NotSupportedError, OverloadedError
from lorax_server.types import TokenTable

TokenMask = npt.NDArray[np.int32]  # a token mask: one bit per token, lowest bit first
Encode = Callable[[str], list[int]]

# llguidance groups tokens by these patterns and allows whole groups where a string may continue freely. The lengths
# serve strings with `maxLength`: with llguidance's default groups, masks of the last 30 characters take twice as long.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
MASK_SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{length}}}" for length in (3, 6, 10, 16, 30)),
    f"{_CHARACTER}+",
)
MAX_VOCABULARIES = 8  # adapter vocabularies in the cache; one with 129k tokens takes about 66 MB
MAX_TENANT_VOCABULARIES = 2  # adapter vocabularies that one tenant uses at the same time
RETRY_S = 60.0  # seconds until a failed build is tried again


class Vocabulary:
    """The tokens of one tokenizer. Building takes up to a second for 129k tokens and holds the GIL."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        encode: Encode | None = None,
        slices: Sequence[str] = MASK_SLICES,
    ) -> None:
        """Build the vocabulary. `encode` tokenizes forced text; if None, text is tokenized by longest match."""
        from llguidance import LLTokenizer  # noqa: PLC0415 - an engine can run without llguidance

        self.table: TokenTable | None = None
        self.encode = encode
        self.num_ids = len(tokens)
        self.num_words = -(-self.num_ids // 32)
        self.mask_bytes = 4 * (self.num_ids // 32 + 1)  # all tokens and the end-of-text token
        self._special_ids = frozenset(special_ids)
        wrapped = _LLGuidanceTokens(tokens, special_ids, WeakMethod(self._encode))
        self.tokenizer = LLTokenizer(wrapped, slices=list(slices))  # type: ignore[arg-type]  # it has the same attributes
        wrapped.tokens = []  # llguidance has its own copy

    @classmethod
    def from_table(cls, table: TokenTable, encode: Encode | None = None) -> "Vocabulary":
        """Build a vocabulary from a token table."""
        ends = np.cumsum(np.frombuffer(table.lengths, np.int32)).tolist()
        content = table.content
        tokens = [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        vocabulary = cls(tokens, table.special_ids, encode)
        vocabulary.table = table
        return vocabulary

    def build_adapter_vocabulary(self, table: TokenTable) -> "Vocabulary":
        """Build an adapter's vocabulary without running its untrusted tokenizer.

        If the adapter only adds tokens to this vocabulary, this vocabulary's tokenizer splits forced text.
        """
        base_table = self.table
        is_extension = (
            base_table is not None
            and table.lengths.startswith(base_table.lengths)
            and table.content.startswith(base_table.content)
        )
        return Vocabulary.from_table(table, self.encode if is_extension else None)

    def make_masks(self, count: int) -> TokenMask:
        """Return `count` all-zero masks with one bit per token ID and an additional bit for the end of the text."""
        return np.zeros((count, self.mask_bytes // 4), np.int32)

    def pop_eos_bits(self, masks: TokenMask) -> npt.NDArray[np.bool_]:
        """Clear the end-of-text bit and all later bits in each mask. Return the end-of-text bits."""
        word, bit = divmod(self.num_ids, 32)
        last = masks[:, word].astype(np.uint32)
        masks[:, word] = (last & np.uint32((1 << bit) - 1)).astype(np.int32)
        return (last >> np.uint32(bit) & np.uint32(1)).astype(np.bool_)

    def _encode(self, text: str) -> list[int]:
        """Return the token IDs of a text. The names of special tokens are encoded as text, because grammars match them
        as text.
        """
        token_ids = [] if self.encode is None else self.encode(text)
        if token_ids and self._special_ids.isdisjoint(token_ids):
            return token_ids
        greedy: list[int] = self.tokenizer.greedy_tokenize(text)
        return greedy


class _LLGuidanceTokens:
    """Token bytes in the form that `LLTokenizer` reads, with an additional end-of-text token.

    That token's mask bit indicates whether the completion may end, regardless of the model's EOS tokens. The garbage
    collector cannot see references held by llguidance, so a strong reference to the vocabulary would leak it.
    """

    is_tokenizer_wrapper = True  # required by llguidance
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], encode: WeakMethod[Encode]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<|end of text|>"]
        self.special_token_ids = [*special_ids, self.eos_token_id]
        self.encode = encode

    def __call__(self, text: str) -> list[int]:
        encode = self.encode()
        return [] if encode is None else encode(text)


class VocabularyCache:
    """A cache for the base model's vocabulary and recently used adapter vocabularies.

    The engine's thread calls `add`, the compile thread calls `find`.
    """

    def __init__(self, build_base: Callable[[], Vocabulary]) -> None:
        # By digest, least recently used first. "" is the base model's.
        self._builders = OrderedDict({"": cache(build_base)})
        self._failures: TTLCache[str, NotSupportedError] = TTLCache(MAX_VOCABULARIES, RETRY_S)

    def add(self, table: TokenTable, tenant: str, in_use: Collection[tuple[str, str]]) -> str | None:
        """Add an adapter's vocabulary for a request. If this evicts another vocabulary, return its digest.

        `in_use` contains the vocabulary digests and the tenants of all running requests. Raise if a limit is reached.
        """
        num_others = len({digest for digest, user in in_use if user == tenant} - {"", table.digest})
        if tenant and num_others >= MAX_TENANT_VOCABULARIES:  # a script has no tenant
            raise OverloadedError(
                f"this client already uses structured output with {num_others} custom-tokenizer adapters (limit "
                f"{MAX_TENANT_VOCABULARIES}); retry later",
                1.0,
            )
        evicted = None
        if table.digest not in self._builders:
            if len(self._builders) > MAX_VOCABULARIES:
                evicted = self._evict({"", *(digest for digest, _ in in_use)})
            self._builders[table.digest] = cache(lambda: self.find("").build_adapter_vocabulary(table))
        self._builders.move_to_end(table.digest)  # never remove the entry, since `find` may run at the same time
        return evicted

    def find(self, digest: str) -> Vocabulary:
        """Return the vocabulary with this digest, and build it if necessary."""
        build, failure = self._builders.get(digest), self._failures.get(digest)
        if build is None:  # evicted after its request ended
            raise BusyError("the adapter's vocabulary was evicted; retry")
        if failure is not None:
            raise failure
        try:
            return build()
        except BaseException as error:  # including Rust panics
            reason = f"structured output is not supported with this tokenizer: {type(error).__name__}: {error}"
            failure = NotSupportedError(str(error) if isinstance(error, LoraxError) else reason[:400])
            self._failures[digest] = failure
            raise failure from error

    def _evict(self, in_use: Collection[str]) -> str:
        """Evict the least recently used vocabulary that is not in use."""
        idle = next((digest for digest in self._builders if digest not in in_use), None)
        if idle is None:
            raise BusyError(
                f"structured output is already in use with {MAX_VOCABULARIES} custom-tokenizer adapters (limit "
                f"{MAX_VOCABULARIES}); retry later"
            )
        del self._builders[idle]
        return idle
