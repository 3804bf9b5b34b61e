"""The disk budget for downloaded adapters. A thread that needs space evicts the least recently used versions.

Caches use the huggingface_hub layout: one folder per repository, with `blobs/<digest>` and links in
`snapshots/<version>`. The modification time of the mark file `.lorax/<version>` is the time of last use. Versions
without a mark belong to other programs: they are not counted and not evicted. Versions with a recent mark are in use,
so processes can share a cache without communication.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from lorax_server.adapters.sources.download import LOCK_SUFFIX, PART_SUFFIX, convert_disk_errors
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.regular_file import stat_or_none

logger = logging.getLogger(__name__)

MIN_IN_USE_PERIOD_S = 300.0  # how long a version is protected after its last use; a longer adapter timeout extends it
MAX_IN_USE_PERIOD_S = 86400.0  # upper limit, so that files become evictable even without an adapter timeout
MARK_INTERVAL_S = 60.0  # how often the marks of versions in use are renewed
MEASURE_INTERVAL_S = 60.0  # how often disk usage is measured again, because other processes can change it
EVICTION_TARGET_FRACTION = 0.9  # evict below the limit, so that the next downloads fit without eviction


def compute_in_use_period_s(adapter_timeout_s: float) -> float:
    """Return the number of seconds after its last use for which a cached version is protected from eviction."""
    return max(MIN_IN_USE_PERIOD_S, min(adapter_timeout_s + MARK_INTERVAL_S, MAX_IN_USE_PERIOD_S))


def mark_path(folder: Path) -> Path:
    """Return the path of a cached version's mark file, whose modification time is the time of last use."""
    return folder.parent.parent / ".lorax" / folder.name


def mark_downloaded(folder: Path) -> None:
    """Create a downloaded version's mark file, so that the version counts toward the disk budget."""
    mark = mark_path(folder)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def mark_used(folder: Path, min_age_s: float = 0.0) -> None:
    """Set the version's time of last use to now, if its mark file exists and is at least `min_age_s` old."""
    mark = mark_path(folder)
    with suppress(OSError):  # versions without a mark can be served too
        if abs(time.time() - mark.stat().st_mtime) >= min_age_s:
            os.utime(mark)


@dataclass(frozen=True)
class CachedVersion:
    """An adapter version in a cache. `used_at` is the time of last use."""

    folder: Path
    used_at: float
    files: Mapping[Path, int]  # blob path -> bytes; versions may share blobs


