"""Defines the interface of adapter sources, and `AdapterSources`, which authorizes, validates and downloads
adapters.
"""

import hashlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from cachetools import TTLCache, cachedmethod

from lorax_server.errors import AdapterAccessError, AdapterError
from lorax_server.files.adapter_files import (
    MAX_CONFIG_BYTES,
    MAX_TEMPLATES,
    PICKLE_FILES,
    REQUIRED_FILES,
    TEMPLATES_FOLDER,
    is_template_file,
    max_file_bytes,
    select_tokenizer_files,
)
from lorax_server.files.names import CONFIG_FILE, MODEL_CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.regular_file import Stamp, convert_read_errors, open_regular_file
from lorax_server.files.strict_json import parse_json
from lorax_server.types import AdapterRef

logger = logging.getLogger(__name__)

MAX_NAME_LENGTH = 512
MAX_AUTHORIZATIONS = 10_000
RefKey = tuple[str, str, str | None]  # source, name, token hash


@dataclass(frozen=True)
class AdapterFiles:
    """The metadata of the files in an adapter's current version."""

    source: str
    name: str  # without a revision
    version: str  # changes with every file change
    sizes: Mapping[str, int]  # file name -> bytes
    tags: Mapping[str, str] = field(default_factory=dict)  # file name -> ETag or digest
    # Stamps of validated files, for sources whose folder other processes can write to.
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


class WatchedPaths(NamedTuple):
    """The paths whose stamps or inodes change if an adapter changes."""

    # The stamp of at least one folder changes if the name resolves to another folder below the same roots, or if a
    # known file is added, removed or replaced. Folders may be missing.
    folders: Sequence[Path] = ()
    roots: Sequence[Path] = ()  # the adapter is unchanged only if these folders keep their inodes


class Source(ABC):
    """An adapter source. The methods raise AdapterError, and the messages contain the adapter name."""

    kind: str

    @abstractmethod
    def authorize(self, name: str, token: str | None) -> None:
        """Raise AdapterAccessError unless the token permits reading the adapter."""

    @abstractmethod
    def find(self, name: str, token: str | None) -> AdapterFiles:
        """Return the metadata of the adapter's files. `name` may include a revision."""

    @abstractmethod
    def fetch(self, files: AdapterFiles, names: Sequence[str], token: str | None) -> Path:
        """Download the named files if necessary, verify them, and return their folder."""

    def find_watched_paths(self, name: str) -> WatchedPaths:  # noqa: ARG002
        """Return the paths to check for adapter changes, or no paths if only the remote source can detect
        changes.
        """
        return WatchedPaths()

    def mark_used(self, folder: Path) -> None:  # noqa: B027 - only remote sources need it
        """Mark a downloaded version as used now, which protects it from eviction. This may block on the file system."""

    def base_model_type(self, name: str, token: str | None) -> str | None:
        """Look up a base model in this source and return its `model_type`, or None if it is unknown."""
        try:
            files = self.find(name, token)
            if files.sizes.get(MODEL_CONFIG_FILE, MAX_CONFIG_BYTES + 1) > MAX_CONFIG_BYTES:
                return None
            path = self.fetch(files, [MODEL_CONFIG_FILE], token) / MODEL_CONFIG_FILE
            config = read_json(path, f"base model {name!r}", files.stamps.get(MODEL_CONFIG_FILE))
        except AdapterError:
            return None
        model_type = config.get("model_type")
        return model_type if isinstance(model_type, str) else None


FindBaseModelType = Callable[[str], str | None]
CheckConfig = Callable[[Mapping[str, Any], FindBaseModelType], None]


@dataclass(frozen=True)
class FetchedAdapter:
    """An adapter whose files are in a local folder."""

    folder: Path
    version: str
    config: dict[str, Any]
    tokenizer_files: tuple[str, ...]
    stamps: Mapping[str, Stamp] = field(default_factory=dict)  # stamps of files that the source validated
    is_new: bool = field(default=False, compare=False)  # some files were downloaded by this call


