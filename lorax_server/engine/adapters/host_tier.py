"""Adapters in host memory: prepared, so that a copy is all that lies between them and the device."""

from collections import OrderedDict
from collections.abc import Iterator

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.entry import AdapterEntry
from lorax_server.errors import AdapterError
from lorax_server.plan import AdapterOp, Drop, Prepare, Prepared
from lorax_server.types import AdapterCounters


class HostTier:
    """Guards a number of bytes. They are counted from when a preparation begins, by what it may take at most.

    Those leave that no request has begun with and that are not on their way to the device, the longest unused first.
    For who has waited, also copies of those on the device that requests have begun with: these then stay there until
    the requests are done.
    """

    def __init__(self, num_bytes: int, itemsize: int, counters: AdapterCounters) -> None:
        self.bytes_used = 0
        self.num_preparing = 0
        self._num_bytes = num_bytes
        self._itemsize = itemsize
        self._counters = counters
        self._entries: OrderedDict[str, AdapterEntry] = OrderedDict()  # those that are prepared, by last use
        self._ops: list[AdapterOp] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_ops(self) -> bool:
        return bool(self._ops)

    def take_ops(self) -> list[AdapterOp]:
        """What the workers are to do, in this order."""
        taken, self._ops = self._ops, []
        return taken

    def begin(self, entry: AdapterEntry, has_waited: bool) -> bool:
        """Let the workers prepare it, if there is room."""
        wanted = self._most_bytes(entry.spec)
        if not self._make_room(wanted, has_waited):
            return False
        entry.spec_in_work = entry.spec
        entry.is_preparing, entry.num_bytes, entry.error = True, wanted, None
        self.bytes_used += wanted
        self.num_preparing += 1
        self._ops.append(Prepare(entry.spec))
        return True

    def find_problem(self, spec: AdapterSpec) -> AdapterError | None:
        """Why it will never be prepared: before any of it is read, since reading takes as much."""
        wanted = self._most_bytes(spec)
        if wanted <= self._num_bytes:
            return None
        return AdapterError(
            f"adapter {spec.name!r}: may take {wanted} bytes of host memory, of which adapters have {self._num_bytes}: "
            "raise adapter_host_bytes"
        )

    def _most_bytes(self, spec: AdapterSpec) -> int:
        return spec.num_elements * self._itemsize

    def settle(self, entry: AdapterEntry, result: Prepared) -> None:
        """The workers have prepared it, or could not."""
        self.num_preparing -= 1
        self.bytes_used += result.num_bytes - entry.num_bytes
        entry.is_preparing, entry.num_bytes = False, result.num_bytes
        if result.error is None:
            self._counters.adapters_prepared += 1
            entry.is_prepared, entry.units, entry.vocab_size = True, result.units, result.vocab_size
            self._entries[entry.identity] = entry

    def trim(self) -> None:
        """Keep to the limit where one took more than was known before."""
        self._make_room(0, has_waited=False)

    def touch(self, entry: AdapterEntry) -> None:
        """It is used, be it that there is no copy here."""
        if entry.is_prepared:
            self._entries.move_to_end(entry.identity)

    def drop(self, entry: AdapterEntry) -> None:
        self._ops.append(Drop(entry.identity))
        del self._entries[entry.identity]
        self.bytes_used -= entry.num_bytes
        entry.is_prepared, entry.num_bytes = False, 0

    def _make_room(self, num_bytes: int, has_waited: bool) -> bool:
        """Nothing is dropped in vain, but for one that has waited: what is free then is kept for it."""
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
            if entry.num_begun and entry.is_loaded:  # which will stay there until these are done
                yield entry
