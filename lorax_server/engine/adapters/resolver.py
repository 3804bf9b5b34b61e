"""Finds out which adapter a name means now: asks the sources on threads of its own, and remembers their answers.

a request -> a pointer whose files are the same   answered after one look at each file, on a thread for looks
          -> a failure of a moment ago            answered at once
          -> a flight, that is a question to a source; all requests for the same name wait for it, on no thread

`pointers.py` says how long an answer is good.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from lorax_server.adapters.sources.finder import AdapterFinder, FoundAdapter
from lorax_server.adapters.sources.source import MAX_NAME_LENGTH, Key, make_ref_key
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.pointers import (
    RETRY_S,
    Pointer,
    PointerCache,
    RecentFailure,
    copy_error,
    is_local,
    shows_writing,
)
from lorax_server.errors import EngineError, InputError, LoraxError, OverloadedError
from lorax_server.threads import DaemonThreads, done, failed, gather
from lorax_server.types import MAX_MERGED, AdapterRef, Merge, Resolved

logger = logging.getLogger(__name__)

FETCHED = "fetched"  # the tier of an adapter whose files had to be brought here for the request
MAX_FLIGHTS = 10_000  # running and waiting for a thread
NUM_LOOKERS = 2  # threads for each kind of source that look at files

Answer = tuple[AdapterSpec, Resolved]


@dataclass(eq=False)
class _Flight:
    """A question to a source, on its way."""

    key: Key
    ref: AdapterRef
    answer: "Future[FoundAdapter]" = field(default_factory=Future)
    has_started: bool = False
    following: "_Flight | None" = None  # starts when this one has ended


class AdapterResolver:
    """Turns names into adapters with an identity, all of whose files are here. Any thread may call any method.

    Each kind of source has threads of its own, so that one that hangs holds up no other.
    """

    def __init__(
        self,
        finder: AdapterFinder,
        *,
        num_threads: int = 16,  # of each kind of source
        revalidate_s: float = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._finder = finder
        sources = finder.sources
        self._threads = {kind: DaemonThreads(f"adapters of {kind}", num_threads) for kind in sources.kinds}
        self._other_threads = DaemonThreads("adapters of nowhere", 1)  # for sources that do not exist
        # A look would wait behind slow fetches for a thread, and a caller must not wait for a file system.
        self._lookers = {kind: DaemonThreads(f"looks at adapters of {kind}", NUM_LOOKERS) for kind in sources.kinds}
        self._lock = threading.Lock()  # of all below; never held while a source is asked or a future is settled
        self._is_closed = False
        self._pointers = PointerCache(sources, revalidate_s, clock)
        self._flights: dict[Key, _Flight] = {}  # those that may be joined, and whose answer will be remembered
        self._unfinished: set[_Flight] = set()
        self._looks: set[Future[FoundAdapter]] = set()  # without an answer

    @property
    def num_fetching(self) -> int:
        """Questions to sources that are being answered or wait for a thread."""
        return len(self._unfinished)

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> "Future[Answer]":
        """Find out which adapter is meant. Errors are in the future, which the caller may cancel."""
        try:
            _check_request(refs, merge)
            adapters = [self._find(ref) for ref in refs]
        except Exception as error:
            return failed(error)
        return gather(adapters, partial(_combine, merge), _copy)

    def forget(self, source: str, name: str) -> None:
        """Forget a name, with any token. Flights reach only the requests that wait for them now."""
        with self._lock:
            self._pointers.forget(source, name)
            for key in [key for key in self._flights if key[:2] == (source, name)]:
                del self._flights[key]

    def close(self) -> None:
        """End all that waits. Threads in the middle of a fetch are left behind; they do not keep the process alive."""
        with self._lock:
            self._is_closed = True
            unfinished, self._unfinished = self._unfinished, set()
            unfinished |= {flight.following for flight in unfinished if flight.following is not None}
            looks, self._looks = self._looks, set()
            self._flights.clear()
            self._pointers.clear()
        for threads in (*self._threads.values(), *self._lookers.values(), self._other_threads):
            threads.close()
        for answer in (*(flight.answer for flight in unfinished), *looks):
            answer.set_exception(_closed())

    def _find(self, ref: AdapterRef) -> "Future[FoundAdapter]":
        key = make_ref_key(ref)
        with self._lock:
            pointer = self._pointers.recall(key)
            if pointer is not None:
                return self._look_later(key, ref, pointer)
        return self._find_anew(key, ref, None)

    def _find_anew(self, key: Key, ref: AdapterRef, pointer: Pointer | None) -> "Future[FoundAdapter]":
        """Return the failure of a moment ago, or what the source says now."""
        with self._lock:
            failure = self._pointers.recall_failure(key)
            if failure is None:
                return self._join(key, ref).answer
            pointer = self._pointers.recall(key) or pointer
        stand_in = self._pointers.find_stand_in(key, pointer, failure.error)
        if stand_in is not None:
            return done(stand_in)
        return failed(copy_error(failure.error, max(0.0, failure.retry_at - self._clock())))

    # --- Looks at files -----------------------------------------------------------------------------------------------

    def _look_later(self, key: Key, ref: AdapterRef, pointer: Pointer) -> "Future[FoundAdapter]":
        """Answer with a pointer if nothing has changed, after a look on a thread."""
        self._check_open(len(self._looks))
        answer: Future[FoundAdapter] = Future()
        self._lookers[ref.source].submit(partial(self._look, key, ref, pointer, answer))
        self._looks.add(answer)
        return answer

    def _look(self, key: Key, ref: AdapterRef, pointer: Pointer, answer: "Future[FoundAdapter]") -> None:
        try:
            now = self._clock()
            is_good = now < (pointer.ask_at if ref.token else pointer.good_until)
            if is_good and self._pointers.is_current(key, pointer.adapter):
                if now >= pointer.ask_at:
                    self._ask_beside(key, ref)
                outcome = done(pointer.adapter)
            else:
                outcome = self._find_anew(key, ref, pointer)
        except Exception as error:
            outcome = failed(error)
        outcome.add_done_callback(partial(self._settle_look, answer))

    def _ask_beside(self, key: Key, ref: AdapterRef) -> None:
        """Ask the source though no request waits for it, unless that is under way or has just failed."""
        with self._lock:
            is_due = self._pointers.recall_failure(key) is None
            if is_due and key not in self._flights and len(self._unfinished) < MAX_FLIGHTS:
                self._join(key, ref)

    def _settle_look(self, answer: "Future[FoundAdapter]", outcome: "Future[FoundAdapter]") -> None:
        with self._lock:
            if answer not in self._looks:
                return  # closed, and settled
            self._looks.remove(answer)
        error = outcome.exception()
        answer.set_result(outcome.result()) if error is None else answer.set_exception(error)

    # --- Questions to sources -----------------------------------------------------------------------------------------

    def _join(self, key: Key, ref: AdapterRef) -> _Flight:
        self._check_open()
        flight = self._flights.get(key)
        if flight is None:
            self._check_open(len(self._unfinished))
            flight = _Flight(key, ref)
            self._depart(flight)
            self._flights[key] = flight
        elif flight.has_started and is_local(key):
            # It may have looked before a new version came, which later requests must get.
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

    def _run(self, flight: _Flight) -> None:
        """Ask the source, on one of its threads."""
        with self._lock:
            if flight not in self._unfinished:
                return
            flight.has_started = True
        try:
            settle = partial(flight.answer.set_result, self._ask(flight))
        except BaseException as error:
            settle = partial(flight.answer.set_exception, error)
        with self._lock:
            if flight not in self._unfinished:
                return  # closed, and settled
            self._unfinished.remove(flight)
            following = flight.following
            if following is not None:
                self._depart(following)
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
                if following is not None:
                    self._flights[flight.key] = following
        settle()

    def _ask(self, flight: _Flight) -> FoundAdapter:
        key = flight.key
        try:
            adapter = self._finder.find(flight.ref)
        except LoraxError as error:
            failure = self._remember_failure(flight, error)
        else:
            with self._lock:
                if self._flights.get(key) is flight:
                    self._pointers.put(key, replace(adapter, is_new=False))
            return adapter
        with self._lock:
            pointer = self._pointers.recall(key)
        stand_in = self._pointers.find_stand_in(key, pointer, failure.error)
        if stand_in is None:
            raise copy_error(failure.error, failure.delay_s)
        logger.warning("%s; until then, what it was before is served", failure.error)
        return stand_in

    def _remember_failure(self, flight: _Flight, error: LoraxError) -> RecentFailure:
        key = flight.key
        with self._lock:
            pointer = self._pointers.recall(key)
        is_writing = shows_writing(key, pointer, error)
        # Other sources are never asked, and their names may be of any size.
        is_worth_keeping = flight.ref.source in self._threads and len(flight.ref.name) <= MAX_NAME_LENGTH
        with self._lock:
            failure = self._pointers.make_failure(key, error)
            if self._flights.get(key) is flight and is_worth_keeping:
                self._pointers.put_failure(key, failure, is_writing)
        return failure


def _check_request(refs: Sequence[AdapterRef], merge: Merge | None) -> None:
    if merge is None and len(refs) != 1:
        raise InputError(f"{len(refs)} adapters are named; one is, or several and how they are merged")
    if len(refs) > MAX_MERGED:
        raise InputError(f"{len(refs)} adapters are to be merged; at most {MAX_MERGED} are")
    if merge is not None and len(refs) != len(merge.weights):
        raise InputError(f"{len(refs)} adapters are to be merged, but {len(merge.weights)} weights are given")


def _combine(merge: Merge | None, adapters: Sequence[FoundAdapter]) -> Answer:
    tier = FETCHED if any(adapter.is_new for adapter in adapters) else ""
    if merge is None:
        return adapters[0].spec, adapters[0].resolved._replace(tier=tier)
    specs = [adapter.spec for adapter in adapters]
    identity = merge.identity([spec.identity for spec in specs])
    parts = tuple(part for spec in specs for part in spec.parts)
    name, num_elements = ",".join(spec.name for spec in specs), sum(spec.num_elements for spec in specs)
    stale = next((adapter.resolved.stale for adapter in adapters if adapter.resolved.stale is not None), None)
    return AdapterSpec(identity, name, parts, num_elements, merge), Resolved(identity, tier=tier, stale=stale)


def _copy(error: BaseException) -> BaseException:
    return copy_error(error, error.retry_after_s) if isinstance(error, LoraxError) else error


def _closed() -> EngineError:
    return EngineError("the server is shutting down")
