"""The part of a disk that fetched adapters may take. The longest unused leave first, on the thread that fetches one.

Each version of an adapter has a mark: a file whose time says when the version was last used, and that a server fetched
it, so that nothing else in the same folder is ever removed. A version that was used a moment ago is in use: it is being
fetched, identified or prepared, or a request waits for it. So processes may share a folder without a word. A version
that leaves is first moved aside, in one step; whoever looks for it then fetches it again. None leaves for a fetch that
does not fit even so.
"""

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from lorax_server.adapters.sources.download import LOCK, PART, storing
from lorax_server.errors import AdapterError, SourceError

logger = logging.getLogger(__name__)

IN_USE_S = 300.0  # at least; as long as a request waits for its adapter, if that is longer
MARK_AGAIN_S = 60.0  # what is used all the time is marked that often
MAX_IN_USE_S = 86400.0  # where a request may wait for ever: some day files have to leave
LOOK_AGAIN_S = 60.0  # what other processes do to the folder is noticed that late
WAIT_S = 60.0  # for another process that makes room
# Whoever has to make room makes some more, so that not each one that comes next has to look at all files.
FILL = 0.9


@dataclass(frozen=True)
class Version:
    """One version of an adapter on the disk."""

    shelf: "Shelf"
    folder: Path
    mark: Path
    used_at: float
    files: Mapping[Path, int]  # bytes of each, which versions may share


class Shelf(Protocol):
    """A folder of versions, laid out as a source likes it."""

    def find_versions(self) -> Iterator[Version]: ...

    def find_parts(self) -> Iterator[Path]:
        """Files that were not fetched to their end."""

    def remove(self, version: Version) -> None:
        """Remove a version, in one step for whoever looks."""

    def finish(self) -> None:
        """Remove what others, which ended in the middle of it, have moved aside."""


def mark_used(mark: Path, is_fetched: bool = False) -> None:
    """Note that a version is used now. Only one that was fetched here gets a mark."""
    if is_fetched:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    else:
        with suppress(OSError):  # whatever is wrong with a note, the files are there
            os.utime(mark)


def mark_used_again(mark: Path) -> None:
    """Note, once a minute at most, that a version is still used."""
    if abs(time.time() - time_of(mark, 0.0)) >= MARK_AGAIN_S:
        mark_used(mark)


def find_in_use_s(adapter_timeout_s: float) -> float:
    """Seconds that a version stays after its last use: while a request may wait for it, and its mark may be older."""
    return max(IN_USE_S, min(adapter_timeout_s + MARK_AGAIN_S, MAX_IN_USE_S))


def time_of(mark: Path, otherwise: float) -> float:
    """The time of a file, which for a mark is when its version was last used."""
    try:
        return os.stat(mark).st_mtime
    except OSError:
        return otherwise


