"""Compiled grammars, and completions that follow them token by token."""

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lorax_server.structured_output.mask_thread import STACK_BYTES
from lorax_server.structured_output.vocabulary import Vocabulary, Words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits

MAX_ERROR = 600  # characters
NO_TEXT = "no text matches this grammar"
TOKEN_S, SPENT_S = 0.01, 0.1  # CPU time: the average per token, and the total before the average counts
NUM_TIMED, SLOW_S = 4, 0.001  # masks whose CPU time decides whether a grammar is fast, and their average


class GrammarError(Exception):
    """A grammar that cannot be compiled or followed. The message is for the user."""


class SlowGrammarError(GrammarError):
    """A grammar whose masks take too long to compute."""


def make_limits() -> "LLParserLimits":
    """Return the limits of a compiled grammar: about 20 ms to start, 10 ms per token, 50 MB of lexer states."""
    from llguidance import LLParserLimits  # noqa: PLC0415 - an engine can run without it

    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


def compile_matcher(vocabulary: Vocabulary, grammar: str) -> "LLMatcher":
    """Compile a grammar without the GIL. Raise `GrammarError` if it is invalid."""
    from llguidance import LLMatcher  # noqa: PLC0415 - as above

    assert vocabulary.tokenizer is not None
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=make_limits())
    _check(matcher)
    return matcher


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise GrammarError(_shorten(matcher.get_error()))


def _shorten(error: str) -> str:
    """Remove the parts of an error that repeat the grammar."""
    if error.startswith("NoExtension"):
        return NO_TEXT
    text, *_ = error.split("\n   1 |", maxsplit=1)
    text = text.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
    return text.removeprefix("at 1(8): ").replace("\n<non-verbose/>", "").strip()[:MAX_ERROR]


