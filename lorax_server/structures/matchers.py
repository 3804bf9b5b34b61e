"""Grammars that are compiled, and answers that follow them token by token."""

import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
from cachetools import LRUCache
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from lorax_server.structures.slots import KEPT_SLOTS, Words
from lorax_server.structures.vocabulary import Vocabulary

MAX_COMPILED = 256
MAX_ERROR = 600  # characters
MAX_FORCED = 32  # tokens that are taken ahead at once: masks of others wait meanwhile
NO_TEXT = "no text has this form"
TOKEN_S, SPENT_S = 0.01, 0.1  # of CPU time: for a token on average, and for all until the average counts
SLOW_S = 0.001  # likewise, for a token on average: others do not wait for it
USUAL_S = 0.0002  # for a token of an answer that is not slow: seldom it takes more on average
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
        self._num_tokens = self._num_alone = 0
        self._spent_s = self._last_s = 0.0  # by all tokens that it took alone, and by the last of them
        self.matcher = compiled.matcher.deep_copy()
        self.max_together = MAX_TOGETHER  # answers that take tokens together, this one among them
        self.words[:] = compiled.words
        self._allow_end(compiled.may_end)

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

    def consume(self, token_id: int) -> None:
        """Take a token, and write the mask of the next. Raise `GrammarError` where that takes too much."""
        if self._failure is not None:
            raise self._failure
        began_s = time.thread_time()
        if not self.matcher.consume_token(token_id):
            _check(self.matcher)
        self.matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)  # `_mask` keeps the memory
        _check(self.matcher)
        self.finish(self._vocabulary.take_end(self._mask), int(np.count_nonzero(self.words)))
        self._last_s = time.thread_time() - began_s
        self._spent_s += self._last_s
        self.note_together(self._last_s >= SLOW_S, 1)
        self._num_alone += 1
        if self._spent_s > max(SPENT_S, TOKEN_S * self._num_alone):
            raise GrammarError(f"it takes longer than {TOKEN_S * 1000:g} ms a token; make the grammar smaller")

    def finish(self, may_end: bool, num_nonzero_words: int) -> None:
        """Complete the mask after one more token, without its end. Raise `GrammarError` if nothing can follow.

        Of its words so many are not zero; `Together` counts up to two.
        """
        self._num_tokens += 1
        self._num_nonzero_words = num_nonzero_words
        if may_end or self._num_tokens < self._ending.min_new_tokens:
            self._allow_end(may_end)
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


class Together:
    """Takes tokens of several answers at once: one call for all, on several threads, without Python's lock."""

    def __init__(self, vocabulary: Vocabulary, masks: Words, num_threads: int) -> None:
        """`masks` are those of all slots."""
        self._vocabulary = vocabulary
        self._masks = masks
        self._num_threads = num_threads

    @cached_property
    def _executor(self) -> LLExecutor:
        """Threads, which begin when they are needed: after the first child was forked."""
        return LLExecutor(self._num_threads)

    def consume(self, followers: Sequence[Follower], token_ids: Sequence[int]) -> list[GrammarError | None]:
        """Write the masks after these tokens. Return what is wrong. Answers that are quick so far may be given."""
        began_s, busy_s = time.perf_counter(), time.process_time()
        matchers = [follower.matcher for follower in followers]
        self._executor.consume_token_par(list(zip(matchers, token_ids, strict=True)))
        places = [(follower.matcher, follower.slot) for follower in followers]
        fill_next_token_bitmask_par(self._executor, places, self._masks)
        # On a busy machine others take time too, but not of this process.
        took_s = min(time.perf_counter() - began_s, time.process_time() - busy_s)
        is_slow = took_s > SLOW_S + USUAL_S * len(matchers) / self._num_threads
        slots = [follower.slot for follower in followers]
        ends = self._vocabulary.take_ends(self._masks, slots)
        errors: list[GrammarError | None] = []
        for follower, may_end, count in zip(followers, ends, _count_words_up_to_two(self._masks, slots), strict=True):
            follower.note_together(is_slow, len(followers))
            try:
                _check(follower.matcher)
                follower.finish(may_end, count)
                errors.append(None)
            except GrammarError as error:
                errors.append(error)
        return errors


def _count_words_up_to_two(masks: Words, slots: Sequence[int]) -> list[int]:
    """Count the words of some masks that are not zero, up to two: of all masks at once, not of each."""
    first, last = min(slots), max(slots)
    # Or these are copied: those between are many, or their memory was given back, and to read them would take it again.
    is_dense = last < min(KEPT_SLOTS, first + 2 * len(slots))
    some, places = (masks[first : last + 1], np.array(slots) - first) if is_dense else (masks[slots], slice(None))
    words = some.view(np.uint32)
    largest, total = np.maximum.reduce(words, axis=1)[places], np.add.reduce(words, axis=1, dtype=np.uint32)[places]
    counts = np.where(largest == 0, 0, 2)
    for number in np.flatnonzero((largest == total) & (largest != 0)).tolist():  # one word, or the others add up to 0
        counts[number] = min(2, np.count_nonzero(masks[slots[number]]))
    return cast(list[int], counts.tolist())


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