def size_of(path: Path) -> int:
    """The bytes of a file; 0 if it is gone."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


class DiskBudget:
    """The bytes that shelves on one disk may take together. Any thread may use it.

    `max_bytes` None: half of what the disk would have free without them. `in_use_s`: how long a version stays that was
    used.
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
        self._shelves: list[Shelf] = []
        self._fixed: list[Shelf] = []  # whose versions count and stay
        self._lock = threading.Lock()  # of all below
        self._used = 0  # without the files that are being fetched
        self._coming = 0  # bytes of those
        self._coming_files: Counter[Path] = Counter()
        self._limit = 0
        self._looked_at = float("-inf")

    def add(self, shelf: Shelf, *, is_fixed: bool = False) -> None:
        """Count a shelf. The versions of a fixed one cannot be fetched again, and never leave."""
        self._shelves.append(shelf)
        if is_fixed:
            self._fixed.append(shelf)

    @contextmanager
    def room_for(self, what: str, num_bytes: int, files: Collection[Path] = ()) -> Iterator[None]:
        """Have room for the files that are fetched meanwhile."""
        with self._lock:
            self._expect(num_bytes, files)
            try:
                self._make_room(what, num_bytes)
            except BaseException:
                self._forget(num_bytes, files)
                raise
        try:
            yield
        except BaseException:
            with self._lock:
                self._forget(num_bytes, files)
                self._looked_at = float("-inf")  # a part of it may have come, and takes room
            raise
        with self._lock:
            self._forget(num_bytes, files)
            self._used += num_bytes

    def _expect(self, num_bytes: int, files: Collection[Path]) -> None:
        self._coming += num_bytes
        self._coming_files.update(files)

    def _forget(self, num_bytes: int, files: Collection[Path]) -> None:
        self._coming -= num_bytes
        self._coming_files.subtract(files)
        self._coming_files = +self._coming_files

    def sweep(self) -> None:
        """Remove what fetches and removals that were cut short have left. What cannot be removed now can wait."""
        for shelf in self._shelves:
            try:
                shelf.finish()
                for part in list(shelf.find_parts()):
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
        """Bytes that are missing."""
        return max(0, self._used + self._coming - self._limit)

    def _look(self, num_bytes: int) -> bool:
        """Find out what there is, and make room. False if there is no way to have this many bytes."""
        self.sweep()
        versions = [version for shelf in self._shelves for version in shelf.find_versions()]
        sizes = {path: size for version in versions for path, size in version.files.items()}
        sizes |= {part: size_of(part) for shelf in self._shelves for part in shelf.find_parts()}
        room = sum(sizes.values()) + shutil.disk_usage(self._folder).free
        self._limit = room // 2 if self._max_bytes is None else min(self._max_bytes, room)
        for path in self._coming_files:  # which count as a whole, however much of each has come
            for name in (path, path.with_name(path.name + PART)):
                sizes.pop(name, None)
        self._used = sum(sizes.values())
        self._looked_at = self._now()
        fixed = {path for version in versions if version.shelf in self._fixed for path in version.files}
        can_ever_fit = num_bytes + sum(sizes.get(path, 0) for path in fixed) <= self._limit
        if can_ever_fit:
            self._clear([version for version in versions if version.shelf not in self._fixed], sizes)
        return can_ever_fit

    def _clear(self, versions: list[Version], sizes: Mapping[Path, int]) -> None:
        """Remove the longest unused versions, if that makes room enough."""
        left = sorted(versions, key=lambda version: version.used_at)
        owners = Counter(path for version in versions for path in version.files)
        while self._needed:
            victims = self._choose(left, owners.copy(), sizes)
            if not victims:
                return
            for version in victims:
                left.remove(version)
                if self._leave(version):
                    self._used -= _disown(version, owners, sizes)

    def _choose(self, versions: Sequence[Version], owners: Counter[Path], sizes: Mapping[Path, int]) -> list[Version]:
        """Choose those that have to leave; none if all that may leave are not enough."""
        victims, used = [], self._used
        for version in versions:
            if used + self._coming <= FILL * self._limit:
                break
            if self._is_idle(version):
                victims.append(version)
                used -= _disown(version, owners, sizes)
        return victims if used + self._coming <= self._limit else []

    def _is_idle(self, version: Version) -> bool:
        try:
            with self._holding(version):
                return True
        except (Timeout, OSError):
            return False

    def _leave(self, version: Version) -> bool:
        """Remove a version; False if it is in use."""
        try:
            with self._holding(version):
                version.shelf.remove(version)
        except Timeout:
            return False
        except OSError as error:
            logger.warning("%s cannot be removed: %s", version.folder, error)
            return False
        logger.info("%s made room for other adapters", version.folder)
        return True

    @contextmanager
    def _holding(self, version: Version) -> Iterator[None]:
        """Keep others from fetching a version. Raises a Timeout if it is in use."""
        if abs(self._now() - time_of(version.mark, version.used_at)) < self._in_use_s:
            raise Timeout(str(version.mark))
        with ExitStack() as held:
            for path in version.files:
                held.enter_context(FileLock(f"{path}{LOCK}", timeout=0))
            yield

    def _remove_part(self, part: Path) -> None:
        """Unless somebody fetches it, or may go on with it soon."""
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


def _disown(version: Version, owners: Counter[Path], sizes: Mapping[Path, int]) -> int:
    """Take a version from the owners of its files; returns the bytes of those that no other has."""
    owners.subtract(list(version.files))
    return sum(sizes.get(path, 0) for path in version.files if not owners[path])
