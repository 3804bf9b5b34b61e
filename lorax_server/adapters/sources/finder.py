"""Adapters fetched from their source and identified. A file is not read again as long as it stays the same."""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from cachetools import LRUCache, TLRUCache, cachedmethod

from lorax_server.adapters.checkpoint import read_header
from lorax_server.adapters.config import AdapterConfig, check_base_model, parse_config
from lorax_server.adapters.identity import identify
from lorax_server.adapters.methods.size import count_elements
from lorax_server.adapters.sources.source import (
    MAX_NAME_LENGTH,
    AdapterSources,
    BaseModelType,
    FetchedAdapter,
    Key,
    key_of,
    read_json,
)
from lorax_server.adapters.spec import AdapterSpec, StoredPart, is_settled
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.adapter_files import REQUIRED_FILES
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.plain_file import Stamp, find_stamp, look, size_in
from lorax_server.types import AdapterRef, Resolved

MAX_IDENTITIES = 100_000
MAX_BASE_TYPES = 10_000
ATTEMPTS = 3  # at reading an adapter that is replaced meanwhile
# For so long no source is asked again for a base model that none knows: a hub that does not answer takes a while.
UNKNOWN_BASE_S = 600.0


@dataclass(frozen=True)
class FoundAdapter:
    """An adapter on this machine, and its files as they were when it was identified."""

    spec: AdapterSpec
    resolved: Resolved
    files: Mapping[Path, Stamp | None]  # and the folders that are watched for it
    roots: Mapping[Path, Stamp | None] = field(default_factory=dict)  # device and inode of each
    is_settled: bool = False  # every later change shows in the stamps
    is_new: bool = False  # some of its files had to be fetched

    def is_unchanged(self) -> bool:
        """Look at each file once. May take as long as the file system does."""
        is_same = all(_find_inode(root) == inode for root, inode in self.roots.items())
        return is_same and all(find_stamp(path) == stamp for path, stamp in self.files.items())

    def is_overwritten(self) -> bool:
        """Tell whether the config or the weights were replaced. Not so if one of them is gone."""
        paths = [self.spec.parts[0].folder / file for file in REQUIRED_FILES]
        now = _stamps(paths)
        return None not in now.values() and any(now[path] != self.files.get(path) for path in paths)

    def is_cut(self) -> bool:
        """Tell whether the weights have become shorter: a process may have begun to write them anew."""
        path = self.spec.parts[0].folder / WEIGHTS_FILE
        before, now = self.files.get(path), find_stamp(path)
        return before is not None and now is not None and size_in(now) < size_in(before)


class AdapterFinder:
    """Finds adapters for one base model. Any thread may use it."""

    def __init__(
        self,
        sources: AdapterSources,
        *,
        model_type: str,
        model_class: str,
        max_inputs: int = 0,  # of any matrix that adapters change
        clock: Callable[[], float] = time.monotonic,
        time_ns: Callable[[], int] = time.time_ns,  # compared with the times of files
    ) -> None:
        self.sources = sources
        self._model_type = model_type
        self._model_class = model_class
        self._max_inputs = max_inputs
        self._time_ns = time_ns
        self._lock = threading.Lock()  # guards all below
        self._identities: LRUCache[tuple[object, ...], tuple[str, int]] = LRUCache(MAX_IDENTITIES)
        self._base_types: TLRUCache[Key, str | None] = TLRUCache(MAX_BASE_TYPES, _remember_until, timer=clock)

    def find(self, ref: AdapterRef) -> FoundAdapter:
        """Fetch an adapter and identify it. Takes as long as its source does."""
        check = partial(self._check_config, key_of(ref))
        failure = SourceError(f"adapter {ref.name!r}: a file of it changed while it was read; try again")
        for _ in range(ATTEMPTS):
            began_ns = self._time_ns()
            paths = self.sources.find_watched_paths(ref.source, ref.name)
            roots = {root: _find_inode(root) for root in paths.roots}
            folders = _stamps(paths.folders)  # before the files in them are read
            try:
                fetched = self.sources.fetch(ref.source, ref.name, ref.token, check)
            except SourceError as error:
                if not paths.roots:
                    raise
                failure = error  # a folder of this machine, which may have changed meanwhile
                continue
            found = self._identify(ref.name, fetched)
            # It may have moved meanwhile, to a root that is not watched.
            if found is not None and self.sources.find_watched_paths(ref.source, ref.name) == paths:
                files = {**folders, **found.files}
                settled = all(is_settled(stamp, began_ns) for stamp in files.values() if stamp is not None)
                return replace(found, files=files, roots=roots, is_settled=settled)
        raise failure

    def _check_config(self, key: Key, raw: Mapping[str, Any], base_model_type: BaseModelType) -> None:
        source, name, token_hash = key
        config = parse_config(raw, name)
        base_type = None
        if config.base_model_name is not None and len(config.base_model_name) <= MAX_NAME_LENGTH:
            base_type = self._find_base_type((source, config.base_model_name, token_hash), base_model_type)
        check_base_model(config, self._model_type, self._model_class, base_type)

    @cachedmethod(attrgetter("_base_types"), key=lambda _, key, __: key, lock=attrgetter("_lock"))
    def _find_base_type(self, key: Key, base_model_type: BaseModelType) -> str | None:
        return base_model_type(key[1])

    def _identify(self, name: str, fetched: FetchedAdapter) -> FoundAdapter | None:
        """Identify a fetched adapter; None if a file has changed since.

        Config and weights must be of one moment, and those that their source has checked.
        """
        folder, config = fetched.folder, parse_config(fetched.config, name)
        weights = folder / WEIGHTS_FILE
        files = _stamps(folder / file for file in (*REQUIRED_FILES, *fetched.tokenizer_files))
        stamp = files[weights]
        is_checked = all(files[folder / file] == stamp for file, stamp in fetched.stamps.items())
        if stamp is None or None in files.values() or not is_checked:
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
        spec = AdapterSpec(identity, name, (StoredPart(folder, config, stamp, identity, settled),), num_elements)
        stamps = tuple(files[folder / file] or () for file in fetched.tokenizer_files)
        resolved = Resolved(identity, str(folder), fetched.tokenizer_files, tokenizer_stamps=stamps)
        return FoundAdapter(spec, resolved, files, is_new=fetched.is_new)

    def _read_identity(self, config: AdapterConfig, path: Path, stamp: Stamp) -> tuple[str, int]:
        """Return the identity and the number of elements. Weights with a known stamp are not read."""
        settings = hashlib.sha256(json.dumps(config.identity_settings(), sort_keys=True).encode()).digest()
        key = (path, stamp, settings)
        with self._lock:
            remembered = self._identities.get(key)
        if remembered is not None:
            return remembered
        keeps = is_settled(stamp, self._time_ns())
        tensors = read_header(path, config.name, stamp)
        num_elements = count_elements(config, tensors, self._max_inputs)
        identity = identify(config, path, tensors, stamp), num_elements
        if keeps and find_stamp(path) == stamp:
            with self._lock:
                self._identities[key] = identity
        return identity


def _remember_until(_: Key, base_type: str | None, now: float) -> float:
    return now + UNKNOWN_BASE_S if base_type is None else math.inf


def _find_inode(path: Path) -> Stamp | None:
    """Return the device and inode of a folder. They change when a link is switched, not when its files change."""
    status = look(path)
    return None if status is None else (status.st_dev, status.st_ino)


def _stamps(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    return {path: find_stamp(path) for path in paths}
