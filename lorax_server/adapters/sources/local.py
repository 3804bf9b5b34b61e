"""Adapters in folders of this machine, below roots that the operator names. Nothing is copied."""

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath

from lorax_server.adapters.files import KNOWN_FILES, TEMPLATES_FOLDER, is_template
from lorax_server.adapters.source import AdapterFiles, read_model_type
from lorax_server.errors import AdapterError, AdapterNotFoundError, SourceError

MAX_ENTRIES = 1000  # that are looked at in a folder of templates


class LocalSource:
    """Folders below `roots`. A name is a path relative to a root, or an absolute path inside one.

    A root that is a link is followed anew for each name, so that it can be switched to another folder in one step.
    """

    kind = "local"

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in roots]

    def authorize(self, name: str, token: str | None) -> None:  # noqa: ARG002 - what is below a root is for all
        self._folder(name)

    def places(self, name: str) -> list[Path]:
        """The folder that a name has below each root, and those in it that hold known files."""
        folders = ("", TEMPLATES_FOLDER) if _is_plain(name) else ()
        return [root / name / folder for root in self._roots for folder in folders]

    def find(self, name: str, token: str | None) -> AdapterFiles:  # noqa: ARG002
        folder, root = self._folder(name)
        known = {file: folder / file for file in KNOWN_FILES if os.path.lexists(f"{folder}/{file}")}
        known |= {file: folder / file for file in _list_templates(folder, root, name)}
        stats = {file: _stat(path, root, name) for file, path in known.items()}
        facts = [(file, found.st_size, found.st_mtime_ns, found.st_ino) for file, found in stats.items()]
        version = hashlib.sha256(repr(facts).encode()).hexdigest()
        return AdapterFiles(self.kind, name, version, {file: found.st_size for file, found in stats.items()})

    def fetch(self, files: AdapterFiles, wanted: Sequence[str], token: str | None) -> Path:  # noqa: ARG002
        if self.find(files.name, token).version != files.version:
            raise SourceError(f"adapter {files.name!r}: its files changed while they were read; try again")
        return self._folder(files.name)[0]

    def base_model_type(self, name: str, token: str | None) -> str | None:
        return read_model_type(self, name, token)

    def _folder(self, name: str) -> tuple[Path, Path]:
        """The folder of a name, and the root that it is below."""
        for root in map(_real, self._roots if _is_plain(name) else ()):
            folder = _real(root / name)
            if folder.is_relative_to(root) and os.path.isdir(folder):
                return folder, root
        # One answer for all: it must not tell what exists outside the roots.
        raise AdapterNotFoundError(
            f"adapter {name!r}: there is no such folder below the server's adapter roots; give a path relative to one"
        )


def _is_plain(name: str) -> bool:
    """Whether a name means the same to everybody, here and in front of us."""
    is_odd = name.startswith("~") or any(text in name for text in ("\\", "%", "://"))
    return name.isprintable() and not is_odd and ".." not in PurePath(name).parts


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _list_templates(folder: Path, root: Path, name: str) -> list[str]:
    """The templates in the folder of templates, which must lie below the root as everything else."""
    path = folder / TEMPLATES_FOLDER
    if not (path.is_dir() or path.is_symlink()):
        return []
    real = _real(path)
    if not (real.is_relative_to(root) and real.is_dir()):
        raise AdapterError(
            f"adapter {name!r}: {TEMPLATES_FOLDER} is not a folder below its root; links out of it are refused"
        )
    try:
        with os.scandir(real) as entries:
            found = [f"{TEMPLATES_FOLDER}/{entry.name}" for entry in islice(entries, MAX_ENTRIES + 1)]
    except OSError as error:
        raise AdapterError(f"adapter {name!r}: {TEMPLATES_FOLDER} cannot be read: {error.strerror}") from error
    if len(found) > MAX_ENTRIES:
        raise AdapterError(f"adapter {name!r}: {TEMPLATES_FOLDER} has more than {MAX_ENTRIES} files")
    return sorted(filter(is_template, found))


def _stat(path: Path, root: Path, name: str) -> os.stat_result:
    real = _real(path)
    with suppress(OSError):
        if real.is_relative_to(root) and stat.S_ISREG((found := os.stat(real)).st_mode):
            return found
    raise AdapterError(
        f"adapter {name!r}: {path.name} is not a plain file below its root; links out of it and devices are refused"
    )
