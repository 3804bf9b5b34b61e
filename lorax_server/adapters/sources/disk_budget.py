"""Disk budget for downloaded adapters: least recently used versions are evicted by the thread that needs space.

Caches have the layout of huggingface_hub: one folder per repository, with `blobs/<digest>` and links to the blobs in
`snapshots/<version>`. A version that this server downloads also has a mark, `.lorax/<version>`, whose modification time
is the time of the last use. Only marked versions count and are evicted, so other programs can share the folder.

A version with a recent mark is in use: a process downloads, identifies or prepares it, or a request waits for it. Thus
processes can share a cache without messages. Nothing is evicted for a download that would not fit even then.
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

from lorax_server.adapters.sources.download import LOCK, PART, storing
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.plain_file import look

logger = logging.getLogger(__name__)

IN_USE_S = 300.0  # minimum; the adapter timeout if that is longer
MAX_IN_USE_S = 86400.0  # for adapter timeouts without a limit, so that files can be evicted at all
MARK_AGAIN_S = 60.0  # a version in constant use is marked this often
MEASURE_AGAIN_S = 60.0  # changes by other processes are noticed after this time
FILL = 0.9  # eviction goes below the limit, so that the next downloads need not measure the caches


def find_in_use_s(adapter_timeout_s: float) -> float:
    """Return how long a version stays after its last use: as long as a request may wait, plus the age of its mark."""
    return max(IN_USE_S, min(adapter_timeout_s + MARK_AGAIN_S, MAX_IN_USE_S))


def mark_of(folder: Path) -> Path:
    """Return the path of a version's mark."""
    return folder.parent.parent / ".lorax" / folder.name


def mark_downloaded(folder: Path) -> None:
    """Mark a version that this server downloads."""
    mark = mark_of(folder)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def mark_used(folder: Path, min_age_s: float = 0.0) -> None:
    """Renew the mark of a version if it has one that is at least `min_age_s` old."""
    mark = mark_of(folder)
    with suppress(OSError):  # a version without a readable mark can still be served
        if abs(time.time() - mark.stat().st_mtime) >= min_age_s:
            os.utime(mark)


@dataclass(frozen=True)
class CachedVersion:
    """A marked version in a cache."""

    folder: Path
    used_at: float
    files: Mapping[Path, int]  # sizes of its blobs, which versions may share


