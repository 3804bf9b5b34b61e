"""The host tier: adapters in host memory, prepared for copying to the device."""

from collections import OrderedDict
from collections.abc import Iterator

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.registry import AdapterEntry
from lorax_server.errors import AdapterError
from lorax_server.plan import AdapterOp, DropOp, PrepareOp, PrepareResult
from lorax_server.types import AdapterCounters


class HostTier:
    """Manages the host memory budget. While an adapter is being prepared, its maximum size counts against the budget.

    Adapters without started requests are evicted, least recently used first, unless they are about to be loaded. For an
    overdue adapter, host copies of adapters with started requests are evicted too, if the adapters are on the device.
    These adapters stay on the device until the requests finish.
    """

    def __init__(self, num_bytes: int, itemsize: int, counters: AdapterCounters, ops: list[AdapterOp]) -> None:
        """Create the tier. Worker operations are appended to `ops`."""
        self.bytes_used = 0
        self.num_preparing = 0
        self._num_bytes = num_bytes
        self._itemsize = itemsize
        self._counters = counters
        self._entries: OrderedDict[str, AdapterEntry] = OrderedDict()  # prepared adapters, least recently used first
        self._ops = ops

    def __len__(self) -> int:
        return len(self._entries)

    def start_preparing(self, entry: AdapterEntry, is_overdue: bool, is_packed: bool = False) -> bool:
        """Start preparing an adapter. Return False if host memory is full. See `PrepareOp` for `is_packed`."""
        num_bytes = self._max_bytes(entry.spec)
        if not self.free_space(num_bytes, is_overdue):
            return False
        entry.preparing_spec = entry.spec
        entry.is_preparing, entry.num_bytes, entry.error = True, num_bytes, None
        self.bytes_used += num_bytes
        self.num_preparing += 1
        self._ops.append(PrepareOp(entry.spec, is_packed))
        return True

    def find_error(self, spec: AdapterSpec) -> AdapterError | None:
        """Return an error if the adapter may exceed the host memory budget. This does not read the adapter files."""
        num_bytes = self._max_bytes(spec)
        if num_bytes <= self._num_bytes:
            return None
        return AdapterError(
            f"adapter {spec.name!r}: may need {num_bytes} bytes of host memory; the limit for adapters is "
            f"{self._num_bytes} bytes: raise adapter_host_bytes"
        )

    def _max_bytes(self, spec: AdapterSpec) -> int:
        return spec.num_elements * self._itemsize

    def finish_preparing(self, entry: AdapterEntry, result: PrepareResult) -> None:
        """Record that an adapter has been prepared or could not be prepared."""
        self.num_preparing -= 1
        self.bytes_used += result.num_bytes - entry.num_bytes
        entry.is_preparing, entry.num_bytes = False, result.num_bytes
        if result.error is None:
            self._counters.adapters_prepared += 1
            entry.is_prepared, entry.units, entry.vocab_size = True, result.units, result.vocab_size
            entry.changes_kv, entry.is_packed_on_device = result.changes_kv, result.is_on_device
            self._entries[entry.identity] = entry

    def touch(self, entry: AdapterEntry) -> None:
        """Mark an adapter as recently used, if it has a host copy."""
        if entry.is_prepared:
            self._entries.move_to_end(entry.identity)

    def drop(self, entry: AdapterEntry) -> None:
        self._ops.append(DropOp(entry.identity))
        del self._entries[entry.identity]
        self.bytes_used -= entry.num_bytes
        entry.is_prepared, entry.num_bytes = False, 0

    def free_space(self, num_bytes: int, is_overdue: bool) -> bool:
        """Evict adapters until `num_bytes` are free, and return True on success.

        If too few bytes can be freed, evict nothing, unless the waiting adapter is overdue.
        """
        left, victims = self.bytes_used, []
        droppable = self._find_droppable(include_started=is_overdue)
        while left + num_bytes > self._num_bytes and (victim := next(droppable, None)) is not None:
            victims.append(victim)
            left -= victim.num_bytes
        is_enough = left + num_bytes <= self._num_bytes
        if is_enough or is_overdue:
            for entry in victims:
                self.drop(entry)
            self._counters.adapters_evicted_from_host += len(victims)
        return is_enough

    def _find_droppable(self, include_started: bool) -> Iterator[AdapterEntry]:
        for entry in self._entries.values():
            is_being_loaded = entry.index is not None or entry.is_wanted
            if not entry.num_started and (entry.is_loaded or not is_being_loaded):
                yield entry
        for entry in self._entries.values() if include_started else ():
            if entry.num_started and entry.is_loaded:  # stays on the device until its requests finish
                yield entry
