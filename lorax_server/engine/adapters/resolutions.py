"""Caches adapter resolutions and failures, and decides when a stale resolution may be used.

A local resolution is valid until a file changes. If the folder is invalid after a change, its files may be partially
written: the previous adapter is then served for up to `INCOMPLETE_WRITE_S` and marked as stale.

A hub or S3 resolution is revalidated after `revalidate_s`. Until `valid_until`, it is still served during revalidation
or if the source fails. This does not apply to requests with a token, because access rights may have changed.
"""

import copy
import math
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple

from cachetools import LRUCache

from lorax_server.adapters.sources.finder import FoundAdapter
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterSources, RefKey
from lorax_server.errors import AdapterError, AdapterNotFoundError, LoraxError, SourceError
from lorax_server.types import Failure

MAX_RESOLUTIONS = 10_000
MAX_FAILURES = 10_000
MAX_STALE_FACTOR = 10  # a resolution is served during revalidation for this many revalidation periods
INCOMPLETE_WRITE_S = 60.0  # maximum time to serve the previous adapter while the folder is invalid
RETRY_S = 1.0
MAX_RETRY_S = 30.0
LOCAL_RETRY_S = 0.1  # short, because checking a local folder is cheap


class Resolution(NamedTuple):
    """A cached result of resolving an adapter name, with expiry times."""

    adapter: FoundAdapter
    revalidate_at: float  # after this time, query the source in the background
    valid_until: float  # after this time, query the source before the request continues
    failing_since: float | None = None  # time when the local folder became invalid


class RecentFailure(NamedTuple):
    error: LoraxError
    retry_at: float
    delay_s: float


class ResolutionCache:
    """Caches resolutions and recent failures by adapter key.

    The caller must hold the resolver's lock, except for `check_current` and `find_fallback`, which read files.
    """

    def __init__(self, sources: AdapterSources, revalidate_s: float, clock: Callable[[], float]) -> None:
        self._sources = sources
        self._revalidate_s = revalidate_s
        self._clock = clock
        self._resolutions: LRUCache[RefKey, Resolution] = LRUCache(MAX_RESOLUTIONS)
        self._failures: LRUCache[RefKey, RecentFailure] = LRUCache(MAX_FAILURES)

    # --- With the lock ------------------------------------------------------------------------------------------------

    def get(self, key: RefKey) -> Resolution | None:
        return self._resolutions.get(key)

    def get_recent_failure(self, key: RefKey) -> RecentFailure | None:
        """Return the last failure, or None if there was no failure or the source may be queried again."""
        failure = self._failures.get(key)
        return failure if failure is not None and self._clock() < failure.retry_at else None

    def put(self, key: RefKey, adapter: FoundAdapter) -> None:
        if is_local(key):
            # Another change to a file that was modified just now may keep the timestamp, so query the source again.
            revalidate_at = valid_until = math.inf if adapter.is_settled else -math.inf
        else:
            revalidate_at = self._clock() + self._revalidate_s
            valid_until = revalidate_at + MAX_STALE_FACTOR * self._revalidate_s
        self._resolutions[key] = Resolution(adapter, revalidate_at, valid_until)
        self._failures.pop(key, None)

    def make_failure(self, key: RefKey, error: LoraxError) -> RecentFailure:
        """Return a failure with its retry time. The delay doubles while the source keeps failing."""
        before, is_source = self._failures.get(key), isinstance(error, SourceError)
        delay_s = RETRY_S
        if is_source and is_local(key):
            delay_s = LOCAL_RETRY_S
        elif is_source and before is not None and isinstance(before.error, SourceError):
            delay_s = min(2 * before.delay_s, MAX_RETRY_S)
        return RecentFailure(copy_error(error, None), self._clock() + delay_s, delay_s)

    def put_failure(self, key: RefKey, failure: RecentFailure, is_writing: bool) -> None:
        """Store a failure. Drop the resolution unless it may serve as a fallback."""
        self._failures[key] = failure
        resolution, now = self._resolutions.get(key), self._clock()
        if resolution is not None and is_writing:
            since = now if resolution.failing_since is None else resolution.failing_since
            if now < since + INCOMPLETE_WRITE_S:
                self._resolutions[key] = resolution._replace(failing_since=since)
                return
        if not isinstance(failure.error, SourceError):
            self._resolutions.pop(key, None)

    def forget(self, source: str, name: str) -> None:
        """Drop all resolutions and failures for an adapter name, for all access tokens."""
        remembered: MutableMapping[RefKey, Any]
        for remembered in (self._resolutions, self._failures):
            for key in [key for key in remembered if key[:2] == (source, name)]:
                del remembered[key]

    def clear(self) -> None:
        self._resolutions.clear()
        self._failures.clear()

    # --- Without the lock: reads files --------------------------------------------------------------------------------

    def check_current(self, key: RefKey, adapter: FoundAdapter) -> bool:
        """Return True if the adapter's files have not changed. Also mark the files as used, so that they are not
        evicted from disk.
        """
        self._sources.mark_used(key[0], adapter.spec.checkpoints[0].folder)
        return adapter.is_unchanged()

    def find_fallback(self, key: RefKey, resolution: Resolution | None, error: LoraxError) -> FoundAdapter | None:
        """Return the cached adapter if it may be served despite the error, otherwise None."""
        if resolution is None:
            return None
        if is_local(key):  # a local folder is never unreachable, but may contain incomplete files
            return self._find_previous(resolution, error)
        has_token = key[2] is not None
        can_fall_back = isinstance(error, SourceError) and not has_token and self.check_current(key, resolution.adapter)
        return resolution.adapter if can_fall_back else None

    def _find_previous(self, resolution: Resolution, error: LoraxError) -> FoundAdapter | None:
        """Return a local folder's previous adapter while the new files may be incomplete, otherwise None."""
        since, adapter = resolution.failing_since, resolution.adapter
        if since is None or self._clock() >= since + INCOMPLETE_WRITE_S or not adapter.is_overwritten():
            return None
        return replace(adapter, resolved=adapter.resolved._replace(stale=Failure.from_error(error)))


def is_incomplete_write(key: RefKey, resolution: Resolution | None, error: LoraxError) -> bool:
    """Return True if an error may be caused by incomplete writes to a local folder.

    A file that changes while it is read does not indicate an incomplete write, unless the weights are truncated.
    """
    if not is_local(key) or not isinstance(error, AdapterError) or isinstance(error, AdapterNotFoundError):
        return False
    return not isinstance(error, SourceError) or (resolution is not None and resolution.adapter.is_truncated())


def is_local(key: RefKey) -> bool:
    return key[0] == LocalSource.kind


def copy_error(error: LoraxError, retry_after_s: float | None) -> LoraxError:
    """Return a copy of the error with this `retry_after_s`. The copy has no traceback, because tracebacks may contain
    secrets.
    """
    same = copy.copy(error)
    same.retry_after_s = retry_after_s
    return same
