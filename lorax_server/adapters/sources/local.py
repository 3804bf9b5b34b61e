"""Adapters in folders of this machine, below roots that the operator names. Nothing is copied."""

import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from lorax_server.adapters.source import KNOWN_FILES, AdapterFiles, read_model_type
from lorax_server.errors import AdapterError, AdapterNotFoundError, SourceError


class LocalSource:
    """Folders below `roots`. A name is a path relative to a root, or an absolute path inside one."""

    kind = "local"

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]

    def authorize(self, name: str, token: str | None) -> None:  # noqa: ARG002 - what is below a root is for all
        self._folder(name)

    def places(self, name: str) -> list[Path]:
        """The folder that a name has below each root, and those in it that hold known files."""
        parents = {PurePath(file).parent for file in KNOWN_FILES}
        return [root / name / parent for root in self._roots for parent in parents] if _is_plain(name) else []

    def find(self, name: str, token: str | None) -> AdapterFiles:  # noqa: ARG002
        folder, root = self._folder(name)
        known = {file: folder / file for file in KNOWN_FILES if os.path.lexists(f"{folder}/{file}")}
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
        for root in self._roots if _is_plain(name) else ():
            folder = Path(os.path.realpath(root / name))
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


def _stat(path: Path, root: Path, name: str) -> os.stat_result:
    real = Path(os.path.realpath(path))
    with suppress(OSError):
        if real.is_relative_to(root) and stat.S_ISREG((found := os.stat(real)).st_mode):
            return found
    raise AdapterError(
        f"adapter {name!r}: {path.name} is not a plain file below its root; links out of it and devices are refused"
    )
