"""Files of models and adapters, each read up to a limit and checked: an adapter's are nobody's to vouch for."""

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
from lorax_server.files.plain_file import ChangedError, Stamp, open_plain, size_in, stamp_of
from lorax_server.files.strict_json import parse_json

MAX_COPIED_BYTES = 2**27  # of one adapter
FolderKey = tuple[Path, tuple[tuple[str, Stamp], ...]]  # a folder, and the files in it that a source has seen


def check_size(path: Path, limit: int | None = None, stamp: Stamp | None = None) -> None:
    """Refuse what is no file or too large. With a stamp, the file is not looked at."""
    limit = limit or find_limit(path.name) or MAX_TOKENIZER_BYTES
    if stamp is None and not path.is_file():
        raise ConfigError(f"{path}: is not a file")
    size = path.stat().st_size if stamp is None else size_in(stamp)
    if size > limit:
        raise ConfigError(f"{path}: has {size} bytes, at most {limit} are allowed")


def read_bytes(path: Path, limit: int | None = None, stamp: Stamp | None = None) -> bytes:
    """All of a plain file. `stamp` is that of the file that is meant, if only that one will do: a ChangedError says
    that it has gone or that another has taken its place."""
    try:
        check_size(path, limit, stamp)
        with open_plain(path, stamp) as file:
            return file.read(limit or find_limit(path.name) or MAX_TOKENIZER_BYTES)
    except OSError as error:
        if stamp is not None and _has_changed(path, stamp, error):
            raise ChangedError(0, "it changed after it was chosen") from error
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _has_changed(path: Path, stamp: Stamp, error: OSError) -> bool:
    try:
        return isinstance(error, ChangedError) or stamp_of(path) != stamp
    except OSError:
        return True


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file. A model's config may hold numbers that JSON does not know."""
    return _parse(path, read_bytes(path)) if path.exists() else None


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content) if path.name == MODEL_CONFIG_FILE else parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is refused: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: is not a JSON object")
    return parsed


class TokenizerFolder:
    """The files of a tokenizer in a folder: all of a model's; of an adapter's, those that its source vouched for, as
    they were then. Whatever else is there, or takes the place of one, is not read."""

    def __init__(self, path: Path, vouched: Mapping[str, Stamp] | None = None) -> None:
        self.path = path
        self._vouched = vouched

    @property
    def key(self) -> FolderKey:
        return self.path, tuple((self._vouched or {}).items())

    @property
    def is_vouched_for(self) -> bool:
        """Only some of its files may be read."""
        return self._vouched is not None

    def has(self, name: str) -> bool:
        return (self.path / name).exists() if self._vouched is None else name in self._vouched

    def read(self, name: str, limit: int | None = None) -> bytes:
        try:
            return read_bytes(self.path / name, limit, self._stamp(name))
        except ChangedError as error:  # its source, asked again, vouches for what is there now
            raise SourceError(f"adapter {self.path.name!r}: {name} changed after it was chosen; try again") from error

    def read_json(self, name: str) -> dict[str, Any] | None:
        """None if there is no such file."""
        return _parse(self.path / name, self.read(name)) if self.has(name) else None

    def read_text(self, name: str, limit: int = MAX_TEMPLATE_BYTES) -> str:
        try:
            return self.read(name, limit).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path / name}: is not UTF-8") from error

    def check(self, name: str) -> None:
        """Refuse what is no file or too large, without reading it."""
        check_size(self.path / name, stamp=self._stamp(name))

    def list_templates(self) -> list[str]:
        """List the folder of templates, up to one more than there may be."""
        if self._vouched is not None:
            return sorted(filter(is_template, self._vouched))[: MAX_TEMPLATES + 1]
        found = sorted((self.path / TEMPLATES_FOLDER).glob("*.jinja"))
        return [f"{TEMPLATES_FOLDER}/{path.name}" for path in found[: MAX_TEMPLATES + 1]]

    def copy_to(self, folder: Path) -> None:
        """Only what was vouched for: for a reader that looks for files by itself."""
        vouched = self._vouched or {}
        total = sum(map(size_in, vouched.values()))
        if total > MAX_COPIED_BYTES:
            raise ConfigError(
                f"{self.path}: the files of its tokenizer have {total} bytes, at most {MAX_COPIED_BYTES} are "
                f"converted; ship a {VOCABULARY_FILE} that can be taken as it is"
            )
        for name in vouched:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.read(name))

    def _stamp(self, name: str) -> Stamp | None:
        return None if self._vouched is None else self._vouched[name]
