"""Meaning of a request's `model` or `adapter_id`: the base model, an adapter by a name of the operator, or an adapter
by a name of its source."""

import asyncio
import logging
import re
import threading
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lorax_server.adapters.sources.local import LocalSource, tidy_name
from lorax_server.adapters.sources.source import MAX_NAME_LENGTH
from lorax_server.errors import AdapterNotFoundError, InputError, LoraxError
from lorax_server.server.access.keys import HUB, Key
from lorax_server.types import AdapterRef, Merge

MAX_NAMES = 2000  # compared; with more, those next to the misspelt one in alphabetical order
MAX_CHARACTERS = 128  # compared per name
MAX_CHECKS = 20_000  # of a key's patterns against names
NUM_SUGGESTIONS = 3
MIN_RATIO = 0.6


logger = logging.getLogger(__name__)

BASE_MODEL = "__base_model__"  # a name of LoRAX's clients
MAX_ALIASES = 100_000
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@.+)?", re.ASCII)


def unknown_model(name: str) -> AdapterNotFoundError:
    """Return an error for clients of OpenAI's routes."""
    return AdapterNotFoundError(f"the model {name[:64]!r} does not exist; /v1/models lists those that do")


class Named(NamedTuple):
    """A name of an adapter at its source."""

    source: str
    name: str


class Choice(NamedTuple):
    """The adapters that a request chose: none, one, or several that are merged."""

    refs: tuple[AdapterRef, ...] = ()
    merge: Merge | None = None
    label: str = ""  # as the request names them; "" is the base model
    allowed: tuple[Named, ...] = ()  # the names by which a key must be allowed to use them
    asked_source: str | None = None  # as the request names it, if it does

    @property
    def source(self) -> str:
        return self.refs[0].source if self.refs else ""

    @property
    def names(self) -> tuple[Named, ...]:
        return tuple(Named(ref.source, ref.name) for ref in self.refs)


@dataclass(frozen=True)
class Listing:
    """The operator's names at one moment. It never changes, so that any thread may read it."""

    adapters: Mapping[str, Named]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self.adapters))

    @cached_property
    def named(self) -> frozenset[Named]:
        """All that the names stand for."""
        return frozenset(self.adapters.values())


