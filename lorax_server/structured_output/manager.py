"""Structured output for the engine: which requests wait for their grammar, and which tokens each may take next.

Masks are computed on threads while the next forward runs. llguidance works without the GIL, so neither masks nor
compiling hold up the engine loop. A grammar gets here only after a trial compile in the sandbox (`trials.py`).
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Self

from cachetools import LRUCache

from lorax_server.errors import EngineError, InputError, LoraxError, NotSupportedError
from lorax_server.machine import GRAMMAR_CACHE_BYTES, count_cores
from lorax_server.structured_output.mask_thread import start_thread
from lorax_server.structured_output.matcher import (
    CompiledGrammar,
    Ending,
    GrammarError,
    GrammarState,
    SlowGrammarError,
    consume_together,
    make_executor,
)
from lorax_server.structured_output.vocabulary import Vocabularies, Vocabulary, Words
from lorax_server.types import Request

logger = logging.getLogger(__name__)

GRAMMAR_BYTES, TOKEN_BYTES = 2**20, 2**11  # weight of a compiled grammar, and of each token consumed (lexer states)
MAX_SHARED_TOKENS = 2**13  # consumed by all completions of a compiled grammar, until it is compiled again
MAX_THREADS = 4
MAX_GPU_FAST_FORWARD = 16  # an H200 saves 8 % per token with 16 completions and loses 20 % with 64
MAX_FORCED = 32  # tokens that are consumed ahead of the model
COMPILE_NICENESS = 10  # forwards go first, but compiling must finish on a busy machine
BATCH_S, BATCH_MASK_S = 0.01, 0.0005  # a batch of masks that takes longer, in all and per mask, is timed one by one
_Key = tuple[str, str]  # a vocabulary's digest, a grammar


class Next(NamedTuple):
    """The forced tokens of a completion, and the mask of the token after them."""

    words: Words
    forced: list[int]


class Settled(NamedTuple):
    """A request whose first mask is ready, or one that fails."""

    request_id: int
    error: LoraxError | None = None


def _weigh(compiled: CompiledGrammar) -> int:
    """Estimate the bytes of a compiled grammar: its trial's measure, and growth by use."""
    return compiled.num_bytes + GRAMMAR_BYTES + TOKEN_BYTES * compiled.num_tokens


class _Completion:
    """A request with a grammar. The thread that computes its mask owns `state`; a lock guards the rest."""

    def __init__(self, request: Request, key: _Key, fast_forward_below: int) -> None:
        stop = request.stop
        self.request_id = request.request_id
        self.key = key
        self.ending = Ending(tuple(sorted(stop.eos_token_ids)), tuple(sorted(stop.stop_token_ids)), stop.min_new_tokens)
        self.fast_forward_below = fast_forward_below
        self.state: GrammarState | None = None
        self.next: Next | None = None
        self.has_started = self.has_failed = self.has_ended = False


class _Item(NamedTuple):
    """A token that a completion consumes next."""

    completion: _Completion
    state: GrammarState
    token_id: int


class _Threads:
    """Fast grammars are served in batches, others one by one, so that fast masks do not wait for slow ones."""

    def __init__(self, num_threads: int) -> None:
        self.executor = make_executor(num_threads)
        self.fast = start_thread("masks")
        self.slow = start_thread("slow-masks")
        self.compile = start_thread("grammar-compiler", COMPILE_NICENESS)

    def close(self) -> None:
        for thread in (self.fast, self.slow, self.compile):
            thread.shutdown(cancel_futures=True)


def _submit(thread: ThreadPoolExecutor, work: Callable[..., None], *args: object) -> None:
    thread.submit(work, *args).add_done_callback(_log_failure)


def _log_failure(job: "Future[None]") -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        logger.error("a job of structured output failed", exc_info=error)


