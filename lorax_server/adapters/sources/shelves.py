"""The folders in which sources keep what they have fetched, and from which versions of adapters leave."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lorax_server.adapters.sources.disk_budget import Version, size_of, time_of
from lorax_server.adapters.sources.download import LOCK, PART

ASIDE = ".aside-"
PLACE = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")


class FolderShelf:
    """A folder for each version, named by a hash."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def mark_of(self, folder: Path) -> Path:
        return folder / ".used"

    def find_versions(self) -> Iterator[Version]:
        for folder in _list(self._root):
            if PLACE.fullmatch(folder.name):
                mark = self.mark_of(folder)
                files = {
                    path: size_of(path) for path in _walk(folder) if path.suffix not in (LOCK, PART) and path != mark
                }
                yield Version(self, folder, mark, time_of(mark, time_of(folder, 0.0)), files)

    def find_parts(self) -> Iterator[Path]:
        return (path for folder in _list(self._root) for path in _walk(folder) if path.suffix == PART)

    def remove(self, version: Version) -> None:
        aside = self._root / f"{ASIDE}{uuid.uuid4().hex}"
        os.rename(version.folder, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def finish(self) -> None:
        for folder in _list(self._root):
            if folder.name.startswith(ASIDE):
                shutil.rmtree(folder, ignore_errors=True)


class HubShelf:
    """huggingface_hub's cache: a folder for each repository, with files by their digests and links to them by version.

    What is ours lies in a folder of each repository that huggingface_hub does not look at.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def mark_of(self, folder: Path) -> Path:
        return _marks(folder.parent.parent) / folder.name

    def find_versions(self) -> Iterator[Version]:
        for repo in self._repos():
            marked = {path.name for path in _list(_marks(repo))}
            others = {path.name for path in _list(repo / "snapshots")} - marked
            for commit in filter(COMMIT.fullmatch, marked | others):
                folder = repo / "snapshots" / commit
                if commit in marked or self.was_fetched(folder):
                    mark, blobs = self.mark_of(folder), (repo / "blobs" / blob for blob in _blobs(folder))
                    yield Version(self, folder, mark, time_of(mark, 0.0), {blob: size_of(blob) for blob in blobs})

    def was_fetched(self, folder: Path) -> bool:
        """True if a server has fetched a version, though it may have been one that set no marks.

        Only a server leaves a lock beside each file: huggingface_hub keeps its locks elsewhere.
        """
        locks = [folder.parent.parent / "blobs" / f"{blob}{LOCK}" for blob in _blobs(folder)]
        return bool(locks) and all(map(os.path.isfile, locks))

    def find_parts(self) -> Iterator[Path]:
        return (path for repo in self._repos() for path in _list(repo / "blobs") if path.suffix == PART)

    def remove(self, version: Version) -> None:
        repo = version.folder.parent.parent
        aside = _marks(repo) / f"{ASIDE}{uuid.uuid4().hex}"
        aside.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # no file of it ever came
            os.rename(version.folder, aside)
        version.mark.unlink(missing_ok=True)
        self._clear(repo, aside)

    def finish(self) -> None:
        for repo in self._repos():
            for aside in _list(_marks(repo)):
                if aside.name.startswith(ASIDE):
                    self._clear(repo, aside)

    def _clear(self, repo: Path, aside: Path) -> None:
        """Remove a version that was moved aside, and of its files those that no other version has."""
        kept = {blob for folder in _list(repo / "snapshots") for blob in _blobs(folder)}
        for blob in _blobs(aside) - kept:
            for path in (repo / "blobs" / blob, repo / "blobs" / f"{blob}{LOCK}"):
                path.unlink(missing_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # it holds something else
            for folder in (_marks(repo), repo / "snapshots", repo / "blobs"):
                folder.rmdir()
            shutil.rmtree(repo / "refs", ignore_errors=True)  # what branches pointed at
            repo.rmdir()  # and nothing that somebody has begun to fetch since

    def _repos(self) -> list[Path]:
        return [repo for repo in _list(self._root) if repo.name.startswith("models--")]


def _marks(repo: Path) -> Path:
    return repo / ".lorax"


def _blobs(folder: Path) -> set[str]:
    """The names of the files that the links of a version lead to."""
    found = set()
    for path in _walk(folder):
        with suppress(OSError):  # no link, or gone
            found.add(os.path.basename(os.readlink(path)))
    return found


def _list(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _walk(folder: Path) -> Iterator[Path]:
    return (Path(place, name) for place, _, names in os.walk(folder) for name in names)
