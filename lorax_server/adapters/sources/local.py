"""Provides adapters in local folders below configured roots. The files are used in place."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePath, PurePosixPath

from lorax_server.adapters.sources.source import MAX_NAME_LENGTH, AdapterFiles, Source, WatchedPaths
from lorax_server.errors import AdapterError, AdapterNotFoundError, SourceError
from lorax_server.files.adapter_files import READABLE_FILES, TEMPLATES_FOLDER, is_template_file
from lorax_server.files.regular_file import Stamp, stamp_from_stat, stamped_size

MAX_TEMPLATE_ENTRIES = 1000  # limit for directory entries in the template folder
# Open a subfolder without following links.
SUBFOLDER_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


class LocalSource(Source):
    """A source of adapters in folders below `roots`. A name is a path relative to a root, or an absolute path inside a
    root.

    A root may be a symbolic link. It is resolved for each request, so it can be switched atomically.
    """

    kind = "local"

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in roots]

    def authorize(self, name: str, token: str | None) -> None:  # noqa: ARG002 - all clients may read the roots
        self._find_folder(name)

    def find_watched_paths(self, name: str) -> WatchedPaths:
        """Return the possible adapter and template folders below each root.

        Roots after the first match are skipped. They are not needed, and if their file system hangs, it must not block
        the request.
        """
        roots = []
        for root in self._roots if is_unambiguous_name(name) else ():
            roots.append(root)
            if _find_below_root(root, name) is not None:
                break
        return WatchedPaths([root / name / folder for root in roots for folder in ("", TEMPLATES_FOLDER)], roots)

    def find(self, name: str, token: str | None) -> AdapterFiles:  # noqa: ARG002
        return self._find_files(name)[1]

    def fetch(self, files: AdapterFiles, names: Sequence[str], token: str | None) -> Path:  # noqa: ARG002
        folder, now = self._find_files(files.name)
        if now.version != files.version:
            raise SourceError(f"adapter {files.name!r}: its files changed while they were read; try again")
        return folder

    def _find_files(self, name: str) -> tuple[Path, AdapterFiles]:
        folder, root = self._find_folder(name)
        files = [file for file in READABLE_FILES if os.path.lexists(f"{folder}/{file}")]
        files += _list_templates(folder, root, name)
        stamps = {file: _stamp_file_below_root(folder / file, root, name) for file in files}
        version = hashlib.sha256(repr(list(stamps.items())).encode()).hexdigest()
        sizes = {file: stamped_size(stamp) for file, stamp in stamps.items()}
        return folder, AdapterFiles(self.kind, name, version, sizes, stamps=stamps)

    def _find_folder(self, name: str) -> tuple[Path, Path]:
        """Return the adapter folder and its root, both with links resolved."""
        roots = self._roots if is_unambiguous_name(name) else []
        for root in roots:
            folder_and_root = _find_below_root(root, name)
            if folder_and_root is not None:
                return folder_and_root
        if any(_links_outside_root(root, name) for root in roots):
            raise AdapterError(f"adapter {name!r}: its folder is outside of its root, and such links are not allowed")
        # All other cases have the same message, so that it does not reveal which paths exist outside of the roots.
        raise AdapterNotFoundError(
            f"adapter {name!r}: no such folder below the server's adapter roots; use a path relative to a root"
        )


def normalize_local_name(name: str, roots: Sequence[Path]) -> str:
    """Return the canonical adapter name. This does not access the file system.

    `./poet`, `poet/`, `poet//.` and the absolute path of `poet` below the first root all become `poet`. An absolute
    path below another root is kept, because an earlier root may contain `poet` too. Invalid names are not changed.
    """
    if not 0 < len(name) <= MAX_NAME_LENGTH or not is_unambiguous_name(name):
        return name
    if not name.startswith("/"):
        return str(PurePosixPath(name))
    path = PurePosixPath("/" + name.lstrip("/"))
    first = PurePosixPath(os.path.abspath(roots[0])) if roots else path
    below = str(path.relative_to(first)) if path != first and path.is_relative_to(first) else ""
    return below if below and is_unambiguous_name(below) else str(path)


def is_unambiguous_name(name: str) -> bool:
    """Return True if proxies cannot interpret the adapter name as a different path."""
    is_special = name.startswith("~") or any(text in name for text in ("\\", "%", "://"))
    return name.isprintable() and not is_special and ".." not in PurePath(name).parts


def _find_below_root(root: Path, name: str) -> tuple[Path, Path] | None:
    """Return the resolved adapter folder and root, or None if the folder does not exist below the root."""
    real_root = _resolve_links(root, name)
    folder = None if real_root is None else _resolve_links(real_root / name, name)
    if real_root is None or folder is None or not (folder.is_relative_to(real_root) and os.path.isdir(folder)):
        return None
    return folder, real_root


def _links_outside_root(root: Path, name: str) -> bool:
    """Return True if the path contains a link that points outside of the root, even to a missing folder."""
    real_root = _resolve_links(root, name)
    if real_root is None or not any((parent / name).is_relative_to(parent) for parent in (root, real_root)):
        return False
    real = _resolve_links(real_root / name, name)
    return real is not None and not real.is_relative_to(real_root)


def _resolve_links(path: Path, name: str) -> Path | None:
    """Return the path with links resolved, or None if the server may not read a link."""
    try:
        return Path(os.path.realpath(path))
    except PermissionError:
        return None
    except OSError as error:  # the link was removed
        raise SourceError(f"adapter {name!r}: its folder changed while it was read; try again") from error


@contextmanager
def _open_folder(folder: Path, root: Path) -> Iterator[int]:
    """Yield a descriptor for a folder below the root. Links are never followed, even if they are created
    concurrently.
    """
    descriptor = os.open(root, SUBFOLDER_FLAGS)
    try:
        for name in folder.relative_to(root).parts:
            inner = os.open(name, SUBFOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _list_templates(folder: Path, root: Path, name: str) -> list[str]:
    """Return the chat templates in the adapter's template folder, which must also be below the root."""
    path = folder / TEMPLATES_FOLDER
    if not (os.path.isdir(path) or os.path.islink(path)):
        return []
    real = _resolve_links(path, name)
    if real is None or not (real.is_relative_to(root) and os.path.isdir(real)):
        raise AdapterError(
            f"adapter {name!r}: {TEMPLATES_FOLDER} is not a folder below its root; links out of it are not allowed"
        )
    try:
        entries = [f"{TEMPLATES_FOLDER}/{entry}" for entry in _list_folder(real, root)]
    except OSError as error:
        raise AdapterError(f"adapter {name!r}: {TEMPLATES_FOLDER} cannot be read: {error.strerror}") from error
    if len(entries) > MAX_TEMPLATE_ENTRIES:
        raise AdapterError(f"adapter {name!r}: {TEMPLATES_FOLDER} has more than {MAX_TEMPLATE_ENTRIES} files")
    return sorted(filter(is_template_file, entries))


def _list_folder(folder: Path, root: Path) -> list[str]:
    """Return at most `MAX_TEMPLATE_ENTRIES` + 1 entry names from a folder."""
    with _open_folder(folder, root) as descriptor:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
    try:
        with os.scandir(readable) as entries:
            return [entry.name for entry in islice(entries, MAX_TEMPLATE_ENTRIES + 1)]
    finally:
        os.close(readable)


def _stamp_file_below_root(path: Path, root: Path, name: str) -> Stamp:
    """Return the stamp of a regular file below the root.

    Readers must compare the stamp with the file that they open, because the file may have been replaced in the
    meantime.
    """
    real = _resolve_links(path, name)
    with suppress(OSError):
        if real is not None and root in real.parents:
            with _open_folder(real.parent, root) as folder:
                status = os.stat(real.name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                return stamp_from_stat(status)
    raise AdapterError(
        f"adapter {name!r}: {path.name} is not a regular file below its root; links out of it are not allowed"
    )