class StructuredOutput:
    """Compile grammars and compute masks for the engine. Its public methods belong to the engine's thread."""

    def __init__(
        self, build_base: Callable[[], Vocabulary], num_threads: int = 1, max_fast_forward: float = math.inf
    ) -> None:
        """`build_base` makes the base model's vocabulary, on another thread, when it is first needed.

        Forced tokens are consumed ahead while there are at most `max_fast_forward` completions with a grammar.
        """
        self.on_news: Callable[[], None] = lambda: None  # called on any thread when `take_settled` has results
        self.fast_forward = True  # consume forced tokens ahead of the model
        self._build_base = build_base
        self._num_threads = num_threads
        self._max_fast_forward = max_fast_forward
        self._threads: _Threads | None = None
        self._completions: dict[int, _Completion] = {}
        self._changed = threading.Condition()  # guards all below
        self._vocabularies = Vocabularies()
        self._compiled: LRUCache[_Key, CompiledGrammar] = LRUCache(GRAMMAR_CACHE_BYTES, _weigh)
        self._waiting: dict[_Key, list[_Completion]] = {}  # for a compile
        self._settled: deque[Settled] = deque()
        self._missing: set[int] = set()  # requests whose masks `gather` waits for
        self._is_urgent = False  # `gather` waits for any mask, not only for the last

    @classmethod
    def for_device(cls, build_base: Callable[[], Vocabulary], device: str) -> Self:
        """On a CPU, the model needs the cores; on a GPU, steps of many sequences with forced tokens are slow."""
        if device == "cpu":
            return cls(build_base)
        return cls(build_base, max(1, min(MAX_THREADS, count_cores() // 4)), MAX_GPU_FAST_FORWARD)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._completions

    @property
    def has_news(self) -> bool:
        return bool(self._settled)

    def begin(self, request: Request, fast_forward_below: int = 0) -> None:
        """Compile a request's grammar; `take_settled` tells when it is ready. Raise if the request is invalid.

        Forced tokens with ids below `fast_forward_below` may be consumed several at a time, unless the request wants
        log probabilities from before the mask.
        """
        assert request.structure is not None
        stop, sampling = request.stop, request.sampling
        if stop.ignore_eos:
            raise InputError("`ignore_eos_token` cannot be combined with structured output, which ends by itself")
        if not stop.eos_token_ids:
            raise InputError("structured output needs a model with an end-of-sequence token")
        if not self.fast_forward or sampling.raw_logprobs or sampling.num_alternatives:
            fast_forward_below = 0
        key = "" if request.vocabulary is None else request.vocabulary.digest, request.structure.grammar
        completion = _Completion(request, key, fast_forward_below)
        threads = self._start_threads()
        with self._changed:
            evicted = self._vocabularies.acquire(request.vocabulary, request.request_id, request.tenant)
            for stale in [other for other in self._compiled if other[0] == evicted]:
                del self._compiled[stale]  # it would keep its vocabulary in memory
            self._completions[request.request_id] = completion
            compiled = self._compiled.get(key)
            if compiled is not None and compiled.num_tokens > MAX_SHARED_TOKENS:
                del self._compiled[key]
                compiled = None
            if compiled is None:
                if key not in self._waiting:
                    _submit(threads.compile, self._compile, key, request.structure.num_bytes)
                self._waiting.setdefault(key, []).append(completion)
        if compiled is not None:
            self._start(completion, compiled)

    def take_settled(self) -> list[Settled]:
        settled = []
        while self._settled:
            settled.append(self._settled.popleft())
        return [each for each in settled if each.request_id in self._completions]

    def advance(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Take the tokens that a step sampled, by request, and start computing the next masks.

        The masks after forced tokens are ready already.
        """
        fast: list[_Item] = []
        threads = self._start_threads()
        for request_id, token_id in tokens:
            completion = self._completions.get(request_id)
            following = None if completion is None else completion.next
            if completion is None or completion.state is None or following is None:
                continue  # it has failed
            if following.forced:
                if (expected := following.forced.pop(0)) != token_id:
                    error = EngineError(f"token {token_id} was sampled where the grammar forces {expected}")
                    logger.error("request %d fails: %s", request_id, error)
                    self._fail(completion, error)
                continue
            completion.next = None
            item = _Item(completion, completion.state, token_id)
            if item.state.compiled.is_fast:
                fast.append(item)
            else:
                _submit(threads.slow, self._consume, item)
        if fast:
            _submit(threads.fast, self._consume_together, fast)

    def end(self, request_id: int) -> None:
        """Forget a request in any state."""
        completion = self._completions.pop(request_id, None)
        if completion is not None:
            with self._changed:
                completion.has_ended = True
                self._vocabularies.release(completion.key[0], request_id)
                if (compiled := self._compiled.get(completion.key)) is not None:
                    self._store(completion.key, compiled)  # it has grown

    def gather(
        self, request_ids: Collection[int], wait_s: float, alone_s: float = 0.0, num_others: int = 0
    ) -> dict[int, Next]:
        """Return the next masks of requests, except for those that are not ready after `wait_s`.

        While neither these requests nor `num_others` other sequences could take a token, wait up to `alone_s`.
        """
        completions = [self._completions[request_id] for request_id in request_ids]
        started = time.monotonic()
        deadline, alone_deadline = started + wait_s, started + max(wait_s, alone_s)
        with self._changed:
            self._missing = {each.request_id for each in completions if each.next is None and not each.has_failed}
            while self._missing:
                self._is_urgent = not num_others and len(self._missing) == len(completions)
                left_s = (alone_deadline if self._is_urgent else deadline) - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            self._missing = set()
            return {each.request_id: each.next for each in completions if each.next is not None}

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
        self._completions.clear()
        self._compiled.clear()

    # --- Compiling ----------------------------------------------------------------------------------------------------

    def _start_threads(self) -> _Threads:
        if self._threads is None:
            self._threads = _Threads(self._num_threads)
        return self._threads

    def _compile(self, key: _Key, num_bytes: int) -> None:
        """Compile a grammar, and start the completions that wait for it. Runs on the compile thread."""
        with self._changed:
            if all(each.has_ended for each in self._waiting[key]):
                del self._waiting[key]
                return
        try:
            compiled = CompiledGrammar(self._find_vocabulary(key[0]), key[1])
            compiled.num_bytes = num_bytes
        except BaseException as error:  # including Rust panics
            with self._changed:
                waiting = self._waiting.pop(key)
            for each in waiting:
                self._fail(each, error)
            return
        with self._changed:
            waiting = self._waiting.pop(key)
            if key[0] in self._vocabularies:
                self._store(key, compiled)
        for each in waiting:
            self._start(each, compiled)

    def _store(self, key: _Key, compiled: CompiledGrammar) -> None:
        self._compiled.pop(key, None)
        with suppress(ValueError):  # it is larger than the cache
            self._compiled[key] = compiled

    def _find_vocabulary(self, digest: str) -> Vocabulary:
        """Return a vocabulary, building it if necessary. Runs on the compile thread."""
        with self._changed:
            found = self._vocabularies.find(digest)
        if isinstance(found, Vocabulary):
            return found
        try:
            built = self._build_base() if found is None else self._find_vocabulary("").build_other(found)
        except BaseException as error:  # including Rust panics
            failure = f"structured output is not supported with this tokenizer: {type(error).__name__}: {error}"[:400]
            failure = str(error) if isinstance(error, LoraxError) else failure
            with self._changed:
                self._vocabularies.store(digest, None, failure)
            raise NotSupportedError(failure) from error
        with self._changed:
            self._vocabularies.store(digest, built)
        return built

    def _start(self, completion: _Completion, compiled: CompiledGrammar) -> None:
        """Give a completion its first mask, which takes microseconds."""
        try:
            completion.state = GrammarState(compiled, completion.ending, completion.fast_forward_below)
        except BaseException as error:  # including Rust panics
            self._fail(completion, error)
        else:
            self._publish([completion])

    # --- Masks --------------------------------------------------------------------------------------------------------

    @property
    def _max_forced(self) -> int:
        return MAX_FORCED if len(self._completions) <= self._max_fast_forward else 0

    def _consume_together(self, items: Sequence[_Item]) -> None:
        """Consume tokens of fast grammars, those of each vocabulary at once."""
        batches: dict[int, list[_Item]] = {}
        for item in items:
            if not item.completion.has_ended:
                batches.setdefault(id(item.state.compiled.vocabulary), []).append(item)
        for batch in batches.values():
            started = time.monotonic()
            pairs = [(item.state, item.token_id) for item in batch]
            try:
                errors = consume_together(self._start_threads().executor, pairs, self._max_forced)
            except BaseException as panic:
                errors = [panic] * len(batch)
            if time.monotonic() - started > BATCH_S + BATCH_MASK_S * len(batch):
                for item in batch:
                    item.state.compiled.is_fast = False
            self._publish([item.completion for item, error in zip(batch, errors, strict=True) if error is None])
            for item, error in zip(batch, errors, strict=True):
                if error is not None:
                    self._recover(item, error)

    def _consume(self, item: _Item) -> None:
        if item.completion.has_ended:
            return
        try:
            item.state.consume(item.token_id, self._max_forced)
        except BaseException as error:  # including Rust panics
            self._recover(item, error)
        else:
            self._publish([item.completion])

    def _recover(self, item: _Item, error: BaseException) -> None:
        """Repeat a completion with a new grammar if earlier ones may have used up its limits. Otherwise fail it."""
        with self._changed:
            if self._compiled.get(item.completion.key) is item.state.compiled:
                del self._compiled[item.completion.key]
        is_limit = isinstance(error, GrammarError) and not isinstance(error, SlowGrammarError)
        if is_limit and item.state.compiled.num_completions > 1:
            _submit(self._start_threads().compile, self._repeat, item)
        else:
            self._fail(item.completion, error)

    def _repeat(self, item: _Item) -> None:
        """Compile a grammar for one completion alone. Runs on the compile thread."""
        completion = item.completion
        if completion.has_ended:
            return
        try:
            digest, grammar = completion.key
            completion.state = item.state.restart(CompiledGrammar(self._find_vocabulary(digest), grammar))
        except BaseException as error:  # including Rust panics
            self._fail(completion, error)
        else:
            self._publish([completion])

    def _publish(self, completions: Sequence[_Completion]) -> None:
        """Hand the next masks to the engine's thread."""
        has_news = False
        with self._changed:
            for completion in completions:
                if completion.has_ended or completion.state is None:
                    continue
                completion.next = Next(completion.state.words, completion.state.forced)
                self._missing.discard(completion.request_id)
                if not completion.has_started:
                    completion.has_started = has_news = True
                    self._settled.append(Settled(completion.request_id))
            if self._is_urgent or not self._missing:
                self._changed.notify_all()
        if has_news:
            self.on_news()

    def _fail(self, completion: _Completion, error: BaseException) -> None:
        if isinstance(error, LoraxError):
            reason = error
        elif isinstance(error, GrammarError):
            reason = InputError(f"the completion cannot continue: {error}" if completion.has_started else str(error))
        else:
            logger.error("structured output fails", exc_info=error)
            reason = InputError(f"the grammar cannot be followed: {type(error).__name__}: {error}"[:400])
        with self._changed:
            completion.next, completion.has_failed = None, True
            self._missing.discard(completion.request_id)
            self._settled.append(Settled(completion.request_id, reason))
            self._changed.notify_all()
        self.on_news()
