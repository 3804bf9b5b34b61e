"""Compiled grammars, and the grammar state of each completion."""

import copy
import time
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from lorax_server.errors import EngineError
from lorax_server.structured_output.vocabulary import TokenMask, Vocabulary
from lorax_server.types import StopParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits

MAX_ERROR_CHARACTERS = 600
NO_MATCH_MESSAGE = "no text matches this grammar"
# CPU time per token on average, and the total below which a completion is not rejected.
MAX_TOKEN_S, MIN_TOTAL_S = 0.01, 0.1
MAX_DRAFT_S = 0.002  # time for the masks of one draft, because the step waits for them
# A grammar is fast if the average CPU time of this many masks is below the limit.
NUM_TIMED_MASKS, MAX_FAST_MASK_S = 4, 0.001


class GrammarError(Exception):
    """Raised if a grammar cannot be compiled or fails during a completion. The message is shown to the user."""


class SlowGrammarError(GrammarError):
    """Raised if a grammar's token masks take too long to compute."""


def make_limits() -> "LLParserLimits":
    """Return the llguidance limits: about 20 ms to start, 10 ms per token, and 50 MB of lexer states."""
    from llguidance import LLParserLimits  # noqa: PLC0415 - an engine can run without llguidance

    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)


def compile_matcher(vocabulary: Vocabulary, grammar: str) -> "LLMatcher":
    """Compile a grammar without the GIL. Raise `GrammarError` if the grammar is invalid."""
    from llguidance import LLMatcher  # noqa: PLC0415 - as above

    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=make_limits())
    _check_matcher(matcher)
    return matcher


