"""Resolves adapters: downloads them, computes their identity, and caches the result until a file changes."""

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
from lorax_server.adapters.identity import compute_identity
from lorax_server.adapters.methods.size import count_elements
from lorax_server.adapters.sources.source import (
    MAX_NAME_LENGTH,
    AdapterSources,
    FetchedAdapter,
    FindBaseModelType,
    RefKey,
    make_ref_key,
    read_json,
)
from lorax_server.adapters.spec import AdapterCheckpoint, AdapterSpec, is_settled
from lorax_server.errors import AdapterError, SourceError
from lorax_server.files.adapter_files import REQUIRED_FILES
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.regular_file import Stamp, read_stamp_or_none, stamped_size, stat_or_none
from lorax_server.types import AdapterRef, ResolvedAdapter

MAX_IDENTITIES = 100_000
MAX_BASE_TYPES = 10_000
MAX_ATTEMPTS = 3  # attempts if files change while they are read
# Unknown base models are not looked up again for this time, because an unreachable hub is slow.
UNKNOWN_BASE_TTL_S = 600.0


@dataclass(frozen=True)
class FoundAdapter:
    """A resolved adapter in a local folder, with file stamps to detect later changes."""

    spec: AdapterSpec
    resolved: ResolvedAdapter
    files: Mapping[Path, Stamp | None]  # stamps of adapter files and watched folders
    roots: Mapping[Path, Stamp | None] = field(default_factory=dict)  # device and inode of each root folder
    is_settled: bool = False  # the stamps are old enough that any later change is detected
    is_new: bool = False  # some files were downloaded

    def is_unchanged(self) -> bool:
        """Return True if no file changed after the adapter was resolved. May block on the file system."""
        is_same = all(_find_inode(root) == inode for root, inode in self.roots.items())
        return is_same and all(read_stamp_or_none(path) == stamp for path, stamp in self.files.items())

    def is_overwritten(self) -> bool:
        """Return True if the config or weights file was replaced. Return False if either file is missing."""
        paths = [self.spec.checkpoints[0].folder / file for file in REQUIRED_FILES]
        now = _read_stamps(paths)
        return None not in now.values() and any(now[path] != self.files.get(path) for path in paths)

    def is_truncated(self) -> bool:
        """Return True if the weights file became shorter, for example because another process is rewriting it."""
        path = self.spec.checkpoints[0].folder / WEIGHTS_FILE
        before, now = self.files.get(path), read_stamp_or_none(path)
        return before is not None and now is not None and stamped_size(now) < stamped_size(before)


