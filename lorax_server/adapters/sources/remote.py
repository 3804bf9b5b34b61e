"""Sources on the network: files come here, into a cache with a disk budget, and are served from there."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from lorax_server.adapters.sources.caches import AdapterCache
from lorax_server.adapters.sources.disk_budget import DiskBudget
from lorax_server.adapters.sources.download import Download, download, is_complete, storing
from lorax_server.adapters.sources.source import AdapterFiles, Source
from lorax_server.errors import SourceError

ATTEMPTS = 3  # at a version that is removed to make room while it is fetched


class RemoteSource(Source):
    """A source whose files are downloaded, each version into a folder of its own."""

    noun = "adapter"  # for messages

    def __init__(self, cache: AdapterCache, budget: DiskBudget, timeout_s: float) -> None:
        self._cache = cache
        self._budget = budget
        self._timeout_s = timeout_s

    def fetch(self, files: AdapterFiles, names: Sequence[str], token: str | None) -> Path:
        folder = self._folder_of(files)
        for _ in range(ATTEMPTS):
            self._cache.mark_used(folder)  # before each look at the files, so that they stay
            missing = [file for file in names if not is_complete(folder / file, files.sizes[file])]
            if not missing:
                return folder
            self._bring(files, folder, missing, token)
        raise SourceError(f"{self.noun} {files.name!r}: its files leave the disk as soon as they come; try again later")

    def mark_used(self, folder: Path) -> None:
        self._cache.mark_used_again(folder)

    @abstractmethod
    def _folder_of(self, files: AdapterFiles) -> Path:
        """Return the folder of a version."""

    @abstractmethod
    def _path_of(self, files: AdapterFiles, file: str) -> Path:
        """Return the path to which a file is downloaded."""

    @abstractmethod
    def _download_all(self, files: AdapterFiles, paths: Mapping[str, Path], token: str | None) -> None:
        """Download files to their paths."""

    def _bring(self, files: AdapterFiles, folder: Path, missing: Sequence[str], token: str | None) -> None:
        what, paths = f"{self.noun} {files.name!r}", {file: self._path_of(files, file) for file in missing}
        sizes = {path: files.sizes[file] for file, path in paths.items()}
        new = {path: size for path, size in sizes.items() if not is_complete(path, size)}
        with self._budget.room_for(what, sum(new.values()), new):
            with storing(what):
                self._cache.mark_fetched(folder)
            self._download_all(files, paths, token)

    def _download(
        self,
        files: AdapterFiles,
        file: str,
        path: Path,
        open_at: Callable[[int], AbstractContextManager[tuple[int, Iterator[bytes]]]],
        is_right: Callable[[Path], bool],
    ) -> None:
        keep = partial(self._cache.mark_used, self._folder_of(files))
        what = f"{self.noun} {files.name!r}: {file}"
        download(Download(what, path, files.sizes[file], is_right, open_at, self._timeout_s, keep))
