"""Download one file: resumed after an interruption, checked, and put in place in one step."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from lorax_server.errors import SourceError

logger = logging.getLogger(__name__)

ATTEMPTS = 5
LOCK, PART = ".lock", ".part"
LOG_EVERY_S = 5.0
# A slower server is taken for one that delays on purpose.
MIN_BYTES_PER_S = 50_000


@dataclass(frozen=True)
class Download:
    """A file to download. `open_at` yields its bytes from an offset, or from an earlier one that it returns."""

    what: str  # for messages
    path: Path
    size: int
    is_right: Callable[[Path], bool]
    open_at: Callable[[int], AbstractContextManager[tuple[int, Iterator[bytes]]]]
    timeout_s: float  # for each wait on the server
    on_progress: Callable[[], None] = lambda: None  # called every now and then


def is_complete(path: Path, size: int) -> bool:
    """Tell whether a file is in place. It was checked before it got there, so its size is enough."""
    return os.path.isfile(path) and os.path.getsize(path) == size


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn errors of this machine's disk into a SourceError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SourceError(f"{what}: the server cannot store it ({reason}); its cache needs room") from error


def download(file: Download) -> None:
    """Download a file unless it is in place. Other threads and processes that want it wait meanwhile."""
    deadline = time.monotonic() + file.timeout_s + file.size / MIN_BYTES_PER_S
    with storing(file.what):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{file.path}{LOCK}", timeout=deadline - time.monotonic()):
                if not is_complete(file.path, file.size):
                    _bring(file, deadline)
        except Timeout as error:
            raise SourceError(f"{file.what}: another request is still fetching it; try again later") from error


def _bring(file: Download, deadline: float) -> None:
    part = file.path.with_name(file.path.name + PART)
    try:
        with part.open("ab") as out:
            _fill(out, file, deadline)
            out.flush()
            os.fsync(out.fileno())
    except OSError:
        # A full disk harms all adapters: half a file must not stay on it.
        part.unlink(missing_ok=True)
        raise
    if part.stat().st_size != file.size or not file.is_right(part):
        part.unlink()
        raise SourceError(f"{file.what}: size or checksum differ from what was announced; it was deleted, try again")
    os.replace(part, file.path)


def _fill(out: BinaryIO, file: Download, deadline: float) -> None:
    """Continue after interruptions, as long as each attempt brings some bytes."""
    for attempts_left in reversed(range(ATTEMPTS)):
        before = out.tell()
        if before >= file.size:
            return
        try:
            return _append(out, file, deadline)
        except SourceError:
            if out.tell() >= file.size:
                # All bytes are here, so the source complains about the content.
                out.truncate(0)
                raise
            if not attempts_left or out.tell() <= before:
                raise


def _append(out: BinaryIO, file: Download, deadline: float) -> None:
    logged = time.monotonic()
    with file.open_at(out.tell()) as (start, chunks):
        out.truncate(start)
        out.seek(start)
        for chunk in chunks:
            out.write(chunk)
            done, now = out.tell(), time.monotonic()
            if done > file.size:
                return
            if now > deadline:
                raise SourceError(f"{file.what}: arrives too slowly, {done} of {file.size} bytes; try again later")
            if now - logged > LOG_EVERY_S:
                logger.info("%s: %d of %d bytes, %d%%", file.what, done, file.size, 100 * done // file.size)
                logged = now
                file.on_progress()
