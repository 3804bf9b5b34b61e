"""Where adapters come from: what a source is, and the front that asks the sources in one safe order."""

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lorax_server.errors import AdapterAccessError, AdapterError, SourceError
from lorax_server.files.adapter_files import (
    MAX_CONFIG_BYTES,
    MAX_TEMPLATES,
    PICKLE_FILES,
    REQUIRED_FILES,
    TEMPLATES_FOLDER,
    count_templates,
    find_limit,
    tokenizer_files,
)
from lorax_server.files.names import CONFIG_FILE, MODEL_CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.plain_file import ChangedError, Stamp, open_plain
from lorax_server.files.strict_json import parse_json

logger = logging.getLogger(__name__)

MAX_NAME_LENGTH = 512
MAX_AUTHORIZATIONS = 10_000


@dataclass(frozen=True)
class AdapterFiles:
    """What a name points at right now."""

    source: str
    name: str  # without a revision
    version: str  # changes whenever a file does
    sizes: Mapping[str, int]  # bytes of each known file that is there
    tags: Mapping[str, str] = field(default_factory=dict)  # what the source needs to fetch and check each file
    # Of the very files that the source has checked, where others may write to their folder.
    stamps: Mapping[str, Stamp] = field(default_factory=dict)


class Source(Protocol):
    """A place that adapters come from. Each method raises an AdapterError that names the adapter."""

    kind: str

    def authorize(self, name: str, token: str | None) -> None:
        """Return only if the bearer of this token may read the adapter now."""

    def find(self, name: str, token: str | None) -> AdapterFiles:
        """What the name, with its revision if it has one, points at."""

    def fetch(self, files: AdapterFiles, wanted: Sequence[str], token: str | None) -> Path:
        """A folder that holds the wanted files, complete and checked. It may hold others."""

    def base_model_type(self, name: str, token: str | None) -> str | None:
        """The `model_type` of a base model that is kept here; None, and never an error, when it cannot be known."""


class Places(NamedTuple):
    """Paths that show whether an adapter has changed."""

    # One at least gets another stamp when the name means another folder of the same roots, or when a known file comes,
    # goes or is replaced. Most of them need not exist.
    folders: Sequence[Path] = ()
    roots: Sequence[Path] = ()  # have to stay the folders that they are, whatever comes and goes in them


@runtime_checkable
class Watchable(Protocol):
    """A source whose adapters lie on this machine, so that a look at some paths tells whether one has changed."""

    def places(self, name: str) -> Places:
        """Name the paths that show whether a name means something else by now."""


@runtime_checkable
class Keeping(Protocol):
    """A source that keeps what it fetched in folders, of which the longest unused leave."""

    def mark_used(self, folder: Path) -> None:
        """Note that a version is still used. Takes as long as the file system does."""


BaseModelType = Callable[[str], str | None]
CheckConfig = Callable[[Mapping[str, Any], BaseModelType], None]


@dataclass(frozen=True)
class FetchedAdapter:
    """An adapter whose files are on this machine."""

    folder: Path
    version: str
    config: dict[str, Any]
    tokenizer_files: tuple[str, ...]
    stamps: Mapping[str, Stamp] = field(default_factory=dict)  # of those files that its source vouches for
    is_new: bool = field(default=False, compare=False)  # some of its files had to be brought here just now


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
        self._authorizations = Authorizations(authorization_ttl_s, clock)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def places(self, source: str, name: str) -> Places:
        """Name the paths to watch for changes of an adapter; none where its source has to be asked."""
        origin: object = self._sources.get(source)
        return origin.places(name) if isinstance(origin, Watchable) and _is_sane(name) else Places()

    def mark_used(self, source: str, folder: Path) -> None:
        """Note that a version, which was fetched before, is still used."""
        origin: object = self._sources.get(source)
        if isinstance(origin, Keeping):
            origin.mark_used(folder)

    def fetch(self, source: str, name: str, token: str | None, check_config: CheckConfig) -> FetchedAdapter:
        """Bring an adapter to this machine. `check_config` raises to refuse it before its weights are fetched."""
        started = self._clock()
        origin = self._sources.get(source)
        if origin is None:
            enabled = ", ".join(sorted(self._sources))
            raise AdapterError(f"adapter {name[:64]!r}: source {source[:64]!r} is not enabled; use one of {enabled}")
        token = token or None
        _check_request(name, token)
        self._authorize(source, name, token)
        files = origin.find(name, token)
        wanted = _choose(files, self._max_bytes)
        config_folder = origin.fetch(files, [CONFIG_FILE], token)
        config = read_json(config_folder / CONFIG_FILE, f"adapter {name!r}", files.stamps.get(CONFIG_FILE))
        check_config(config, partial(self._base_model_type, source, token))
        is_new = not all(os.path.isfile(config_folder / file) for file in wanted)
        folder = origin.fetch(files, wanted, token)
        total = sum(files.sizes[file] for file in wanted)
        logger.debug("adapter %r of source %s: %d bytes in %.1f s", name, source, total, self._clock() - started)
        stamps = {file: files.stamps[file] for file in wanted if file in files.stamps}
        return FetchedAdapter(folder, files.version, config, tuple(tokenizer_files(wanted)), stamps, is_new)

    def _authorize(self, source: str, name: str, token: str | None) -> None:
        key = (source, name, token and hashlib.sha256(token.encode()).hexdigest())
        if not self._authorizations.holds(key):
            self._sources[source].authorize(name, token)
            self._authorizations.add(key)

    def _base_model_type(self, source: str, token: str | None, name: str) -> str | None:
        """Asks the adapter's own source first. The token was given for that one; no other sees it."""
        if not _is_sane(name):
            return None
        found = self._sources[source].base_model_type(name, token)
        others = (other for kind, other in self._sources.items() if kind != source)
        return found or next(filter(None, (other.base_model_type(name, None) for other in others)), None)