class DiskBudget:
    """Limits the total disk space of several caches on one disk. All methods are thread-safe.

    `max_bytes` defaults to half of the free space plus the space that the caches use. Versions used within `in_use_s`
    are not evicted.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int | None = None,
        *,
        in_use_s: float = MIN_IN_USE_PERIOD_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._in_use_s = in_use_s
        self._now = now
        self._caches: list[Path] = []
        self._lock = threading.Lock()  # guards the fields below
        self._used = 0  # bytes in the caches, without current downloads
        self._downloads: list[tuple[int, Collection[Path]]] = []
        self._limit = 0
        self._measured_at = float("-inf")

    def add_cache(self, cache: Path) -> None:
        """Add a cache folder to the budget."""
        self._caches.append(cache)

    @contextmanager
    def reserve_space(self, label: str, num_bytes: int, files: Collection[Path] = ()) -> Iterator[None]:
        """Reserve disk space for a download while the context is active. Evict idle versions if necessary."""
        download, is_finished = (num_bytes, files), False
        try:
            with self._lock:
                self._downloads.append(download)
                self._free_space(label, num_bytes)
            yield
            is_finished = True
        finally:
            with self._lock:
                self._downloads.remove(download)
                if is_finished:
                    self._used += num_bytes
                else:
                    self._measured_at = float("-inf")  # measure again, because partial files may use space

    def remove_interrupted_downloads(self) -> dict[Path, int]:
        """Remove old files from interrupted downloads. Return the sizes of recent files, which are kept."""
        sizes = {}
        for path, used_at in self._find_interrupted_downloads():
            blob = path.with_name(path.name.removesuffix(PART_SUFFIX))
            try:
                sizes[path] = path.stat().st_size
                if abs(self._now() - used_at) >= MIN_IN_USE_PERIOD_S:
                    with _lock_blobs([blob]):
                        path.unlink()
                        blob.with_name(blob.name + LOCK_SUFFIX).unlink(missing_ok=True)
                        del sizes[path]
            except (FileNotFoundError, Timeout):
                pass
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error)
        return sizes

    @property
    def _count_excess_bytes(self) -> int:
        """Return the number of bytes by which caches and current downloads exceed the limit."""
        return self._used + sum(num_bytes for num_bytes, _ in self._downloads) - self._limit

    def _free_space(self, label: str, num_bytes: int) -> None:
        if abs(self._now() - self._measured_at) < MEASURE_INTERVAL_S and self._count_excess_bytes <= 0:
            return
        with convert_disk_errors(label):
            self._folder.mkdir(parents=True, exist_ok=True)
            sizes = self.remove_interrupted_downloads()
            versions = list(self._find_versions())
            self._measure_usage(versions, sizes)
            if self._count_excess_bytes > 0 and num_bytes <= self._limit:
                self._evict(versions, sizes)
        if self._count_excess_bytes > 0:
            size = f"{label}: needs {num_bytes} bytes of disk space, the limit for all adapters is {self._limit}"
            if num_bytes > self._limit:
                raise AdapterError(f"{size}; the server's operator can raise --adapter-disk-bytes or free the disk")
            raise SourceError(f"{size} and the other adapters are in use; try again in a few minutes")

    def _measure_usage(self, versions: Collection[CachedVersion], sizes: dict[Path, int]) -> None:
        """Update the limit and the used bytes. In `sizes`, add the versions' files and remove current downloads."""
        for version in versions:
            sizes.update(version.files)
        space = sum(sizes.values()) + shutil.disk_usage(self._folder).free
        self._limit = space // 2 if self._max_bytes is None else min(self._max_bytes, space)
        for _, files in self._downloads:
            for path in files:
                sizes.pop(path, None)
                sizes.pop(path.with_name(path.name + PART_SUFFIX), None)
        self._used = sum(sizes.values())
        self._measured_at = self._now()

    def _evict(self, versions: list[CachedVersion], sizes: Mapping[Path, int]) -> None:
        """Evict the least recently used versions. If this could not free enough space, evict no version."""
        idle: list[CachedVersion] = []
        in_use: set[Path] = set()
        for version in sorted(versions, key=lambda version: version.used_at):
            if self._is_idle(version):
                idle.append(version)
            else:
                in_use.update(version.files)
        evictable = {path for version in idle for path in version.files} - in_use
        if sum(sizes.get(path, 0) for path in evictable) < self._count_excess_bytes:
            return
        for version in idle:
            if self._count_excess_bytes <= (EVICTION_TARGET_FRACTION - 1) * self._limit:
                return
            self._used -= self._remove(version)

    def _is_idle(self, version: CachedVersion) -> bool:
        return abs(self._now() - _mtime_of(mark_path(version.folder))) >= self._in_use_s

    def _remove(self, version: CachedVersion) -> int:
        """Remove a version unless it is in use, and return the freed bytes.

        The mark file is removed last, so that the eviction can be repeated after a crash.
        """
        freed, repo = 0, version.folder.parent.parent
        others = [folder for folder in _list_folder(version.folder.parent) if folder != version.folder]
        try:
            with _lock_blobs(version.files):
                if not self._is_idle(version):
                    return 0
                for blob in set(version.files).difference(*map(_find_blobs, others)):
                    blob.unlink(missing_ok=True)
                    freed += version.files[blob]
                    blob.with_name(blob.name + LOCK_SUFFIX).unlink(missing_ok=True)
                shutil.rmtree(version.folder, ignore_errors=True)
                mark_path(version.folder).unlink(missing_ok=True)
        except Timeout:
            return freed
        except OSError as error:
            logger.warning("%s cannot be removed: %s", version.folder, error)
            return freed
        with suppress(OSError):  # the folder contains another version
            for folder in (repo / ".lorax", repo / "snapshots", repo / "blobs"):
                folder.rmdir()
            shutil.rmtree(repo / "refs", ignore_errors=True)
            repo.rmdir()
        logger.info("%s was evicted", version.folder)
        return freed

    def _find_versions(self) -> Iterator[CachedVersion]:
        for repo in self._list_repos():
            for mark in _list_folder(repo / ".lorax"):
                folder = repo / "snapshots" / mark.name
                yield CachedVersion(folder, _mtime_of(mark), {blob: _size_of(blob) for blob in _find_blobs(folder)})

    def _find_interrupted_downloads(self) -> Iterator[tuple[Path, float]]:
        """Yield the path and last use time of each partial download and of each blob without a version."""
        for repo in self._list_repos():
            marks = _list_folder(repo / ".lorax")
            used_at = max(map(_mtime_of, marks), default=0.0)
            linked = set[Path]().union(*map(_find_blobs, _list_folder(repo / "snapshots")))
            for path in _list_folder(repo / "blobs"):
                if path.suffix == PART_SUFFIX:
                    yield path, _mtime_of(path)
                elif marks and not path.suffix and path not in linked:
                    yield path, used_at

    def _list_repos(self) -> Iterator[Path]:
        return (repo for cache in self._caches for repo in _list_folder(cache))


@contextmanager
def _lock_blobs(blobs: Collection[Path]) -> Iterator[None]:
    """Prevent downloads of these blobs while the context is active. Raise Timeout if a blob is being downloaded."""
    with ExitStack() as locks:
        for blob in blobs:
            locks.enter_context(FileLock(f"{blob}{LOCK_SUFFIX}", timeout=0))
        yield


def _find_blobs(folder: Path) -> set[Path]:
    """Return the blobs that a version links to."""
    blobs = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the path is not a link, or was removed
                blobs.add(folder.parent.parent / "blobs" / os.path.basename(os.readlink(os.path.join(parent, name))))
    return blobs


def _list_folder(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _size_of(path: Path) -> int:
    status = stat_or_none(path)
    return 0 if status is None else status.st_size


def _mtime_of(path: Path) -> float:
    status = stat_or_none(path)
    return 0.0 if status is None else status.st_mtime