class ModelNames:
    """All names but those that only a source knows. Another thread may set the folder's names.

    Several spellings of a folder become one name here: for labels, for patterns of keys, and in logs.
    """

    def __init__(
        self,
        model_id: str,
        served_names: Sequence[str] = (),
        default_source: str = HUB,
        static_adapter: tuple[str, str] | None = None,
        roots: Sequence[Path] = (),  # of folders of this machine, in the order of search
    ) -> None:
        self._roots = roots
        self.primary = served_names[0] if served_names else model_id
        self.base_names = frozenset((model_id, *served_names))
        self.default_source = default_source
        self._static = None if static_adapter is None else self.tidy(*static_adapter)
        self._aliases: dict[str, Named] = {}
        self._folder: Mapping[str, Named] = {}
        self._listing: Listing | None = None  # None: names have changed since it was made
        self._lock = threading.Lock()

    # --- Names of the operator ----------------------------------------------------------------------------------------

    @property
    def listing(self) -> Listing:
        """The operator's names; the same object until they change."""
        with self._lock:
            if self._listing is None:
                self._listing = Listing({**self._folder, **self._aliases})
            return self._listing

    @property
    def adapters(self) -> Mapping[str, Named]:
        return self.listing.adapters

    @property
    def aliases(self) -> Mapping[str, Named]:
        """The names that the operator gave, without those of the folder."""
        return self._aliases

    def add(self, alias: str, source: str, name: str) -> None:
        if not (0 < len(alias) <= MAX_NAME_LENGTH and alias.isprintable()):
            raise InputError(f"an adapter's name is 1 to {MAX_NAME_LENGTH} printable characters, not {alias[:64]!r}")
        if alias in self.base_names or alias == BASE_MODEL:
            raise InputError(f"{alias!r} is the base model; choose another name")
        with self._lock:
            if len(self._aliases) >= MAX_ALIASES and alias not in self._aliases:
                raise InputError(f"{MAX_ALIASES} adapters have names already; unload some")
            self._aliases[alias] = self.tidy(source, name)
            self._listing = None

    def remove(self, alias: str) -> bool:
        """Remove a name. Return whether it was there."""
        with self._lock:
            self._listing = None
            return self._aliases.pop(alias, None) is not None

    def set_folder(self, names: Iterable[str]) -> None:
        """Replace the names of the folder that is watched. A name of the base model keeps meaning that."""
        folder = {name: Named(LocalSource.kind, name) for name in names}
        for name in sorted(folder.keys() & {BASE_MODEL, *self.base_names}):
            del folder[name]
            logger.warning("the adapter in %r is not listed: that name is the base model's; rename the folder", name)
        with self._lock:
            self._folder = folder
            self._listing = None
        listing = self.listing
        # These are computed here, on the thread that watches the folder, and not while requests wait.
        _ = listing.names, listing.named

    # --- Names of requests --------------------------------------------------------------------------------------------

    @property
    def base(self) -> Choice:
        """The choice of a request that names no adapter."""
        if self._static is None:
            return Choice()
        return Choice((AdapterRef(*self._static),), None, self._static.name, (self._static,))

    def by_model(self, model: str, source: str | None, token: str | None) -> Choice:
        """Read OpenAI's `model`: the base model, an adapter, or `base:adapter`."""
        name = self.without_base(model)
        if self._is_base(name, source):
            return self.base
        if source is None and self._look_up(name) is None and not self._may_be_somewhere(name):
            raise AdapterNotFoundError(
                f"the model {model[:64]!r} does not exist; /v1/models lists those that have a name, and adapters of "
                "the hub are named owner/name"
            )
        return self.find(name, source, token)

    def by_adapter(self, adapter_id: str | None, source: str | None, token: str | None) -> Choice:
        """Read LoRAX's `adapter_id`."""
        if adapter_id is None or self._is_base(adapter_id, source):
            return self.base
        return self.find(adapter_id, source, token)

    def merged(self, ids: Sequence[str], merge: Merge | None, source: str | None, token: str | None) -> Choice:
        choices = [self.find(name, source, token) for name in ids]
        return Choice(
            tuple(ref for choice in choices for ref in choice.refs),
            merge,
            ",".join(choice.label for choice in choices),
            tuple(name for choice in choices for name in choice.allowed),
            source,
        )

    def find(self, name: str, source: str | None, token: str | None = None) -> Choice:
        """Read a name that can only be an adapter's."""
        named = self._look_up(name) if source is None else None
        if named is None:
            is_path, name = name.startswith("/"), self._tidy(name, source)
            look_up = self._folder.get if is_path else self._look_up  # a path is not the alias of its name
            named = look_up(name) if source is None else None
        if named is not None:
            # A key is allowed a name, whichever adapter the operator has chosen for it.
            allowed = Named(self.default_source, name)
            return Choice((AdapterRef(*named, token),), None, name, (allowed,))
        named = Named((source or self.default_source).lower(), name)
        return Choice((AdapterRef(*named, token),), None, name, (named,), source and named.source)

    def may_use(self, key: Key, alias: str, named: Named) -> bool:
        """Tell whether a key may use an adapter by the operator's name for it."""
        return key.may_use(self.default_source, alias, self.default_source, named.source == HUB)

    def tidy(self, source: str, name: str) -> Named:
        """Return a name at its source, in its one spelling."""
        return Named(source, self._tidy(name, source))

    def _tidy(self, name: str, source: str | None) -> str:
        is_local = (source or self.default_source).lower() == LocalSource.kind
        return tidy_name(name, self._roots) if is_local else name

    def _is_base(self, name: str, source: str | None) -> bool:
        return name in ("", BASE_MODEL) or name in self.base_names or self._tidy(name, source) in self.base_names

    def _look_up(self, name: str) -> Named | None:
        """Return the adapter of an operator's name, which may have a revision added."""
        named = self._aliases.get(name) or self._folder.get(name)
        if named is not None:
            return named
        alias, at, revision = name.partition("@")
        named = self._aliases.get(alias) or self._folder.get(alias) if at else None
        return None if named is None else Named(named.source, f"{named.name}@{revision}")

    def without_base(self, model: str) -> str:
        """Return the adapter of a `model`; "" if it is the base model. An adapter's own name may have a colon too."""
        if model in ("", BASE_MODEL) or model in self.base_names:
            return ""
        if self._look_up(model) is None:
            for base in sorted(self.base_names, key=len, reverse=True):
                if model.startswith(f"{base}:"):
                    return model[len(base) + 1 :]
        return model

    def _may_be_somewhere(self, name: str) -> bool:
        """Tell whether the default source could have a name. Only a hub's names have a rule."""
        return self.default_source != HUB or HUB_NAME.fullmatch(name) is not None


# --- Suggestions for a name that does not exist -----------------------------------------------------------------------


async def with_nearest(error: LoraxError, misspelt: str, source: str | None, names: ModelNames, key: Key) -> LoraxError:
    """Return the same error, with suggestions if there are any."""
    nearest = await asyncio.to_thread(find_nearest, misspelt, source, names, key)
    if not nearest:
        return error
    suggesting = type(error)(f"{error}; did you mean {' or '.join(map(repr, nearest))}?")
    suggesting.status, suggesting.retry_after_s = error.status, error.retry_after_s
    return suggesting


def find_nearest(misspelt: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    """Return the nearest names, the best first. If a request names a source, they are names of that source."""
    misspelt = names.without_base(misspelt).partition("@")[0]
    if not 0 < len(misspelt) <= MAX_CHARACTERS:
        return []
    candidates = [*_list_candidates(misspelt, source, names, key), *(names.base_names if key.base_model else ())]
    by_plain = {_plain(name): name for name in reversed(candidates) if name != misspelt}
    return [by_plain[near] for near in get_close_matches(_plain(misspelt), by_plain, NUM_SUGGESTIONS, MIN_RATIO)]


def _list_candidates(misspelt: str, source: str | None, names: ModelNames, key: Key) -> list[str]:
    listing, candidates = names.listing, []
    count = min(MAX_NAMES, MAX_CHECKS // max(1, len(key.adapters or ())))
    start = max(0, min(bisect(listing.names, misspelt) - count // 2, len(listing.names) - count))
    for name in listing.names[start : start + count]:
        named = listing.adapters[name]
        if source is None and names.may_use(key, name, named):
            candidates.append(name)
        elif source == named.source and key.may_use(*named, names.default_source):
            candidates.append(named.name)
    return candidates


def _plain(name: str) -> str:
    return name[:MAX_CHARACTERS].casefold()
