"""Grammars that are compiled, and answers that follow them token by token."""

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache
from llguidance import LLMatcher, LLParserLimits

from lorax_server.structures.vocabulary import Vocabulary, Words

MAX_COMPILED = 256
MAX_ERROR = 600  # characters
NO_TEXT = "no text has this form"
TOKEN_S, SPENT_S = 0.01, 0.1  # of CPU time: for a token on average, and for all until the average counts


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


def compute_mask(vocabulary: Vocabulary, matcher: LLMatcher) -> tuple[Words, bool]:
    mask = matcher.compute_bitmask()
    _check(matcher)
    words, may_end = vocabulary.read_mask(mask)
    if not may_end and not words.any():
        raise GrammarError(NO_TEXT)
    return words, may_end


class Compiled(NamedTuple):
    """A grammar at its beginning, and the mask of the first token."""

    matcher: LLMatcher
    words: Words
    may_end: bool

    @classmethod
    def of(cls, vocabulary: Vocabulary, grammar: str) -> "Compiled":
        """Raise `GrammarError` if no answer can begin."""
        matcher = compile_grammar(vocabulary, grammar)
        return cls(matcher, *compute_mask(vocabulary, matcher))


class CompiledGrammars(LRUCache[str, Compiled]):
    """The grammars that were used last."""

    def __init__(self) -> None:
        super().__init__(MAX_COMPILED)


class Ending(NamedTuple):
    """The tokens that end an answer."""

    eos: tuple[int, ...]
    others: tuple[int, ...]  # stop tokens, which may be text
    min_new_tokens: int  # none of them comes earlier, unless nothing else can come


class Follower:
    """One answer: it consumes tokens, and tells which may come next."""

    def __init__(self, vocabulary: Vocabulary, compiled: Compiled, ending: Ending) -> None:
        self._vocabulary = vocabulary
        self._ending = ending
        self._matcher = compiled.matcher.deep_copy()
        self._num_tokens = 0
        self._spent_s = 0.0
        self.first_mask = self._allow_end(compiled.words.copy(), compiled.may_end)

    def consume(self, token_id: int) -> Words:
        """Take a token, and return the mask of the next. Raise `GrammarError` where that takes too much."""
        began_s = time.thread_time()
        self._num_tokens += 1
        if not self._matcher.consume_token(token_id):
            _check(self._matcher)
        mask = self._allow_end(*compute_mask(self._vocabulary, self._matcher))
        self._spent_s += time.thread_time() - began_s
        if self._spent_s > max(SPENT_S, TOKEN_S * self._num_tokens):
            raise GrammarError(f"it takes longer than {TOKEN_S * 1000:g} ms a token; make the grammar smaller")
        return mask

    def _allow_end(self, words: Words, may_end: bool) -> Words:
        if may_end:
            _set(words, self._ending.eos)
        if self._num_tokens < self._ending.min_new_tokens:
            longer = words.copy()
            _clear(longer, self._ending.eos + self._ending.others)
            return longer if longer.any() else words  # the form goes first
        return words


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
