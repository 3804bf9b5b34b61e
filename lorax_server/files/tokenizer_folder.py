"""The files of a tokenizer, each read up to a limit and checked: those of an adapter are untrusted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorax_server.errors import ConfigError, SourceError
from lorax_server.files.adapter_files import (
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATES,
    MAX_TOKENIZER_BYTES,
    TEMPLATES_FOLDER,
    find_limit,
    is_template,
)
from lorax_server.files.names import MODEL_CONFIG_FILE, VOCABULARY_FILE
from lorax_server.files.plain_file import ChangedError, Stamp, find_stamp, open_plain, size_in
from lorax_server.files.strict_json import parse_json

MAX_COPIED_BYTES = 2**27  # of one adapter
FolderKey = tuple[Path, tuple[tuple[str, Stamp], ...]]  # a folder, and the stamps of its files


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object of a model; None if there is no such file."""
    return TokenizerFolder(path.parent).read_json(path.name)


class TokenizerFolder:
    """The files of a tokenizer in a folder: all of a model's; of an adapter's, those with a stamp.

    The stamps are those that the adapter's source has seen. A file without one, or with another, is not read.
    """

    def __init__(self, path: Path, stamps: Mapping[str, Stamp] | None = None) -> None:
        self.path = path
        self._stamps = stamps

    @property
    def key(self) -> FolderKey:
        return self.path, tuple((self._stamps or {}).items())

    @property
    def is_restricted(self) -> bool:
        """Only files with a stamp may be read."""
        return self._stamps is not None

    def has(self, name: str) -> bool:
        return (self.path / name).exists() if self._stamps is None else name in self._stamps

    def check(self, name: str, limit: int | None = None) -> int:
        """Reject a path that is not a file or is too large, without reading it. Return the limit."""
        path, stamp = self.path / name, self._stamp(name)
        limit = limit or find_limit(path.name) or MAX_TOKENIZER_BYTES
        if stamp is None and not path.is_file():
            raise ConfigError(f"{path}: is not a file")
        size = path.stat().st_size if stamp is None else size_in(stamp)
        if size > limit:
            raise ConfigError(f"{path}: has {size} bytes, at most {limit} are allowed")
        return limit

    def read(self, name: str, limit: int | None = None) -> bytes:
        path, stamp = self.path / name, self._stamp(name)
        try:
            limit = self.check(name, limit)
            with open_plain(path, stamp) as file:
                return file.read(limit)
        except OSError as error:
            is_changed = isinstance(error, ChangedError) or find_stamp(path) != stamp
            if stamp is None or not is_changed:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
            # The source stamps the new file when it is asked again.
            raise SourceError(f"adapter {self.path.name!r}: {name} changed after it was chosen; try again") from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object; None if there is no such file."""
        if not self.has(name):
            return None
        path, content = self.path / name, self.read(name)
        try:
            # A model's config may hold numbers that JSON does not know.
            parsed = json.loads(content) if name == MODEL_CONFIG_FILE else parse_json(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is refused: {error}") from error
        if not isinstance(parsed, dict):
            raise ConfigError(f"{path}: is not a JSON object")
        return parsed

    def read_template(self, name: str) -> str:
        try:
            return self.read(name, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path / name}: is not UTF-8") from error

    def list_templates(self) -> list[str]:
        """List the folder of templates, up to one more than there may be."""
        if self._stamps is None:
            paths = (self.path / TEMPLATES_FOLDER).glob("*.jinja")
            templates = sorted(f"{TEMPLATES_FOLDER}/{path.name}" for path in paths)
        else:
            templates = sorted(filter(is_template, self._stamps))
        return templates[: MAX_TEMPLATES + 1]

    def copy_to(self, folder: Path) -> None:
        """Copy the files with a stamp, for a program that looks for files by itself."""
        stamps = self._stamps or {}
        total = sum(map(size_in, stamps.values()))
        if total > MAX_COPIED_BYTES:
            raise ConfigError(
                f"{self.path}: the files of its tokenizer have {total} bytes, at most {MAX_COPIED_BYTES} are "
                f"converted; ship a {VOCABULARY_FILE} that can be taken as it is"
            )
        for name in stamps:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.read(name))

    def _stamp(self, name: str) -> Stamp | None:
        return None if self._stamps is None else self._stamps[name]
