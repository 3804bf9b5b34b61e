"""Open a file that nobody vouches for, and tell it from one that takes its place."""

import os
import stat
from io import BufferedReader
from pathlib import Path

Stamp = tuple[int, ...]


class ChangedError(OSError):
    """A file that is not the one that was chosen."""


def stamp_of(path: Path | int) -> Stamp:
    """Changes whenever the file does, but for two changes within one tick of the file system's clock. A number is that
    of a file that is open."""
    return to_stamp(os.stat(path))


def to_stamp(found: os.stat_result) -> Stamp:
    """The time of the last change of any kind is last: the writer of a file can set the other time back, as `cp -p`
    does."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def size_in(stamp: Stamp) -> int:
    """Bytes of the file when it was stamped."""
    return stamp[1]


def open_plain(path: Path, stamp: Stamp | None = None) -> BufferedReader:
    """Open a plain file to read. Anything else is an OSError, and none of it blocks: a FIFO or a device may have taken
    the place of a file since it was looked at. `stamp` is that of the file that is meant, if only that one will do."""
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
