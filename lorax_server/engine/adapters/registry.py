"""A registry of resolved adapters that has a size limit."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.errors import AdapterError, InputError, LoraxError
from lorax_server.types import AdapterStage, AdapterState

MAX_KNOWN_ADAPTERS = 100_000  # maximum number of entries; entries that are only on disk are removed
MAX_MERGES = 1000  # maximum number of merges; requests can recreate removed merges
MAX_DESCRIBED_ADAPTERS = 2000  # maximum per call, so that a listing does not delay steps


@dataclass(eq=False, slots=True)
class AdapterEntry:
    """The state of one adapter, updated by `AdapterTable` and both tiers."""

    spec: AdapterSpec
    num_requests: int = 0  # waiting or running requests
    num_uses: int = 0  # all requests so far
    num_started: int = 0  # unfinished requests that have run at least once
    num_running: int = 0  # running sequences
    is_wanted: bool = False  # needed on the device since `waiting_since`
    is_load_requested: bool = False  # `request_load` was called, and the load has not finished
    should_unload: bool = False  # unload as soon as no request uses it
    waiting_since: float = 0.0
    error: LoraxError | None = None
    retry_at: float = 0.0

    # Host tier
    is_preparing: bool = False
    preparing_spec: AdapterSpec | None = None  # spec of the current or last preparation
    is_prepared: bool = False  # has a host copy
    num_bytes: int = 0  # host memory size; during preparation, the maximum size
    units: int = 0
    vocab_size: int = 0
    changes_kv: bool = True  # keys and values depend on the adapter
    is_packed_on_device: bool = False  # steps can use the adapter as soon as the load is submitted; until the next step

    # Device tier
    index: int | None = None
    is_loaded: bool = False
    is_pinned: bool = False
    protected_until: float = -math.inf  # protected from eviction until its request runs, or until this time
    is_draining: bool = False  # no new sequences start, because another adapter is overdue

    @property
    def identity(self) -> str:
        return self.spec.identity

    @property
    def state(self) -> AdapterStage:
        if self.index is not None:
            return AdapterStage.DEVICE if self.is_loaded else AdapterStage.LOADING
        if self.is_prepared:
            return AdapterStage.HOST
        if self.error is not None:
            return AdapterStage.FAILED
        return AdapterStage.PREPARING if self.is_preparing else AdapterStage.DISK


class AdapterRegistry:
    """Adapter entries by identity, least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, AdapterEntry] = OrderedDict()
        self._merges: OrderedDict[str, AdapterEntry] = OrderedDict()  # merged adapters only

    def __getitem__(self, identity: str) -> AdapterEntry:
        return self.entries[identity]

    def get(self, identity: str) -> AdapterEntry | None:
        return self.entries.get(identity)

    def is_merged(self, identity: str) -> bool:
        return identity in self._merges

    def add(self, spec: AdapterSpec) -> tuple[AdapterEntry, list[str]]:
        """Add an adapter, or update its file location. Return its entry, and the identities of entries that were
        removed.
        """
        entry, forgotten = self.entries.get(spec.identity), []
        if entry is None:
            entry = self.entries[spec.identity] = AdapterEntry(spec)
            if spec.merge is not None:
                self._merges[spec.identity] = entry
            forgotten = [
                *self._evict_idle_entries(self.entries, MAX_KNOWN_ADAPTERS),
                *self._evict_idle_entries(self._merges, MAX_MERGES),
            ]
        if spec.checkpoints != entry.spec.checkpoints:  # same content in another folder; the old folder may be gone
            entry.spec, entry.error = spec, None
        self._touch(spec.identity)
        return entry, forgotten

    def remove(self, identity: str) -> None:
        """Remove an adapter that no request uses and that is not in memory."""
        del self.entries[identity]
        self._merges.pop(identity, None)

    def find_usable(self, identity: str, now: float) -> AdapterEntry:
        """Return an adapter's entry. Raise if the adapter is unknown or has just failed."""
        entry = self.entries.get(identity)
        if entry is None:
            raise AdapterError(f"adapter {identity[:64]!r} is no longer known; resolve its name again")
        if entry.error is not None and entry.state is AdapterStage.FAILED:
            if now < entry.retry_at:
                raise type(entry.error)(str(entry.error), entry.retry_at - now)
            entry.error = None
        self._touch(identity)
        return entry

    def describe(self, identities: Sequence[str], itemsize: int) -> list[AdapterState]:
        """Return the states of these adapters. Unknown adapters are omitted."""
        if len(identities) > MAX_DESCRIBED_ADAPTERS:
            raise InputError(
                f"at most {MAX_DESCRIBED_ADAPTERS} adapters can be listed per call (got {len(identities)})"
            )
        entries = (self.entries.get(identity) for identity in identities)
        return [_describe(entry, itemsize) for entry in entries if entry is not None]

    def _touch(self, identity: str) -> None:
        self.entries.move_to_end(identity)
        if identity in self._merges:
            self._merges.move_to_end(identity)

    def _evict_idle_entries(self, entries: OrderedDict[str, AdapterEntry], limit: int) -> list[str]:
        """Remove entries of adapters that are only on disk, least recently used first, until `limit` remain. Return
        their identities.
        """
        forgotten = []
        while len(entries) > limit:
            identity, entry = next(iter(entries.items()))
            if (
                entry.num_requests
                or entry.is_load_requested
                or entry.state not in (AdapterStage.DISK, AdapterStage.FAILED)
            ):
                entries.move_to_end(identity)
                break
            del self.entries[identity]
            self._merges.pop(identity, None)
            forgotten.append(identity)
        return forgotten


def _describe(entry: AdapterEntry, itemsize: int) -> AdapterState:
    return AdapterState(
        entry.identity,
        entry.spec.name,
        entry.state.value,
        entry.num_bytes or entry.spec.num_elements * itemsize,
        entry.is_pinned,
        entry.num_requests,
        entry.num_uses,
        str(entry.error) if entry.error is not None and entry.state is AdapterStage.FAILED else None,
    )
