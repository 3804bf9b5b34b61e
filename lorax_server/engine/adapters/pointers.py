"""Remembered answers of sources: how long each is good, and which one may stand in while a source fails.

A pointer to a local folder is good as long as no file changes. If the folder is broken after a change, its files may be
in the middle of being written: for a while the previous adapter stands in, marked as stale.

A pointer to a hub or a bucket is good for a while. After that it still serves while its source is asked, or fails. Not
so for requests with a token: what a token may read is never older than the while, and such a request fails with its
source.
"""

import copy
import math
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple

from cachetools import LRUCache

from lorax_server.adapters.sources.finder import FoundAdapter
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterSources, Key
from lorax_server.errors import AdapterError, AdapterNotFoundError, LoraxError, SourceError
from lorax_server.types import Failure

MAX_POINTERS = 10_000
MAX_FAILURES = 10_000
MAX_STALE = 10  # a pointer serves while its source is asked for so many times as long as it is good
WRITING_S = 60.0  # how long a folder's previous adapter stands in while the present one is broken
RETRY_S = 1.0
MAX_RETRY_S = 30.0
LOOK_AGAIN_S = 0.1  # before another look at a folder that changed while it was read, which costs little


class Pointer(NamedTuple):
    """The adapter that a name means."""

    adapter: FoundAdapter
    ask_at: float  # from then on its source has to be asked again,
    good_until: float  # and from then on before any request gets an answer
    failing_since: float | None = None  # of a local folder: since when it is broken


class RecentFailure(NamedTuple):
    error: LoraxError
    retry_at: float
    delay_s: float


class PointerCache:
    """Pointers and failures by name and token. The resolver's lock guards all methods of the first group; those of the
    second one look at files, so that no lock may be held."""

    def __init__(self, sources: AdapterSources, revalidate_s: float, clock: Callable[[], float]) -> None:
        self._sources = sources
        self._revalidate_s = revalidate_s
        self._clock = clock
        self._pointers: LRUCache[Key, Pointer] = LRUCache(MAX_POINTERS)
        self._failures: LRUCache[Key, RecentFailure] = LRUCache(MAX_FAILURES)

    # --- With the lock ------------------------------------------------------------------------------------------------

    def recall(self, key: Key) -> Pointer | None:
        return self._pointers.get(key)

    def recall_failure(self, key: Key) -> RecentFailure | None:
        """Return the failure of a moment ago; None if the source may be asked."""
        failure = self._failures.get(key)
        return failure if failure is not None and self._clock() < failure.retry_at else None

    def put(self, key: Key, adapter: FoundAdapter) -> None:
        if is_local(key):
            # Where a change might not show in the stamps, only another thorough look can tell.
            ask_at = good_until = math.inf if adapter.is_settled else -math.inf
        else:
            ask_at = self._clock() + self._revalidate_s
            good_until = ask_at + MAX_STALE * self._revalidate_s
        self._pointers[key] = Pointer(adapter, ask_at, good_until)
        self._failures.pop(key, None)

    def make_failure(self, key: Key, error: LoraxError) -> RecentFailure:
        """Say when a failed source may be asked again: ever later, if it keeps failing."""
        before, is_source = self._failures.get(key), isinstance(error, SourceError)
        delay_s = RETRY_S
        if is_source and is_local(key):
            delay_s = LOOK_AGAIN_S
        elif is_source and before is not None and isinstance(before.error, SourceError):
            delay_s = min(2 * before.delay_s, MAX_RETRY_S)
        return RecentFailure(copy_error(error, None), self._clock() + delay_s, delay_s)

    def put_failure(self, key: Key, failure: RecentFailure, is_writing: bool) -> None:
        """Remember a failure, and keep the pointer only if it may stand in."""
        self._failures[key] = failure
        pointer, now = self._pointers.get(key), self._clock()
        if pointer is not None and is_writing:
            since = now if pointer.failing_since is None else pointer.failing_since
            if now < since + WRITING_S:
                self._pointers[key] = pointer._replace(failing_since=since)
                return
        if not isinstance(failure.error, SourceError):
            self._pointers.pop(key, None)

    def forget(self, source: str, name: str) -> None:
        """Forget a name, with any token."""
        remembered: MutableMapping[Key, Any]
        for remembered in (self._pointers, self._failures):
            for key in [key for key in remembered if key[:2] == (source, name)]:
                del remembered[key]

    def clear(self) -> None:
        self._pointers.clear()
        self._failures.clear()

    # --- Without the lock: looks at files -----------------------------------------------------------------------------

    def is_current(self, key: Key, adapter: FoundAdapter) -> bool:
        """Look once at each file. Mark the files as used, so that they do not leave the disk."""
        self._sources.mark_used(key[0], adapter.spec.parts[0].folder)
        return adapter.is_unchanged()

    def find_stand_in(self, key: Key, pointer: Pointer | None, error: LoraxError) -> FoundAdapter | None:
        """Return an adapter that may be served in spite of its source's error."""
        if pointer is None:
            return None
        if is_local(key):  # local folders never fail: they only change
            return self._find_previous(pointer, error)
        has_token = key[2] is not None
        can_stand_in = isinstance(error, SourceError) and not has_token and self.is_current(key, pointer.adapter)
        return pointer.adapter if can_stand_in else None

    def _find_previous(self, pointer: Pointer, error: LoraxError) -> FoundAdapter | None:
        """Return the adapter that a folder held before, as long as its files may be in the middle of being written."""
        since, adapter = pointer.failing_since, pointer.adapter
        if since is None or self._clock() >= since + WRITING_S or not adapter.is_overwritten():
            return None
        return replace(adapter, resolved=adapter.resolved._replace(stale=Failure.of(error)))


def shows_writing(key: Key, pointer: Pointer | None, error: LoraxError) -> bool:
    """Tell whether an error may come of files in the middle of being written into a local folder.

    Files that changed while they were read do not say so, since each may have been whole; shorter weights do.
    """
    if not is_local(key) or not isinstance(error, AdapterError) or isinstance(error, AdapterNotFoundError):
        return False
    return not isinstance(error, SourceError) or (pointer is not None and pointer.adapter.is_cut())


def is_local(key: Key) -> bool:
    return key[0] == LocalSource.kind


def copy_error(error: LoraxError, retry_after_s: float | None) -> LoraxError:
    """Return the same error without its traceback, in which tokens may be found."""
    same = copy.copy(error)
    same.retry_after_s = retry_after_s
    return same
