"""Downloads a file. Interrupted downloads are resumed, checksums are verified, and complete files are renamed
atomically.

Neither `huggingface_hub.snapshot_download` (2.4) nor boto3's transfers (1.44) can do all of this (tested with local
servers): resume a download from an earlier call, verify checksums, stop responses that are larger than announced, and
limit the total time.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from lorax_server.errors import SourceError

MAX_ATTEMPTS = 5
LOCK_SUFFIX, PART_SUFFIX = ".lock", ".part"
# Slower downloads time out, so that a malicious server cannot block a thread forever.
MIN_BYTES_PER_S = 50_000


@dataclass(frozen=True)
class Download:
    """A file to download. `open_at(offset)` requests the file and returns the response's start offset and chunks."""

    label: str  # describes the file in error messages
    path: Path
    size: int
    is_valid: Callable[[Path], bool]
    open_at: Callable[[int], AbstractContextManager[tuple[int, Iterator[bytes]]]]
    timeout_s: float  # for each network operation
    on_chunk: Callable[[], None] = lambda: None


def is_complete(path: Path, size: int) -> bool:
    """Return True if the file exists and has this size. Checksums are verified before a file gets its final name."""
    return os.path.isfile(path) and os.path.getsize(path) == size


@contextmanager
def convert_disk_errors(label: str) -> Iterator[None]:
    """Convert disk errors in the context to a SourceError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SourceError(f"{label}: the server cannot store it ({reason}); free disk space for its cache") from error


def download(file: Download) -> None:
    """Download a file unless it is complete. Other threads and processes that need the file wait for this download."""
    deadline = time.monotonic() + file.timeout_s + file.size / MIN_BYTES_PER_S
    with convert_disk_errors(file.label):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{file.path}{LOCK_SUFFIX}", timeout=deadline - time.monotonic()):
                if not is_complete(file.path, file.size):
                    _download_and_verify(file, deadline)
        except Timeout as error:
            raise SourceError(f"{file.label}: another request is still downloading it; try again later") from error


def _download_and_verify(file: Download, deadline: float) -> None:
    part = file.path.with_name(file.path.name + PART_SUFFIX)
    try:
        with part.open("ab") as part_file:
            _receive(part_file, file, deadline)
            part_file.flush()
            os.fsync(part_file.fileno())
    except OSError:
        # The disk may be full, which affects all adapters, so remove the partial file.
        part.unlink(missing_ok=True)
        raise
    if part.stat().st_size != file.size or not file.is_valid(part):
        part.unlink()
        raise SourceError(f"{file.label}: the size or checksum is wrong and the file was deleted; try again")
    os.replace(part, file.path)


def _receive(part_file: BinaryIO, file: Download, deadline: float) -> None:
    """Append the missing bytes to the partial file. Make up to `MAX_ATTEMPTS` attempts, as long as each attempt makes
    progress.
    """
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        before = part_file.tell()
        if before >= file.size:
            return
        try:
            return _receive_once(part_file, file, deadline)
        except SourceError:
            if part_file.tell() >= file.size:
                # The file is complete, so the error concerns its content.
                part_file.truncate(0)
                raise
            if not attempts_left or part_file.tell() <= before:
                raise


def _receive_once(part_file: BinaryIO, file: Download, deadline: float) -> None:
    with file.open_at(part_file.tell()) as (start, chunks):
        part_file.truncate(start)
        part_file.seek(start)
        for chunk in chunks:
            part_file.write(chunk)
            file.on_chunk()
            if part_file.tell() > file.size:
                return
            if time.monotonic() > deadline:
                raise SourceError(
                    f"{file.label}: the download is too slow ({part_file.tell()} of {file.size} bytes); try again later"
                )


def count_downloaded_bytes(path: Path) -> int:
    """Return the size of the complete or partial file at `path`, or 0 if neither exists."""
    sizes = (os.path.getsize(candidate) for candidate in (path, f"{path}{PART_SUFFIX}") if os.path.exists(candidate))
    return next(sizes, 0)
