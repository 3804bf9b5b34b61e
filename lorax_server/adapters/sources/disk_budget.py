"""The bytes of a disk that fetched adapters may take. The longest unused leave first, on the thread that fetches one.

A version whose mark is recent is in use: it is being fetched, identified or prepared, or a request waits for it. So
processes can share a folder without messages. A version that leaves is first moved aside, in one step; a process that
looks for it then fetches it again. No version leaves for a fetch that would not fit even so.
"""

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lorax_server.adapters.sources.caches import MARK_AGAIN_S, AdapterCache, CachedVersion, read_size, read_time
from lorax_server.adapters.sources.download import LOCK, PART, storing
from lorax_server.errors import AdapterError, SourceError

logger = logging.getLogger(__name__)

IN_USE_S = 300.0  # at least; as long as a request may wait for its adapter, if that is longer
MAX_IN_USE_S = 86400.0  # where a request may wait for ever: some day files have to leave
LOOK_AGAIN_S = 60.0  # changes by other processes are noticed after this time
WAIT_S = 60.0  # for another process that makes room
FILL = 0.9  # a fetch that makes room makes some more, so that the next one need not look at all files


def find_in_use_s(adapter_timeout_s: float) -> float:
    """Return the seconds that a version stays after its last use: a request may wait for it, its mark may be older."""
    return max(IN_USE_S, min(adapter_timeout_s + MARK_AGAIN_S, MAX_IN_USE_S))


