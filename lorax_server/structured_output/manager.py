"""Structured output for the engine: compiles grammars, and computes token masks for constrained completions.

Masks are computed on threads during the next forward pass. llguidance releases the GIL, so neither masks nor compiles
block the engine loop. Grammars reach the engine only after a trial compile in the sandbox (`trials.py`).
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Self

from cachetools import LRUCache

from lorax_server.errors import EngineError, InputError, LoraxError
from lorax_server.machine import GRAMMAR_CACHE_BYTES, count_cores
from lorax_server.structured_output.mask_threads import MaskThreads
from lorax_server.structured_output.matcher import (
    CompiledGrammar,
    GrammarError,
    GrammarState,
    SlowGrammarError,
    consume_batch,
)
from lorax_server.structured_output.vocabulary import Vocabulary, VocabularyCache
from lorax_server.types import Request

logger = logging.getLogger(__name__)

# Cache weight of a compiled grammar, and of each token it consumed.
MIN_GRAMMAR_BYTES, GRAMMAR_BYTES_PER_TOKEN = 2**20, 2**11
MAX_SHARED_TOKENS = 2**13  # tokens that completions consume before their shared grammar is compiled again
MAX_GPU_MASK_THREADS = 4
MAX_GPU_FAST_FORWARD = 16  # maximum completions; an H200 saves 8% per token with 16 and loses 20% with 64
MAX_FORCED_TOKENS = 32  # consumed in one step
# A batch of masks that takes longer, in total and per mask, has its grammars timed again outside batches.
MAX_BATCH_S, MAX_BATCH_MASK_S = 0.01, 0.0005
_Key = tuple[str, str]  # vocabulary digest, grammar


class GrammarResult(NamedTuple):
    """Reports that a request's first mask is ready, or that the request has failed."""

    request_id: int
    error: LoraxError | None = None


@dataclass(eq=False)
class _GrammarRequest:
    """A request with a grammar. `_changed` guards the mutable fields."""

    request: Request
    key: _Key
    fast_forward_below: int
    state: GrammarState | None = None  # None while a thread computes the next mask
    has_started: bool = False
    has_failed: bool = False


class _MaskJob(NamedTuple):
    grammar_request: _GrammarRequest
    state: GrammarState
    token_ids: Sequence[int]


class _CachedGrammar(NamedTuple):
    compiled: "Future[CompiledGrammar]"
    num_bytes: int  # measured by the trial compile

    def estimate_bytes(self) -> int:
        """Return the estimated memory in bytes, which grows with the number of consumed tokens."""
        num_tokens = self.compiled.result().num_tokens if self.compiled.done() else 0
        return self.num_bytes + MIN_GRAMMAR_BYTES + GRAMMAR_BYTES_PER_TOKEN * num_tokens


def _submit(thread: ThreadPoolExecutor, work: Callable[..., None], *args: object) -> None:
    thread.submit(work, *args).add_done_callback(_log_failure)


def _log_failure(job: "Future[None]") -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        logger.error("a structured output job failed", exc_info=error)


