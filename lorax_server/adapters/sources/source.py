"""Sources of adapters: what a source is, and the front that asks the sources in one safe order."""

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
    find_limit,
    is_template,
    tokenizer_files,
)
from lorax_server.files.names import CONFIG_FILE, MODEL_CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.plain_file import Stamp, open_plain, reading
from lorax_server.files.strict_json import parse_json
from lorax_server.types import AdapterRef

logger = logging.getLogger(__name__)

MAX_NAME_LENGTH = 512
MAX_AUTHORIZATIONS = 10_000
Key = tuple[str, str, str | None]  # source, name, and a hash of the token, on which the answer depends


@dataclass(frozen=True)
class AdapterFiles:
    """The version of an adapter that a name points at now."""

    source: str
    name: str  # without a revision
    version: str  # changes whenever a file does
    sizes: Mapping[str, int]  # bytes of each known file that is there
    tags: Mapping[str, str] = field(default_factory=dict)  # by which the source fetches and checks each file
    # Stamps of the files that the source has checked, where other processes may write to their folder.
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


class WatchedPaths(NamedTuple):
    """Paths that show whether an adapter has changed."""

    # At least one gets another stamp when the name means another folder of the same roots, or when a known file comes,
    # goes or is replaced. Most of them need not exist.
    folders: Sequence[Path] = ()
    roots: Sequence[Path] = ()  # have to stay the folders that they are, whatever comes and goes in them


class Source(ABC):
    """An origin of adapters. Each method raises an AdapterError that names the adapter."""

    kind: str

    @abstractmethod
    def authorize(self, name: str, token: str | None) -> None:
        """Return only if the bearer of this token may read the adapter now."""

    @abstractmethod
    def find(self, name: str, token: str | None) -> AdapterFiles:
        """Return the files that a name, with its revision if it has one, points at."""

    @abstractmethod
    def fetch(self, files: AdapterFiles, names: Sequence[str], token: str | None) -> Path:
        """Return a folder that holds the named files, complete and checked. It may hold others."""

    def find_watched_paths(self, name: str) -> WatchedPaths:  # noqa: ARG002
        """Return the paths that show whether a name means another adapter; none where the source has to be asked."""
        return WatchedPaths()

    def mark_used(self, folder: Path) -> None:  # noqa: B027 - most sources keep nothing
        """Note that a fetched version is still used, where unused ones leave. Takes as long as the file system does."""

    def base_model_type(self, name: str, token: str | None) -> str | None:
        """Return the `model_type` of a base model that is kept here; None, and no error, where it is unknown."""
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


BaseModelType = Callable[[str], str | None]
CheckConfig = Callable[[Mapping[str, Any], BaseModelType], None]


@dataclass(frozen=True)
class FetchedAdapter:
    """An adapter whose files are on this machine."""

    folder: Path
    version: str
    config: dict[str, Any]
    tokenizer_files: tuple[str, ...]
    stamps: Mapping[str, Stamp] = field(default_factory=dict)  # of the files that its source has checked
    is_new: bool = field(default=False, compare=False)  # some of its files had to be fetched just now


