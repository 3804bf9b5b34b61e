"""Grammars that are compiled, and answers that follow them token by token."""

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache
from llguidance import LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask

from lorax_server.structured_output.slots import Words
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.structured_output.wire import MAX_COMPILED

MAX_ERROR = 600  # characters
MAX_FORCED = 32  # tokens that are taken ahead at once: masks of others wait meanwhile
NO_TEXT = "no text has this form"
TOKEN_S, SPENT_S = 0.01, 0.1  # of CPU time: for a token on average, and for all until the average counts
SLOW_S = 0.001  # likewise, for a token on average: others do not wait for it


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed; the message is for its sender."""


def make_limits() -> LLParserLimits:
    """Return what one grammar may take: some 20 ms to begin, 10 ms a token, and 50 MB."""
    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


def compile_grammar(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=make_limits())
    _check(matcher)
    return matcher


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_shorten(matcher.get_error()))


def _shorten(error: str) -> str:
    """Cut what quotes the grammar back at its sender, and say in words what the library says by a name."""
    if error.startswith("NoExtension"):
        return NO_TEXT
    said, *_ = error.split("\n   1 |", maxsplit=1)
    said = said.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
    return said.removeprefix("at 1(8): ").replace("\n<non-verbose/>", "").strip()[:MAX_ERROR]


class Compiled(NamedTuple):
    """A grammar at its beginning, and the mask of the first token."""

    matcher: LLMatcher
    words: Words
    may_end: bool

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammar: str) -> "Compiled":
        """Raise `GrammarError` if no answer can begin."""
        matcher, masks = compile_grammar(vocabulary, grammar), vocabulary.make_masks(1)
        fill_next_token_bitmask(matcher, masks)
        _check(matcher)
        may_end, words = vocabulary.take_end(masks[0]), masks[0, : vocabulary.num_words]
        if not may_end and not words.any():
            raise GrammarError(NO_TEXT)
        return cls(matcher, words, may_end)


class CompiledGrammars(LRUCache[str, Compiled]):
    """The grammars that were used last."""

    def __init__(self) -> None:
        super().__init__(MAX_COMPILED)


class Ending(NamedTuple):
    """The tokens that end an answer."""

    eos: tuple[int, ...]
    others: tuple[int, ...]  # stop tokens, which may be text
    min_new_tokens: int  # none of them comes earlier, unless nothing else can come

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.eos or token_id in self.others


class Follower:
    """One answer: it consumes tokens, and writes into its slot which may come next."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        compiled: Compiled,
        ending: Ending,
        masks: Words,
        slot: int = 0,
        jump_below: int = 0,
    ) -> None:
        """`masks` are those of all slots. Forced tokens below `jump_below` may be taken ahead."""
        self.slot = slot
        self._mask = masks[slot]
        self._address = self._mask.ctypes.data
        self.words = self._mask[: vocabulary.num_words]
        self._vocabulary = vocabulary
        self._ending = ending
        self._jump_below = jump_below
        self._failure: GrammarError | None = None
        self._num_tokens, self.spent_s = 0, 0.0  # that it took, and what they took
        self.matcher = compiled.matcher.deep_copy()
        self.words[:] = compiled.words
        self._allow_end(compiled.may_end)

    @property
    def is_slow(self) -> bool:
        return self.spent_s > SLOW_S * self._num_tokens

    def consume(self, token_id: int) -> None:
        """Take a token, and write the mask of the next. Raise `GrammarError` where that takes too much."""
        if self._failure is not None:
            raise self._failure
        began_s = time.thread_time()
        if not self.matcher.consume_token(token_id):
            _check(self.matcher)
        self.matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)  # `_mask` keeps the memory
        _check(self.matcher)
        self._finish(self._vocabulary.take_end(self._mask))
        self.spent_s += time.thread_time() - began_s
        if self.spent_s > max(SPENT_S, TOKEN_S * self._num_tokens):
            raise GrammarError(f"it takes longer than {TOKEN_S * 1000:g} ms a token; make the grammar smaller")

    def _finish(self, may_end: bool) -> None:
        """Complete the mask after one more token. Raise `GrammarError` if nothing can follow."""
        self._num_tokens += 1
        if may_end or self._num_tokens < self._ending.min_new_tokens:
            self._allow_end(may_end)
        else:
            self._num_nonzero_words = int(np.count_nonzero(self.words))
        if not self._num_nonzero_words:
            raise GrammarError(NO_TEXT)

    def find_forced(self) -> int | None:
        """Return the only token that the mask allows, if it may be taken ahead: it does not end the answer."""
        if not self._jump_below or self._num_nonzero_words != 1:
            return None
        place = int(np.flatnonzero(self.words)[0])
        bits = int(self.words.view(np.uint32)[place])
        token_id = place * 32 + bits.bit_length() - 1
        is_only = bits & (bits - 1) == 0
        return token_id if is_only and token_id < self._jump_below and token_id not in self._ending else None

    def fail_after(self, token_id: int, error: GrammarError) -> None:
        """Raise an error when this token is taken again: it was taken ahead, and the answer may end before."""
        self.words.fill(0)
        _set(self.words, (token_id,))
        self._failure = error

    def _allow_end(self, may_end: bool) -> None:
        words = self.words
        if may_end:
            _set(words, self._ending.eos)
        if self._num_tokens < self._ending.min_new_tokens:
            longer = words.copy()
            _clear(longer, self._ending.eos + self._ending.others)
            if longer.any():  # or the form goes first
                words[:] = longer
        self._num_nonzero_words = int(np.count_nonzero(words))


def _set(words: Words, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        if token_id // 32 < len(bits):
            bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(words: Words, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        if token_id // 32 < len(bits):
            bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