class DiskBudget:
    """The bytes that caches on one disk may take together. Any thread may use it.

    `max_bytes` None: half of what the disk would have free without them. `in_use_s`: how long a version stays after its
    last use.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int | None = None,
        *,
        in_use_s: float = IN_USE_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._in_use_s = in_use_s
        self._now = now
        self._caches: list[AdapterCache] = []
        self._fixed: list[AdapterCache] = []  # their versions count and stay
        self._lock = threading.Lock()  # guards all below
        self._used = 0  # bytes, without the files that are being fetched
        self._coming = 0  # bytes of the files that are being fetched
        self._coming_files: Counter[Path] = Counter()
        self._limit = 0
        self._looked_at = float("-inf")

    def add(self, cache: AdapterCache, *, is_fixed: bool = False) -> None:
        """Count a cache. The versions of a fixed one cannot be fetched again, and never leave."""
        self._caches.append(cache)
        if is_fixed:
            self._fixed.append(cache)

    @contextmanager
    def room_for(self, what: str, num_bytes: int, files: Collection[Path] = ()) -> Iterator[None]:
        """Make room for files, and reserve it while they are fetched."""
        with self._lock:
            self._coming += num_bytes
            self._coming_files.update(files)
            try:
                self._make_room(what, num_bytes)
            except BaseException:
                self._release(num_bytes, files)
                raise
        has_come = False
        try:
            yield
            has_come = True
        finally:
            with self._lock:
                self._release(num_bytes, files)
                if has_come:
                    self._used += num_bytes
                else:
                    self._looked_at = float("-inf")  # parts of the files may have come, and take room

    def _release(self, num_bytes: int, files: Collection[Path]) -> None:
        self._coming -= num_bytes
        self._coming_files.subtract(files)
        self._coming_files = +self._coming_files

    def sweep(self) -> None:
        """Remove the remains of interrupted fetches and removals. Failures are logged, and retried later."""
        for cache in self._caches:
            try:
                cache.finish_removals()
                for part in list(cache.find_parts()):
                    self._remove_part(part)
            except OSError as error:
                logger.warning("%s cannot be tidied up: %s", self._folder, error)

    def _make_room(self, what: str, num_bytes: int) -> None:
        is_fresh = abs(self._now() - self._looked_at) < LOOK_AGAIN_S
        if is_fresh and self._needed == 0:
            return
        with storing(what):
            locks = self._folder / ".locks"  # which huggingface_hub has too
            locks.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(locks / f"lorax-budget{LOCK}", timeout=WAIT_S):
                    can_ever_fit = self._look(num_bytes)
            except Timeout as error:
                raise SourceError(f"{what}: another process makes room on the disk; try again later") from error
        if self._needed:
            raise self._refusal(what, num_bytes, can_ever_fit)

    @property
    def _needed(self) -> int:
        """Bytes that have to leave."""
        return max(0, self._used + self._coming - self._limit)

    def _look(self, num_bytes: int) -> bool:
        """Measure the caches and make room. Return False if this many bytes can never fit."""
        self.sweep()
        versions = [version for cache in self._caches for version in cache.find_versions()]
        sizes = {path: size for version in versions for path, size in version.files.items()}
        sizes |= {part: read_size(part) for cache in self._caches for part in cache.find_parts()}
        room = sum(sizes.values()) + shutil.disk_usage(self._folder).free
        self._limit = room // 2 if self._max_bytes is None else min(self._max_bytes, room)
        for path in self._coming_files:  # these count as a whole, however much of each has come
            for name in (path, path.with_name(path.name + PART)):
                sizes.pop(name, None)
        self._used = sum(sizes.values())
        self._looked_at = self._now()
        fixed = {path for version in versions if version.cache in self._fixed for path in version.files}
        can_ever_fit = num_bytes + sum(sizes.get(path, 0) for path in fixed) <= self._limit
        if can_ever_fit:
            self._clear([version for version in versions if version.cache not in self._fixed], sizes)
        return can_ever_fit

    def _clear(self, versions: list[CachedVersion], sizes: Mapping[Path, int]) -> None:
        """Remove the longest unused versions, if that makes room enough."""
        candidates = sorted(versions, key=lambda version: version.used_at)
        owners = Counter(path for version in versions for path in version.files)
        while self._needed:
            victims = self._choose(candidates, owners.copy(), sizes)
            if not victims:
                return
            for version in victims:
                candidates.remove(version)
                if self._remove(version):
                    self._used -= _disown(version, owners, sizes)

    def _choose(
        self, versions: Sequence[CachedVersion], owners: Counter[Path], sizes: Mapping[Path, int]
    ) -> list[CachedVersion]:
        """Choose the versions to remove; none if all that may leave are not enough."""
        victims, used = [], self._used
        for version in versions:
            if used + self._coming <= FILL * self._limit:
                break
            if self._is_idle(version):
                victims.append(version)
                used -= _disown(version, owners, sizes)
        return victims if used + self._coming <= self._limit else []

    def _is_idle(self, version: CachedVersion) -> bool:
        try:
            with self._holding(version):
                return True
        except (Timeout, OSError):
            return False

    def _remove(self, version: CachedVersion) -> bool:
        """Remove a version. Return False if it is in use."""
        try:
            with self._holding(version):
                version.cache.remove(version)
        except Timeout:
            return False
        except OSError as error:
            logger.warning("%s cannot be removed: %s", version.folder, error)
            return False
        logger.info("%s made room for other adapters", version.folder)
        return True

    @contextmanager
    def _holding(self, version: CachedVersion) -> Iterator[None]:
        """Keep other processes from fetching a version. Raises a Timeout if it is in use."""
        if abs(self._now() - read_time(version.mark, version.used_at)) < self._in_use_s:
            raise Timeout(str(version.mark))
        with ExitStack() as locks:
            for path in version.files:
                locks.enter_context(FileLock(f"{path}{LOCK}", timeout=0))
            yield

    def _remove_part(self, part: Path) -> None:
        """Remove a part, unless a process fetches it or may resume it soon."""
        with suppress(FileNotFoundError, Timeout):
            if abs(self._now() - os.stat(part).st_mtime) >= IN_USE_S:
                lock = part.with_name(part.name.removesuffix(PART) + LOCK)
                with FileLock(lock, timeout=0):
                    part.unlink()
                    lock.unlink(missing_ok=True)

    def _refusal(self, what: str, num_bytes: int, can_ever_fit: bool) -> AdapterError:
        size = f"{what}: takes {num_bytes} bytes of the disk, where adapters have {self._limit}"
        if can_ever_fit:
            return SourceError(f"{size}, most of which others use now; try again in some minutes")
        kept = "" if num_bytes > self._limit else " and most of them cannot leave, since the hub is offline"
        return AdapterError(f"{size}{kept}; the server's operator can raise --adapter-disk-bytes or free the disk")


def _disown(version: CachedVersion, owners: Counter[Path], sizes: Mapping[Path, int]) -> int:
    """Take a version from the owners of its files. Return the bytes of those that no other version has."""
    owners.subtract(list(version.files))
    return sum(sizes.get(path, 0) for path in version.files if not owners[path])
