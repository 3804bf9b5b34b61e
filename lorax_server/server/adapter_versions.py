"""Manages uploaded adapter versions. `poet@v2` is an adapter, and `poet` refers to one version or to a weighted split.

The versions are stored in `STATE_FILE`, so they survive a restart of the server.
"""

import asyncio
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import MAX_NAME_LENGTH
from lorax_server.errors import AdapterNotFoundError, ConfigError, ConflictError, InputError, SourceError
from lorax_server.server.access.model_names import AdapterKey, ModelNames

MAX_VERSIONS = 8  # per name; the oldest versions without requests are removed
STATE_FILE = "versions.json"
FOLDER_PATTERN = re.compile(r"[0-9a-f]{32}")
NUMBER_PATTERN = re.compile(r"[1-9][0-9]{0,8}")
MAX_NAME_CHARACTERS = MAX_NAME_LENGTH - len("@v999999999")

logger = logging.getLogger(__name__)


class AdapterVersion(NamedTuple):
    """One version of an adapter. For an uploaded version, `key` is the name of its folder below the upload folder."""

    key: AdapterKey
    is_uploaded: bool = True


@dataclass(frozen=True)
class VersionedAdapter:
    """The versions of one name. The object is immutable; metrics count the requests."""

    versions: Mapping[int, AdapterVersion] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)  # fraction of requests by version; the sum is 1
    last_number: int = 0
    num_requests: dict[int, int] = field(default_factory=dict, compare=False)

    @property
    def primary(self) -> int:
        """The version with the largest weight. If weights are equal, the newest version."""
        return max(self.weights, key=lambda number: (self.weights[number], number))

    def choose(self, name: str, request_id: str) -> int:
        """Return the version for a request. A request ID always selects the same version for the same weights."""
        digest = sha256(f"{name}\0{request_id}".encode(errors="surrogatepass")).digest()
        position, chosen = int.from_bytes(digest[:8], "big") / 2**64, self.primary
        for number, weight in sorted(self.weights.items()):
            if position < weight:
                chosen = number
                break
            position -= weight
        return chosen