def _check_matcher(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        raise GrammarError(_shorten_error(matcher.get_error()))


def _shorten_error(error: str) -> str:
    """Remove the parts of an llguidance error that repeat the grammar."""
    if error.startswith("NoExtension"):
        return NO_MATCH_MESSAGE
    text, *_ = error.split("\n   1 |", maxsplit=1)
    text = text.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
    return text.removeprefix("at 1(8): ").replace("\n<non-verbose/>", "").strip()[:MAX_ERROR_CHARACTERS]


class CompiledGrammar:
    """A matcher in its initial state, with the first token mask. Completions copy the matcher.

    The copies share a lexer, and its states accumulate over all completions. `num_tokens` counts the consumed tokens,
    so the grammar can be replaced before llguidance's state limit is reached.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        """Compile the grammar. Raise `GrammarError` if the grammar is invalid or no text matches it."""
        self.vocabulary = vocabulary
        self.matcher = compile_matcher(vocabulary, grammar)
        self.mask, self.may_end = _compute_mask(vocabulary, self.matcher)
        _check_matcher(self.matcher)
        if not self.may_end and not self.mask.any():
            raise GrammarError(NO_MATCH_MESSAGE)
        self.num_completions = 0
        self.num_tokens = 0
        self.is_fast = False
        self._mask_s: list[float] = []

    def record_time(self, spent_s: float) -> None:
        """Record the CPU time of a mask. After every `NUM_TIMED_MASKS` masks, update `is_fast`."""
        self._mask_s.append(spent_s)
        if len(self._mask_s) >= NUM_TIMED_MASKS:  # more if several threads record times
            self.is_fast = sum(self._mask_s) <= NUM_TIMED_MASKS * MAX_FAST_MASK_S
            self._mask_s = []


class GrammarState:
    """A completion's grammar state. It consumes tokens and stores the mask of the next token."""

    def __init__(self, compiled: CompiledGrammar, stop: StopParams, fast_forward_below: int = 0) -> None:
        """Create the state. Forced tokens with IDs below `fast_forward_below` may be consumed ahead of the model."""
        if not any(token_id < compiled.vocabulary.num_ids for token_id in stop.eos_token_ids):
            raise GrammarError("the model has no end-of-sequence token in its vocabulary")
        self.compiled = compiled
        self.mask: TokenMask  # mask of the token after `forced`
        self.forced: list[int] = []  # consumed tokens that the model has not computed
        self.history: list[int] = []  # all consumed tokens
        self.spent_s = 0.0  # CPU time of masks that were computed outside batches
        self._stop = stop
        self._fast_forward_below = fast_forward_below
        compiled.num_completions += 1
        self.matcher = compiled.matcher.deep_copy()
        self._set_mask(compiled.mask.copy(), compiled.may_end)

    def consume(self, token_ids: Sequence[int], max_forced: int = 0) -> None:
        """Consume tokens and up to `max_forced` forced tokens after each of them, and compute the next mask.

        Tokens in `forced` are already consumed. Raise `GrammarError` if a limit is exceeded.
        """
        started_s = time.thread_time()
        for token_id in token_ids:
            if not self.pop_forced(token_id):
                self.matcher.consume_token(token_id)
                self.record(token_id)
                self.consume_forced(max_forced)
        self.finish(*_compute_mask(self.compiled.vocabulary, self.matcher))
        spent_s = time.thread_time() - started_s
        self.compiled.record_time(spent_s)
        self.spent_s += spent_s
        if self.spent_s > max(MIN_TOTAL_S, MAX_TOKEN_S * len(self.history)):
            raise SlowGrammarError(f"it takes longer than {MAX_TOKEN_S * 1000:g} ms per token; simplify the grammar")

    def pop_forced(self, token_id: int) -> bool:
        """Remove the first forced token, which must be `token_id`. Return False if there are no forced tokens."""
        if not self.forced:
            return False
        if (expected := self.forced.pop(0)) != token_id:
            raise EngineError(f"token {token_id} was sampled where the grammar forces {expected}")
        return True

    def mask_draft(self, draft: Sequence[int], max_forced: int = 0) -> tuple[list[TokenMask], list[int]]:
        """Return token masks for the positions of a draft's tokens and for the next position.

        The masks end at the first draft token that is not allowed, or when they take too long. Also return the forced
        tokens after the last masked position, if all positions have forced tokens.
        """
        state, masks, is_forced = self, [self.next_mask()], bool(self.forced)
        started_s = time.monotonic()
        for token_id in draft:
            is_late = time.monotonic() - started_s > MAX_DRAFT_S
            if not _is_allowed(masks[-1], token_id) or is_late:
                break
            if state is self:
                state = self.copy()
            try:
                state.consume((token_id,), max_forced)
            except BaseException:  # limits and Rust panics; if the sequence gets there, it fails itself
                return masks, []
            masks.append(state.next_mask())
            is_forced = is_forced and bool(state.forced)
        return masks, state.forced[1:] if is_forced else []

    def next_mask(self) -> TokenMask:
        """Return the mask of the next token. If there are forced tokens, it allows only the first of them."""
        if not self.forced:
            return self.mask
        only = np.zeros_like(self.mask)
        _set_tokens(only, self.forced[:1], True)
        return only

    def copy(self) -> "GrammarState":
        """Return an independent state after the same tokens."""
        other = copy.copy(self)
        other.matcher, other.forced, other.history = self.matcher.deep_copy(), [*self.forced], [*self.history]
        return other

    def record(self, *token_ids: int) -> None:
        """Record tokens that the matcher has consumed."""
        self.history += token_ids
        self.compiled.num_tokens += len(token_ids)

    def consume_forced(self, max_forced: int) -> None:
        """Consume the tokens that the grammar forces, except for tokens that end the completion."""
        self.forced = []
        if max_forced and self._fast_forward_below:
            following = self.matcher.compute_ff_tokens()[:max_forced]
            self.forced = list(takewhile(self._may_force, following))
            if self.forced:
                self.matcher.consume_tokens(self.forced)
                self.record(*self.forced)

    def finish(self, mask: TokenMask, may_end: bool) -> None:
        """Set the mask of the next token. Raise `GrammarError` if the matcher failed or no token is allowed."""
        _check_matcher(self.matcher)
        self._set_mask(mask, may_end)

    def restart(self, compiled: CompiledGrammar) -> "GrammarState":
        """Return a state for the recompiled grammar that has consumed the same tokens, except the tokens in
        `forced`.
        """
        state = GrammarState(compiled, self._stop, self._fast_forward_below)
        *before, last = self.history[: len(self.history) - len(self.forced)]
        state.matcher.consume_tokens(before)
        state.record(*before)
        state.consume((last,))
        return state

    def _may_force(self, token_id: int) -> bool:
        stop = self._stop
        is_end = token_id in stop.eos_token_ids or token_id in stop.stop_token_ids
        return token_id < self._fast_forward_below and not is_end

    def _set_mask(self, mask: TokenMask, may_end: bool) -> None:
        """Set the mask. End tokens are allowed only if `may_end`. Raise `GrammarError` if no token is allowed."""
        stop, self.mask = self._stop, mask[: self.compiled.vocabulary.num_words]
        # An EOS token may also match as text, so it is forbidden where the text cannot end.
        _set_tokens(self.mask, stop.eos_token_ids, may_end)
        if len(self.history) < stop.min_new_tokens:
            longer = self.mask.copy()
            _set_tokens(longer, stop.eos_token_ids | stop.stop_token_ids, False)
            if longer.any():
                self.mask = longer
        if not self.mask.any():
            raise GrammarError(NO_MATCH_MESSAGE)


def consume_batch(
    executor: "LLExecutor", items: Sequence[tuple[GrammarState, int]], max_forced: int
) -> list[BaseException | None]:
    """Consume a token in each state and compute the next masks without the GIL. Return an error or None for each state.

    All states share a vocabulary and have no forced tokens.
    """
    vocabulary = items[0][0].compiled.vocabulary
    executor.consume_token_par([(state.matcher, token_id) for state, token_id in items])
    errors: list[BaseException | None] = [None] * len(items)
    for index, (state, token_id) in enumerate(items):
        state.record(token_id)
        try:
            state.consume_forced(max_forced)
        except BaseException as error:  # including Rust panics, which must not fail the other completions
            errors[index] = error
    masks = vocabulary.make_masks(len(items))
    matchers = [(state.matcher, index) for index, (state, _) in enumerate(items)]
    executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, vocabulary.mask_bytes, len(items))
    for index, may_end in enumerate(vocabulary.pop_eos_bits(masks).tolist()):
        try:
            items[index][0].finish(masks[index], may_end)
        except GrammarError as error:
            errors[index] = errors[index] or error
    return errors


def _compute_mask(vocabulary: Vocabulary, matcher: "LLMatcher") -> tuple[TokenMask, bool]:
    """Return the mask of the next token, and True if the text may end here."""
    masks = vocabulary.make_masks(1)
    matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
    (may_end,) = vocabulary.pop_eos_bits(masks)
    return masks[0], bool(may_end)


def _is_allowed(mask: TokenMask, token_id: int) -> bool:
    return token_id // 32 < len(mask) and bool(mask[token_id // 32] >> token_id % 32 & 1)


def _set_tokens(mask: TokenMask, token_ids: Iterable[int], is_allowed: bool) -> None:
    bits = mask.view(np.uint32)
    for token_id in token_ids:
        word, bit = token_id // 32, np.uint32(1 << token_id % 32)
        if word < len(bits):
            bits[word] = bits[word] | bit if is_allowed else bits[word] & ~bit