class AdapterSources:
    """The enabled sources. Access is checked before anything is downloaded, and the config before the weights."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        max_bytes: int,
        authorization_ttl_s: float = 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()  # guards `_authorizations`
        self._authorizations: TTLCache[RefKey, None] = TTLCache(MAX_AUTHORIZATIONS, authorization_ttl_s, timer=clock)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def find_watched_paths(self, source: str, name: str) -> WatchedPaths:
        """Return the paths to check for adapter changes, or no paths if only the remote source can detect
        changes.
        """
        is_allowed = source in self._sources and _is_valid_name(name)
        return self._sources[source].find_watched_paths(name) if is_allowed else WatchedPaths()

    def mark_used(self, source: str, folder: Path) -> None:
        """Mark a downloaded version as used now, which protects it from eviction."""
        if source in self._sources:
            self._sources[source].mark_used(folder)

    def fetch(self, source: str, name: str, token: str | None, check_config: CheckConfig) -> FetchedAdapter:
        """Download an adapter. `check_config` may raise an error to reject it before its weights are downloaded."""
        started = self._clock()
        origin = self._sources.get(source)
        if origin is None:
            enabled = ", ".join(sorted(self._sources))
            raise AdapterError(f"adapter {name[:64]!r}: source {source[:64]!r} is not enabled; use one of {enabled}")
        token = token or None
        _check_request(name, token)
        self._authorize(AdapterRef(source, name, token))
        files = origin.find(name, token)
        _reject_medusa(origin, files, token)
        names = _select_files(files, self._max_bytes)
        config_folder = origin.fetch(files, [CONFIG_FILE], token)
        config = read_json(config_folder / CONFIG_FILE, f"adapter {name!r}", files.stamps.get(CONFIG_FILE))
        check_config(config, partial(self._base_model_type, source, token))
        is_new = not all(os.path.isfile(config_folder / file) for file in names)
        folder = origin.fetch(files, names, token)
        total = sum(files.sizes[file] for file in names)
        logger.debug("adapter %r of source %s: %d bytes in %.1f s", name, source, total, self._clock() - started)
        stamps = {file: files.stamps[file] for file in names if file in files.stamps}
        return FetchedAdapter(folder, files.version, config, tuple(select_tokenizer_files(names)), stamps, is_new)

    @cachedmethod(attrgetter("_authorizations"), key=lambda _, ref: make_ref_key(ref), lock=attrgetter("_lock"))
    def _authorize(self, ref: AdapterRef) -> None:
        self._sources[ref.source].authorize(ref.name, ref.token)

    def _base_model_type(self, source: str, token: str | None, name: str) -> str | None:
        """Return the `model_type` of base model `name`, or None if it is unknown.

        The adapter's source is queried first, with the token. Then the other sources are queried without a token.
        """
        if not _is_valid_name(name):
            return None
        others = (other for kind, other in self._sources.items() if kind != source)
        return self._sources[source].base_model_type(name, token) or next(
            filter(None, (other.base_model_type(name, None) for other in others)), None
        )


def make_ref_key(ref: AdapterRef) -> RefKey:
    # Tokens may contain any characters.
    token_hash = hashlib.sha256(ref.token.encode(errors="surrogatepass")).hexdigest() if ref.token else None
    return ref.source, ref.name, token_hash


def _is_valid_name(name: str) -> bool:
    # `isprintable` excludes control characters, line breaks and lone surrogates.
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _check_request(name: str, token: str | None) -> None:
    if not _is_valid_name(name):
        raise AdapterError(f"adapter {name[:64]!r}: a name must have 1 to {MAX_NAME_LENGTH} printable characters")
    # The token is sent in a header, where a line break would start another header.
    if token is not None and not (token.isascii() and token.isprintable()):
        raise AdapterAccessError(f"adapter {name!r}: the token contains invalid characters; check how it is sent")


def _reject_medusa(origin: Source, files: AdapterFiles, token: str | None) -> None:
    """Raise AdapterError if the files contain Medusa heads but no LoRA adapter. If they contain both, the heads are not
    used.
    """
    size = files.sizes.get(MODEL_CONFIG_FILE, MAX_CONFIG_BYTES + 1)
    if CONFIG_FILE in files.sizes or size > MAX_CONFIG_BYTES:
        return
    path = origin.fetch(files, [MODEL_CONFIG_FILE], token) / MODEL_CONFIG_FILE
    if "medusa_num_heads" in read_json(path, f"adapter {files.name!r}", files.stamps.get(MODEL_CONFIG_FILE)):
        raise AdapterError(
            f"adapter {files.name!r}: has Medusa heads but no LoRA adapter; omit the adapter, download the folder, and "
            "start the server with --draft-heads FOLDER"
        )


def _select_files(files: AdapterFiles, max_bytes: int) -> list[str]:
    """Return the files to download. Raise AdapterError if a required file is missing or the files are too large."""
    label, missing = f"adapter {files.name!r}", [file for file in REQUIRED_FILES if file not in files.sizes]
    pickles = [file for file in PICKLE_FILES if file in files.sizes]
    if WEIGHTS_FILE in missing and pickles:
        raise AdapterError(
            f"{label}: has {pickles[0]} but no {WEIGHTS_FILE}; pickle files are not supported. If you trust the file, "
            "load it with PEFT and save it with `save_pretrained(folder, safe_serialization=True)`"
        )
    if missing:
        raise AdapterError(
            f"{label}: has no {' and no '.join(missing)}; save the adapter with PEFT, or convert a GGUF adapter with "
            "`lorax convert-adapter`"
        )
    names = [*REQUIRED_FILES, *select_tokenizer_files(files.sizes)]
    if sum(map(is_template_file, names)) > MAX_TEMPLATES:
        raise AdapterError(f"{label}: {TEMPLATES_FOLDER} has more than {MAX_TEMPLATES} templates")
    for file in names:
        size, limit = files.sizes[file], max_file_bytes(file) or max_bytes
        if not 0 <= size <= limit:
            raise AdapterError(f"{label}: {file} has {size} bytes, at most {limit} are allowed")
    total = sum(files.sizes[file] for file in names)
    if total > max_bytes:
        raise AdapterError(f"{label}: the files have {total} bytes, at most {max_bytes} are allowed")
    return names


def read_json(path: Path, label: str, stamp: Stamp | None = None) -> dict[str, Any]:
    """Return the JSON object in an untrusted file. Raise SourceError if the file changed after `stamp` was read."""
    try:
        with convert_read_errors(label, path), open_regular_file(path, stamp) as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
        return parse_json(content)
    except ValueError as error:
        raise AdapterError(f"{label}: {path.name} is invalid: {error}") from error
