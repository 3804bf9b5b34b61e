"""Maps the field `model` or `adapter_id` in a request to the base model, a listed adapter, or a name in an adapter
source.

Listed names are the adapter names in `/v1/models`: aliases and the subfolders of `--adapters-dir`.
"""

import asyncio
import logging
import re
import threading
from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lorax_server.adapters.sources.local import LocalSource, normalize_local_name
from lorax_server.adapters.sources.source import MAX_NAME_LENGTH
from lorax_server.errors import AdapterNotFoundError, InputError, LoraxError
from lorax_server.server.access.keys import HUB_SOURCE, Key
from lorax_server.types import AdapterRef, Merge

MAX_COMPARED_NAMES = 2000  # if there are more, the alphabetically closest names are compared
MAX_COMPARED_CHARACTERS = 128  # compared characters per name
MAX_PATTERN_CHECKS = 20_000  # limit for key patterns times compared names
NUM_SUGGESTIONS = 3
MIN_SIMILARITY = 0.6


logger = logging.getLogger(__name__)

BASE_MODEL = "__base_model__"  # LoRAX clients use this name for the base model
MAX_ALIASES = 100_000
HUB_NAME_PATTERN = re.compile(r"[\w.-]+/[\w.-]+(@.+)?", re.ASCII)


def list_base_names(model_id: str, served_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that `/v1/models` lists for the base model. A path is listed by its last component."""
    path = Path(model_id).expanduser()
    own_name = path.absolute().name.removesuffix(".gguf") if path.exists() else model_id
    return tuple(dict.fromkeys(served_names)) or (own_name or model_id,)


def make_unknown_model_error(name: str) -> AdapterNotFoundError:
    """Return the error that OpenAI routes raise for an unknown model."""
    return AdapterNotFoundError(f"the model {name[:64]!r} does not exist; /v1/models lists the available models")


class AdapterKey(NamedTuple):
    """An adapter name and the source that it refers to."""

    source: str
    name: str


class ModelSelection(NamedTuple):
    """The model that a request selects: the base model, one adapter, or several merged adapters."""

    refs: tuple[AdapterRef, ...] = ()
    merge: Merge | None = None
    label: str = ""  # the requested names, or "" for the base model
    access_keys: tuple[AdapterKey, ...] = ()  # checked against the API key's permissions
    requested_source: str | None = None  # None if the request does not specify a source

    @property
    def source(self) -> str:
        return self.refs[0].source if self.refs else ""

    @property
    def adapter_keys(self) -> tuple[AdapterKey, ...]:
        return tuple(AdapterKey(ref.source, ref.name) for ref in self.refs)


@dataclass(frozen=True)
class NameSnapshot:
    """An immutable snapshot of the listed names. It is safe to read from any thread."""

    adapters: Mapping[str, AdapterKey]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The listed names in sorted order."""
        return tuple(sorted(self.adapters))

    @cached_property
    def adapter_keys(self) -> frozenset[AdapterKey]:
        """The adapters that the listed names refer to."""
        return frozenset(self.adapters.values())


class ModelNames:
    """Resolves base model names, aliases and folder names. `set_folder_names` may be called from another thread.

    Different spellings of a local path are normalized to one name for labels, key patterns and logs.
    """

    def __init__(
        self,
        model_id: str,
        served_names: Sequence[str] = (),
        default_source: str = HUB_SOURCE,
        static_adapter: tuple[str, str] | None = None,
        roots: Sequence[Path] = (),  # folders that contain local adapters, in search order
    ) -> None:
        self._local_roots = roots
        self.listed_base_names = list_base_names(model_id, served_names)
        self.primary_name = self.listed_base_names[0]
        self.base_names = frozenset((model_id, *self.listed_base_names))
        self.default_source = default_source
        self._static_adapter = None if static_adapter is None else self.normalize(*static_adapter)
        self._aliases: dict[str, AdapterKey] = {}
        self._version_names: dict[str, str] = {}  # name without the version, by alias, for uploaded versions
        self._folder_names: Mapping[str, AdapterKey] = {}
        self._snapshot: NameSnapshot | None = None  # None after a change
        self._lock = threading.Lock()

    # --- Listed names -------------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> NameSnapshot:
        """A snapshot of the listed names. The same object is returned until the names change."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = NameSnapshot({**self._folder_names, **self._aliases})
            return self._snapshot

    @property
    def adapters(self) -> Mapping[str, AdapterKey]:
        return self.snapshot.adapters

    @property
    def aliases(self) -> Mapping[str, AdapterKey]:
        """A map from alias to adapter, without folder names."""
        return self._aliases

    def check_alias(self, alias: str) -> None:
        """Raise if this name is not allowed for an adapter."""
        if not (0 < len(alias) <= MAX_NAME_LENGTH and alias.isprintable()):
            raise InputError(
                f"an adapter name must have 1 to {MAX_NAME_LENGTH} printable characters, not {alias[:64]!r}"
            )
        if alias in self.base_names or alias == BASE_MODEL:
            raise InputError(f"{alias!r} is a base model name; choose another name")

    def check_aliases(self, aliases: Collection[str]) -> None:
        """Raise if these names are not allowed for adapters, or if they exceed the limit of names."""
        for alias in aliases:
            self.check_alias(alias)
        num_new = sum(alias not in self._aliases for alias in aliases)
        if num_new and len(self._aliases) + num_new > MAX_ALIASES:
            raise InputError(f"the limit of {MAX_ALIASES} adapter names is reached; unload some adapters")

    def add_alias(self, alias: str, source: str, name: str, version_of: str | None = None) -> None:
        """Make a name refer to an adapter. A key that may use `version_of` may also use the new name."""
        with self._lock:
            self.check_aliases([alias])
            self._aliases[alias] = self.normalize(source, name)
            self._version_names.pop(alias, None)
            if version_of is not None:
                self._version_names[alias] = version_of
            self._snapshot = None

    def remove_alias(self, alias: str) -> bool:
        """Remove an alias. Return True if it existed."""
        with self._lock:
            self._snapshot = None
            self._version_names.pop(alias, None)
            return self._aliases.pop(alias, None) is not None

    def set_folder_names(self, names: Iterable[str]) -> None:
        """Replace the folder names. Folders with the name of the base model are not listed."""
        folder = {name: AdapterKey(LocalSource.kind, name) for name in names}
        for name in sorted(folder.keys() & {BASE_MODEL, *self.base_names}):
            del folder[name]
            logger.warning("the adapter in %r is not listed: this is a base model name; rename the folder", name)
        with self._lock:
            self._folder_names = folder
            self._snapshot = None
        snapshot = self.snapshot
        # Compute the cached properties on the watcher thread, so that requests do not have to.
        _ = snapshot.names, snapshot.adapter_keys

    # --- Requested names ----------------------------------------------------------------------------------------------

    @property
    def base_selection(self) -> ModelSelection:
        """The selection for requests that name no adapter: the base model, or the static adapter."""
        if self._static_adapter is None:
            return ModelSelection()
        return ModelSelection(
            (AdapterRef(*self._static_adapter),), None, self._static_adapter.name, (self._static_adapter,)
        )

    def select_model(self, model: str, source: str | None, token: str | None) -> ModelSelection:
        """Return the selection for OpenAI's `model` field: the base model, an adapter, or `base:adapter`."""
        name = self.strip_base_name(model)
        if self._is_base_model(name, source):
            return self.base_selection
        if source is None and self._find_listed_adapter(name) is None and not self._may_exist_in_source(name):
            raise AdapterNotFoundError(
                f"the model {model[:64]!r} does not exist; use a name from /v1/models, or owner/name for a hub adapter"
            )
        return self.select_adapter(name, source, token)

    def select_adapter_id(self, adapter_id: str | None, source: str | None, token: str | None) -> ModelSelection:
        """Return the selection for LoRAX's `adapter_id` field."""
        if adapter_id is None or self._is_base_model(adapter_id, source):
            return self.base_selection
        return self.select_adapter(adapter_id, source, token)

    def select_merged_adapters(
        self, ids: Sequence[str], merge: Merge | None, source: str | None, token: str | None
    ) -> ModelSelection:
        selections = [self.select_adapter(name, source, token) for name in ids]
        return ModelSelection(
            tuple(ref for selection in selections for ref in selection.refs),
            merge,
            ",".join(selection.label for selection in selections),
            tuple(name for selection in selections for name in selection.access_keys),
            source,
        )

    def select_adapter(self, name: str, source: str | None, token: str | None = None) -> ModelSelection:
        """Return the selection for an adapter name. Unlike `select_model`, never return the base model."""
        named = self._find_listed_adapter(name) if source is None else None
        if named is None:
            is_path, name = name.startswith("/"), self._normalize_name(name, source)
            look_up = self._folder_names.get if is_path else self._find_listed_adapter  # paths never refer to aliases
            named = look_up(name) if source is None else None
        if named is not None:
            # Key permissions apply to the listed name, not to the adapter that it refers to.
            allowed = AdapterKey(self.default_source, name)
            return ModelSelection((AdapterRef(*named, token),), None, name, (allowed,))
        named = AdapterKey((source or self.default_source).lower(), name)
        return ModelSelection((AdapterRef(*named, token),), None, name, (named,), source and named.source)

    def is_base_alias(self, name: str) -> bool:
        """Return True if a name in an adapter's config refers to this base model. Ignore folders, owners and case."""
        return _last_path_part(name) in {_last_path_part(base) for base in self.base_names}

    def may_use(self, key: Key, alias: str, adapter_key: AdapterKey) -> bool:
        """Return True if the key may use the adapter under this listed name."""
        allowed = self.strip_version(alias)
        return key.may_use(self.default_source, allowed, self.default_source, adapter_key.source == HUB_SOURCE)

    def strip_version(self, alias: str) -> str:
        """Return `poet` for the uploaded version `poet@v2`, and other names unchanged."""
        return self._version_names.get(alias, alias)

    def normalize(self, source: str, name: str) -> AdapterKey:
        """Return the adapter key for a name, after normalizing the name."""
        return AdapterKey(source, self._normalize_name(name, source))

    def _normalize_name(self, name: str, source: str | None) -> str:
        is_local = (source or self.default_source).lower() == LocalSource.kind
        return normalize_local_name(name, self._local_roots) if is_local else name

    def _is_base_model(self, name: str, source: str | None) -> bool:
        return (
            name in ("", BASE_MODEL) or name in self.base_names or self._normalize_name(name, source) in self.base_names
        )

    def _find_listed_adapter(self, name: str) -> AdapterKey | None:
        """Return the adapter that a listed name refers to, or None. The name may have a revision suffix."""
        named = self._aliases.get(name) or self._folder_names.get(name)
        if named is not None:
            return named
        alias, at, revision = name.partition("@")
        named = self._aliases.get(alias) or self._folder_names.get(alias) if at else None
        return None if named is None else AdapterKey(named.source, f"{named.name}@{revision}")

    def strip_base_name(self, model: str) -> str:
        """Return `adapter` for `base:adapter`, and "" for the base model. Listed names that contain a colon are not
        split.
        """
        if model in ("", BASE_MODEL) or model in self.base_names:
            return ""
        if self._find_listed_adapter(model) is None:
            for base in sorted(self.base_names, key=len, reverse=True):
                if model.startswith(f"{base}:"):
                    return model[len(base) + 1 :]
        return model

    def _may_exist_in_source(self, name: str) -> bool:
        """Return True if the name is valid in the default source. Only the hub restricts names."""
        return self.default_source != HUB_SOURCE or HUB_NAME_PATTERN.fullmatch(name) is not None


def _last_path_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


# --- Suggestions for unknown names ------------------------------------------------------------------------------------


async def with_suggestions(
    error: LoraxError, unknown_name: str, source: str | None, names: ModelNames, key: Key
) -> LoraxError:
    """Return the error with similar names appended to its message."""
    nearest = await asyncio.to_thread(suggest_names, unknown_name, source, names, key)
    if not nearest:
        return error
    suggesting = type(error)(f"{error}; did you mean {' or '.join(map(repr, nearest))}?")
    suggesting.status, suggesting.retry_after_s = error.status, error.retry_after_s
    return suggesting


def suggest_names(unknown_name: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    """Return similar names that the key may use, best match first. If `source` is set, return only names in this
    source.
    """
    unknown_name = names.strip_base_name(unknown_name).partition("@")[0]
    if not 0 < len(unknown_name) <= MAX_COMPARED_CHARACTERS:
        return []
    candidates = [
        *_list_candidate_names(unknown_name, source, names, key),
        *(names.base_names if key.base_model else ()),
    ]
    by_folded_name = {_fold_case(name): name for name in reversed(candidates) if name != unknown_name}
    return [
        by_folded_name[near]
        for near in get_close_matches(_fold_case(unknown_name), by_folded_name, NUM_SUGGESTIONS, MIN_SIMILARITY)
    ]


def _list_candidate_names(unknown_name: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    snapshot, candidates = names.snapshot, []
    count = min(MAX_COMPARED_NAMES, MAX_PATTERN_CHECKS // max(1, len(key.adapters or ())))
    start = max(0, min(bisect(snapshot.names, unknown_name) - count // 2, len(snapshot.names) - count))
    for name in snapshot.names[start : start + count]:
        named = snapshot.adapters[name]
        if source is None and names.may_use(key, name, named):
            candidates.append(name)
        elif source == named.source and key.may_use(*named, names.default_source):
            candidates.append(named.name)
    return candidates


def _fold_case(name: str) -> str:
    return name[:MAX_COMPARED_CHARACTERS].casefold()