class AdapterFinder:
    """Resolves adapters for one base model. All methods are thread-safe."""

    def __init__(
        self,
        sources: AdapterSources,
        *,
        model_type: str,
        model_class: str,
        max_inputs: int = 0,  # largest input size of any adapter target
        task: str = "generate",
        clock: Callable[[], float] = time.monotonic,
        time_ns: Callable[[], int] = time.time_ns,  # clock to compare with file times
    ) -> None:
        self.sources = sources
        self._model_type = model_type
        self._model_class = model_class
        self._max_inputs = max_inputs
        self._task = task
        self._time_ns = time_ns
        self._lock = threading.Lock()  # guards the caches below
        self._identities: LRUCache[tuple[object, ...], tuple[str, int]] = LRUCache(MAX_IDENTITIES)
        self._base_types: TLRUCache[RefKey, str | None] = TLRUCache(MAX_BASE_TYPES, _expires_at, timer=clock)

    def find(self, ref: AdapterRef) -> FoundAdapter:
        """Download an adapter if necessary, and compute its identity. Block until the source responds."""
        check = partial(self._check_config, make_ref_key(ref))
        failure = SourceError(f"adapter {ref.name!r}: a file changed while it was read; try again")
        for _ in range(MAX_ATTEMPTS):
            started_ns = self._time_ns()
            paths = self.sources.find_watched_paths(ref.source, ref.name)
            roots = {root: _find_inode(root) for root in paths.roots}
            folders = _read_stamps(paths.folders)  # before reading files, to detect concurrent changes
            try:
                fetched = self.sources.fetch(ref.source, ref.name, ref.token, check)
            except SourceError as error:
                if not paths.roots:
                    raise
                failure = error  # a local folder may have changed concurrently
                continue
            adapter = self._identify(ref.name, fetched)
            # The adapter may have moved to a root that is not watched.
            if adapter is not None and self.sources.find_watched_paths(ref.source, ref.name) == paths:
                files = {**folders, **adapter.files}
                settled = all(is_settled(stamp, started_ns) for stamp in files.values() if stamp is not None)
                return replace(adapter, files=files, roots=roots, is_settled=settled)
        raise failure

    def _check_config(self, key: RefKey, raw: Mapping[str, Any], base_model_type: FindBaseModelType) -> None:
        source, name, token_hash = key
        config = parse_config(raw, name)
        base_type = None
        if config.base_model_name is not None and len(config.base_model_name) <= MAX_NAME_LENGTH:
            base_type = self._find_base_type((source, config.base_model_name, token_hash), base_model_type)
        check_base_model(config, self._model_type, self._model_class, base_type, self._task)

    @cachedmethod(attrgetter("_base_types"), key=lambda _, key, __: key, lock=attrgetter("_lock"))
    def _find_base_type(self, key: RefKey, base_model_type: FindBaseModelType) -> str | None:
        return base_model_type(key[1])

    def _identify(self, name: str, fetched: FetchedAdapter) -> FoundAdapter | None:
        """Return the adapter with its identity, or None if a file changed after the source validated it.

        Also return None if a file changes during this call, because config and weights must be consistent.
        """
        folder, config = fetched.folder, parse_config(fetched.config, name)
        weights = folder / WEIGHTS_FILE
        files = _read_stamps(folder / file for file in (*REQUIRED_FILES, *fetched.tokenizer_files))
        stamp = files[weights]
        is_checked = all(files[folder / file] == stamp for file, stamp in fetched.stamps.items())
        if stamp is None or None in files.values() or not is_checked:
            return None
        settled = is_settled(stamp, self._time_ns())
        try:
            current_config = read_json(folder / CONFIG_FILE, f"adapter {name!r}", files[folder / CONFIG_FILE])
            identity, num_elements = self._read_identity(config, weights, stamp)
        except SourceError:
            return None
        except AdapterError:
            if _read_stamps(files) == files:
                raise
            return None
        if current_config != fetched.config or _read_stamps(files) != files:
            return None
        spec = AdapterSpec(identity, name, (AdapterCheckpoint(folder, config, stamp, identity, settled),), num_elements)
        stamps = tuple(files[folder / file] or () for file in fetched.tokenizer_files)
        base_name = config.base_model_name and config.base_model_name[:MAX_NAME_LENGTH]
        resolved = ResolvedAdapter(
            identity, str(folder), fetched.tokenizer_files, tokenizer_stamps=stamps, base_model_name=base_name or None
        )
        return FoundAdapter(spec, resolved, files, is_new=fetched.is_new)

    def _read_identity(self, config: AdapterConfig, path: Path, stamp: Stamp) -> tuple[str, int]:
        """Return the adapter identity and the number of elements to reserve. The result is cached by file stamp."""
        settings = hashlib.sha256(json.dumps(config.identity_settings(), sort_keys=True).encode()).digest()
        key = (path, stamp, settings)
        with self._lock:
            cached = self._identities.get(key)
        if cached is not None:
            return cached
        is_cacheable = is_settled(stamp, self._time_ns())
        tensors = read_header(path, config.name, stamp)
        num_elements = count_elements(config, tensors, self._max_inputs)
        identity = compute_identity(config, path, tensors, stamp), num_elements
        if is_cacheable and read_stamp_or_none(path) == stamp:
            with self._lock:
                self._identities[key] = identity
        return identity


def _expires_at(_: RefKey, base_type: str | None, now: float) -> float:
    return now + UNKNOWN_BASE_TTL_S if base_type is None else math.inf


def _find_inode(path: Path) -> Stamp | None:
    """Return the folder's device and inode, or None if it does not exist. They change if the path is a symlink and its
    target changes.
    """
    status = stat_or_none(path)
    return None if status is None else (status.st_dev, status.st_ino)


def _read_stamps(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    return {path: read_stamp_or_none(path) for path in paths}
