"""The folders in which sources keep the adapters that they have fetched, a version at a time.

Each version has a mark: a file whose time says when the version was last used. Only a version that a server fetched has
one, so nothing else in the same folder is ever removed.
"""

import os
import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lorax_server.adapters.sources.download import LOCK, PART
from lorax_server.files.plain_file import look

ASIDE = ".aside-"
VERSION_HASH = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
MARK_AGAIN_S = 60.0  # a version in constant use is marked this often


@dataclass(frozen=True)
class CachedVersion:
    """One version of an adapter on the disk."""

    cache: "AdapterCache"
    folder: Path
    mark: Path
    used_at: float
    files: Mapping[Path, int]  # bytes of each file, which versions may share


class AdapterCache(ABC):
    """A folder of versions."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @abstractmethod
    def mark_of(self, folder: Path) -> Path:
        """Return the path of a version's mark."""

    @abstractmethod
    def find_versions(self) -> Iterator[CachedVersion]: ...

    @abstractmethod
    def find_parts(self) -> Iterator[Path]:
        """Yield the files of unfinished downloads."""

    @abstractmethod
    def remove(self, version: CachedVersion) -> None:
        """Remove a version. For other processes it is gone in one step."""

    @abstractmethod
    def finish_removals(self) -> None:
        """Finish the removals of processes that ended in the middle."""

    def mark_fetched(self, folder: Path) -> None:
        """Mark a version that this server begins to fetch."""
        mark = self.mark_of(folder)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def mark_used(self, folder: Path) -> None:
        """Note that a version is used now, if it has a mark."""
        with suppress(OSError):  # a version without a readable mark can still be served
            os.utime(self.mark_of(folder))

    def mark_used_again(self, folder: Path) -> None:
        """Note, once a minute at most, that a version is still used."""
        if abs(time.time() - read_time(self.mark_of(folder), 0.0)) >= MARK_AGAIN_S:
            AdapterCache.mark_used(self, folder)


class FolderCache(AdapterCache):
    """A folder for each version, named by a hash."""

    def mark_of(self, folder: Path) -> Path:
        return folder / ".used"

    def find_versions(self) -> Iterator[CachedVersion]:
        for folder in _list(self._root):
            if VERSION_HASH.fullmatch(folder.name):
                mark = self.mark_of(folder)
                paths = (path for path in _walk(folder) if path.suffix not in (LOCK, PART) and path != mark)
                used_at = read_time(mark, read_time(folder, 0.0))
                yield CachedVersion(self, folder, mark, used_at, {path: read_size(path) for path in paths})

    def find_parts(self) -> Iterator[Path]:
        return (path for folder in _list(self._root) for path in _walk(folder) if path.suffix == PART)

    def remove(self, version: CachedVersion) -> None:
        aside = self._root / f"{ASIDE}{uuid.uuid4().hex}"
        os.rename(version.folder, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def finish_removals(self) -> None:
        for folder in _list(self._root):
            if folder.name.startswith(ASIDE):
                shutil.rmtree(folder, ignore_errors=True)


class HubCache(AdapterCache):
    """huggingface_hub's cache: a folder for each repository, with files by their digests and links to them by version.

    Marks lie in a folder of each repository that huggingface_hub ignores.
    """

    def mark_of(self, folder: Path) -> Path:
        return _marks(folder.parent.parent) / folder.name

    def mark_used(self, folder: Path) -> None:
        with suppress(OSError):
            if not self.mark_of(folder).exists() and self._was_fetched(folder):
                self.mark_fetched(folder)
        super().mark_used(folder)

    def find_versions(self) -> Iterator[CachedVersion]:
        for repo in self._repos():
            marked = {path.name for path in _list(_marks(repo))}
            unmarked = {path.name for path in _list(repo / "snapshots")} - marked
            for commit in filter(COMMIT.fullmatch, marked | unmarked):
                folder = repo / "snapshots" / commit
                if commit in marked or self._was_fetched(folder):
                    mark, blobs = self.mark_of(folder), (repo / "blobs" / blob for blob in _blobs(folder))
                    sizes = {blob: read_size(blob) for blob in blobs}
                    yield CachedVersion(self, folder, mark, read_time(mark, 0.0), sizes)

    def find_parts(self) -> Iterator[Path]:
        return (path for repo in self._repos() for path in _list(repo / "blobs") if path.suffix == PART)

    def remove(self, version: CachedVersion) -> None:
        repo = version.folder.parent.parent
        aside = _marks(repo) / f"{ASIDE}{uuid.uuid4().hex}"
        aside.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # no file of it ever came
            os.rename(version.folder, aside)
        version.mark.unlink(missing_ok=True)
        self._clear(repo, aside)

    def finish_removals(self) -> None:
        for repo in self._repos():
            for aside in _list(_marks(repo)):
                if aside.name.startswith(ASIDE):
                    self._clear(repo, aside)

    def _was_fetched(self, folder: Path) -> bool:
        """Tell whether a server fetched a version, maybe one that set no marks.

        Only a server leaves a lock beside each file: huggingface_hub keeps its locks elsewhere.
        """
        locks = [folder.parent.parent / "blobs" / f"{blob}{LOCK}" for blob in _blobs(folder)]
        return bool(locks) and all(map(os.path.isfile, locks))

    def _clear(self, repo: Path, aside: Path) -> None:
        """Remove a version that was moved aside, and its files unless another version has them."""
        kept = {blob for folder in _list(repo / "snapshots") for blob in _blobs(folder)}
        for blob in _blobs(aside) - kept:
            for path in (repo / "blobs" / blob, repo / "blobs" / f"{blob}{LOCK}"):
                path.unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # it holds something else
            for folder in (_marks(repo), repo / "snapshots", repo / "blobs"):
                folder.rmdir()
            shutil.rmtree(repo / "refs", ignore_errors=True)  # the commits of branches
            repo.rmdir()  # unless another process has begun to fetch since

    def _repos(self) -> list[Path]:
        return [repo for repo in _list(self._root) if repo.name.startswith("models--")]


def read_time(path: Path, default: float) -> float:
    """Return the time of a file. For a mark, this is when its version was last used."""
    status = look(path)
    return default if status is None else status.st_mtime


def read_size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is gone."""
    status = look(path)
    return 0 if status is None else status.st_size


def _marks(repo: Path) -> Path:
    return repo / ".lorax"


def _blobs(folder: Path) -> set[str]:
    """Return the names of the files that a version links to."""
    names = set()
    for path in _walk(folder):
        with suppress(OSError):  # no link, or gone
            names.add(os.path.basename(os.readlink(path)))
    return names


def _list(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _walk(folder: Path) -> Iterator[Path]:
    return (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
