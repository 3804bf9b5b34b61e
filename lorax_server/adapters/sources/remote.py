"""The base class of remote sources, which download files to a disk cache."""

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

from lorax_server.adapters.sources.disk_budget import MARK_INTERVAL_S, DiskBudget, mark_downloaded, mark_used
from lorax_server.adapters.sources.download import (
    Download,
    convert_disk_errors,
    count_downloaded_bytes,
    download,
    is_complete,
)
from lorax_server.adapters.sources.source import AdapterFiles, Source
from lorax_server.errors import SourceError
from lorax_server.files.adapter_files import select_known_files

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0
EVICTION_ATTEMPTS = 3  # retries if a version is evicted during its download


class RemoteSource(Source):
    """A remote source with a disk cache, which has the layout of huggingface_hub.

    `lorax download` uses the same classes for base models, with `kind="model"`, a different `select_files` and no
    disk budget.
    """

    def __init__(
        self,
        cache_dir: Path,
        *,
        timeout_s: float = 10.0,  # for each network operation
        budget: DiskBudget | None = None,
        kind: str = "adapter",
        select_files: Callable[[Collection[str]], Sequence[str]] = select_known_files,
        num_threads: int = 1,  # concurrent downloads of one version
    ) -> None:
        self._cache_dir = cache_dir
        self._timeout_s = timeout_s
        self._budget = budget
        self._kind = kind
        self._select_files = select_files
        self._num_threads = num_threads

    def fetch(self, files: AdapterFiles, names: Sequence[str], token: str | None) -> Path:
        folder = self._repo_folder(files.name) / "snapshots" / files.version
        for _ in range(EVICTION_ATTEMPTS):
            mark_used(folder)  # before checking the files, so that they are not evicted after the check
            missing = [file for file in names if not is_complete(folder / file, files.sizes[file])]
            if not missing:
                return folder
            self._download_missing(files, folder, missing, token)
        raise SourceError(f"{self._label(files.name)}: its files were evicted during the download; try again later")

    def mark_used(self, folder: Path) -> None:
        mark_used(folder, MARK_INTERVAL_S)

    @abstractmethod
    def _repo_folder(self, name: str) -> Path:
        """Return the cache folder that contains all versions of the adapter `name`."""

    @abstractmethod
    def _blob_name(self, files: AdapterFiles, file: str) -> str:
        """Return the file's name in the `blobs` folder, which identifies its content."""

    @abstractmethod
    def _connect(self, token: str | None) -> AbstractContextManager[Any]:
        """Return a client for the requests in one download."""

    @abstractmethod
    def _open(
        self, client: Any, files: AdapterFiles, file: str, offset: int
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Request a file, starting at an offset. Yield the response's start offset and its chunks."""

    @abstractmethod
    def _make_checksum_test(self, client: Any, files: AdapterFiles, file: str) -> Callable[[Path], bool]:
        """Return a function that returns True if a downloaded file has the right content."""

    def _label(self, name: str) -> str:
        return f"{self._kind} {name!r}"

    def _download_missing(self, files: AdapterFiles, folder: Path, names: Sequence[str], token: str | None) -> None:
        """Download the missing files, and then link them into `folder`, so that the folder never contains incomplete
        files.
        """
        label = self._label(files.name)
        blobs = {file: folder.parent.parent / "blobs" / self._blob_name(files, file) for file in names}
        with self._reserve_space(label, folder, {blob: files.sizes[file] for file, blob in blobs.items()}):
            with self._connect(token) as client:
                self._download_all(client, files, folder, blobs)
            with convert_disk_errors(label):
                for file, blob in blobs.items():
                    _link_blob(folder / file, blob)

    @contextmanager
    def _reserve_space(self, label: str, folder: Path, sizes: dict[Path, int]) -> Iterator[None]:
        if self._budget is None:
            yield
            return
        new = {blob: size for blob, size in sizes.items() if not is_complete(blob, size)}
        with self._budget.reserve_space(label, sum(new.values()), new):
            with convert_disk_errors(label):
                mark_downloaded(folder)
            yield
            with convert_disk_errors(label):
                mark_downloaded(folder)  # repeated, because an eviction may have removed the mark

    def _download_all(self, client: Any, files: AdapterFiles, folder: Path, blobs: dict[str, Path]) -> None:
        failures: list[BaseException] = []
        total, log_at = sum(files.sizes[file] for file in blobs), time.monotonic() + LOG_INTERVAL_S

        def on_chunk() -> None:
            nonlocal log_at
            if failures:
                raise CancelledError
            if time.monotonic() >= log_at:
                log_at = time.monotonic() + LOG_INTERVAL_S
                done = sum(map(count_downloaded_bytes, blobs.values()))
                logger.info("%s: %d of %d bytes, %d%%", self._label(files.name), done, total, 100 * done // total)
                mark_used(folder)

        def download_one(file: str) -> None:
            label, open_at = f"{self._label(files.name)}: {file}", partial(self._open, client, files, file)
            try:
                if not failures:
                    check = self._make_checksum_test(client, files, file)
                    download(Download(label, blobs[file], files.sizes[file], check, open_at, self._timeout_s, on_chunk))
            except BaseException as error:
                failures.append(error)

        with ThreadPoolExecutor(self._num_threads) as pool:
            try:
                list(pool.map(download_one, blobs))
            except KeyboardInterrupt as interrupt:  # raised only in this thread, so stop the others
                failures.append(interrupt)
        if failures:
            raise failures[0]


def _link_blob(path: Path, blob: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    new.symlink_to(os.path.relpath(blob, path.parent))
    os.replace(new, path)
