"""Resolves adapter names to identities and local files.

A cached resolution is returned after a file check on a separate thread. A recent failure is returned immediately.
Otherwise a fetch queries the source. All requests for the same name share one fetch. `resolutions.py` defines how long
results are valid.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from lorax_server.adapters.sources.finder import AdapterFinder, FoundAdapter
from lorax_server.adapters.sources.source import MAX_NAME_LENGTH, RefKey, make_ref_key
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.resolutions import (
    RETRY_S,
    RecentFailure,
    Resolution,
    ResolutionCache,
    copy_error,
    is_incomplete_write,
    is_local,
)
from lorax_server.errors import EngineError, InputError, LoraxError, OverloadedError
from lorax_server.threads import DaemonThreads, completed_future, failed_future, gather
from lorax_server.types import MAX_MERGED_ADAPTERS, AdapterRef, Merge, ResolvedAdapter

logger = logging.getLogger(__name__)

FETCHED_TIER = "fetched"  # tier of an adapter that was downloaded for this request
MAX_PENDING_FETCHES = 10_000  # maximum number of running and queued fetches
NUM_CHECK_THREADS = 2  # number of threads per source that check files

SpecAndResolved = tuple[AdapterSpec, ResolvedAdapter]


@dataclass(eq=False)
class _Fetch:
    """A pending query to an adapter source."""

    key: RefKey
    ref: AdapterRef
    result: "Future[FoundAdapter]" = field(default_factory=Future)
    has_started: bool = False
    next_fetch: "_Fetch | None" = None  # fetch for later requests, starts when this fetch finishes


class AdapterResolver:
    """Resolves names to adapters whose files are on local disk. All methods are thread-safe.

    Each source has separate threads, so that a hanging source does not block other sources.
    """

    def __init__(
        self,
        finder: AdapterFinder,
        *,
        num_threads: int = 16,  # per source
        revalidate_s: float = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._finder = finder
        sources = finder.sources
        self._threads = {kind: DaemonThreads(f"adapter fetch {kind}", num_threads) for kind in sources.kinds}
        self._other_threads = DaemonThreads("unknown adapter source", 1)  # for unknown sources
        # File checks have separate threads, because fetches may be slow and callers must not wait for the file system.
        self._check_threads = {
            kind: DaemonThreads(f"adapter check {kind}", NUM_CHECK_THREADS) for kind in sources.kinds
        }
        self._lock = threading.Lock()  # guards the fields below; not held while querying a source
        self._is_closed = False
        self._resolutions = ResolutionCache(sources, revalidate_s, clock)
        self._fetches: dict[RefKey, _Fetch] = {}  # fetches that later requests may share and whose result is cached
        self._unfinished: set[_Fetch] = set()
        self._pending_checks: set[Future[FoundAdapter]] = set()  # unfinished file checks

    @property
    def num_fetching(self) -> int:
        """The number of fetches that are running or waiting for a thread."""
        return len(self._unfinished)

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> "Future[SpecAndResolved]":
        """Resolve adapter names, and return a future. Errors are set on the future, which the caller may cancel."""
        try:
            _check_request(refs, merge)
            adapters = [self._find(ref) for ref in refs]
        except Exception as error:
            return failed_future(error)
        return gather(adapters, partial(_combine_adapters, merge), _copy_error)

    def forget(self, source: str, name: str) -> None:
        """Drop the cached resolution of an adapter name. Later requests do not share running fetches."""
        with self._lock:
            self._resolutions.forget(source, name)
            for key in [key for key in self._fetches if key[:2] == (source, name)]:
                del self._fetches[key]

    def close(self) -> None:
        """Fail all pending futures. Running fetches continue, but do not block process exit."""
        with self._lock:
            self._is_closed = True
            unfinished, self._unfinished = self._unfinished, set()
            unfinished |= {fetch.next_fetch for fetch in unfinished if fetch.next_fetch is not None}
            checks, self._pending_checks = self._pending_checks, set()
            self._fetches.clear()
            self._resolutions.clear()
        for threads in (*self._threads.values(), *self._check_threads.values(), self._other_threads):
            threads.close()
        for result in (*(fetch.result for fetch in unfinished), *checks):
            result.set_exception(_make_closed_error())

    def _find(self, ref: AdapterRef) -> "Future[FoundAdapter]":
        key = make_ref_key(ref)
        with self._lock:
            resolution = self._resolutions.get(key)
            if resolution is not None:
                return self._schedule_file_check(key, ref, resolution)
        return self._fetch_or_fail(key, ref, None)

    def _fetch_or_fail(self, key: RefKey, ref: AdapterRef, resolution: Resolution | None) -> "Future[FoundAdapter]":
        """Return a future for a fetch from the source.

        After a recent failure, return a fallback or the failure instead.
        """
        with self._lock:
            failure = self._resolutions.get_recent_failure(key)
            if failure is None:
                return self._join_fetch(key, ref).result
            resolution = self._resolutions.get(key) or resolution
        fallback = self._resolutions.find_fallback(key, resolution, failure.error)
        if fallback is not None:
            return completed_future(fallback)
        return failed_future(copy_error(failure.error, max(0.0, failure.retry_at - self._clock())))

    # --- File checks --------------------------------------------------------------------------------------------------

    def _schedule_file_check(self, key: RefKey, ref: AdapterRef, resolution: Resolution) -> "Future[FoundAdapter]":
        """Return a future for the cached adapter, after another thread has checked that its files are unchanged.

        If the files have changed, the adapter is fetched again.
        """
        self._check_open(len(self._pending_checks))
        result: Future[FoundAdapter] = Future()
        self._check_threads[ref.source].submit(partial(self._check_files, key, ref, resolution, result))
        self._pending_checks.add(result)
        return result

    def _check_files(
        self, key: RefKey, ref: AdapterRef, resolution: Resolution, result: "Future[FoundAdapter]"
    ) -> None:
        try:
            now = self._clock()
            is_good = now < (resolution.revalidate_at if ref.token else resolution.valid_until)
            if is_good and self._resolutions.check_current(key, resolution.adapter):
                if now >= resolution.revalidate_at:
                    self._revalidate_in_background(key, ref)
                outcome = completed_future(resolution.adapter)
            else:
                outcome = self._fetch_or_fail(key, ref, resolution)
        except Exception as error:
            outcome = failed_future(error)
        outcome.add_done_callback(partial(self._settle_check, result))

    def _revalidate_in_background(self, key: RefKey, ref: AdapterRef) -> None:
        """Start a fetch that updates the cached resolution, unless a fetch is running or has just failed."""
        with self._lock:
            is_due = self._resolutions.get_recent_failure(key) is None
            if is_due and key not in self._fetches and len(self._unfinished) < MAX_PENDING_FETCHES:
                self._join_fetch(key, ref)

    def _settle_check(self, result: "Future[FoundAdapter]", outcome: "Future[FoundAdapter]") -> None:
        with self._lock:
            if result not in self._pending_checks:
                return  # closed, and settled
            self._pending_checks.remove(result)
        error = outcome.exception()
        result.set_result(outcome.result()) if error is None else result.set_exception(error)

    # --- Fetches ------------------------------------------------------------------------------------------------------

    def _join_fetch(self, key: RefKey, ref: AdapterRef) -> _Fetch:
        self._check_open()
        fetch = self._fetches.get(key)
        if fetch is None:
            self._check_open(len(self._unfinished))
            fetch = _Fetch(key, ref)
            self._start_fetch(fetch)
            self._fetches[key] = fetch
        elif fetch.has_started and is_local(key):
            # The running fetch may have read the old version, but later requests must get the new version.
            fetch.next_fetch = fetch.next_fetch or _Fetch(key, ref)
            return fetch.next_fetch
        return fetch

    def _check_open(self, num_before: int = 0) -> None:
        if self._is_closed:
            raise _make_closed_error()
        if num_before >= MAX_PENDING_FETCHES:
            raise OverloadedError(f"{MAX_PENDING_FETCHES} adapters are being fetched already; try again later", RETRY_S)

    def _start_fetch(self, fetch: _Fetch) -> None:
        self._threads.get(fetch.ref.source, self._other_threads).submit(partial(self._run_fetch, fetch))
        self._unfinished.add(fetch)

    def _run_fetch(self, fetch: _Fetch) -> None:
        """Query the source and complete the fetch. Runs on one of the source's threads."""
        with self._lock:
            if fetch not in self._unfinished:
                return
            fetch.has_started = True
        try:
            settle = partial(fetch.result.set_result, self._fetch(fetch))
        except BaseException as error:
            settle = partial(fetch.result.set_exception, error)
        with self._lock:
            if fetch not in self._unfinished:
                return  # closed, and settled
            self._unfinished.remove(fetch)
            next_fetch = fetch.next_fetch
            if next_fetch is not None:
                self._start_fetch(next_fetch)
            if self._fetches.get(fetch.key) is fetch:
                del self._fetches[fetch.key]
                if next_fetch is not None:
                    self._fetches[fetch.key] = next_fetch
        settle()

    def _fetch(self, fetch: _Fetch) -> FoundAdapter:
        key = fetch.key
        try:
            adapter = self._finder.find(fetch.ref)
        except LoraxError as error:
            failure = self._remember_failure(fetch, error)
        else:
            with self._lock:
                if self._fetches.get(key) is fetch:
                    self._resolutions.put(key, replace(adapter, is_new=False))
            return adapter
        with self._lock:
            resolution = self._resolutions.get(key)
        fallback = self._resolutions.find_fallback(key, resolution, failure.error)
        if fallback is None:
            raise copy_error(failure.error, failure.delay_s)
        logger.warning("%s; serving the previous version of the adapter", failure.error)
        return fallback

    def _remember_failure(self, fetch: _Fetch, error: LoraxError) -> RecentFailure:
        key = fetch.key
        with self._lock:
            resolution = self._resolutions.get(key)
        is_writing = is_incomplete_write(key, resolution, error)
        # Failures for unknown sources or overlong names are not cached.
        should_cache = fetch.ref.source in self._threads and len(fetch.ref.name) <= MAX_NAME_LENGTH
        with self._lock:
            failure = self._resolutions.make_failure(key, error)
            if self._fetches.get(key) is fetch and should_cache:
                self._resolutions.put_failure(key, failure, is_writing)
        return failure


