"""Finds out which adapter a name means now: asks the sources on threads of its own, and remembers what they said.

a request -> a pointer, if its files are the same   answered after one look at each, on a thread for looks
          -> a failure of a moment ago              answered at once
          -> a flight: somebody asks the source     all who want to know the same wait for it, in no thread

A pointer to a folder of this machine is good as long as no file changes. If what is there then is broken, somebody may
be writing it: for a while what was there before is answered with, marked as stale. One to a hub or a bucket is good for
a while; then it is still answered with, and its source is asked beside it, or fails. Not for a request that brings a
token, though: what that may read is never older than the while, and when its source fails then so does the request.
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from cachetools import LRUCache

from lorax_server.adapters.sources.finder import AdapterFinder, Found, Key, key_of
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import MAX_NAME_LENGTH, AdapterSources
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.errors import (
    AdapterError,
    AdapterNotFoundError,
    EngineError,
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.types import AdapterRef, Failure, Merge, Resolved

logger = logging.getLogger(__name__)

FETCHED = "fetched"  # a tier: its files had to be brought here for the one who asks
MAX_MERGED = 32  # adapters, into one
MAX_POINTERS = 10_000
MAX_FAILURES = 10_000
MAX_FLIGHTS = 10_000  # running and waiting for a thread
NUM_LOOKERS = 2  # threads for each kind of source that look at files
MAX_STALE = 10  # how many times as long as it is good a pointer may be answered with while its source is asked
WRITING_S = 60.0  # for so long a folder's former adapter is answered with while what is there now is broken
RETRY_S = 1.0
LOOK_AGAIN_S = 0.1  # at a folder that changed while it was read, which costs little
MAX_RETRY_S = 30.0

Answer = tuple[AdapterSpec, Resolved]


class _Pointer(NamedTuple):
    found: Found
    ask_at: float  # from then on its source has to be asked again,
    good_until: float  # and from then on before anybody is answered
    failing_since: float | None = None  # of a folder of this machine: what is there now is broken


class _Failure(NamedTuple):
    error: LoraxError
    retry_at: float
    delay_s: float


@dataclass(eq=False)
class _Flight:
    """A question to a source, on its way."""

    key: Key
    ref: AdapterRef
    answer: "Future[Found]" = field(default_factory=Future)
    has_started: bool = False
    following: "_Flight | None" = None  # starts when this one has ended


class AdapterResolver:
    """Turns names into adapters with an identity, all of whose files are here. All methods may be called by any thread.

    Each kind of source has threads of its own, so that one that hangs holds up no other.
    """

    def __init__(
        self,
        sources: AdapterSources,
        *,
        model_type: str,
        model_class: str,
        num_threads: int = 16,  # of each kind of source
        revalidate_s: float = 60,
        clock: Callable[[], float] = time.monotonic,
        time_ns: Callable[[], int] = time.time_ns,  # what the times of files are held against
    ) -> None:
        self._sources = sources
        self._revalidate_s = revalidate_s
        self._clock = clock
        self._finder = AdapterFinder(
            sources, model_type=model_type, model_class=model_class, clock=clock, time_ns=time_ns
        )
        self._threads = {kind: _Threads(f"adapters of {kind}", num_threads) for kind in sources.kinds}
        self._other_threads = _Threads("adapters of nowhere", 1)  # for sources that do not exist
        # Behind slow fetches a look would wait for a thread, and whoever calls us must not wait for a file system.
        self._lookers = {kind: _Threads(f"looks at adapters of {kind}", NUM_LOOKERS) for kind in sources.kinds}
        self._lock = threading.Lock()  # of all below; never held while somebody is asked or told
        self._is_closed = False
        self._pointers: LRUCache[Key, _Pointer] = LRUCache(MAX_POINTERS)
        self._failures: LRUCache[Key, _Failure] = LRUCache(MAX_FAILURES)
        self._flights: dict[Key, _Flight] = {}  # those that may be joined, and whose answer will be remembered
        self._unfinished: set[_Flight] = set()
        self._looks: set[Future[Found]] = set()  # that have not been answered

    @property
    def num_fetching(self) -> int:
        """How many questions to sources are being answered or wait for a thread."""
        return len(self._unfinished)

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> "Future[Answer]":
        """Find out which adapter is meant. What goes wrong is in the Future, which the caller may cancel."""
        try:
            _check_request(refs, merge)
            parts = [self._find(ref) for ref in refs]
        except Exception as error:
            return _failed(error)
        return _Gathering(parts, partial(_combine, merge)).outcome

    def forget(self, source: str, name: str) -> None:
        """Whatever is known of a name, with any token. What is on its way reaches only those who wait for it now."""
        remembered: MutableMapping[Key, Any]
        with self._lock:
            for remembered in (self._pointers, self._failures, self._flights):
                for key in [key for key in remembered if key[:2] == (source, name)]:
                    del remembered[key]

    def close(self) -> None:
        """Ends all that waits. Threads in the middle of a fetch are left behind, and do not keep the process alive."""
        remembered: MutableMapping[Key, Any]
        with self._lock:
            self._is_closed = True
            unfinished, self._unfinished = self._unfinished, set()
            unfinished |= {flight.following for flight in unfinished if flight.following is not None}
            looks, self._looks = self._looks, set()
            for remembered in (self._flights, self._pointers, self._failures):
                remembered.clear()
        for threads in (*self._threads.values(), *self._lookers.values(), self._other_threads):
            threads.close()
        for answer in (*(flight.answer for flight in unfinished), *looks):
            answer.set_exception(_closed())

    # --- where an answer comes from

    def _find(self, ref: AdapterRef) -> "Future[Found]":
        key = key_of(ref)
        with self._lock:
            pointer = self._pointers.get(key)
            if pointer is not None:
                return self._look_later(key, ref, pointer)
        return self._find_anew(key, ref, None)

    def _find_anew(self, key: Key, ref: AdapterRef, pointer: _Pointer | None) -> "Future[Found]":
        """Give the failure of a moment ago, or what its source says now."""
        with self._lock:
            failure, now = self._failures.get(key), self._clock()
            if failure is None or now >= failure.retry_at:
                return self._join(key, ref).answer
            pointer = self._pointers.get(key, pointer)
        stand_in = self._stand_in(key, pointer, failure.error)
        return _done(stand_in) if stand_in else _failed(_again(failure.error, failure.retry_at - now))

    # --- looking at files

    def _look_later(self, key: Key, ref: AdapterRef, pointer: _Pointer) -> "Future[Found]":
        """Answer with a pointer if nothing has changed, which is found out on a thread."""
        self._check_open(len(self._looks))
        answer: Future[Found] = Future()
        self._lookers[ref.source].submit(partial(self._look, key, ref, pointer, answer))
        self._looks.add(answer)
        return answer

    def _look(self, key: Key, ref: AdapterRef, pointer: _Pointer, answer: "Future[Found]") -> None:
        try:
            now = self._clock()
            is_good = now < (pointer.ask_at if ref.token else pointer.good_until)
            if is_good and self._is_here(key, pointer.found):
                if now >= pointer.ask_at:
                    self._ask_beside(key, ref)
                found = _done(pointer.found)
            else:
                found = self._find_anew(key, ref, pointer)
        except Exception as error:
            found = _failed(error)
        found.add_done_callback(partial(self._tell_looker, answer))

    def _ask_beside(self, key: Key, ref: AdapterRef) -> None:
        """Ask the source though nobody waits for it, unless that is under way or has just failed."""
        with self._lock:
            failure = self._failures.get(key)
            is_due = failure is None or self._clock() >= failure.retry_at
            if is_due and key not in self._flights and len(self._unfinished) < MAX_FLIGHTS:
                self._join(key, ref)

    def _is_here(self, key: Key, found: Found) -> bool:
        """One look at each file. Those that are here are used now, so that they do not leave."""
        self._sources.mark_used(key[0], found.spec.parts[0].folder)
        return found.is_unchanged()

    def _stand_in(self, key: Key, pointer: _Pointer | None, error: LoraxError) -> Found | None:
        """An answer that may be given while a source fails; it takes looks at files.

        This machine's folders never fail: they only change. What a token may read is known for its time and no longer.
        """
        source, _, token_hash = key
        if pointer is not None and source == LocalSource.kind:
            return self._former(pointer, error)
        if pointer is None or token_hash or not isinstance(error, SourceError):
            return None
        return pointer.found if self._is_here(key, pointer.found) else None

    def _former(self, pointer: _Pointer, error: LoraxError) -> Found | None:
        """Find the adapter that a folder held before, as long as somebody may still be writing what it is to hold."""
        since, found = pointer.failing_since, pointer.found
        if since is None or self._clock() >= since + WRITING_S or not found.is_overwritten():
            return None
        return replace(found, resolved=found.resolved._replace(stale=Failure.of(error)))

    def _tell_looker(self, answer: "Future[Found]", found: "Future[Found]") -> None:
        with self._lock:
            if answer not in self._looks:
                return  # closed, and told
            self._looks.remove(answer)
        error = found.exception()
        answer.set_result(found.result()) if error is None else answer.set_exception(error)

    # --- asking sources

    def _join(self, key: Key, ref: AdapterRef) -> _Flight:
        self._check_open()
        flight = self._flights.get(key)
        if flight is None:
            self._check_open(len(self._unfinished))
            flight = _Flight(key, ref)
            self._depart(flight)
            self._flights[key] = flight
        elif flight.has_started and ref.source == LocalSource.kind:
            # It may have looked before somebody put a new version there, which who comes after that must get.
            flight.following = flight.following or _Flight(key, ref)
            return flight.following
        return flight

    def _check_open(self, num_before: int = 0) -> None:
        if self._is_closed:
            raise _closed()
        if num_before >= MAX_FLIGHTS:
            raise OverloadedError(f"{MAX_FLIGHTS} adapters are being fetched already; try again later", RETRY_S)

    def _depart(self, flight: _Flight) -> None:
        self._threads.get(flight.ref.source, self._other_threads).submit(partial(self._run, flight))
        self._unfinished.add(flight)

    # --- on a thread

    def _run(self, flight: _Flight) -> None:
        with self._lock:
            if flight not in self._unfinished:
                return
            flight.has_started = True
        try:
            found = self._ask(flight)
        except BaseException as error:
            self._land(flight, partial(flight.answer.set_exception, error))
        else:
            self._land(flight, partial(flight.answer.set_result, found))

    def _land(self, flight: _Flight, tell: Callable[[], None]) -> None:
        with self._lock:
            if flight not in self._unfinished:
                return  # closed, and all have been told
            self._unfinished.remove(flight)
            following = flight.following
            if following is not None:
                self._depart(following)
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
                if following is not None:
                    self._flights[flight.key] = following
        tell()

    def _ask(self, flight: _Flight) -> Found:
        try:
            found = self._finder.find(flight.ref)
        except LoraxError as error:
            failure = self._remember_failure(flight, error, self._shows_writing(flight.key, error))
        else:
            self._remember(flight, replace(found, is_new=False))
            return found
        with self._lock:
            pointer = self._pointers.get(flight.key)
        stand_in = self._stand_in(flight.key, pointer, failure.error)
        if stand_in is None:
            raise _again(failure.error, failure.delay_s)
        logger.warning("%s; until then, what it was before is served", failure.error)
        return stand_in

    def _remember(self, flight: _Flight, found: Found) -> None:
        if flight.ref.source == LocalSource.kind:
            # Where a change might not show, only another thorough look can tell.
            ask_at = good_until = float("inf") if found.is_settled else float("-inf")
        else:
            ask_at = self._clock() + self._revalidate_s
            good_until = ask_at + MAX_STALE * self._revalidate_s
        with self._lock:
            if self._flights.get(flight.key) is flight:
                self._pointers[flight.key] = _Pointer(found, ask_at, good_until)
                self._failures.pop(flight.key, None)

    def _shows_writing(self, key: Key, error: LoraxError) -> bool:
        """Tell whether an error comes of somebody who may be writing into a folder of this machine. That files changed
        while they were read does not say so, since each may have been whole, unless the weights have become shorter."""
        if key[0] != LocalSource.kind or not isinstance(error, AdapterError) or isinstance(error, AdapterNotFoundError):
            return False
        with self._lock:
            pointer = self._pointers.get(key)
        return not isinstance(error, SourceError) or (pointer is not None and pointer.found.is_cut())

    def _remember_failure(self, flight: _Flight, error: LoraxError, is_writing: bool) -> _Failure:
        is_source = isinstance(error, SourceError)
        with self._lock:
            before = self._failures.get(flight.key)
            is_repeated = is_source and before is not None and isinstance(before.error, SourceError)
            delay_s = min(2 * before.delay_s, MAX_RETRY_S) if before is not None and is_repeated else RETRY_S
            if is_source and flight.ref.source == LocalSource.kind:
                delay_s = LOOK_AGAIN_S
            failure = _Failure(_again(error, None), self._clock() + delay_s, delay_s)
            if self._flights.get(flight.key) is flight and self._is_worth_keeping(flight.ref):
                self._failures[flight.key] = failure
                self._mark_failing(flight.key, error, is_writing)
        return failure

    def _mark_failing(self, key: Key, error: LoraxError, is_writing: bool) -> None:
        """Keep what may stand in: for a source that fails, and for a folder into which somebody may be writing."""
        pointer, now = self._pointers.get(key), self._clock()
        if pointer is not None and is_writing:
            since = now if pointer.failing_since is None else pointer.failing_since
            if now < since + WRITING_S:
                self._pointers[key] = pointer._replace(failing_since=since)
                return
        if not isinstance(error, SourceError):
            self._pointers.pop(key, None)

    def _is_worth_keeping(self, ref: AdapterRef) -> bool:
        """No source is asked for the others, and their names may be of any size."""
        return ref.source in self._threads and len(ref.name) <= MAX_NAME_LENGTH


class _Gathering:
    """Waits, in no thread, for all parts of an answer, or for the first that fails."""

    def __init__(self, parts: Sequence["Future[Found]"], combine: Callable[[Sequence[Found]], Answer]) -> None:
        self.outcome: Future[Answer] = Future()
        self._parts = parts
        self._combine = combine
        self._num_missing = len(parts)
        self._lock = threading.Lock()
        for part in parts:
            part.add_done_callback(self._arrive)

    def _arrive(self, part: "Future[Found]") -> None:
        with self._lock:
            if self._num_missing == 0:
                return
            self._num_missing = 0 if part.exception() is not None else self._num_missing - 1
            is_over = self._num_missing == 0
        if is_over and self.outcome.set_running_or_notify_cancel():
            self._tell(part.exception())

    def _tell(self, error: BaseException | None) -> None:
        if isinstance(error, LoraxError):
            # Each gets one of its own: raising an error changes it.
            error = _again(error, error.retry_after_s)
        if error is not None:
            self.outcome.set_exception(error)
            return
        try:
            self.outcome.set_result(self._combine([part.result() for part in self._parts]))
        except Exception as bug:
            self.outcome.set_exception(bug)


class _Threads:
    """Up to so many threads, each started when there is work. They end with the process, whatever they wait for."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._num_started = 0
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, work: Callable[[], None]) -> None:
        if self._num_started < self._limit:
            self._start()
        self._work.put(work)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._num_started += 1
        except RuntimeError:  # the machine has no more threads
            if not self._num_started:
                raise

    def close(self) -> None:
        for _ in range(self._num_started):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _check_request(refs: Sequence[AdapterRef], merge: Merge | None) -> None:
    if merge is None and len(refs) != 1:
        raise InputError(f"{len(refs)} adapters are named; one is, or several and how they are merged")
    if len(refs) > MAX_MERGED:
        raise InputError(f"{len(refs)} adapters are to be merged; at most {MAX_MERGED} are")
    if merge is not None and len(refs) != len(merge.weights):
        raise InputError(f"{len(refs)} adapters are to be merged, but {len(merge.weights)} weights are given")


def _combine(merge: Merge | None, parts: Sequence[Found]) -> Answer:
    tier = FETCHED if any(part.is_new for part in parts) else ""
    if merge is None:
        return parts[0].spec, parts[0].resolved._replace(tier=tier)
    specs = [part.spec for part in parts]
    identity = merge.identity([spec.identity for spec in specs])
    stored = tuple(part for spec in specs for part in spec.parts)
    name, num_elements = ",".join(spec.name for spec in specs), sum(spec.num_elements for spec in specs)
    stale = next((part.resolved.stale for part in parts if part.resolved.stale is not None), None)
    return AdapterSpec(identity, name, stored, num_elements, merge), Resolved(identity, tier=tier, stale=stale)


def _again(error: LoraxError, retry_after_s: float | None) -> LoraxError:
    """The same error without its history, in which tokens may be found."""
    same = copy.copy(error)
    same.retry_after_s = retry_after_s
    return same


def _closed() -> EngineError:
    return EngineError("the server is shutting down")


def _done(found: Found) -> "Future[Found]":
    future: Future[Found] = Future()
    future.set_result(found)
    return future


def _failed(error: BaseException) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
