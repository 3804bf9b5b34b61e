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
from functools import partial
from itertools import compress
from typing import NamedTuple, Self

from cachetools import LRUCache

from lorax_server.errors import EngineError, InputError, LoraxError
from lorax_server.machine import GRAMMAR_CACHE_BYTES, count_cores
from lorax_server.structured_output.mask_thread import WorkThread
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
MAX_BATCH = 256  # masks that are computed at once
MAX_FORCED = 32  # tokens that are consumed ahead of the model
FORCED_S, GPU_FORCED_S = 0.01, 0.002  # for them at a stretch, so that their mask is not late
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
    """A request with a grammar. The thread that computes its mask owns `state` and `ahead`; a lock guards the rest."""

    def __init__(self, request: Request, key: _Key, fast_forward_below: int) -> None:
        self.request_id = request.request_id
        self.key = key
        self.ending = Ending(
            tuple(sorted(request.stop.eos_token_ids)),
            tuple(sorted(request.stop.stop_token_ids)),
            request.stop.min_new_tokens,
        )
        self.fast_forward_below = fast_forward_below
        self.state: GrammarState | None = None
        self.ahead: list[int] = []  # forced tokens that were consumed since the model's last token
        self.ahead_until = 0.0
        self.next: Next | None = None
        self.has_started = self.has_failed = self.has_ended = False


class _Item(NamedTuple):
    """A token that a completion consumes next."""

    completion: _Completion
    token_id: int


_Job = partial[None]


class _Threads(NamedTuple):
    fast: WorkThread[_Item]
    slow: WorkThread[_Job]
    compile: WorkThread[_Job]


