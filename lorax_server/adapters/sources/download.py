"""Download one file: resumed after an interruption, verified, and moved into place atomically.

Used for hub and S3, adapters and base models, because neither `huggingface_hub.snapshot_download` (2.4) nor boto3's
transfers (1.44) can do all of this, measured against local servers: resume a download that an earlier call began,
verify a checksum (both accept a flipped bit), stop a response that is larger than announced before it fills the disk
(boto3 accepts it), and limit the total time (a server that sends a byte now and then holds both forever).
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

ATTEMPTS = 5
LOCK, PART = ".lock", ".part"
# A slower server may delay on purpose.
MIN_BYTES_PER_S = 50_000


@dataclass(frozen=True)
class Download:
    """A file to download. `open_at` returns the offset at which the response starts, and its chunks."""

    what: str  # for messages
    path: Path
    size: int
    is_valid: Callable[[Path], bool]
    open_at: Callable[[int], AbstractContextManager[tuple[int, Iterator[bytes]]]]
    timeout_s: float  # for each wait on the server
    on_chunk: Callable[[], None] = lambda: None


def is_complete(path: Path, size: int) -> bool:
    """Return True if a file is in place. It was verified before, so its size is enough."""
    return os.path.isfile(path) and os.path.getsize(path) == size


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Convert disk errors into a SourceError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SourceError(f"{what}: the server cannot store it ({reason}); its cache needs room") from error


def download(file: Download) -> None:
    """Download a file unless it is in place. Other threads and processes that need it wait."""
    deadline = time.monotonic() + file.timeout_s + file.size / MIN_BYTES_PER_S
    with storing(file.what):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{file.path}{LOCK}", timeout=deadline - time.monotonic()):
                if not is_complete(file.path, file.size):
                    _complete(file, deadline)
        except Timeout as error:
            raise SourceError(f"{file.what}: another request is still fetching it; try again later") from error


def _complete(file: Download, deadline: float) -> None:
    part = file.path.with_name(file.path.name + PART)
    try:
        with part.open("ab") as out:
            _fill(out, file, deadline)
            out.flush()
            os.fsync(out.fileno())
    except OSError:
        # A full disk affects all adapters, so a partial file must not stay.
        part.unlink(missing_ok=True)
        raise
    if part.stat().st_size != file.size or not file.is_valid(part):
        part.unlink()
        raise SourceError(f"{file.what}: size or checksum differ from what was announced; it was deleted, try again")
    os.replace(part, file.path)


def _fill(out: BinaryIO, file: Download, deadline: float) -> None:
    """Resume after interruptions, as long as each attempt receives some bytes."""
    for attempts_left in reversed(range(ATTEMPTS)):
        before = out.tell()
        if before >= file.size:
            return
        try:
            return _append(out, file, deadline)
        except SourceError:
            if out.tell() >= file.size:
                # All bytes are here, so the error is about the content.
                out.truncate(0)
                raise
            if not attempts_left or out.tell() <= before:
                raise


def _append(out: BinaryIO, file: Download, deadline: float) -> None:
    with file.open_at(out.tell()) as (start, chunks):
        out.truncate(start)
        out.seek(start)
        for chunk in chunks:
            out.write(chunk)
            file.on_chunk()
            if out.tell() > file.size:
                return
            if time.monotonic() > deadline:
                raise SourceError(
                    f"{file.what}: arrives too slowly, {out.tell()} of {file.size} bytes; try again later"
                )


def count_bytes(path: Path) -> int:
    """Return the bytes of a file that are on the disk, in place or in part."""
    sizes = (os.path.getsize(each) for each in (path, f"{path}{PART}") if os.path.exists(each))
    return next(sizes, 0)
