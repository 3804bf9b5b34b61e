"""Adapters in host memory: prepared, so that they only have to be copied to the device."""

from collections import OrderedDict
from collections.abc import Iterator

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.registry import AdapterEntry
from lorax_server.errors import AdapterError
from lorax_server.plan import AdapterOp, Drop, Prepare, Prepared
from lorax_server.types import AdapterCounters


class HostTier:
    """Guards a number of bytes. An adapter counts from the start of its preparation, with the most it may take.

    Adapters leave that no request has begun with and that are not on their way to the device, the longest unused first.
    For an adapter that has waited, copies of adapters on the device leave too, even if requests have begun with them:
    those adapters stay on the device until the requests are done.
    """

    def __init__(self, num_bytes: int, itemsize: int, counters: AdapterCounters, ops: list[AdapterOp]) -> None:
        """Operations for the workers are appended to `ops`."""
        self.bytes_used = 0
        self.num_preparing = 0
        self._num_bytes = num_bytes
        self._itemsize = itemsize
        self._counters = counters
        self._entries: OrderedDict[str, AdapterEntry] = OrderedDict()  # those that are prepared, by last use
        self._ops = ops

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, entry: AdapterEntry, has_waited: bool) -> bool:
        """Let the workers prepare an adapter; False if there is no room."""
        num_bytes = self._most_bytes(entry.spec)
        if not self.make_room(num_bytes, has_waited):
            return False
        entry.spec_in_work = entry.spec
        entry.is_preparing, entry.num_bytes, entry.error = True, num_bytes, None
        self.bytes_used += num_bytes
        self.num_preparing += 1
        self._ops.append(Prepare(entry.spec))
        return True

    def find_problem(self, spec: AdapterSpec) -> AdapterError | None:
        """Return the error of an adapter that is too large, before any of it is read: reading takes as much."""
        num_bytes = self._most_bytes(spec)
        if num_bytes <= self._num_bytes:
            return None
        return AdapterError(
            f"adapter {spec.name!r}: may take {num_bytes} bytes of host memory, of which adapters have "
            f"{self._num_bytes}: raise adapter_host_bytes"
        )

    def _most_bytes(self, spec: AdapterSpec) -> int:
        return spec.num_elements * self._itemsize

    def settle(self, entry: AdapterEntry, result: Prepared) -> None:
        """Note that the workers have prepared an adapter, or have failed to."""
        self.num_preparing -= 1
        self.bytes_used += result.num_bytes - entry.num_bytes
        entry.is_preparing, entry.num_bytes = False, result.num_bytes
        if result.error is None:
            self._counters.adapters_prepared += 1
            entry.is_prepared, entry.units, entry.vocab_size = True, result.units, result.vocab_size
            self._entries[entry.identity] = entry

    def touch(self, entry: AdapterEntry) -> None:
        """Note that an adapter is used, whether it has a copy here or not."""
        if entry.is_prepared:
            self._entries.move_to_end(entry.identity)

    def drop(self, entry: AdapterEntry) -> None:
        self._ops.append(Drop(entry.identity))
        del self._entries[entry.identity]
        self.bytes_used -= entry.num_bytes
        entry.is_prepared, entry.num_bytes = False, 0

    def make_room(self, num_bytes: int, has_waited: bool) -> bool:
        """Drop adapters until so many bytes are free. Drop none in vain, except for an adapter that has waited: it gets
        what is free later."""
        left, victims = self.bytes_used, []
        droppable = self._droppable(even_begun=has_waited)
        while left + num_bytes > self._num_bytes and (victim := next(droppable, None)) is not None:
            victims.append(victim)
            left -= victim.num_bytes
        is_enough = left + num_bytes <= self._num_bytes
        if is_enough or has_waited:
            for entry in victims:
                self.drop(entry)
            self._counters.adapters_evicted_from_host += len(victims)
        return is_enough

    def _droppable(self, even_begun: bool) -> Iterator[AdapterEntry]:
        for entry in self._entries.values():
            is_on_its_way = entry.index is not None or entry.is_wanted
            if not entry.num_begun and (entry.is_loaded or not is_on_its_way):
                yield entry
        for entry in self._entries.values() if even_begun else ():
            if entry.num_begun and entry.is_loaded:  # it stays there until its requests are done
                yield entry