class AdapterVersions:
    """The versioned adapters of one server. Use it on the event loop, except for `load` and `delete_folder`."""

    def __init__(self, names: ModelNames, folder: Path | None) -> None:
        self.folder = folder  # None if uploads are disabled
        self.lock = asyncio.Lock()  # held while a change is stored and applied
        self.num_uploads = 0  # uploads in progress
        self.in_use: list[AdapterKey] = []  # adapters whose files uploads in progress read
        self.retired: list[AdapterVersion] = []  # removed, but their folders may be in use
        self._names = names
        self._adapters: dict[str, VersionedAdapter] = {}
        self._skipped: dict[str, Any] = {}  # invalid entries of the state file, which are kept in the file

    def __iter__(self) -> Iterator[tuple[str, VersionedAdapter]]:
        return iter(list(self._adapters.items()))

    def get(self, name: str) -> VersionedAdapter | None:
        return self._adapters.get(name)

    def select(self, name: str, request_id: str) -> tuple[int, AdapterKey] | None:
        """Return the version that a request for this name uses, or None if the name has no versions."""
        adapter = self._adapters.get(name)
        if adapter is None:
            base, chosen = split_version(name)
            adapter = self._adapters.get(base)
            if adapter is None or chosen not in adapter.versions:
                return None
        else:
            chosen = adapter.choose(name, request_id)
        adapter.num_requests[chosen] = adapter.num_requests.get(chosen, 0) + 1
        return chosen, adapter.versions[chosen].key

    def is_uploaded(self, key: AdapterKey) -> bool:
        """Return True if an adapter is an uploaded version."""
        version = AdapterVersion(key)
        return version in self.retired or any(version in adapter.versions.values() for _, adapter in self)

    def check_has_version(self, name: str) -> None:
        """Raise if this is a name such as `poet@v9`, and `poet` has no such version."""
        base, at, version = name.partition("@")
        adapter = self._adapters.get(base) if at else None
        if adapter is not None and split_version(name)[1] not in adapter.versions:
            raise AdapterNotFoundError(_describe_unknown_version(base, version, adapter))

    def check_name(self, name: str) -> None:
        """Raise if a name cannot have uploaded versions."""
        self._names.check_alias(name)
        canonical = self._names.normalize(self._names.default_source, name).name
        if canonical != name:
            raise InputError(f"adapter {name[:64]!r}: use the name {canonical[:64]!r}")
        if "@" in name:
            raise InputError(f"adapter {name[:64]!r}: a name with uploaded versions must not contain @")
        if len(name) > MAX_NAME_CHARACTERS:
            raise InputError(
                f"adapter {name[:64]!r}: a name with uploaded versions must have at most {MAX_NAME_CHARACTERS} "
                "characters"
            )
        for other in self._names.adapters:
            is_version = other.startswith(f"{name}@v") and split_version(other)[0] == name
            if is_version and self._names.strip_version(other) != name:
                raise ConflictError(f"{other[:64]!r} is another adapter; rename it before an upload of {name[:64]!r}")

    # --- Changes: each is stored before it is applied -----------------------------------------------------------------

    def add(self, name: str, key: AdapterKey, previous: AdapterKey | None, activate: bool) -> VersionedAdapter:
        """Return the adapter with an additional version. `previous` becomes version 1 of a name without versions. It
        must not be an uploaded version, because its files may be deleted.
        """
        adapter = self._adapters.get(name)
        if adapter is None:
            adapter = VersionedAdapter()
            if previous is not None:
                adapter = VersionedAdapter({1: AdapterVersion(previous, is_uploaded=False)}, {1: 1.0}, 1)
        number = adapter.last_number + 1
        versions = {**adapter.versions, number: AdapterVersion(key)}
        weights = {number: 1.0} if activate or not adapter.weights else adapter.weights
        removable = [each for each in versions if each not in weights and each != number]
        for each in removable[: max(0, len(versions) - MAX_VERSIONS)]:
            del versions[each]
        return replace(adapter, versions=versions, weights=weights, last_number=number)

    def weigh(self, name: str, weights: Mapping[int, float]) -> VersionedAdapter:
        """Return the adapter with other version weights, after normalizing the weights."""
        adapter = self._adapters[name]
        unknown = sorted(weights.keys() - adapter.versions.keys())
        if unknown:
            raise InputError(_describe_unknown_version(name, f"v{unknown[0]}", adapter))
        total = sum(weights.values())
        return replace(adapter, weights={number: weight / total for number, weight in weights.items() if weight})

    async def apply(
        self, name: str, adapter: VersionedAdapter | None, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Store and apply the versions of a name. None removes the name and all its versions. The caller must hold
        `lock`.

        `prepare` is called after the versions are stored. If it raises, the stored versions are restored.
        """
        adapters = {**self._adapters, name: adapter} if adapter is not None else dict(self._adapters)
        if adapter is None:
            adapters.pop(name, None)
        else:
            self._names.check_aliases(list(_list_aliases(name, adapter)))
        await self._store(adapters)
        if prepare is not None:
            try:
                await prepare()
            except BaseException:
                await self._store(self._adapters)
                raise
        before = self._adapters.get(name, VersionedAdapter())
        versions = {} if adapter is None else adapter.versions
        for number, version in before.versions.items():
            if number not in versions:
                self._names.remove_alias(f"{name}@v{number}")
                before.num_requests.pop(number, None)
                self.retired += [version] if version.is_uploaded else []
        if adapter is None:
            self._adapters.pop(name, None)
            self._names.remove_alias(name)
        else:
            self._adapters[name] = adapter
            self._add_aliases(name, adapter)

    def _add_aliases(self, name: str, adapter: VersionedAdapter) -> None:
        for alias, key in _list_aliases(name, adapter).items():
            self._names.add_alias(alias, *key, version_of=None if alias == name else name)

    # --- Files --------------------------------------------------------------------------------------------------------

    def make_folder(self) -> Path:
        """Create and return a folder for an upload. This may block on the file system."""
        assert self.folder is not None
        folder = self.folder / uuid.uuid4().hex
        folder.mkdir()
        return folder

    def delete_folder(self, name: str) -> None:
        """Delete an uploaded version's files. This may block on the file system."""
        if self.folder is not None and FOLDER_PATTERN.fullmatch(name):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def load(self) -> None:
        """Read the stored versions, and delete the files of interrupted uploads and removed versions."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / STATE_FILE
            stored = json.loads(path.read_bytes()) if path.exists() else {}
            if not isinstance(stored, dict):
                raise ValueError("it must be a JSON object")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--adapter-uploads-dir {self.folder}: {STATE_FILE} cannot be read: {error}") from error
        for name, entry in stored.items():
            try:
                adapter = _decode(entry)
                self._names.check_aliases(list(_list_aliases(name, adapter)))
            except (InputError, AttributeError, LookupError, TypeError, ValueError) as error:
                logger.warning("%s: the versions of adapter %r are not served: %r", STATE_FILE, name[:64], error)
                self._skipped[name] = entry
            else:
                self._adapters[name] = adapter
                self._add_aliases(name, adapter)
        used = {each.key.name for _, adapter in self for each in adapter.versions.values()}
        for folder in self.folder.iterdir():
            if folder.name not in used and not self._skipped:  # a skipped entry may use any folder
                self.delete_folder(folder.name)

    async def _store(self, adapters: Mapping[str, VersionedAdapter]) -> None:
        try:
            await asyncio.to_thread(self._write_state, adapters)
        except OSError as error:
            raise SourceError(f"the adapter versions cannot be stored: {error.strerror}") from error

    def _write_state(self, adapters: Mapping[str, VersionedAdapter]) -> None:
        assert self.folder is not None
        content = self._skipped | {name: _encode(adapter) for name, adapter in adapters.items()}
        partial = self.folder / f"{STATE_FILE}.part"
        partial.write_text(json.dumps(content, indent=1))
        os.replace(partial, self.folder / STATE_FILE)


def make_upload_key(folder: Path) -> AdapterKey:
    return AdapterKey(LocalSource.kind, folder.name)


def split_version(name: str) -> tuple[str, int]:
    """Return the name and the number of a version such as `poet@v2`. Other names have the number 0."""
    base, at, number = name.rpartition("@v")
    return (base, int(number)) if at and NUMBER_PATTERN.fullmatch(number) else (name, 0)


def _describe_unknown_version(name: str, version: str, adapter: VersionedAdapter) -> str:
    known = ", ".join(f"v{number}" for number in adapter.versions)
    return f"adapter {name[:64]!r} has no version {version[:16]!r}; its versions are {known}"


def _list_aliases(name: str, adapter: VersionedAdapter) -> dict[str, AdapterKey]:
    """Return the names of an adapter and its versions."""
    aliases = {f"{name}@v{number}": version.key for number, version in adapter.versions.items()}
    return aliases | {name: adapter.versions[adapter.primary].key}


def _encode(adapter: VersionedAdapter) -> dict[str, object]:
    versions = {number: [*each.key, each.is_uploaded] for number, each in adapter.versions.items()}
    return {"versions": versions, "weights": adapter.weights, "last_number": adapter.last_number}


def _decode(entry: Mapping[str, Any]) -> VersionedAdapter:
    versions = {
        int(number): AdapterVersion(AdapterKey(source, name), bool(is_uploaded))
        for number, (source, name, is_uploaded) in entry["versions"].items()
    }
    weights = {int(number): float(weight) for number, weight in entry["weights"].items()}
    return VersionedAdapter(versions, weights, int(entry["last_number"]))
