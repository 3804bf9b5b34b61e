"""Compiled grammars, and completions that follow them token by token."""

import os
import time
from collections.abc import Iterable, Sequence
from itertools import takewhile
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
        if not any(token_id < compiled.vocabulary.num_ids for token_id in ending.eos):
            raise GrammarError("the model has no end-of-sequence token in its vocabulary")
        self.compiled = compiled
        self.history: list[int] = []  # consumed tokens
        self.forced: list[int] = []  # tokens that were consumed after the model's last one: the grammar allows no other
        self.spent_s = 0.0  # CPU time of masks that were computed alone
        self._ending = ending
        self._fast_forward_below = fast_forward_below
        compiled.num_completions += 1
        self.matcher = compiled.matcher.deep_copy()
        self._take_mask(compiled.mask.copy(), compiled.may_end)

    def consume(self, token_id: int, max_forced: int = 0) -> None:
        """Consume a token and up to `max_forced` forced ones, and compute the next mask.

        Raise `GrammarError` if a limit is exceeded.
        """
        started_s = time.thread_time()
        self.matcher.consume_token(token_id)
        self.note(token_id)
        self.look_ahead(max_forced)
        vocabulary = self.compiled.vocabulary
        masks = vocabulary.make_masks(1)
        self.matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        (may_end,) = vocabulary.take_ends(masks)
        self.finish(masks[0], bool(may_end))
        spent_s = time.thread_time() - started_s
        self.compiled.record(spent_s)
        self.spent_s += spent_s
        if self.spent_s > max(SPENT_S, TOKEN_S * len(self.history)):
            raise SlowGrammarError(f"it takes longer than {TOKEN_S * 1000:g} ms per token; simplify the grammar")

    def note(self, *token_ids: int) -> None:
        """Record tokens that the matcher has consumed."""
        self.history += token_ids
        self.compiled.num_tokens += len(token_ids)

    def look_ahead(self, max_forced: int) -> None:
        """Consume the tokens that the grammar forces, except for those that end the completion."""
        self.forced = []
        if max_forced and self._fast_forward_below:
            following = self.matcher.compute_ff_tokens()[:max_forced]
            self.forced = list(takewhile(self._may_force, following))
            if self.forced:
                self.matcher.consume_tokens(self.forced)
                self.note(*self.forced)

    def finish(self, mask: Words, may_end: bool) -> None:
        """Take the mask of the next token. Raise `GrammarError` if the matcher has failed or no token is left."""
        try:
            _check(self.matcher)
            self._take_mask(mask, may_end)
        except GrammarError:
            if not self.forced:
                raise
            # The completion may end before the forced tokens do, so it fails only when it consumes one more.
            mask.fill(0)
            mask.view(np.uint32)[self.forced[0] // 32] = 1 << self.forced[0] % 32
            self.words = mask[: self.compiled.vocabulary.num_words]
            del self.history[-len(self.forced) :]
            self.forced = []

    def restart(self, compiled: CompiledGrammar) -> "GrammarState":
        """Return a state that has consumed the same tokens with another compiled grammar."""
        state = GrammarState(compiled, self._ending, self._fast_forward_below)
        *before, last = self.history
        state.matcher.consume_tokens(before)
        state.note(*before)
        state.consume(last)
        return state

    def _may_force(self, token_id: int) -> bool:
        return token_id < self._fast_forward_below and token_id not in self._ending

    def _take_mask(self, mask: Words, may_end: bool) -> None:
        """Set or clear the ending tokens in a mask. Raise `GrammarError` if no token is left."""
        self.words = mask[: self.compiled.vocabulary.num_words]
        bits = self.words.view(np.uint32)
        for token_id in self._ending.eos:  # an eos token can be text of the grammar too, and would cut it off
            if token_id // 32 < len(bits):
                bit = np.uint32(1 << token_id % 32)
                bits[token_id // 32] = bits[token_id // 32] | bit if may_end else bits[token_id // 32] & ~bit
        if len(self.history) < self._ending.min_new_tokens:
            longer = self.words.copy()
            _clear(longer, (*self._ending.eos, *self._ending.others))
            if longer.any():
                self.words = longer
        if not self.words.any():
            raise GrammarError(NO_TEXT)


def consume_together(
    executor: "LLExecutor", items: Sequence[tuple[GrammarState, int]], max_forced: int
) -> list[BaseException | None]:
    """Consume a token of each completion and compute their next masks, all without the GIL. Return their errors.

    The completions share a vocabulary.
    """
    vocabulary = items[0][0].compiled.vocabulary
    executor.consume_token_par([(state.matcher, token_id) for state, token_id in items])
    errors: list[BaseException | None] = []
    for state, token_id in items:
        errors.append(None)
        try:
            state.note(token_id)
            state.look_ahead(max_forced)
        except BaseException as error:
            errors[-1] = error
    masks = vocabulary.make_masks(len(items))
    rows = [(state.matcher, row) for row, (state, _) in enumerate(items)]
    executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, vocabulary.mask_bytes, len(items))
    for row, may_end in enumerate(vocabulary.take_ends(masks).tolist()):
        try:
            items[row][0].finish(masks[row], may_end)
        except GrammarError as error:
            errors[row] = errors[row] or error
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