class Authorizations:
    """What was allowed a short while ago. It forgets the oldest first: callers may ask for any number of names."""

    def __init__(self, ttl_s: float, clock: Callable[[], float], limit: int = MAX_AUTHORIZATIONS) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._limit = limit
        self._ends: OrderedDict[tuple[str | None, ...], float] = OrderedDict()
        self._lock = threading.Lock()

    def holds(self, key: tuple[str | None, ...]) -> bool:
        with self._lock:
            return self._clock() < self._ends.get(key, float("-inf"))

    def add(self, key: tuple[str | None, ...]) -> None:
        with self._lock:
            self._ends[key] = self._clock() + self._ttl_s
            self._ends.move_to_end(key)
            if len(self._ends) > self._limit:
                self._ends.popitem(last=False)


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
    """The files to fetch, if all that is needed is there and nothing is too large."""
    what, missing = f"adapter {files.name!r}", [file for file in REQUIRED_FILES if file not in files.sizes]
    pickles = [file for file in PICKLE_FILES if file in files.sizes]
    if WEIGHTS_FILE in missing and pickles:
        raise AdapterError(
            f"{what}: has {pickles[0]} and no {WEIGHTS_FILE}; pickle files are never opened. Load it with PEFT where "
            "you trust it, and save it again with `save_pretrained(folder, safe_serialization=True)`"
        )
    if missing:
        raise AdapterError(f"{what}: has no {' and no '.join(missing)}; save it with PEFT")
    wanted = [*REQUIRED_FILES, *tokenizer_files(files.sizes)]
    if count_templates(wanted) > MAX_TEMPLATES:
        raise AdapterError(f"{what}: {TEMPLATES_FOLDER} has more than {MAX_TEMPLATES} templates")
    for file in wanted:
        size, limit = files.sizes[file], find_limit(file) or max_bytes
        if not 0 <= size <= limit:
            raise AdapterError(f"{what}: {file} has {size} bytes, at most {limit} are allowed")
    total = sum(files.sizes[file] for file in wanted)
    if total > max_bytes:
        raise AdapterError(f"{what}: its files have {total} bytes, at most {max_bytes} are allowed")
    return wanted


def read_model_type(source: Source, name: str, token: str | None) -> str | None:
    """`model_type` in the config.json that a source keeps under a name, or None."""
    try:
        files = source.find(name, token)
        if files.sizes.get(MODEL_CONFIG_FILE, MAX_CONFIG_BYTES + 1) > MAX_CONFIG_BYTES:
            return None
        folder = source.fetch(files, [MODEL_CONFIG_FILE], token)
        stamp = files.stamps.get(MODEL_CONFIG_FILE)
        found = read_json(folder / MODEL_CONFIG_FILE, f"base model {name!r}", stamp).get("model_type")
    except AdapterError:
        return None
    return found if isinstance(found, str) else None


def read_json(path: Path, what: str, stamp: Stamp | None = None) -> dict[str, Any]:
    """A JSON object from a file whose content nobody vouches for. `stamp` is that of the file that is meant, if only
    that one will do."""
    try:
        with open_plain(path, stamp) as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
        return parse_json(content)
    except ChangedError as error:
        raise SourceError(f"{what}: {path.name} changed while it was read; try again") from error
    except OSError as error:
        raise AdapterError(f"{what}: {path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AdapterError(f"{what}: {path.name} is refused: {error}") from error
