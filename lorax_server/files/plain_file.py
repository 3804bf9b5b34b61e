"""Open untrusted files, and tell a file from one that takes its place."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from lorax_server.errors import AdapterError, SourceError

Stamp = tuple[int, ...]


class ChangedError(OSError):
    """A file is not the one that was chosen."""


def stamp_of(file: Path | int) -> Stamp:
    """Return the stamp of a path or of an open file. It changes whenever the file does, except for two changes within
    one tick of the file system's clock."""
    return to_stamp(os.stat(file))


def look(path: Path) -> os.stat_result | None:
    """Return the status of a path; None if it is gone or hidden."""
    try:
        return os.stat(path)
    except OSError:
        return None


def find_stamp(path: Path) -> Stamp | None:
    """Return the stamp of a path; None if it is gone or hidden."""
    status = look(path)
    return None if status is None else to_stamp(status)


def to_stamp(status: os.stat_result) -> Stamp:
    """Return inode, size and times. The time of the last change of any kind is last: a writer can set the other one
    back, as `cp -p` does."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def size_in(stamp: Stamp) -> int:
    """Return the bytes of the file when it was stamped."""
    return stamp[1]


def open_plain(path: Path, stamp: Stamp | None = None) -> BufferedReader:
    """Open a plain file to read, with a `stamp` only the file that has it.

    Anything else is an OSError, and nothing blocks: a FIFO or a device may have taken the file's place.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stamp is not None and stamp_of(descriptor) != stamp:
            raise ChangedError(0, "it is not the file that was chosen")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a plain file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def reading(what: str, path: Path) -> Iterator[None]:
    """Turn errors of a file of an adapter into an AdapterError. `what` names the adapter."""
    try:
        yield
    except ChangedError as error:
        raise SourceError(f"{what}: {path.name} changed while it was read; try again") from error
    except OSError as error:
        raise AdapterError(f"{what}: {path.name} cannot be read: {error.strerror}") from error