class CompiledGrammar:
    """A grammar at its start, with its first mask. Completions copy the matcher.

    Copies share the lexer, so its states add up over all completions. `num_tokens` counts the tokens that they
    consumed, to replace the grammar before the sum matters.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        """Raise `GrammarError` if no text matches."""
        self.vocabulary = vocabulary
        self.matcher = compile_matcher(vocabulary, grammar)
        self.mask = vocabulary.make_masks(1)[0]
        self.matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        _check(self.matcher)
        self.may_end = bool(vocabulary.take_ends(self.mask[None])[0])
        if not self.may_end and not self.mask.any():
            raise GrammarError(NO_TEXT)
        self.num_bytes = 0  # as measured by its trial
        self.num_completions = 0
        self.num_tokens = 0
        self.is_fast = False  # known to compute masks fast
        self._spent_s: list[float] = []

    def record(self, spent_s: float) -> None:
        """Note the CPU time of a mask, and decide from a few whether the grammar is fast."""
        self._spent_s.append(spent_s)
        if len(self._spent_s) == NUM_TIMED:
            self.is_fast = sum(self._spent_s) <= NUM_TIMED * SLOW_S
            self._spent_s = []


class Ending(NamedTuple):
    """The tokens that end a completion."""

    eos: tuple[int, ...]
    others: tuple[int, ...]  # stop tokens, which may be text
    min_new_tokens: int  # no ending token comes earlier, unless no other token can

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.eos or token_id in self.others


class GrammarState:
    """The state of one completion: it consumes tokens and holds the mask of the next one."""

    def __init__(self, compiled: CompiledGrammar, ending: Ending, fast_forward_below: int = 0) -> None:
        """Forced tokens with ids below `fast_forward_below` may be consumed ahead of the model."""
        self.compiled = compiled
        self.history: list[int] = []  # consumed tokens
        self.spent_s = 0.0  # CPU time of masks that were computed alone
        self._vocabulary = compiled.vocabulary
        self._ending = ending
        self._fast_forward_below = fast_forward_below
        self._failure: GrammarError | None = None
        compiled.num_completions += 1
        self.matcher = compiled.matcher.deep_copy()
        self.words = compiled.mask[: self._vocabulary.num_words].copy()
        self._finish_mask(compiled.may_end, int(np.count_nonzero(self.words)))

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def consume(self, *token_ids: int) -> None:
        """Consume tokens and compute the next mask. Raise `GrammarError` if a limit is exceeded."""
        if self._failure is not None:
            raise self._failure
        started_s = time.thread_time()
        self.history += token_ids
        self.compiled.num_tokens += len(token_ids)
        if not self.matcher.consume_tokens(list(token_ids)):
            _check(self.matcher)
        masks = self._vocabulary.make_masks(1)
        self.matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        may_end = bool(self._vocabulary.take_ends(masks)[0])
        self.take_mask(masks[0], may_end, int(np.count_nonzero(masks)))
        spent_s = time.thread_time() - started_s
        self.compiled.record(spent_s)
        self.spent_s += spent_s
        if self.spent_s > max(SPENT_S, TOKEN_S * len(self.history)):
            raise SlowGrammarError(f"it takes longer than {TOKEN_S * 1000:g} ms per token; simplify the grammar")

    def take_mask(self, mask: Words, may_end: bool, num_nonzero: int) -> None:
        """Take the mask of the next token. Raise `GrammarError` if the matcher has failed or no token is left."""
        _check(self.matcher)
        self.words = mask[: self._vocabulary.num_words]
        self._finish_mask(may_end, num_nonzero)

    def restart(self, compiled: CompiledGrammar) -> "GrammarState":
        """Return a state that has consumed the same tokens with another compiled grammar."""
        state = GrammarState(compiled, self._ending, self._fast_forward_below)
        state.consume(*self.history)
        return state

    def find_forced(self) -> int | None:
        """Return the only token that the mask allows, unless it ends the completion."""
        if not self._fast_forward_below or self._num_nonzero_words != 1:
            return None
        place = int(np.flatnonzero(self.words)[0])
        bits = int(self.words.view(np.uint32)[place])
        token_id = place * 32 + bits.bit_length() - 1
        is_only = bits & (bits - 1) == 0
        return token_id if is_only and token_id < self._fast_forward_below and token_id not in self._ending else None

    def fail_when_reached(self, token_id: int, error: GrammarError) -> None:
        """Allow only this token, and fail when it is consumed: the completion may end before that."""
        self.words.fill(0)
        self.words.view(np.uint32)[token_id // 32] = 1 << token_id % 32
        self._failure = error

    def _finish_mask(self, may_end: bool, num_nonzero: int) -> None:
        """Set or clear the ending tokens in the mask. Raise `GrammarError` if no token is left."""
        bits, ending = self.words.view(np.uint32), self._ending
        for token_id in ending.eos:  # an eos token can be text of the grammar too, and would cut it off
            word, bit = token_id // 32, 1 << token_id % 32
            if word >= len(bits):
                continue
            before = int(bits[word])
            after = before | bit if may_end else before & ~bit
            if after != before:
                bits[word] = after
                num_nonzero += bool(after) - bool(before)
        if len(self.history) < ending.min_new_tokens:
            longer = self.words.copy()
            _clear(longer, (*ending.eos, *ending.others))
            if longer.any():
                self.words[:] = longer
                num_nonzero = int(np.count_nonzero(longer))
        self._num_nonzero_words = num_nonzero
        if not num_nonzero:
            raise GrammarError(NO_TEXT)


def consume_together(executor: "LLExecutor", items: Sequence[tuple[GrammarState, int]]) -> list[GrammarError | None]:
    """Consume a token of each completion and compute their next masks, all without the GIL. Return their errors.

    The completions share a vocabulary.
    """
    vocabulary = items[0][0].compiled.vocabulary
    for state, token_id in items:
        state.history.append(token_id)
        state.compiled.num_tokens += 1
    executor.consume_token_par([(state.matcher, token_id) for state, token_id in items])
    masks = vocabulary.make_masks(len(items))
    places = [(state.matcher, place) for place, (state, _) in enumerate(items)]
    executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, vocabulary.mask_bytes, len(items))
    errors: list[GrammarError | None] = []
    ends = vocabulary.take_ends(masks).tolist()
    counts = np.count_nonzero(masks, axis=1).tolist()
    for (state, _), mask, may_end, num_nonzero in zip(items, masks, ends, counts, strict=True):
        try:
            state.take_mask(mask, may_end, num_nonzero)
            errors.append(None)
        except GrammarError as error:
            errors.append(error)
    return errors


def make_executor(num_threads: int) -> "LLExecutor":
    """Make an executor whose threads have the stack of mask threads."""
    from llguidance import LLExecutor  # noqa: PLC0415 - as above

    name, before = "RUST_MIN_STACK", os.environ.get("RUST_MIN_STACK")
    os.environ[name] = str(STACK_BYTES)  # read when the threads start
    try:
        return LLExecutor(num_threads)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _clear(words: Words, token_ids: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token_id in token_ids:
        if token_id // 32 < len(bits):
            bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