class DiskBudget:
    """The bytes that caches on one disk may use together. Thread-safe.

    `max_bytes` defaults to half of the space that would be free without the caches. `in_use_s` is how long a version
    stays after its last use.
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
        self._caches: list[Path] = []
        self._lock = threading.Lock()  # guards all below
        self._used = 0  # bytes, without current downloads
        self._downloads: list[tuple[int, Collection[Path]]] = []
        self._limit = 0
        self._measured_at = float("-inf")

    def add(self, cache: Path) -> None:
        """Count a cache, and evict its versions if they need too much space."""
        self._caches.append(cache)

    @contextmanager
    def room_for(self, what: str, num_bytes: int, files: Collection[Path] = ()) -> Iterator[None]:
        """Make room for files, and reserve it while they are downloaded."""
        download, is_done = (num_bytes, files), False
        try:
            with self._lock:
                self._downloads.append(download)
                self._make_room(what, num_bytes)
            yield
            is_done = True
        finally:
            with self._lock:
                self._downloads.remove(download)
                if is_done:
                    self._used += num_bytes
                else:
                    self._measured_at = float("-inf")  # parts of the files may take space

    def sweep(self) -> dict[Path, int]:
        """Remove files of downloads that were interrupted a while ago. Return the sizes of more recent ones."""
        sizes = {}
        for path, used_at in self._find_unfinished():
            blob = path.with_name(path.name.removesuffix(PART))
            try:
                sizes[path] = path.stat().st_size
                if abs(self._now() - used_at) >= IN_USE_S:
                    with _locked([blob]):
                        path.unlink()
                        blob.with_name(blob.name + LOCK).unlink(missing_ok=True)
                        del sizes[path]
            except (FileNotFoundError, Timeout):
                pass
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error)
        return sizes

    @property
    def _excess(self) -> int:
        """Bytes to evict."""
        return self._used + sum(num_bytes for num_bytes, _ in self._downloads) - self._limit

    def _make_room(self, what: str, num_bytes: int) -> None:
        if abs(self._now() - self._measured_at) < MEASURE_AGAIN_S and self._excess <= 0:
            return
        with storing(what):
            self._folder.mkdir(parents=True, exist_ok=True)
            sizes = self.sweep()
            versions = list(self._find_versions())
            self._measure(versions, sizes)
            if self._excess > 0 and num_bytes <= self._limit:
                self._evict(versions, sizes)
        if self._excess > 0:
            size = f"{what}: takes {num_bytes} bytes of the disk, where adapters have {self._limit}"
            if num_bytes > self._limit:
                raise AdapterError(f"{size}; the server's operator can raise --adapter-disk-bytes or free the disk")
            raise SourceError(f"{size}, most of which others use now; try again in some minutes")

    def _measure(self, versions: Collection[CachedVersion], sizes: dict[Path, int]) -> None:
        """Add the files of versions to `sizes`, and drop the files of current downloads, which count in full."""
        for version in versions:
            sizes.update(version.files)
        space = sum(sizes.values()) + shutil.disk_usage(self._folder).free
        self._limit = space // 2 if self._max_bytes is None else min(self._max_bytes, space)
        for _, files in self._downloads:
            for path in files:
                sizes.pop(path, None)
                sizes.pop(path.with_name(path.name + PART), None)
        self._used = sum(sizes.values())
        self._measured_at = self._now()

    def _evict(self, versions: list[CachedVersion], sizes: Mapping[Path, int]) -> None:
        """Evict the least recently used versions, if that makes enough room."""
        idle: list[CachedVersion] = []
        in_use: set[Path] = set()
        for version in sorted(versions, key=lambda each: each.used_at):
            if self._is_idle(version):
                idle.append(version)
            else:
                in_use.update(version.files)
        evictable = {path for version in idle for path in version.files} - in_use
        if sum(sizes.get(path, 0) for path in evictable) < self._excess:
            return
        for version in idle:
            if self._excess <= (FILL - 1) * self._limit:
                return
            self._used -= self._remove(version)

    def _is_idle(self, version: CachedVersion) -> bool:
        return abs(self._now() - _time_of(mark_of(version.folder))) >= self._in_use_s

    def _remove(self, version: CachedVersion) -> int:
        """Remove a version unless it is in use, and return the freed bytes.

        The mark goes last: after a crash, the version can still be removed.
        """
        freed, repo = 0, version.folder.parent.parent
        others = [folder for folder in _list(version.folder.parent) if folder != version.folder]
        try:
            with _locked(version.files):
                if not self._is_idle(version):
                    return 0
                for blob in set(version.files).difference(*map(_find_blobs, others)):
                    blob.unlink(missing_ok=True)
                    freed += version.files[blob]
                    blob.with_name(blob.name + LOCK).unlink(missing_ok=True)
                shutil.rmtree(version.folder, ignore_errors=True)
                mark_of(version.folder).unlink(missing_ok=True)
        except Timeout:
            return freed
        except OSError as error:
            logger.warning("%s cannot be removed: %s", version.folder, error)
            return freed
        with suppress(OSError):  # a folder is not empty: another version is in it, or is being downloaded
            for folder in (repo / ".lorax", repo / "snapshots", repo / "blobs"):
                folder.rmdir()
            shutil.rmtree(repo / "refs", ignore_errors=True)
            repo.rmdir()
        logger.info("%s was evicted", version.folder)
        return freed

    def _find_versions(self) -> Iterator[CachedVersion]:
        for repo in self._list_repos():
            for mark in _list(repo / ".lorax"):
                folder = repo / "snapshots" / mark.name
                yield CachedVersion(folder, _time_of(mark), {blob: _size_of(blob) for blob in _find_blobs(folder)})

    def _find_unfinished(self) -> Iterator[tuple[Path, float]]:
        """Yield parts of downloads, and blobs of versions that are not complete, with the time of their last use."""
        for repo in self._list_repos():
            marks = _list(repo / ".lorax")
            used_at = max(map(_time_of, marks), default=0.0)
            linked = set[Path]().union(*map(_find_blobs, _list(repo / "snapshots")))
            for path in _list(repo / "blobs"):
                if path.suffix == PART:
                    yield path, _time_of(path)
                elif marks and not path.suffix and path not in linked:
                    yield path, used_at

    def _list_repos(self) -> Iterator[Path]:
        return (repo for cache in self._caches for repo in _list(cache))


@contextmanager
def _locked(blobs: Collection[Path]) -> Iterator[None]:
    """Keep other threads and processes from downloading files. Raises a Timeout if one is being downloaded."""
    with ExitStack() as locks:
        for blob in blobs:
            locks.enter_context(FileLock(f"{blob}{LOCK}", timeout=0))
        yield


def _find_blobs(folder: Path) -> set[Path]:
    """Return the blobs that a version links to."""
    blobs = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # not a link, or gone
                blobs.add(folder.parent.parent / "blobs" / os.path.basename(os.readlink(os.path.join(parent, name))))
    return blobs


def _list(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _size_of(path: Path) -> int:
    status = look(path)
    return 0 if status is None else status.st_size


def _time_of(path: Path) -> float:
    status = look(path)
    return 0.0 if status is None else status.st_mtime
