"""Opens untrusted files safely, and detects replaced files by inode, size and timestamps."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from lorax_server.errors import AdapterError, SourceError

Stamp = tuple[int, ...]


class FileChangedError(OSError):
    """Raised if a file has changed since the adapter was resolved."""


def read_stamp(file: Path | int) -> Stamp:
    """Return a file stamp (inode, size, mtime and ctime) for a path or file descriptor.

    The stamp changes with every file change, except for two changes within one tick of the file system clock.
    """
    return stamp_from_stat(os.stat(file))


def stat_or_none(path: Path) -> os.stat_result | None:
    """Return the `os.stat` result, or None if the path cannot be read."""
    try:
        return os.stat(path)
    except OSError:
        return None


def read_stamp_or_none(path: Path) -> Stamp | None:
    """Return the file stamp, or None if the path cannot be read."""
    status = stat_or_none(path)
    return None if status is None else stamp_from_stat(status)


def stamp_from_stat(status: os.stat_result) -> Stamp:
    """Return a file stamp: inode, size, mtime and ctime. Programs such as `cp -p` can set mtime, but not ctime."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def stamped_size(stamp: Stamp) -> int:
    """Return the file size in a stamp."""
    return stamp[1]


def open_regular_file(path: Path, stamp: Stamp | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Raise OSError for FIFOs and devices without blocking, and FileChangedError if the file's stamp differs from `stamp`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stamp is not None and read_stamp(descriptor) != stamp:
            raise FileChangedError(0, "it changed since it was resolved")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def convert_read_errors(label: str, path: Path) -> Iterator[None]:
    """Convert OSError in the context to AdapterError, or to SourceError if the file has changed. Messages start with
    `label`.
    """
    try:
        yield
    except FileChangedError as error:
        raise SourceError(f"{label}: {path.name} changed while it was read; try again") from error
    except OSError as error:
        raise AdapterError(f"{label}: {path.name} cannot be read: {error.strerror}") from error
