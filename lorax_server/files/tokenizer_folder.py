"""Read tokenizer files with size limits. Adapter tokenizers are untrusted."""

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
    is_template_file,
    max_file_bytes,
)
from lorax_server.files.names import MODEL_CONFIG_FILE, VOCABULARY_FILE
from lorax_server.files.regular_file import FileChangedError, Stamp, open_regular_file, read_stamp_or_none, stamped_size
from lorax_server.files.strict_json import parse_json

MAX_COPIED_BYTES = 2**27  # limit for all files of one adapter
FolderKey = tuple[Path, tuple[tuple[str, Stamp], ...]]  # folder, file stamps


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object from a file in a model folder, or None if the file does not exist."""
    return TokenizerFolder(path.parent).read_json(path.name)


class TokenizerFolder:
    """Tokenizer files in a model or adapter folder.

    In a model folder, all files may be read. In an adapter folder, only files that are unchanged since the adapter was
    resolved may be read. `stamps` contains their file stamps.
    """

    def __init__(self, path: Path, stamps: Mapping[str, Stamp] | None = None) -> None:
        self.path = path
        self._stamps = stamps

    @property
    def key(self) -> FolderKey:
        return self.path, tuple((self._stamps or {}).items())

    @property
    def is_restricted(self) -> bool:
        """Return True if only files in `stamps` may be read."""
        return self._stamps is not None

    def has(self, name: str) -> bool:
        return (self.path / name).exists() if self._stamps is None else name in self._stamps

    def check_size(self, name: str, max_bytes: int | None = None) -> int:
        """Return the file's size limit. Raise ConfigError if the path is not a file or the file is too large."""
        path, stamp = self.path / name, self._stamp(name)
        max_bytes = max_bytes or max_file_bytes(path.name) or MAX_TOKENIZER_BYTES
        if stamp is None and not path.is_file():
            raise ConfigError(f"{path}: is not a file")
        size = path.stat().st_size if stamp is None else stamped_size(stamp)
        if size > max_bytes:
            raise ConfigError(f"{path}: has {size} bytes, at most {max_bytes} are allowed")
        return max_bytes

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        path, stamp = self.path / name, self._stamp(name)
        try:
            max_bytes = self.check_size(name, max_bytes)
            with open_regular_file(path, stamp) as file:
                return file.read(max_bytes)
        except OSError as error:
            is_changed = isinstance(error, FileChangedError) or read_stamp_or_none(path) != stamp
            if stamp is None or not is_changed:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
            # The next request resolves the adapter again and reads the new file.
            raise SourceError(f"adapter {self.path.name!r}: {name} changed after it was resolved; try again") from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in a file, or None if the file does not exist."""
        if not self.has(name):
            return None
        path, content = self.path / name, self.read(name)
        try:
            # Model configs may contain NaN and Infinity, which strict JSON excludes.
            parsed = json.loads(content) if name == MODEL_CONFIG_FILE else parse_json(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is invalid: {error}") from error
        if not isinstance(parsed, dict):
            raise ConfigError(f"{path}: is not a JSON object")
        return parsed

    def read_template(self, name: str) -> str:
        try:
            return self.read(name, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path / name}: is not UTF-8") from error

    def list_templates(self) -> list[str]:
        """Return the paths of additional chat templates, at most `MAX_TEMPLATES` + 1."""
        if self._stamps is None:
            paths = (self.path / TEMPLATES_FOLDER).glob("*.jinja")
            templates = sorted(f"{TEMPLATES_FOLDER}/{path.name}" for path in paths)
        else:
            templates = sorted(filter(is_template_file, self._stamps))
        return templates[: MAX_TEMPLATES + 1]

    def copy_to(self, folder: Path) -> None:
        """Copy an adapter's files to `folder`, for libraries that read from a folder."""
        stamps = self._stamps or {}
        total = sum(map(stamped_size, stamps.values()))
        if total > MAX_COPIED_BYTES:
            raise ConfigError(
                f"{self.path}: the tokenizer files have {total} bytes, at most {MAX_COPIED_BYTES} can be "
                f"converted; provide a {VOCABULARY_FILE} instead"
            )
        for name in stamps:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.read(name))

    def _stamp(self, name: str) -> Stamp | None:
        return None if self._stamps is None else self._stamps[name]