class AdapterSources:
    """The sources a server allows, their limits, and the order of steps."""

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
        self._lock = threading.Lock()  # guards the clients' rights of a short while ago
        self._authorizations: TTLCache[Key, None] = TTLCache(MAX_AUTHORIZATIONS, authorization_ttl_s, timer=clock)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def find_watched_paths(self, source: str, name: str) -> WatchedPaths:
        """Return the paths to watch for changes of an adapter; none where its source has to be asked."""
        is_known = source in self._sources and _is_sane(name)
        return self._sources[source].find_watched_paths(name) if is_known else WatchedPaths()

    def mark_used(self, source: str, folder: Path) -> None:
        """Note that a version, which was fetched before, is still used."""
        if source in self._sources:
            self._sources[source].mark_used(folder)

    def fetch(self, source: str, name: str, token: str | None, check_config: CheckConfig) -> FetchedAdapter:
        """Fetch an adapter to this machine. `check_config` raises to refuse it before its weights are fetched."""
        started = self._clock()
        origin = self._sources.get(source)
        if origin is None:
            enabled = ", ".join(sorted(self._sources))
            raise AdapterError(f"adapter {name[:64]!r}: source {source[:64]!r} is not enabled; use one of {enabled}")
        token = token or None
        _check_request(name, token)
        self._authorize(AdapterRef(source, name, token))
        files = origin.find(name, token)
        names = _choose(files, self._max_bytes)
        config_folder = origin.fetch(files, [CONFIG_FILE], token)
        config = read_json(config_folder / CONFIG_FILE, f"adapter {name!r}", files.stamps.get(CONFIG_FILE))
        check_config(config, partial(self._base_model_type, source, token))
        is_new = not all(os.path.isfile(config_folder / file) for file in names)
        folder = origin.fetch(files, names, token)
        total = sum(files.sizes[file] for file in names)
        logger.debug("adapter %r of source %s: %d bytes in %.1f s", name, source, total, self._clock() - started)
        stamps = {file: files.stamps[file] for file in names if file in files.stamps}
        return FetchedAdapter(folder, files.version, config, tuple(tokenizer_files(names)), stamps, is_new)

    @cachedmethod(attrgetter("_authorizations"), key=lambda _, ref: key_of(ref), lock=attrgetter("_lock"))
    def _authorize(self, ref: AdapterRef) -> None:
        self._sources[ref.source].authorize(ref.name, ref.token)

    def _base_model_type(self, source: str, token: str | None, name: str) -> str | None:
        """Ask the adapter's own source first. The token was given for that one; no other source sees it."""
        if not _is_sane(name):
            return None
        others = (other for kind, other in self._sources.items() if kind != source)
        return self._sources[source].base_model_type(name, token) or next(
            filter(None, (other.base_model_type(name, None) for other in others)), None
        )


def key_of(ref: AdapterRef) -> Key:
    # A token may hold any characters.
    token_hash = hashlib.sha256(ref.token.encode(errors="surrogatepass")).hexdigest() if ref.token else None
    return ref.source, ref.name, token_hash


def _is_sane(name: str) -> bool:
    # Printable leaves out control characters, line breaks and lone surrogates.
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _check_request(name: str, token: str | None) -> None:
    if not _is_sane(name):
        raise AdapterError(f"adapter {name[:64]!r}: a name is 1 to {MAX_NAME_LENGTH} printable characters")
    # It goes into a header, where a line break would start another one.
    if token is not None and not (token.isascii() and token.isprintable()):
        raise AdapterAccessError(f"adapter {name!r}: the token holds characters no token has; check how it is sent")


def _choose(files: AdapterFiles, max_bytes: int) -> list[str]:
    """Return the files to fetch. Refuse an adapter that lacks one or is too large."""
    what, missing = f"adapter {files.name!r}", [file for file in REQUIRED_FILES if file not in files.sizes]
    pickles = [file for file in PICKLE_FILES if file in files.sizes]
    if WEIGHTS_FILE in missing and pickles:
        raise AdapterError(
            f"{what}: has {pickles[0]} and no {WEIGHTS_FILE}; pickle files are never opened. Load it with PEFT where "
            "you trust it, and save it again with `save_pretrained(folder, safe_serialization=True)`"
        )
    if missing:
        raise AdapterError(f"{what}: has no {' and no '.join(missing)}; save it with PEFT")
    names = [*REQUIRED_FILES, *tokenizer_files(files.sizes)]
    if sum(map(is_template, names)) > MAX_TEMPLATES:
        raise AdapterError(f"{what}: {TEMPLATES_FOLDER} has more than {MAX_TEMPLATES} templates")
    for file in names:
        size, limit = files.sizes[file], find_limit(file) or max_bytes
        if not 0 <= size <= limit:
            raise AdapterError(f"{what}: {file} has {size} bytes, at most {limit} are allowed")
    total = sum(files.sizes[file] for file in names)
    if total > max_bytes:
        raise AdapterError(f"{what}: its files have {total} bytes, at most {max_bytes} are allowed")
    return names


def read_json(path: Path, what: str, stamp: Stamp | None = None) -> dict[str, Any]:
    """Read a JSON object from an untrusted file. With a `stamp`, only the file that has it is read."""
    try:
        with reading(what, path), open_plain(path, stamp) as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
        return parse_json(content)
    except ValueError as error:
        raise AdapterError(f"{what}: {path.name} is refused: {error}") from error