class StructuredOutput:
    """Compile grammars and compute masks for the engine. Its public methods belong to the engine's thread."""

    def __init__(
        self,
        build_base: Callable[[], Vocabulary],
        num_threads: int = 1,
        max_fast_forward: float = math.inf,
        forced_s: float = FORCED_S,
    ) -> None:
        """`build_base` makes the base model's vocabulary, on another thread, when it is first needed.

        Forced tokens are consumed ahead while there are at most `max_fast_forward` completions with a grammar, for up
        to `forced_s` at a stretch.
        """
        self.on_news: Callable[[], None] = lambda: None  # called on any thread when `take_settled` has results
        self.fast_forward = True  # consume forced tokens ahead of the model
        self._build_base = build_base
        self._num_threads = num_threads
        self._max_fast_forward, self._forced_s = max_fast_forward, forced_s
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
        return cls(build_base, max(1, min(MAX_THREADS, count_cores() // 4)), MAX_GPU_FAST_FORWARD, GPU_FORCED_S)

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
        threads = self._start_threads()
        if not self.fast_forward or sampling.raw_logprobs or sampling.num_alternatives:
            fast_forward_below = 0
        key = "" if request.vocabulary is None else request.vocabulary.digest, request.structure.grammar
        completion = _Completion(request, key, fast_forward_below)
        with self._changed:
            evicted = self._vocabularies.acquire(request.vocabulary, request.request_id, request.tenant)
            for stale in [other for other in self._compiled if other[0] == evicted]:
                del self._compiled[stale]  # it would keep its vocabulary in memory
            self._completions[request.request_id] = completion
            compiled = self._compiled.get(key)
            if compiled is not None and compiled.num_tokens > MAX_SHARED_TOKENS:
                del self._compiled[key]
                compiled = None
            if compiled is not None:
                threads.slow.put([partial(self._start_completion, completion, compiled)], is_urgent=True)
            elif (waiting := self._waiting.get(key)) is not None:
                waiting.append(completion)
            else:
                self._waiting[key] = [completion]
                threads.compile.put([partial(self._compile, key, request.structure.num_bytes)])

    def take_settled(self) -> list[Settled]:
        settled = []
        while self._settled:
            settled.append(self._settled.popleft())
        return [each for each in settled if each.request_id in self._completions]

    def advance(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Take the tokens that a step sampled, by request, and start computing the next masks.

        The masks after forced tokens are ready already.
        """
        items: list[_Item] = []
        for request_id, token_id in tokens:
            completion = self._completions.get(request_id)
            following = None if completion is None else completion.next
            if completion is None or following is None:
                continue  # it has failed
            if not following.forced:
                completion.next = None
                items.append(_Item(completion, token_id))
            elif (expected := following.forced.pop(0)) != token_id:
                error = EngineError(f"token {token_id} was sampled where the grammar forces {expected}")
                logger.error("request %d fails: %s", request_id, error)
                self._fail([completion], error)
        self._put(items)

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
        for thread in self._threads or ():
            thread.close()
        self._completions.clear()
        self._compiled.clear()

    # --- Compiling ----------------------------------------------------------------------------------------------------

    def _start_threads(self) -> "_Threads":
        if self._threads is None:
            self._executor = make_executor(self._num_threads)
            self._threads = _Threads(
                WorkThread("masks", self._consume_together, max_items=MAX_BATCH),
                WorkThread("slow-masks", self._run_jobs, max_items=1),
                WorkThread("grammar-compiler", self._run_jobs, max_items=1, niceness=COMPILE_NICENESS),
            )
        return self._threads

    def _run_jobs(self, jobs: Sequence["_Job"]) -> None:
        for job in jobs:
            try:
                job()
            except BaseException as error:  # including Rust panics
                logger.exception("structured output failed unexpectedly")
                completions = [each for each in job.args if isinstance(each, _Completion)]
                self._fail(completions, EngineError(f"internal error: {type(error).__name__}"))

    def _compile(self, key: _Key, num_bytes: int) -> None:
        """Compile a grammar, and start the completions that wait for it. Runs on the compile thread."""
        with self._changed:
            if all(each.has_ended for each in self._waiting[key]):
                del self._waiting[key]
                return
        compiled: CompiledGrammar | LoraxError
        try:
            compiled = self._try_compile(key)
        except LoraxError as error:
            compiled = error
        with self._changed:
            waiting = [each for each in self._waiting.pop(key) if not each.has_ended]
            if not isinstance(compiled, LoraxError):
                compiled.num_bytes = num_bytes
                if key[0] in self._vocabularies:
                    self._store(key, compiled)
        if isinstance(compiled, LoraxError):
            self._fail(waiting, compiled)
            return
        starts = [partial(self._start_completion, each, compiled) for each in waiting]
        self._start_threads().slow.put(starts, is_urgent=True)

    def _store(self, key: _Key, compiled: CompiledGrammar) -> None:
        self._compiled.pop(key, None)
        if _weigh(compiled) <= self._compiled.maxsize:
            self._compiled[key] = compiled

    def _try_compile(self, key: _Key) -> CompiledGrammar:
        digest, grammar = key
        try:
            return CompiledGrammar(self._find_vocabulary(digest), grammar)
        except GrammarError as error:
            raise InputError(str(error)) from error
        except LoraxError:
            raise
        except BaseException as error:  # including Rust panics
            raise InputError(f"the grammar cannot be compiled: {type(error).__name__}: {error}"[:400]) from error

    def _find_vocabulary(self, digest: str) -> Vocabulary:
        """Return a vocabulary, building it if necessary. Runs on the compile thread."""
        with self._changed:
            vocabulary, table = self._vocabularies.find(digest)
        if vocabulary is not None:
            return vocabulary
        built: Vocabulary | LoraxError
        try:
            built = self._build_base() if table is None else self._find_vocabulary("").build_other(table)
        except LoraxError as error:
            built = error
        except BaseException as error:  # including Rust panics
            built = InputError(f"structured output cannot use this tokenizer: {type(error).__name__}: {error}"[:400])
        with self._changed:
            self._vocabularies.store(digest, built)
        if isinstance(built, LoraxError):
            raise built
        return built

    # --- Masks --------------------------------------------------------------------------------------------------------

    def _put(self, items: Sequence["_Item"]) -> None:
        """Queue masks: those of fast grammars together, all others one by one on another thread."""
        threads = self._start_threads()
        is_fast = [item.completion.state is not None and item.completion.state.compiled.is_fast for item in items]
        if any(is_fast):
            threads.fast.put(compress(items, is_fast))
        if not all(is_fast):
            threads.slow.put(
                [partial(self._consume, *item) for item, fast in zip(items, is_fast, strict=True) if not fast]
            )

    def _consume_together(self, items: Sequence["_Item"]) -> None:
        """Consume tokens of fast grammars, those of each vocabulary at once."""
        try:
            self._consume_batches(items)
        except BaseException as error:  # including Rust panics
            logger.exception("masks cannot be computed")
            self._fail([item.completion for item in items], EngineError(f"internal error: {type(error).__name__}"))

    def _consume_batches(self, items: Sequence["_Item"]) -> None:
        started = time.monotonic()
        batches: dict[int, list[tuple[_Completion, GrammarState, int]]] = {}
        for completion, token_id in items:
            state = completion.state
            if completion.has_ended or state is None:
                continue
            if state.has_failed:
                self._consume(completion, token_id)
            else:
                batches.setdefault(id(state.compiled.vocabulary), []).append((completion, state, token_id))
        for batch in batches.values():
            errors = consume_together(self._executor, [(state, token_id) for _, state, token_id in batch])
            is_late = time.monotonic() - started > BATCH_S + BATCH_MASK_S * len(batch)
            ready: list[_Completion] = []
            for (completion, state, _), error in zip(batch, errors, strict=True):
                state.compiled.is_fast = state.compiled.is_fast and not is_late
                if error is None and state.find_forced() is None:
                    ready.append(completion)
                else:
                    self._finish_token(completion, state, error)
            self._publish(ready)

    def _start_completion(self, completion: _Completion, compiled: CompiledGrammar) -> None:
        if completion.has_ended:
            return
        vocabulary = compiled.vocabulary
        if not any(token_id < vocabulary.num_ids for token_id in completion.ending.eos):
            self._fail([completion], InputError("the model has no end-of-sequence token in its vocabulary"))
            return
        try:
            completion.state = GrammarState(compiled, completion.ending, completion.fast_forward_below)
        except GrammarError as error:
            self._fail([completion], InputError(str(error)))
            return
        self._publish([completion])

    def _consume(self, completion: _Completion, token_id: int) -> None:
        state, error = completion.state, None
        if completion.has_ended or state is None:
            return
        try:
            state.consume(token_id)
        except GrammarError as raised:
            error = raised
        self._finish_token(completion, state, error)

    def _finish_token(self, completion: _Completion, state: GrammarState, error: GrammarError | None) -> None:
        """Publish the next mask, or go on with a forced token, or recover from an error."""
        if error is None:
            self._look_ahead(completion, state)
            return
        with self._changed:
            if self._compiled.get(completion.key) is state.compiled:
                del self._compiled[completion.key]
        # The completions before it may have used up the limits of the grammar, but not its own time.
        if state.compiled.num_completions > 1 and not isinstance(error, SlowGrammarError):
            self._start_threads().compile.put([partial(self._compile_again, completion, state)])
        else:
            self._stop_following(completion, state, error)

    def _look_ahead(self, completion: _Completion, state: GrammarState) -> None:
        now = time.monotonic()
        if not completion.ahead:
            completion.ahead_until = now + self._forced_s
        may_continue = len(completion.ahead) < MAX_FORCED and now <= completion.ahead_until
        may_continue &= len(self._completions) <= self._max_fast_forward
        forced = state.find_forced() if may_continue else None
        if forced is None:
            self._publish([completion])
            return
        completion.ahead.append(forced)
        self._put([_Item(completion, forced)])

    def _stop_following(self, completion: _Completion, state: GrammarState, error: GrammarError) -> None:
        """Fail a completion, or let it fail when it reaches the forced token that could not be consumed."""
        if completion.ahead:
            state.fail_when_reached(completion.ahead.pop(), error)
            self._publish([completion])
        else:
            self._fail([completion], InputError(f"the completion cannot continue: {error}"))

    def _compile_again(self, completion: _Completion, state: GrammarState) -> None:
        """Compile a grammar for one completion alone. Runs on the compile thread."""
        if completion.has_ended:
            return
        try:
            compiled = self._try_compile(completion.key)
        except LoraxError as error:
            self._fail([completion], error)
            return
        self._start_threads().slow.put([partial(self._repeat, completion, state, compiled)])

    def _repeat(self, completion: _Completion, state: GrammarState, compiled: CompiledGrammar) -> None:
        try:
            completion.state = state.restart(compiled)
        except GrammarError as error:
            self._stop_following(completion, state, error)
            return
        self._look_ahead(completion, completion.state)

    def _publish(self, completions: Sequence[_Completion]) -> None:
        """Hand the next masks to the engine's thread."""
        has_news = False
        with self._changed:
            for completion in completions:
                forced, completion.ahead = completion.ahead, []
                if completion.has_ended or completion.state is None:
                    continue
                completion.next = Next(completion.state.words, forced)
                self._missing.discard(completion.request_id)
                if not completion.has_started:
                    completion.has_started = has_news = True
                    self._settled.append(Settled(completion.request_id))
            if self._is_urgent or not self._missing:
                self._changed.notify_all()
        if has_news:
            self.on_news()

    def _fail(self, completions: Iterable[_Completion], error: LoraxError) -> None:
        with self._changed:
            for completion in completions:
                completion.next, completion.has_failed = None, True
                self._missing.discard(completion.request_id)
                self._settled.append(Settled(completion.request_id, error))
            self._changed.notify_all()
        self.on_news()
