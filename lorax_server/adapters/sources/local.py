"""Adapters in folders of this machine, below roots that the operator names. Nothing is copied."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePath, PurePosixPath

from lorax_server.adapters.sources.source import MAX_NAME_LENGTH, AdapterFiles, Source, WatchedPaths
from lorax_server.errors import AdapterError, AdapterNotFoundError, SourceError
from lorax_server.files.adapter_files import KNOWN_FILES, TEMPLATES_FOLDER, is_template
from lorax_server.files.plain_file import Stamp, size_in, to_stamp

MAX_ENTRIES = 1000  # of a folder of templates
STEP = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)  # from a folder into a subfolder


class LocalSource(Source):
    """Folders below `roots`. A name is a path relative to a root, or an absolute path inside one.

    A root that is a link is followed anew for each name, so that it can be switched to another folder in one step.
    """

    kind = "local"

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in roots]

    def authorize(self, name: str, token: str | None) -> None:  # noqa: ARG002 - all clients may use what is below a root
        self._folder(name)

    def find_watched_paths(self, name: str) -> WatchedPaths:
        """Return the folder that a name has below each root, and the folder of templates in it.

        Roots after the one that has the adapter are left out: they cannot win, and one that hangs must not hold it up.
        """
        roots = []
        for root in self._roots if is_plain(name) else ():
            roots.append(root)
            if _look_below(root, name) is not None:
                break
        return WatchedPaths([root / name / folder for root in roots for folder in ("", TEMPLATES_FOLDER)], roots)

    def find(self, name: str, token: str | None) -> AdapterFiles:  # noqa: ARG002
        return self._find(name)[1]

    def fetch(self, files: AdapterFiles, names: Sequence[str], token: str | None) -> Path:  # noqa: ARG002
        folder, now = self._find(files.name)
        if now.version != files.version:
            raise SourceError(f"adapter {files.name!r}: its files changed while they were read; try again")
        return folder

    def _find(self, name: str) -> tuple[Path, AdapterFiles]:
        folder, root = self._folder(name)
        files = [file for file in KNOWN_FILES if os.path.lexists(f"{folder}/{file}")]
        files += _list_templates(folder, root, name)
        stamps = {file: _stamp_below(folder / file, root, name) for file in files}
        version = hashlib.sha256(repr(list(stamps.items())).encode()).hexdigest()
        sizes = {file: size_in(stamp) for file, stamp in stamps.items()}
        return folder, AdapterFiles(self.kind, name, version, sizes, stamps=stamps)

    def _folder(self, name: str) -> tuple[Path, Path]:
        """Return the folder of a name, and its root."""
        roots = self._roots if is_plain(name) else []
        for root in roots:
            folder_and_root = _look_below(root, name)
            if folder_and_root is not None:
                return folder_and_root
        if any(_leads_out(root, name) for root in roots):
            raise AdapterError(f"adapter {name!r}: its folder is not below its root; links out of it are refused")
        # One answer for all others: it must not tell what exists outside the roots.
        raise AdapterNotFoundError(
            f"adapter {name!r}: there is no such folder below the server's adapter roots; give a path relative to one"
        )


def tidy_name(name: str, roots: Sequence[Path]) -> str:
    """Return the one name of a folder that can be spelt in many ways, without a look at the disk.

    `./poet`, `poet/`, `poet//.` and the path of `poet` below the first root are all `poet`. A path below another root
    stays as it is, since `poet` may be in an earlier root too. So does a name that is refused anyway.
    """
    if not 0 < len(name) <= MAX_NAME_LENGTH or not is_plain(name):
        return name
    if not name.startswith("/"):
        return str(PurePosixPath(name))
    path = PurePosixPath("/" + name.lstrip("/"))
    first = PurePosixPath(os.path.abspath(roots[0])) if roots else path
    below = str(path.relative_to(first)) if path != first and path.is_relative_to(first) else ""
    return below if below and is_plain(below) else str(path)


def is_plain(name: str) -> bool:
    """Tell whether a name means the same to this server and to the proxies in front of it."""
    is_odd = name.startswith("~") or any(text in name for text in ("\\", "%", "://"))
    return name.isprintable() and not is_odd and ".." not in PurePath(name).parts


def _look_below(root: Path, name: str) -> tuple[Path, Path] | None:
    """Return the folder of a name below a root, and the root, both without links; None if there is none."""
    real_root = _real(root, name)
    folder = None if real_root is None else _real(real_root / name, name)
    if real_root is None or folder is None or not (folder.is_relative_to(real_root) and os.path.isdir(folder)):
        return None
    return folder, real_root


def _leads_out(root: Path, name: str) -> bool:
    """Tell whether a name is below a root, but a link on the way leads out, be it to a folder or to nothing."""
    real_root = _real(root, name)
    if real_root is None or not any((parent / name).is_relative_to(parent) for parent in (root, real_root)):
        return False
    real = _real(real_root / name, name)
    return real is not None and not real.is_relative_to(real_root)


def _real(path: Path, name: str) -> Path | None:
    """Follow the links of a path; None if the server may not know where they lead."""
    try:
        return Path(os.path.realpath(path))
    except PermissionError:
        return None
    except OSError as error:  # the link is gone
        raise SourceError(f"adapter {name!r}: its folder changed while it was read; try again") from error


@contextmanager
def _open_folder(folder: Path, root: Path) -> Iterator[int]:
    """Open a folder below the root. No step to it follows a link, even if one is put in its way meanwhile."""
    descriptor = os.open(root, STEP)
    try:
        for name in folder.relative_to(root).parts:
            inner = os.open(name, STEP, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _list_templates(folder: Path, root: Path, name: str) -> list[str]:
    """List the templates in the folder of templates, which must lie below the root too."""
    path = folder / TEMPLATES_FOLDER
    if not (os.path.isdir(path) or os.path.islink(path)):
        return []
    real = _real(path, name)
    if real is None or not (real.is_relative_to(root) and os.path.isdir(real)):
        raise AdapterError(
            f"adapter {name!r}: {TEMPLATES_FOLDER} is not a folder below its root; links out of it are refused"
        )
    try:
        entries = [f"{TEMPLATES_FOLDER}/{entry}" for entry in _list_folder(real, root)]
    except OSError as error:
        raise AdapterError(f"adapter {name!r}: {TEMPLATES_FOLDER} cannot be read: {error.strerror}") from error
    if len(entries) > MAX_ENTRIES:
        raise AdapterError(f"adapter {name!r}: {TEMPLATES_FOLDER} has more than {MAX_ENTRIES} files")
    return sorted(filter(is_template, entries))


def _list_folder(folder: Path, root: Path) -> list[str]:
    """List a folder, up to one entry more than there may be."""
    with _open_folder(folder, root) as descriptor:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
    try:
        with os.scandir(readable) as entries:
            return [entry.name for entry in islice(entries, MAX_ENTRIES + 1)]
    finally:
        os.close(readable)


def _stamp_below(path: Path, root: Path, name: str) -> Stamp:
    """Return the stamp of a plain file below the root. A reader compares it with the file it opens: the path may lead
    elsewhere by then."""
    real = _real(path, name)
    with suppress(OSError):
        if real is not None and root in real.parents:
            with _open_folder(real.parent, root) as folder:
                status = os.stat(real.name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                return to_stamp(status)
    raise AdapterError(
        f"adapter {name!r}: {path.name} is not a plain file below its root; links out of it and devices are refused"
    )
