"""How much of the disk fetched adapters may take. The longest unused leave first, on the thread that fetches another.

Each version of an adapter has a mark: a file whose time says when the version was last used, and that a server fetched
it, so that nothing else in the same folder is ever removed. A version that was used a moment ago is in use: it is being
fetched, identified or prepared, or a request waits for it. So processes may share a folder without a word. A version
that leaves is first moved aside, in one step; whoever looks for it then fetches it again.
"""

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from lorax_server.adapters.sources.download import LOCK, PART, storing
from lorax_server.errors import AdapterError, SourceError

logger = logging.getLogger(__name__)

IN_USE_S = 300.0  # longer than a request waits for its adapter
LOOK_AGAIN_S = 60.0  # what other processes do to the folder is noticed that late
WAIT_S = 60.0  # for another process that makes room
# Whoever has to make room makes some more, so that not each one that comes next has to look at all files.
FILL = 0.9


@dataclass(frozen=True)
class Version:
    """One version of an adapter on the disk."""

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
        """Remove it, in one step for whoever looks."""

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


def time_of(mark: Path, otherwise: float) -> float:
    """When a version was last used."""
    try:
        return os.stat(mark).st_mtime
    except OSError:
        return otherwise


class DiskBudget:
    """The bytes that shelves on one disk may take together. Any thread may use it.

    `max_bytes` None: half of what the disk would have free without them.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None, *, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._now = now
        self._shelves: list[Shelf] = []
        self._lock = threading.Lock()  # of all below
        self._used = 0
        self._coming = 0  # bytes that are being fetched
        self._limit = 0
        self._looked_at = float("-inf")

    def add(self, shelf: Shelf) -> None:
        self._shelves.append(shelf)

    @contextmanager
    def room_for(self, what: str, num_bytes: int) -> Iterator[None]:
        """Have room for what is fetched meanwhile."""
        with self._lock:
            self._coming += num_bytes
            try:
                self._make_room(what, num_bytes)
            except BaseException:
                self._coming -= num_bytes
                raise
        num_stored = 0
        try:
            yield
            num_stored = num_bytes
        finally:
            with self._lock:
                self._coming -= num_bytes
                self._used += num_stored

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
        if is_fresh and self._used + self._coming <= self._limit:
            return
        with storing(what):
            locks = self._folder / ".locks"  # which huggingface_hub has too
            locks.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(locks / f"lorax-budget{LOCK}", timeout=WAIT_S):
                    self._look()
            except Timeout as error:
                raise SourceError(f"{what}: another process makes room on the disk; try again later") from error
        if self._used + self._coming > self._limit:
            raise self._refusal(what, num_bytes)

    def _look(self) -> None:
        self.sweep()
        versions = [(version, shelf) for shelf in self._shelves for version in shelf.find_versions()]
        sizes = {path: size for version, _ in versions for path, size in version.files.items()}
        self._used = sum(sizes.values())
        self._limit = self._find_limit()
        self._looked_at = self._now()
        if self._used + self._coming > self._limit:
            owners = Counter(path for version, _ in versions for path in version.files)
            for version, shelf in sorted(versions, key=lambda each: each[0].used_at):
                if self._used + self._coming <= FILL * self._limit:
                    return
                if self._leave(version, shelf):
                    owners.subtract(list(version.files))
                    self._used -= sum(size for path, size in version.files.items() if not owners[path])

    def _find_limit(self) -> int:
        room = self._used + shutil.disk_usage(self._folder).free
        return room // 2 if self._max_bytes is None else min(self._max_bytes, room)

    def _leave(self, version: Version, shelf: Shelf) -> bool:
        """False if it is in use."""
        if abs(self._now() - time_of(version.mark, version.used_at)) < IN_USE_S:
            return False
        try:
            with ExitStack() as held:
                for path in version.files:
                    held.enter_context(FileLock(f"{path}{LOCK}", timeout=0))
                shelf.remove(version)
        except Timeout:
            return False
        except OSError as error:
            logger.warning("%s cannot be removed: %s", version.folder, error)
            return False
        logger.info("%s made room for other adapters", version.folder)
        return True

    def _remove_part(self, part: Path) -> None:
        """Unless somebody fetches it, or may go on with it soon."""
        with suppress(FileNotFoundError, Timeout):
            if abs(self._now() - os.stat(part).st_mtime) >= IN_USE_S:
                lock = part.with_name(part.name.removesuffix(PART) + LOCK)
                with FileLock(lock, timeout=0):
                    part.unlink()
                    lock.unlink(missing_ok=True)

    def _refusal(self, what: str, num_bytes: int) -> AdapterError:
        size = f"{what}: takes {num_bytes} bytes of the disk, where adapters have {self._limit}"
        if num_bytes > self._limit:
            return AdapterError(f"{size}; the server's operator can raise --adapter-disk-bytes or free the disk")
        return SourceError(f"{size}, most of which others use now; try again in some minutes")
