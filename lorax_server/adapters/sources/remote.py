"""Sources on the network: files are downloaded into a cache with a disk budget, and served from there."""

import logging
import os
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lorax_server.adapters.sources.disk_budget import MARK_AGAIN_S, DiskBudget, mark_downloaded, mark_used
from lorax_server.adapters.sources.download import Download, count_bytes, download, is_complete, storing
from lorax_server.adapters.sources.source import AdapterFiles, Source
from lorax_server.errors import SourceError
from lorax_server.files.adapter_files import known_files

logger = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
ATTEMPTS = 3  # for a version that is evicted while it is downloaded


class RemoteSource(Source):
    """A source whose files are downloaded to a cache, in huggingface_hub's layout.

    `lorax download` uses the same sources for base models: with `noun` "model", files chosen by `choose`, and without a
    budget.
    """

    def __init__(
        self,
        cache_dir: Path,
        *,
        timeout_s: float = 10.0,  # for each wait on the server
        budget: DiskBudget | None = None,
        noun: str = "adapter",
        choose: Callable[[Collection[str]], Sequence[str]] = known_files,
        num_threads: int = 1,  # concurrent downloads of one version
    ) -> None:
        self._cache_dir = cache_dir
        self._timeout_s = timeout_s
        self._budget = budget
        self._noun = noun
        self._choose = choose
        self._num_threads = num_threads

    def fetch(self, files: AdapterFiles, names: Sequence[str], token: str | None) -> Path:
        folder = self._repo_folder(files.name) / "snapshots" / files.version
        for _ in range(ATTEMPTS):
            mark_used(folder)  # before each look at the files, so that they stay
            missing = [file for file in names if not is_complete(folder / file, files.sizes[file])]
            if not missing:
                return folder
            self._download_missing(files, folder, missing, token)
        raise SourceError(f"{self._what(files.name)}: its files leave the disk as soon as they come; try again later")

    def mark_used(self, folder: Path) -> None:
        mark_used(folder, MARK_AGAIN_S)

    @abstractmethod
    def _repo_folder(self, name: str) -> Path:
        """Return the folder for all versions of a name."""

    @abstractmethod
    def _blob_name(self, files: AdapterFiles, file: str) -> str:
        """Return the name of a file's blob, which identifies its content."""

    @abstractmethod
    def _connect(self, token: str | None) -> AbstractContextManager[Any]:
        """Return a client for the requests of one download."""

    @abstractmethod
    def _open(
        self, client: Any, files: AdapterFiles, file: str, offset: int
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Request a file from an offset. Return the offset at which the response starts, and its chunks."""

    @abstractmethod
    def _make_check(self, client: Any, files: AdapterFiles, file: str) -> Callable[[Path], bool]:
        """Return a function that verifies the content of a downloaded file."""

    def _what(self, name: str) -> str:
        return f"{self._noun} {name!r}"

    def _download_missing(self, files: AdapterFiles, folder: Path, names: Sequence[str], token: str | None) -> None:
        """Download files, then link all of them: a version that was interrupted has no links."""
        what = self._what(files.name)
        blobs = {file: folder.parent.parent / "blobs" / self._blob_name(files, file) for file in names}
        with self._reserving(what, folder, {blob: files.sizes[file] for file, blob in blobs.items()}):
            with self._connect(token) as client:
                self._download_all(client, files, folder, blobs)
            with storing(what):
                for file, blob in blobs.items():
                    _link(folder / file, blob)

    @contextmanager
    def _reserving(self, what: str, folder: Path, sizes: dict[Path, int]) -> Iterator[None]:
        if self._budget is None:
            yield
            return
        new = {blob: size for blob, size in sizes.items() if not is_complete(blob, size)}
        with self._budget.room_for(what, sum(new.values()), new):
            with storing(what):
                mark_downloaded(folder)
            yield
            with storing(what):
                mark_downloaded(folder)  # again: an eviction may have removed the mark meanwhile

    def _download_all(self, client: Any, files: AdapterFiles, folder: Path, blobs: dict[str, Path]) -> None:
        failures: list[BaseException] = []
        total, log_at = sum(files.sizes[file] for file in blobs), time.monotonic() + LOG_EVERY_S

        def on_chunk() -> None:
            nonlocal log_at
            if failures:
                raise CancelledError
            if time.monotonic() >= log_at:
                log_at = time.monotonic() + LOG_EVERY_S
                done = sum(map(count_bytes, blobs.values()))
                logger.info("%s: %d of %d bytes, %d%%", self._what(files.name), done, total, 100 * done // total)
                mark_used(folder)

        def download_one(file: str) -> None:
            what, open_at = f"{self._what(files.name)}: {file}", partial(self._open, client, files, file)
            try:
                if not failures:
                    check = self._make_check(client, files, file)
                    download(Download(what, blobs[file], files.sizes[file], check, open_at, self._timeout_s, on_chunk))
            except BaseException as error:
                failures.append(error)

        with ThreadPoolExecutor(self._num_threads) as pool:
            try:
                list(pool.map(download_one, blobs))
            except KeyboardInterrupt as interrupt:  # raised in this thread: the downloads have to stop too
                failures.append(interrupt)
        if failures:
            raise failures[0]


def _link(path: Path, blob: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    new.symlink_to(os.path.relpath(blob, path.parent))
    os.replace(new, path)
