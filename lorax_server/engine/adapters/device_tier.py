"""The device tier. Each adapter on the device has an extent in the adapter buffer and an index for step plans."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from lorax_server.engine.adapters.registry import AdapterEntry
from lorax_server.engine.adapters.space import AdapterSpace
from lorax_server.errors import AdapterError
from lorax_server.plan import AdapterOp, Capabilities, LoadOp, MoveOp, UnloadOp
from lorax_server.types import AdapterCounters

# Protects a new adapter from eviction until its request runs. The time is limited, because a request that never runs
# must not block other adapters.
UNUSED_ADAPTER_PROTECTION_S = 30.0
MAX_MOVED_BYTES_PER_STEP = 2**29  # a GPU copies this in a fraction of a millisecond
EXTRA_FREE_FRACTION = 0.03  # fraction of the buffer to free in addition, so that moves are rare


class EvictionCandidates:
    """The adapters that may be evicted, least recently used first.

    One instance serves all adapters that need space at the same time, so that each entry is checked only once.
    """

    def __init__(self, entries: Mapping[str, AdapterEntry], now: float) -> None:
        self._entries = entries
        self._now = now
        self._eviction_order: dict[bool, list[AdapterEntry]] = {}  # in reverse eviction order

    def pop(self, include_wanted: bool) -> AdapterEntry | None:
        """Return the next adapter to evict, or None. `include_wanted` also allows adapters with waiting requests."""
        if include_wanted not in self._eviction_order:
            evictable = [entry for entry in self._entries.values() if self._is_evictable(entry, include_wanted)]
            self._eviction_order[include_wanted] = evictable[::-1]
        found = self._eviction_order[include_wanted]
        while found:
            entry = found.pop()
            if self._is_evictable(entry, include_wanted):  # its state may have changed after the list was built
                return entry
        return None

    def _is_evictable(self, entry: AdapterEntry, include_wanted: bool) -> bool:
        is_free = entry.is_loaded and not entry.is_pinned and not entry.num_running
        # A draining adapter without started requests cannot be used, so it needs no protection.
        is_fresh = self._now < entry.protected_until and (entry.num_started or not entry.is_draining)
        # Without a host copy, the adapter must stay for its started requests.
        can_return = entry.is_prepared or not entry.num_started
        return is_free and not is_fresh and can_return and (include_wanted or not entry.num_requests)


class DeviceTier:
    """Manages the adapters' space in the device buffer and their indices.

    An adapter is not evicted while a running sequence uses it, while it is pinned, loading or protected after loading,
    or while it has started requests but no host copy.

    Space is freed in three stages. First, adapters without requests are evicted, least recently used first. If the
    loading adapter is overdue, adapters with waiting requests are also evicted. If that is not enough, the least
    recently used adapters drain: no new sequence starts with them.
    """

    def __init__(self, capabilities: Capabilities, counters: AdapterCounters, ops: list[AdapterOp]) -> None:
        """Create the tier. Worker operations are appended to `ops`."""
        self._num_units = capabilities.num_adapter_units
        self._max_adapters = capabilities.max_adapters
        self._unit_bytes = capabilities.adapter_unit_bytes
        self._counters = counters
        self._space = AdapterSpace(self._num_units, MAX_MOVED_BYTES_PER_STEP // capabilities.adapter_unit_bytes)
        self._entries: OrderedDict[str, AdapterEntry] = OrderedDict()  # loaded or loading, least recently used first
        self._by_index: dict[int, AdapterEntry] = {}
        self._free_indices: list[int] = []
        self._loading: set[int] = set()
        self._ordered_loads: set[str] = set()  # loaded by the next step; moves would run before these loads
        self._num_pinned = 0
        self._num_pinned_units = 0
        self._ops = ops

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def needs_step(self) -> bool:
        """Return True if a step must run to execute planned moves, even if the step has no sequences."""
        return self._space.needs_step

    @property
    def _has_index(self) -> bool:
        return len(self._entries) < self._max_adapters

    def submit(self) -> list[MoveOp]:
        """Return the adapter moves for the next step. The step must run them before its other adapter operations."""
        _, moves = self._space.submit()
        for identity in self._ordered_loads:
            self._space.finish_loading(identity)
        self._ordered_loads.clear()
        self._counters.adapter_moves += len(moves)
        ops = []
        for move in moves:
            index = self._entries[str(move.key)].index
            assert index is not None
            ops.append(MoveOp(index, move.source, move.target))
        return ops

    def complete_step(self, step: int) -> None:
        """Record a finished step. From now on, loads may overwrite freed space that the step has read."""
        self._space.complete_step(step)

    def finish_loading(self, indices: Iterable[int], now: float) -> list[AdapterEntry]:
        """Record finished loads, and return the entries of the loaded adapters."""
        entries = []
        for index in indices:
            entry = self._by_index[index]
            self._loading.remove(index)
            if entry.is_packed_on_device:
                self._ordered_loads.add(entry.identity)
                entry.is_packed_on_device = False
            else:
                self._space.finish_loading(entry.identity)
            self._counters.adapters_loaded += 1
            entry.is_loaded = True
            entry.protected_until = now + UNUSED_ADAPTER_PROTECTION_S if entry.num_requests else -math.inf
            entries.append(entry)
        return entries

    def load(self, entry: AdapterEntry) -> bool:
        """Start copying an adapter to the device. Return False if no space or no index is free."""
        if not self._has_index:
            return False
        start = self._space.allocate(entry.identity, entry.units)
        if start is None:
            return False
        entry.index = heapq.heappop(self._free_indices) if self._free_indices else len(self._by_index) + 1
        self._by_index[entry.index] = self._entries[entry.identity] = entry
        self._loading.add(entry.index)
        self._num_pinned += entry.is_pinned
        self._num_pinned_units += entry.units * entry.is_pinned
        self._ops.append(LoadOp(entry.identity, entry.index, start, entry.is_packed_on_device))
        return True

    def evict(self, entry: AdapterEntry) -> None:
        assert entry.index is not None
        self._counters.adapters_evicted_from_device += 1
        if entry.identity in self._ordered_loads:
            self._ordered_loads.remove(entry.identity)
            self._space.finish_loading(entry.identity)
        self._space.free(entry.identity)
        self._ops.append(UnloadOp(entry.index))
        del self._by_index[entry.index], self._entries[entry.identity]
        heapq.heappush(self._free_indices, entry.index)
        entry.index, entry.is_loaded, entry.is_draining, entry.protected_until = None, False, False, -math.inf

    def touch(self, entry: AdapterEntry) -> None:
        """Mark an adapter as recently used."""
        self._entries.move_to_end(entry.identity)

    def pin(self, entry: AdapterEntry, is_pinned: bool) -> None:
        """Pin or unpin an adapter."""
        if entry.index is not None:
            self._num_pinned += is_pinned - entry.is_pinned
            self._num_pinned_units += entry.units * (is_pinned - entry.is_pinned)
        entry.is_pinned = is_pinned

    def find_error(self, entry: AdapterEntry) -> AdapterError | None:
        """Return an error if the adapter does not fit on the device together with the pinned adapters."""
        unit, pinned = self._unit_bytes, self._num_pinned_units
        if entry.index is None and self._num_pinned >= self._max_adapters:
            return AdapterError(
                f"adapter {entry.spec.name!r}: the device holds at most {self._max_adapters} adapters, and all are "
                "pinned: unpin some, or raise adapter_bytes"
            )
        if entry.units <= self._num_units - pinned:
            return None
        return AdapterError(
            f"adapter {entry.spec.name!r}: needs {entry.units * unit} bytes of device memory; the adapter buffer has "
            f"{self._num_units * unit} bytes, {pinned * unit} of them pinned: raise adapter_bytes, or unpin adapters"
        )

    def find_eviction_candidates(self, now: float) -> EvictionCandidates:
        """Return the eviction candidates, which are valid until the next request or worker event."""
        return EvictionCandidates(self._entries, now)

    def free_space(self, units: int, is_overdue: bool, candidates: EvictionCandidates) -> list[AdapterEntry]:
        """Evict adapters to free `units` buffer units, and compact the buffer. Return the evicted adapters.

        This may free too little space, so the caller must check the result.
        """
        evicted = []
        is_short = self._space.num_free_units < units  # if False, space is fragmented or still being read
        if is_short or not self._has_index:
            evicted = self._evict_candidates(
                units + int(self._num_units * EXTRA_FREE_FRACTION) * is_short, candidates, False
            )
            if is_overdue:
                evicted += self._evict_candidates(units, candidates, True)
                self._drain(units - self._space.num_free_units)
        self._space.compact(units)
        return evicted

    def _evict_candidates(self, units: int, candidates: EvictionCandidates, include_wanted: bool) -> list[AdapterEntry]:
        """Evict adapters until `units` and an index are free, or no candidates remain. Return the evicted adapters."""
        victims: list[AdapterEntry] = []
        while self._space.num_free_units < units or not self._has_index:
            victim = candidates.pop(include_wanted)
            if victim is None:
                break
            self.evict(victim)
            victims.append(victim)
        return victims

    def _drain(self, missing: int) -> None:
        """Mark adapters as draining until they cover `missing` units, and one index if no index is free.

        No new sequence starts with a draining adapter.
        """
        if missing <= 0 and self._has_index:
            return
        draining = [entry.units for entry in self._entries.values() if entry.is_draining]
        missing -= sum(draining)
        lacks_index = not self._has_index and not draining
        for entry in self._entries.values():
            if missing <= 0 and not lacks_index:
                return
            if entry.is_loaded and entry.num_started and not entry.is_pinned and not entry.is_draining:
                entry.is_draining, lacks_index = True, False
                missing -= entry.units
