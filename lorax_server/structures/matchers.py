"""Grammars that are compiled, and answers that follow them token by token."""

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask_par

from lorax_server.structures.vocabulary import Vocabulary, Words

MAX_COMPILED = 256
MAX_ERROR = 600  # characters
MAX_FORCED = 32  # tokens that are taken ahead at once: masks of others wait meanwhile
NO_TEXT = "no text has this form"
TOKEN_S, SPENT_S = 0.01, 0.1  # of CPU time: for a token on average, and for all until the average counts
SLOW_S = 0.001  # likewise, for a token on average: others do not wait for it
USUAL_S = 0.0001  # for a token of an answer that is not slow
PROVEN = 4  # tokens that an answer takes alone before it takes them together with others
MAX_TOGETHER = 1024  # answers that take tokens together


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
    words, may_end = vocabulary.read_masks(np.frombuffer(mask, np.int32).copy()[None])
    if not may_end[0] and not words.any():
        raise GrammarError(NO_TEXT)
    return words[0], bool(may_end[0])


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

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.eos or token_id in self.others


class Follower:
    """One answer: it consumes tokens, and tells which may come next."""

    def __init__(self, vocabulary: Vocabulary, compiled: Compiled, ending: Ending, jump_below: int = 0) -> None:
        """Forced tokens below `jump_below` may be taken ahead."""
        self._vocabulary = vocabulary
        self._ending = ending
        self._jump_below = jump_below
        self._failure: GrammarError | None = None
        self._num_tokens = self._num_alone = 0
        self._spent_s = self._last_s = 0.0  # by all tokens that it took alone, and by the last of them
        self.matcher = compiled.matcher.deep_copy()
        self.max_together = MAX_TOGETHER  # answers that take tokens together, this one among them
        self.first_mask = self._allow_end(compiled.words.copy(), compiled.may_end)

    @property
    def is_slow(self) -> bool:
        return self._spent_s > SLOW_S * self._num_alone

    @property
    def is_quick(self) -> bool:
        """Tell whether its tokens may be taken together with those of others: it has shown that it is not slow."""
        is_known = self._num_alone >= PROVEN and self.max_together > 1
        return is_known and self._last_s < SLOW_S and not self.is_slow and self._failure is None

    def note_together(self, is_slow: bool, num_together: int) -> None:
        """Be among fewer after tokens that took long, and among more after others. So the slow one is soon alone."""
        self.max_together = max(1, num_together // 4) if is_slow else min(MAX_TOGETHER, 2 * self.max_together)

    def consume(self, token_id: int) -> Words:
        """Take a token, and return the mask of the next. Raise `GrammarError` where that takes too much."""
        if self._failure is not None:
            raise self._failure
        began_s = time.thread_time()
        if not self.matcher.consume_token(token_id):
            _check(self.matcher)
        mask = self.finish(*compute_mask(self._vocabulary, self.matcher))
        self._last_s = time.thread_time() - began_s
        self._spent_s += self._last_s
        self.note_together(self._last_s >= SLOW_S, 1)
        self._num_alone += 1
        if self._spent_s > max(SPENT_S, TOKEN_S * self._num_alone):
            raise GrammarError(f"it takes longer than {TOKEN_S * 1000:g} ms a token; make the grammar smaller")
        return mask

    def finish(self, words: Words, may_end: bool) -> Words:
        """Return the mask after one more token, which the matcher has taken."""
        self._num_tokens += 1
        return self._allow_end(words, may_end)

    def find_forced(self, words: Words) -> int | None:
        """Return the only token that a mask allows, if it may be taken ahead: it does not end the answer."""
        if not self._jump_below or np.count_nonzero(words) != 1:
            return None
        place = int(np.flatnonzero(words)[0])
        bits = int(words.view(np.uint32)[place])
        token_id = place * 32 + bits.bit_length() - 1
        is_only = bits & (bits - 1) == 0
        return token_id if is_only and token_id < self._jump_below and token_id not in self._ending else None

    def fail_next(self, error: GrammarError) -> None:
        """Raise an error when the next token is taken: it was taken ahead, and the answer may end before."""
        self._failure = error

    def _allow_end(self, words: Words, may_end: bool) -> Words:
        if may_end:
            _set(words, self._ending.eos)
        if self._num_tokens < self._ending.min_new_tokens:
            longer = words.copy()
            _clear(longer, self._ending.eos + self._ending.others)
            return longer if longer.any() else words  # the form goes first
        return words


class Together:
    """Takes tokens of several answers at once: one call for all, on several threads, without Python's lock."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads

    @cached_property
    def _executor(self) -> LLExecutor:
        """Threads, which begin when they are needed: after the first child was forked."""
        return LLExecutor(self._num_threads)

    def consume(self, followers: Sequence[Follower], token_ids: Sequence[int]) -> list[Words | GrammarError]:
        """Return the masks after these tokens. Answers that are quick so far may be given."""
        began_s, busy_s = time.perf_counter(), time.process_time()
        matchers = [follower.matcher for follower in followers]
        self._executor.consume_token_par(list(zip(matchers, token_ids, strict=True)))
        masks = np.zeros((len(matchers), self._vocabulary.num_words_and_end), np.int32)
        fill_next_token_bitmask_par(self._executor, [(each, row) for row, each in enumerate(matchers)], masks)
        # On a busy machine others take time too, but not of this process.
        took_s = min(time.perf_counter() - began_s, time.process_time() - busy_s)
        is_slow = took_s > SLOW_S + USUAL_S * len(matchers) / self._num_threads
        words, may_end = self._vocabulary.read_masks(masks)
        can_go_on = may_end | words.any(1)
        found: list[Words | GrammarError] = []
        for row, (follower, matcher) in enumerate(zip(followers, matchers, strict=True)):
            follower.note_together(is_slow, len(followers))
            if matcher.is_error():
                found.append(GrammarError(_shorten(matcher.get_error())))
            else:
                mask = follower.finish(words[row], bool(may_end[row]))
                found.append(mask if can_go_on[row] else GrammarError(NO_TEXT))
        return found


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