def _check_request(refs: Sequence[AdapterRef], merge: Merge | None) -> None:
    if merge is None and len(refs) != 1:
        raise InputError(f"{len(refs)} adapters are named; name one adapter, or set a merge")
    if len(refs) > MAX_MERGED_ADAPTERS:
        raise InputError(f"{len(refs)} adapters cannot be merged; the maximum is {MAX_MERGED_ADAPTERS}")
    if merge is not None and len(refs) != len(merge.weights):
        raise InputError(f"{len(refs)} merged adapters need {len(refs)} weights (got {len(merge.weights)})")


def _combine_adapters(merge: Merge | None, adapters: Sequence[FoundAdapter]) -> SpecAndResolved:
    tier = FETCHED_TIER if any(adapter.is_new for adapter in adapters) else ""
    if merge is None:
        return adapters[0].spec, adapters[0].resolved._replace(tier=tier)
    specs = [adapter.spec for adapter in adapters]
    identity = merge.identity([spec.identity for spec in specs])
    parts = tuple(part for spec in specs for part in spec.checkpoints)
    name, num_elements = ",".join(spec.name for spec in specs), sum(spec.num_elements for spec in specs)
    stale = next((adapter.resolved.stale for adapter in adapters if adapter.resolved.stale is not None), None)
    return AdapterSpec(identity, name, parts, num_elements, merge), ResolvedAdapter(identity, tier=tier, stale=stale)


def _copy_error(error: BaseException) -> BaseException:
    return copy_error(error, error.retry_after_s) if isinstance(error, LoraxError) else error


def _make_closed_error() -> EngineError:
    return EngineError("the server is shutting down")
