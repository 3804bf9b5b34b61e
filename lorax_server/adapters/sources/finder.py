"""An adapter from its source, read and identified. Nothing of it is read again as long as its file stays the same."""

import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorax_server.adapters.checkpoint import read_header
from lorax_server.adapters.config import AdapterConfig, check_base_model, parse_config
from lorax_server.adapters.identity import identify
from lorax_server.adapters.sources.source import (
    MAX_NAME_LENGTH,
    AdapterSources,
    BaseModelType,
    FetchedAdapter,
    read_json,
)
from lorax_server.adapters.spec import AdapterSpec, StoredPart, count_elements, is_settled
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.adapter_files import REQUIRED_FILES
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.plain_file import Stamp, size_in, stamp_of
from lorax_server.types import AdapterRef, Resolved

MAX_IDENTITIES = 100_000
MAX_BASE_TYPES = 10_000
ATTEMPTS = 3  # at reading an adapter that somebody replaces meanwhile
# How long a base model that no source knows stays unknown: asking takes a while where the hub does not answer.
UNKNOWN_BASE_S = 600.0

K = TypeVar("K")
V = TypeVar("V")
Key = tuple[str, str, str | None]  # source, name, and a hash of the token: what a caller may read depends on it


class Recent(OrderedDict[K, V]):
    """Forgets what was not asked for longest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def recall(self, key: K) -> V | None:
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


@dataclass(frozen=True)
class Found:
    """An adapter on this machine, and its files as they were when it was identified."""

    spec: AdapterSpec
    resolved: Resolved
    files: Mapping[Path, Stamp | None]  # and the folders that are watched for it
    roots: Mapping[Path, Stamp | None] = field(default_factory=dict)  # which folder each was
    is_settled: bool = False  # a change from then on shows in the stamps
    is_new: bool = False  # some of its files had to be brought here

    def is_unchanged(self) -> bool:
        """One look at each file. May take as long as the file system does."""
        is_same = all(_which_folder(root) == folder for root, folder in self.roots.items())
        return is_same and all(_stamp(path) == stamp for path, stamp in self.files.items())

    def is_overwritten(self) -> bool:
        """Tell whether other config or weights lie where these were. Not so if one of them is gone."""
        paths = [self.spec.parts[0].folder / file for file in REQUIRED_FILES]
        now = _stamps(paths)
        return None not in now.values() and any(now[path] != self.files.get(path) for path in paths)

    def is_cut(self) -> bool:
        """Tell whether shorter weights lie where these were: somebody may have begun to write them anew."""
        path = self.spec.parts[0].folder / WEIGHTS_FILE
        before, now = self.files.get(path), _stamp(path)
        return before is not None and now is not None and size_in(now) < size_in(before)


class AdapterFinder:
    """Adapters for one base model. May be called by any thread."""

    def __init__(
        self,
        sources: AdapterSources,
        *,
        model_type: str,
        model_class: str,
        clock: Callable[[], float] = time.monotonic,
        time_ns: Callable[[], int] = time.time_ns,  # what the times of files are held against
    ) -> None:
        self._sources = sources
        self._model_type = model_type
        self._model_class = model_class
        self._clock = clock
        self._time_ns = time_ns
        self._lock = threading.Lock()  # of all below
        self._identities: Recent[tuple[object, ...], tuple[str, int]] = Recent(MAX_IDENTITIES)
        self._base_types: Recent[Key, tuple[str | None, float]] = Recent(MAX_BASE_TYPES)

    def find(self, ref: AdapterRef) -> Found:
        """Brings it here and reads it. Takes as long as its source does."""
        check = partial(self._check_config, key_of(ref))
        failure = SourceError(f"adapter {ref.name!r}: a file of it changed while it was read; try again")
        for _ in range(ATTEMPTS):
            began_ns = self._time_ns()
            places = self._sources.places(ref.source, ref.name)
            roots = {root: _which_folder(root) for root in places.roots}
            folders = _stamps(places.folders)  # before anything in them is looked at
            try:
                fetched = self._sources.fetch(ref.source, ref.name, ref.token, check)
            except SourceError as error:
                if not places.roots:
                    raise
                failure = error  # a folder of this machine, which may have changed meanwhile
                continue
            found = self._identify(ref.name, fetched)
            # It may have moved meanwhile, to a root that is not watched.
            if found is not None and self._sources.places(ref.source, ref.name) == places:
                return replace(_watch(found, folders, began_ns), roots=roots)
        raise failure

    def _check_config(self, key: Key, raw: Mapping[str, Any], base_model_type: BaseModelType) -> None:
        source, name, token_hash = key
        config = parse_config(raw, name)
        found = None
        if config.base_model_name is not None and len(config.base_model_name) <= MAX_NAME_LENGTH:
            found = self._base_type((source, config.base_model_name, token_hash), base_model_type)
        check_base_model(config, self._model_type, self._model_class, found)

    def _base_type(self, key: Key, base_model_type: BaseModelType) -> str | None:
        with self._lock:
            found, unknown_until = self._base_types.recall(key) or (None, float("-inf"))
        if found is None and self._clock() >= unknown_until:
            found = base_model_type(key[1])
            with self._lock:
                self._base_types[key] = (found, self._clock() + UNKNOWN_BASE_S)
        return found

    def _identify(self, name: str, fetched: FetchedAdapter) -> Found | None:
        """None if a file is not what it was when it was fetched: config and weights must be of one moment, and of the
        files that their source vouches for. What lies under their names by now may be anything."""
        folder, config = fetched.folder, parse_config(fetched.config, name)
        weights = folder / WEIGHTS_FILE
        files = _stamps(folder / file for file in (*REQUIRED_FILES, *fetched.tokenizer_files))
        stamp = files[weights]
        is_vouched_for = all(files[folder / file] == stamp for file, stamp in fetched.stamps.items())
        if stamp is None or None in files.values() or not is_vouched_for:
            return None
        settled = is_settled(stamp, self._time_ns())
        try:
            again = read_json(folder / CONFIG_FILE, f"adapter {name!r}", files[folder / CONFIG_FILE])
            identity, num_elements = self._read_identity(config, weights, stamp)
        except SourceError:
            return None
        except AdapterError:
            if _stamps(files) == files:
                raise
            return None
        if again != fetched.config or _stamps(files) != files:
            return None
        part = StoredPart(folder, config, stamp, identity, settled)
        spec = AdapterSpec(identity, name, (part,), num_elements)
        vouched = tuple(files[folder / file] or () for file in fetched.tokenizer_files)
        resolved = Resolved(identity, str(folder), fetched.tokenizer_files, tokenizer_stamps=vouched)
        return Found(spec, resolved, files, is_new=fetched.is_new)

    def _read_identity(self, config: AdapterConfig, path: Path, stamp: Stamp) -> tuple[str, int]:
        """Who it is, and how many elements it has. The weights are read only if they are not known by their stamp."""
        settings = hashlib.sha256(json.dumps(config.identity(), sort_keys=True).encode()).digest()
        key = (path, stamp, settings)
        with self._lock:
            known = self._identities.recall(key)
        if known is not None:
            return known
        keeps = is_settled(stamp, self._time_ns())
        tensors = read_header(path, config.name, stamp)
        found = identify(config, path, tensors, stamp), count_elements(tensors)
        if keeps and _stamps([path]) == {path: stamp}:
            with self._lock:
                self._identities[key] = found
        return found


def key_of(ref: AdapterRef) -> Key:
    # A token may be anything that was sent.
    token_hash = hashlib.sha256(ref.token.encode(errors="surrogatepass")).hexdigest() if ref.token else None
    return ref.source, ref.name, token_hash


def _watch(found: Found, places: Mapping[Path, Stamp | None], now_ns: int) -> Found:
    """The same, with the folders to be watched, which were looked at not before `now_ns`."""
    watched = {**places, **found.files}
    settled = all(is_settled(stamp, now_ns) for stamp in watched.values() if stamp is not None)
    return replace(found, files=watched, is_settled=settled)


def _which_folder(path: Path) -> Stamp | None:
    """Another one when a link is switched, and the same whatever comes and goes in the folder."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _stamps(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    return {path: _stamp(path) for path in paths}


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None
