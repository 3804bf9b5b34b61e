"""Adapters on the device: each has an extent of the one buffer, and an index by which steps name it."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from lorax_server.engine.adapters.registry import AdapterEntry
from lorax_server.engine.adapters.space import AdapterSpace
from lorax_server.errors import AdapterError
from lorax_server.plan import AdapterOp, Capabilities, Load, Move, Unload
from lorax_server.types import AdapterCounters

# How long an adapter is kept for the request that it was loaded for. Not for good: a request that never gets its turn
# would keep out the adapters of all others.
FRESH_S = 30.0
MOVED_BYTES = 2**29  # at most, in one step: that takes a GPU a fraction of a millisecond
SPARE = 0.03  # of the buffer is freed beyond the need, so that moves are rare


class Leaving:
    """The adapters that may leave the device, the longest unused first, for all that need room at one moment.

    Each is looked at once, however many need room: thousands may wait, and hundreds that may not leave are used longer
    ago than the first that may.
    """

    def __init__(self, entries: Mapping[str, AdapterEntry], now: float) -> None:
        self._entries = entries
        self._now = now
        self._found: dict[bool, list[AdapterEntry]] = {}  # the last to leave first

    def take(self, even_wanted: bool) -> AdapterEntry | None:
        """Return the next one that may leave, if there is one; one that requests wait for only if asked for it."""
        if even_wanted not in self._found:
            may_leave = [entry for entry in self._entries.values() if self._may_leave(entry, even_wanted)]
            self._found[even_wanted] = may_leave[::-1]
        found = self._found[even_wanted]
        while found:
            entry = found.pop()
            if self._may_leave(entry, even_wanted):  # it may have left since, or have arrived for a request
                return entry
        return None

    def _may_leave(self, entry: AdapterEntry, even_wanted: bool) -> bool:
        is_free = entry.is_loaded and not entry.is_pinned and not entry.num_running
        # No sequence can run with one that drains and that none has begun with, so there is no reason to keep it.
        is_fresh = self._now < entry.fresh_until and (entry.num_begun or not entry.is_draining)
        # Without a copy in host memory it stays for the requests that have begun with it.
        can_return = entry.is_prepared or not entry.num_begun
        return is_free and not is_fresh and can_return and (even_wanted or not entry.num_requests)


class DeviceTier:
    """Guards the buffer's units and the indices. An adapter is not evicted while it runs, is pinned, is being loaded or
    is fresh, nor is the only copy of one that requests have begun with.

    Room is made in three degrees. Adapters that no request needs leave, the longest unused first. For an adapter that
    has waited, also those leave that other requests wait for. Where this is not enough, the least recently used ones
    drain: no new sequence begins with them.
    """

    def __init__(self, capabilities: Capabilities, counters: AdapterCounters, ops: list[AdapterOp]) -> None:
        """Operations for the workers are appended to `ops`."""
        self._num_units = capabilities.num_adapter_units
        self._max_adapters = capabilities.max_adapters
        self._unit_bytes = capabilities.adapter_unit_bytes
        self._counters = counters
        self._space = AdapterSpace(self._num_units, MOVED_BYTES // capabilities.adapter_unit_bytes)
        self._entries: OrderedDict[str, AdapterEntry] = OrderedDict()  # loaded or being loaded, by last use
        self._by_index: dict[int, AdapterEntry] = {}
        self._free_indices: list[int] = []
        self._loading: set[int] = set()
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
        """Tell whether moves wait for a step, even if it computes nothing."""
        return self._space.needs_step

    @property
    def _has_index(self) -> bool:
        return len(self._entries) < self._max_adapters

    def submit(self) -> list[Move]:
        """Return the moves that the workers do before the step that goes out now, and before all other operations."""
        _, moves = self._space.submit()
        self._counters.adapter_moves += len(moves)
        ops = []
        for move in moves:
            index = self._entries[str(move.key)].index
            assert index is not None
            ops.append(Move(index, move.source, move.target))
        return ops

    def completed(self, step: int) -> None:
        """Note that a step has ended: what it read may be overwritten."""
        self._space.completed(step)

    def loaded(self, indices: Iterable[int], now: float) -> list[AdapterEntry]:
        """Note that the loads of these indices have ended, and return their entries."""
        entries = []
        for index in indices:
            entry = self._by_index[index]
            self._loading.remove(index)
            self._space.loaded(entry.identity)
            self._counters.adapters_loaded += 1
            entry.is_loaded = True
            entry.fresh_until = now + FRESH_S if entry.num_requests else -math.inf
            entries.append(entry)
        return entries

    def load(self, entry: AdapterEntry) -> bool:
        """Begin to copy an adapter to the device; False if there is no room."""
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
        self._ops.append(Load(entry.identity, entry.index, start))
        return True

    def evict(self, entry: AdapterEntry) -> None:
        assert entry.index is not None
        self._counters.adapters_evicted_from_device += 1
        self._space.free(entry.identity)
        self._ops.append(Unload(entry.index))
        del self._by_index[entry.index], self._entries[entry.identity]
        heapq.heappush(self._free_indices, entry.index)
        entry.index, entry.is_loaded, entry.is_draining, entry.fresh_until = None, False, False, -math.inf

    def touch(self, entry: AdapterEntry) -> None:
        """Note that an adapter is used."""
        self._entries.move_to_end(entry.identity)

    def pin(self, entry: AdapterEntry, is_pinned: bool) -> None:
        """Let an adapter stay from when it is on the device, or leave again."""
        if entry.index is not None:
            self._num_pinned += is_pinned - entry.is_pinned
            self._num_pinned_units += entry.units * (is_pinned - entry.is_pinned)
        entry.is_pinned = is_pinned

    def find_problem(self, entry: AdapterEntry) -> AdapterError | None:
        """Return the error of an adapter that would not fit even if all others left."""
        unit, pinned = self._unit_bytes, self._num_pinned_units
        if entry.index is None and self._num_pinned >= self._max_adapters:
            return AdapterError(
                f"adapter {entry.spec.name!r}: the device's tables hold {self._max_adapters} adapters, and all are "
                "pinned: give adapters more memory, or unpin some"
            )
        if entry.units <= self._num_units - pinned:
            return None
        return AdapterError(
            f"adapter {entry.spec.name!r}: takes {entry.units * unit} bytes of device memory; adapters have "
            f"{self._num_units * unit} in all, of which {pinned * unit} are pinned: give them more, or unpin some"
        )

    def find_leaving(self, now: float) -> Leaving:
        """Return what `make_room` takes adapters from until requests or workers change something."""
        return Leaving(self._entries, now)

    def make_room(self, units: int, has_waited: bool, leaving: Leaving) -> list[AdapterEntry]:
        """Evict adapters for one of this size, and join free space. Return those evicted; it may not be enough yet."""
        evicted = []
        is_short = self._space.num_free_units < units  # else it is only scattered, or still being read
        if is_short or not self._has_index:
            evicted = self._evict_some(units + int(self._num_units * SPARE) * is_short, leaving, False)
            if has_waited:
                evicted += self._evict_some(units, leaving, True)
                self._drain(units - self._space.num_free_units)
        self._space.compact(units)
        return evicted

    def _evict_some(self, units: int, leaving: Leaving, even_wanted: bool) -> list[AdapterEntry]:
        """Evict until so many units and an index are free, or no more adapters may leave."""
        victims: list[AdapterEntry] = []
        while self._space.num_free_units < units or not self._has_index:
            victim = leaving.take(even_wanted)
            if victim is None:
                break
            self.evict(victim)
            victims.append(victim)
        return victims

    def _drain(self, missing: int) -> None:
        """Let no sequence begin with some running adapters, so that there will be room when they are done."""
        if missing <= 0 and self._has_index:
            return
        draining = [entry.units for entry in self._entries.values() if entry.is_draining]
        missing -= sum(draining)
        lacks_index = not self._has_index and not draining
        for entry in self._entries.values():
            if missing <= 0 and not lacks_index:
                return
            if entry.is_loaded and entry.num_begun and not entry.is_pinned and not entry.is_draining:
                entry.is_draining, lacks_index = True, False
                missing -= entry.units