class StructuredOutput:
    """Compiles grammars and computes token masks. Only the engine's thread may call the public methods."""

    def __init__(
        self, build_base: Callable[[], Vocabulary], num_threads: int = 1, max_fast_forward: float = math.inf
    ) -> None:
        """Create an instance. `build_base` builds the base model's vocabulary, on another thread at first use.

        As long as at most `max_fast_forward` completions use a grammar, several forced tokens are consumed per step.
        """
        self.on_event: Callable[[], None] = lambda: None  # called on any thread when `pop_results` has results
        self.max_fast_forward = max_fast_forward
        self._num_threads = num_threads
        self._vocabularies = VocabularyCache(build_base)
        self._grammar_requests: dict[int, _GrammarRequest] = {}
        self._condition = threading.Condition()  # guards the fields below
        self._cache: LRUCache[_Key, _CachedGrammar] = LRUCache(GRAMMAR_CACHE_BYTES, _CachedGrammar.estimate_bytes)
        self._results: deque[GrammarResult] = deque()

    @classmethod
    def for_device(cls, build_base: Callable[[], Vocabulary], device: str) -> Self:
        """Create an instance for a device.

        On CPUs, one thread computes masks, because the model needs the cores. On GPUs, forced
        tokens are consumed one per step if many completions use a grammar, because large steps are slow.
        """
        if device == "cpu":
            return cls(build_base)
        return cls(build_base, max(1, min(MAX_GPU_MASK_THREADS, count_cores() // 4)), MAX_GPU_FAST_FORWARD)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._grammar_requests

    @property
    def has_events(self) -> bool:
        return bool(self._results)

    def start(self, request: Request, fast_forward_below: int = 0) -> None:
        """Compile the request's grammar. `pop_results` reports when it is ready. Raise if the request is invalid.

        Several forced tokens may be consumed per step if their IDs are below `fast_forward_below` and the request does
        not need log probabilities without the mask.
        """
        assert request.structure is not None
        stop, sampling = request.stop, request.sampling
        if stop.ignore_eos:
            raise InputError("`ignore_eos_token` cannot be combined with structured output, which ends by itself")
        if not stop.eos_token_ids:
            raise InputError("structured output needs a model with an end-of-sequence token")
        if sampling.raw_logprobs or sampling.num_alternatives:
            fast_forward_below = 0
        key = "" if request.vocabulary is None else request.vocabulary.digest, request.structure.grammar
        completion = _GrammarRequest(request, key, fast_forward_below)
        evicted = None
        if request.vocabulary is not None:
            in_use = [(each.key[0], each.request.tenant) for each in self._grammar_requests.values()]
            evicted = self._vocabularies.add(request.vocabulary, request.tenant, in_use)
        self._grammar_requests[request.request_id] = completion
        with self._condition:
            for stale in [other for other in self._cache if other[0] == evicted]:
                del self._cache[stale]  # otherwise the vocabulary stays in memory
            cached = self._cache.get(key)
            if cached is None or (cached.compiled.done() and cached.compiled.result().num_tokens > MAX_SHARED_TOKENS):
                cached = _CachedGrammar(
                    self._threads.compile_thread.submit(self._compile, key), request.structure.num_bytes
                )
                self._store(key, cached)
        cached.compiled.add_done_callback(partial(self._start, request.request_id))

    def pop_results(self) -> list[GrammarResult]:
        results = [self._results.popleft() for _ in range(len(self._results))]
        return [each for each in results if each.request_id in self._grammar_requests]

    def advance(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Consume the sampled tokens of a step, given as (request ID, token ID), and start to compute the next masks.

        The tokens of a request must be consecutive. Forced tokens were consumed in an earlier call, so their masks are
        already available.
        """
        batches: dict[Vocabulary, list[_MaskJob]] = {}
        for request_id, group in groupby(tokens, itemgetter(0)):
            completion = self._grammar_requests.get(request_id)
            state = None if completion is None else completion.state
            if completion is None or state is None:
                continue  # the completion has failed
            token_ids = [token_id for _, token_id in group]
            try:
                while token_ids and state.pop_forced(token_ids[0]):
                    del token_ids[0]
            except EngineError as error:
                logger.error("request %d fails: %s", request_id, error)
                self._fail(completion, error)
                continue
            if not token_ids:
                continue
            completion.state = None
            job = _MaskJob(completion, state, token_ids)
            if not state.compiled.is_fast:
                _submit(self._threads.slow_thread, self._consume, job)
            elif len(token_ids) > 1:  # accepted draft tokens
                _submit(self._threads.fast_thread, self._consume, job)
            else:
                batches.setdefault(state.compiled.vocabulary, []).append(job)
        for batch in batches.values():
            _submit(self._threads.fast_thread, self._consume_batch, batch)

    def finish(self, request_id: int) -> None:
        """Remove a request in any state."""
        completion = self._grammar_requests.pop(request_id, None)
        if completion is not None:
            with self._condition:
                if (cached := self._cache.get(completion.key)) is not None:
                    self._store(completion.key, cached)  # update its weight

    def collect_masks(
        self, request_ids: Collection[int], wait_s: float, blocked_wait_s: float = 0.0, num_unmasked: int = 0
    ) -> dict[int, GrammarState]:
        """Return the grammar states of requests whose next masks are ready.

        Wait up to `wait_s` until all masks are ready. If no sequence can continue (no mask is ready and `num_unmasked`
        is 0), wait up to `blocked_wait_s` for the first mask.
        """
        completions = [self._grammar_requests[request_id] for request_id in request_ids]

        def is_done(completion: _GrammarRequest) -> bool:
            return completion.state is not None or completion.has_failed

        wait_s = min(wait_s, threading.TIMEOUT_MAX)
        with self._condition:
            self._condition.wait_for(lambda: all(map(is_done, completions)), wait_s)
            if completions and not num_unmasked and blocked_wait_s > wait_s:
                self._condition.wait_for(lambda: any(map(is_done, completions)), blocked_wait_s - wait_s)
            return {each.request.request_id: each.state for each in completions if each.state is not None}

    def close(self) -> None:
        if "_threads" in self.__dict__:
            self._threads.close()
        self._grammar_requests.clear()
        self._cache.clear()

    # --- Compiling ----------------------------------------------------------------------------------------------------

    @cached_property
    def _threads(self) -> MaskThreads:
        """The mask threads, which start with the first request that has a grammar."""
        return MaskThreads(self._num_threads)

    def _compile(self, key: _Key) -> CompiledGrammar:
        """Compile a grammar on the compile thread, unless all requests with the grammar have finished."""
        with self._condition:
            if all(each.key != key for each in list(self._grammar_requests.values())):
                self._cache.pop(key, None)  # under the same lock, so a new request compiles the grammar again
                raise EngineError("all requests with this grammar have finished")
        try:
            return CompiledGrammar(self._vocabularies.find(key[0]), key[1])
        except BaseException:  # including Rust panics
            with self._condition:
                self._cache.pop(key, None)
            raise

    def _store(self, key: _Key, cached: _CachedGrammar) -> None:
        self._cache.pop(key, None)
        with suppress(ValueError):  # larger than the cache
            self._cache[key] = cached

    def _start(self, request_id: int, compiled: "Future[CompiledGrammar]", state: GrammarState | None = None) -> None:
        """Publish a completion's first mask. If `state` is set, restart it with the new grammar and publish its current
        mask.
        """
        completion = self._grammar_requests.get(request_id)
        if completion is None or compiled.cancelled():
            return
        try:
            if state is None:
                state = GrammarState(compiled.result(), completion.request.stop, completion.fast_forward_below)
            else:
                state = state.restart(compiled.result())
        except BaseException as error:  # including Rust panics
            self._fail(completion, error)
        else:
            self._publish([(completion, state)])

    # --- Masks --------------------------------------------------------------------------------------------------------

    @property
    def max_forced(self) -> int:
        """The maximum number of forced tokens that a completion consumes in one step."""
        return MAX_FORCED_TOKENS if len(self._grammar_requests) <= self.max_fast_forward else 0

    def _consume_batch(self, batch: Sequence[_MaskJob]) -> None:
        """Consume one token of each completion in a batch of fast grammars that share a vocabulary."""
        started = time.monotonic()
        errors: Sequence[BaseException | None]
        try:
            pairs = [(job.state, job.token_ids[0]) for job in batch]
            errors = consume_batch(self._threads.executor, pairs, self.max_forced)
        except BaseException as panic:
            errors = [panic] * len(batch)
        if time.monotonic() - started > MAX_BATCH_S + MAX_BATCH_MASK_S * len(batch):
            for job in batch:
                job.state.compiled.is_fast = False
        results = list(zip(batch, errors, strict=True))
        self._publish([(job.grammar_request, job.state) for job, error in results if error is None])
        for job, error in results:
            if error is not None:
                self._recover(job, error)

    def _consume(self, job: _MaskJob) -> None:
        if job.grammar_request.request.request_id not in self:
            return
        try:
            job.state.consume(job.token_ids, self.max_forced)
        except BaseException as error:  # including Rust panics
            self._recover(job, error)
        else:
            self._publish([(job.grammar_request, job.state)])

    def _recover(self, job: _MaskJob, error: BaseException) -> None:
        """Restart the grammar state after an error if other completions used up the shared limits. Otherwise, fail the
        request.
        """
        completion, state, _ = job
        with self._condition:
            self._cache.pop(completion.key, None)
        if completion.request.request_id not in self:
            return
        is_limit = isinstance(error, GrammarError) and not isinstance(error, SlowGrammarError)
        if is_limit and state.compiled.num_completions > 1:
            compiled = self._threads.compile_thread.submit(self._compile, completion.key)
            compiled.add_done_callback(partial(self._start, completion.request.request_id, state=state))
        else:
            self._fail(completion, error)

    def _publish(self, ready: Sequence[tuple[_GrammarRequest, GrammarState]]) -> None:
        """Make the next masks available to the engine's thread."""
        has_events = False
        with self._condition:
            for completion, state in ready:
                completion.state = state
                if not completion.has_started:
                    completion.has_started = has_events = True
                    self._results.append(GrammarResult(completion.request.request_id))
            self._condition.notify_all()
        if has_events:
            self.on_event()

    def _fail(self, completion: _GrammarRequest, error: BaseException) -> None:
        if isinstance(error, LoraxError):
            reason = error
        elif isinstance(error, GrammarError):
            reason = InputError(f"the completion cannot continue: {error}" if completion.has_started else str(error))
        else:
            logger.error("structured output failed", exc_info=error)
            reason = InputError(f"the grammar cannot be followed: {type(error).__name__}: {error}"[:400])
        with self._condition:
            completion.state, completion.has_failed = None, True
            self._results.append(GrammarResult(completion.request.request_id, reason))
            self._condition.notify_all()
        self.on_event()
