"""Where each adapter is (on disk, in host memory, on the device), who needs it, and what leaves when room is needed.

Adapters are known by their identity, so one that is replaced under its name is another one here, and nothing that is
cached of an adapter can become wrong. The table decides and counts; the workers prepare, copy and forget what it says.

An adapter that somebody waits for moves up as room is made: first go those that nobody waits for, the longest unused
first. Who has waited for longer than `patience_s` may also take the place of one that others wait for; and where all
run, the one that was used least lately gets no new sequences until it is free. So those who wait are served in the
order in which they came, each within a bounded time, and until then what is resident is used first.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapter_space import AdapterSpace
from lorax_server.errors import AdapterError, LoraxError
from lorax_server.plan import AdapterOp, Capabilities, Drop, Load, Move, Prepare, Prepared, Unload

BASE_MODEL = ""
MAX_KNOWN = 100_000  # adapters that are remembered though they are nowhere but on disk
MAX_PREPARING = 4  # at once: enough to keep the workers busy, and few enough that a new one does not wait for many
SPARE = 0.03  # of the device's buffer: how much more than needed is freed, so that moves are rare


class State(Enum):
    """How far an adapter has come."""

    DISK = "on disk"
    PREPARING = "being prepared"
    HOST = "in host memory"
    LOADING = "being loaded"
    DEVICE = "on the device"
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class _Entry:
    spec: AdapterSpec
    num_requests: int = 0  # that need it, waiting or running
    num_begun: int = 0  # of these: have had a place on the device, and must not lose it for good
    num_running: int = 0  # of these: have it now
    is_pinned: bool = False
    is_asked_for: bool = False  # to be on the device, whether requests wait for it or not
    is_dismissed: bool = False  # to leave as soon as nobody needs it

    is_preparing: bool = False
    is_prepared: bool = False  # in host memory
    num_bytes: int = 0  # there, or as many as it may take
    units: int = 0
    vocab_size: int = 0

    index: int | None = None  # on the device
    is_loaded: bool = False
    is_fresh: bool = False  # loaded for somebody who has not run yet
    is_draining: bool = False  # lets nobody in, since another one has waited for too long

    waits_since: float = 0.0
    error: LoraxError | None = None
    retry_at: float = 0.0

    @property
    def identity(self) -> str:
        return self.spec.identity

    @property
    def state(self) -> State:
        if self.index is not None:
            return State.DEVICE if self.is_loaded else State.LOADING
        if self.is_prepared:
            return State.HOST
        if self.error is not None:
            return State.FAILED
        return State.PREPARING if self.is_preparing else State.DISK


@dataclass
class AdapterCounters:
    """What happened so far."""

    prepared: int = 0
    failed: int = 0
    loaded: int = 0
    evicted_from_device: int = 0
    evicted_from_host: int = 0
    moves: int = 0


class AdapterTable:
    """One engine's adapters. Not thread-safe: only the engine's loop calls it."""

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        host_bytes: int,
        patience_s: float = 1.0,
        retry_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = AdapterCounters()
        self.host_bytes_used = 0
        self._host_bytes = host_bytes
        self._capabilities = capabilities
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._clock = clock
        self._space = AdapterSpace(capabilities.num_adapter_units) if capabilities.num_adapter_units else None
        self._known: OrderedDict[str, _Entry] = OrderedDict()
        self._wanted: set[str] = set()  # on the device
        self._to_prepare: OrderedDict[str, _Entry] = OrderedDict()  # of these, by who came first
        self._to_load: OrderedDict[str, _Entry] = OrderedDict()  # likewise
        self._prefetch: OrderedDict[str, _Entry] = OrderedDict()  # to be in host memory, where there is room
        self._on_host: OrderedDict[str, _Entry] = OrderedDict()  # by last use
        self._on_device: OrderedDict[str, _Entry] = OrderedDict()  # likewise
        self._by_index: dict[int, _Entry] = {}
        self._free_indices: list[int] = []
        self.num_preparing = 0
        self._num_pinned_units = 0
        self._loading: set[int] = set()
        self._is_stirred = False  # something has happened since the last `advance`
        self._ops: list[AdapterOp] = []
        self._arrived: list[str] = []
        self._failed: list[tuple[str, LoraxError]] = []

    # --- What the engine does with it ---------------------------------------------------------------------------------

    def register(self, spec: AdapterSpec, prefetch: bool = True) -> None:
        """Know an adapter from now on. A request that names it is about to come, so it is prepared where room is."""
        if self._space is None:
            raise AdapterError(f"adapter {spec.name!r}: this model is served without adapters")
        entry = self._known.get(spec.identity)
        if entry is None:
            entry = self._known[spec.identity] = _Entry(spec)
            self._forget_some()
        if spec.parts != entry.spec.parts:  # the same content in another place: the old one may be gone
            entry.spec, entry.error = spec, None
        entry.is_dismissed = False
        self._known.move_to_end(spec.identity)
        self._is_stirred = True
        if prefetch and entry.state is State.DISK:
            self._prefetch[spec.identity] = entry

    @property
    def num_on_host(self) -> int:
        return len(self._on_host)

    @property
    def num_on_device(self) -> int:
        return len(self._on_device)

    def state(self, identity: str) -> State | None:
        """None if it is not known."""
        entry = self._known.get(identity)
        return None if entry is None else entry.state

    def ask_for(self, identity: str, pin: bool) -> None:
        """Bring an adapter to the device, and keep it there if it is pinned."""
        entry = self._usable(identity)
        self._pin(entry, entry.is_pinned or pin)
        entry.is_dismissed = False
        if entry.is_loaded and entry.is_pinned:
            self._arrive(entry)  # it will not leave, so that nobody needs to be kept from it
        elif entry.is_loaded:
            self._arrived.append(identity)
        else:
            entry.is_asked_for = True
            self.bring(identity)

    def dismiss(self, identity: str) -> None:
        """Let an adapter go, pinned or not, as soon as nobody needs it."""
        entry = self._known.get(identity)
        if entry is not None:
            self._pin(entry, False)
            entry.is_asked_for = False
            entry.is_dismissed = True
            self._leave_if_dismissed(entry)
            self._is_stirred = True

    def prepared(self, result: Prepared) -> None:
        """The workers have prepared an adapter, or could not."""
        entry = self._known[result.identity]
        self._is_stirred = True
        self.num_preparing -= 1
        self.host_bytes_used += result.num_bytes - entry.num_bytes
        entry.is_preparing, entry.num_bytes = False, result.num_bytes
        if result.error is None:
            self.counters.prepared += 1
            entry.is_prepared, entry.units, entry.vocab_size = True, result.units, result.vocab_size
            self._on_host[entry.identity] = entry
            if entry.identity in self._wanted:
                self._to_load[entry.identity] = entry
            self._leave_if_dismissed(entry)
            self._make_room_on_host(0, has_waited=False)  # where it takes more than was known before
        else:
            self._fail(entry, result.error)

    def advance(self) -> None:
        """Do what can be done now for those who wait, in the order in which they came: nobody overtakes one who waits
        for room, since what is freed is for that one."""
        now = self._clock()
        self._is_stirred = False
        while self._to_load and self._load(next(iter(self._to_load.values())), now):
            pass
        while self._to_prepare and self.num_preparing < MAX_PREPARING:
            entry = next(iter(self._to_prepare.values()))
            if not self._prepare(entry, self._has_waited(entry, now)):
                break
        while self._prefetch and not self._to_prepare and self.num_preparing < MAX_PREPARING:
            identity, entry = next(iter(self._prefetch.items()))
            if entry.state is State.DISK and not self._prepare(entry, has_waited=False):
                break
            self._prefetch.pop(identity, None)

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or `advance` may do more than it could the last time."""
        waits = self._to_load or self._to_prepare or self._prefetch
        return bool(self._arrived or self._failed or (self._is_stirred and waits))

    @property
    def deadline_s(self) -> float | None:
        """When `advance` can do more though nothing has happened: when the patience of a first one ends."""
        firsts = [next(iter(queue.values())) for queue in (self._to_load, self._to_prepare) if queue]
        now = self._clock()
        left = [entry.waits_since + self._patience_s - now for entry in firsts if not self._has_waited(entry, now)]
        return min(left, default=None)

    def take_arrived(self) -> list[str]:
        """Adapters that can be used from now on."""
        taken, self._arrived = self._arrived, []
        return taken

    def take_failed(self) -> list[tuple[str, LoraxError]]:
        """Adapters that cannot be used, and why."""
        taken, self._failed = self._failed, []
        return taken

    # --- What the scheduler asks and tells ----------------------------------------------------------------------------

    def index_of(self, identity: str, has_begun: bool) -> int | None:
        """Where the workers have it; None if a sequence cannot begin, or go on, with it now."""
        if identity == BASE_MODEL:
            return 0
        entry = self._known[identity]
        return entry.index if entry.is_loaded and (has_begun or not entry.is_draining) else None

    def vocab_size(self, identity: str) -> int:
        """Of an adapter that is there."""
        return self._capabilities.vocab_size if identity == BASE_MODEL else self._known[identity].vocab_size

    def add_request(self, identity: str) -> None:
        """A request needs it. Refused if it is not known or has just failed."""
        if identity != BASE_MODEL:
            entry = self._usable(identity)
            entry.num_requests += 1
            entry.is_dismissed = False

    def end_request(self, identity: str, has_begun: bool) -> None:
        if identity != BASE_MODEL:
            entry = self._known[identity]
            entry.num_requests -= 1
            entry.num_begun -= has_begun
            self._is_stirred = True
            if entry.num_requests == 0:
                entry.is_fresh = False
                if not entry.is_asked_for:
                    self._stop_waiting(entry)
            self._leave_if_dismissed(entry)

    def bring(self, identity: str) -> None:
        """Somebody waits for it to be on the device."""
        if identity in self._wanted:
            return
        entry = self._known[identity]
        entry.waits_since = self._clock()
        self._wanted.add(identity)
        self._is_stirred = True
        if entry.is_loaded or entry.state is State.HOST:
            self._to_load[identity] = entry
        elif entry.index is None and not entry.is_preparing:  # else it is on its way
            self._to_prepare[identity] = entry

    def begin(self, identity: str) -> None:
        """A request runs for the first time: from now on the adapter is kept for it, if not on the device."""
        if identity != BASE_MODEL:
            self._known[identity].num_begun += 1

    def hold(self, identity: str) -> None:
        """A sequence runs that needs it."""
        if identity != BASE_MODEL:
            entry = self._known[identity]
            assert entry.is_loaded, f"{identity} is {entry.state.value}"
            entry.num_running += 1
            entry.is_fresh = False
            self._touch(entry)

    def release(self, identity: str) -> None:
        if identity != BASE_MODEL:
            entry = self._known[identity]
            entry.num_running -= 1
            self._is_stirred = True
            self._touch(entry)

    @property
    def needs_step(self) -> bool:
        """Whether the workers must be told something, even if there is nothing to compute."""
        return bool(self._ops) or (self._space is not None and self._space.needs_step)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def submit(self) -> tuple[AdapterOp, ...]:
        """A step goes out; what is to be done before it."""
        if self._space is None:
            return ()
        _, moves = self._space.submit()
        self.counters.moves += len(moves)
        ops: list[AdapterOp] = []
        for move in moves:
            index = self._known[str(move.key)].index
            assert index is not None
            ops.append(Move(index, move.source, move.target))
        ops += self._ops
        self._ops = []
        return tuple(ops)

    def completed(self, step: int, loaded: Iterable[int]) -> None:
        """A step has ended, and these loads have."""
        if self._space is None:
            return
        self._space.completed(step)
        self._is_stirred = True
        for index in loaded:
            entry = self._by_index[index]
            self._loading.remove(index)
            self._space.loaded(entry.identity)
            self.counters.loaded += 1
            entry.is_loaded = True
            entry.is_fresh = entry.num_requests > 0
            if entry.identity in self._wanted:
                self._arrive(entry)
            self._leave_if_dismissed(entry)

    # --- Moving up ----------------------------------------------------------------------------------------------------

    def _has_waited(self, entry: _Entry, now: float) -> bool:
        return now - entry.waits_since >= self._patience_s

    def _prepare(self, entry: _Entry, has_waited: bool) -> bool:
        """Let the workers prepare it, if there is room in host memory."""
        wanted = entry.spec.num_elements * self._capabilities.itemsize
        if not self._make_room_on_host(wanted, has_waited):
            return False
        self._to_prepare.pop(entry.identity, None)
        self._prefetch.pop(entry.identity, None)
        entry.is_preparing, entry.num_bytes, entry.error = True, wanted, None
        self.host_bytes_used += wanted
        self.num_preparing += 1
        self._ops.append(Prepare(entry.spec))
        return True

    def _load(self, entry: _Entry, now: float) -> bool:
        """Give it a place on the device and let it be copied there. False if it has to wait for room."""
        assert self._space is not None
        if entry.is_loaded:
            self._arrive(entry)
            return True
        problem = self._never_fits(entry)
        if problem is not None:
            self._drop(entry)
            self._fail(entry, problem)
            return True
        start = self._space.allocate(entry.identity, entry.units)
        if start is None:
            self._make_room_on_device(entry.units, self._has_waited(entry, now))
            self._space.compact(entry.units)
            start = self._space.allocate(entry.identity, entry.units)
        if start is None:
            return False
        del self._to_load[entry.identity]
        entry.index = heapq.heappop(self._free_indices) if self._free_indices else len(self._by_index) + 1
        self._by_index[entry.index] = entry
        self._loading.add(entry.index)
        self._num_pinned_units += entry.units * entry.is_pinned
        self._touch(entry)
        self._ops.append(Load(entry.identity, entry.index, start))
        return True

    def _arrive(self, entry: _Entry) -> None:
        entry.is_draining = entry.is_asked_for = False
        self._stop_waiting(entry)
        self._arrived.append(entry.identity)

    def _stop_waiting(self, entry: _Entry) -> None:
        self._wanted.discard(entry.identity)
        self._to_prepare.pop(entry.identity, None)
        self._to_load.pop(entry.identity, None)

    def _never_fits(self, entry: _Entry) -> AdapterError | None:
        unit, pinned = self._capabilities.adapter_unit_bytes, self._num_pinned_units
        room = self._capabilities.num_adapter_units
        if entry.units > room - pinned:
            return AdapterError(
                f"adapter {entry.spec.name!r}: takes {entry.units * unit} bytes of device memory; adapters have "
                f"{room * unit} in all, of which {pinned * unit} are pinned: give them more, or unpin some"
            )
        return None

    # --- Making room --------------------------------------------------------------------------------------------------

    def _make_room_on_device(self, units: int, has_waited: bool) -> None:
        assert self._space is not None
        if self._space.num_free_units >= units:
            return  # it is only scattered, or still being read
        self._evict_some(units + int(self._capabilities.num_adapter_units * SPARE), even_wanted=False)
        if has_waited:
            self._evict_some(units, even_wanted=True)
            self._drain(units - self._space.num_free_units)

    def _evict_some(self, units: int, even_wanted: bool) -> None:
        """Until so many are free, or no more can be."""
        assert self._space is not None
        missing = units - self._space.num_free_units
        victims = []
        evictable = self._evictable(even_wanted)
        while missing > 0 and (victim := next(evictable, None)) is not None:
            victims.append(victim)
            missing -= victim.units
        for victim in victims:
            self._evict(victim)

    def _evictable(self, even_wanted: bool) -> Iterator[_Entry]:
        for entry in self._on_device.values():
            is_free = entry.is_loaded and not entry.is_pinned and not entry.is_fresh and not entry.num_running
            # What cannot be brought back from host memory stays for those who have begun with it.
            can_return = entry.is_prepared or not entry.num_begun
            if is_free and can_return and (even_wanted or not entry.num_requests):
                yield entry

    def _drain(self, missing: int) -> None:
        """Let nobody begin with some that run, so that there will be room when they are done."""
        missing -= sum(entry.units for entry in self._on_device.values() if entry.is_draining)
        for entry in self._on_device.values():
            if missing <= 0:
                return
            if entry.is_loaded and entry.num_begun and not entry.is_pinned and not entry.is_draining:
                entry.is_draining = True
                missing -= entry.units

    def _make_room_on_host(self, num_bytes: int, has_waited: bool) -> bool:
        """Nothing is dropped in vain, but for one that has waited: what is free then is kept for it."""
        left, victims = self.host_bytes_used, []
        droppable = self._droppable(even_begun=has_waited)
        while left + num_bytes > self._host_bytes and (victim := next(droppable, None)) is not None:
            victims.append(victim)
            left -= victim.num_bytes
        # One that is larger than all there is gets it while it is alone.
        is_enough = left + num_bytes <= self._host_bytes or left == 0
        if is_enough or has_waited:
            for entry in victims:
                self._drop(entry)
            self.counters.evicted_from_host += len(victims)
        return is_enough

    def _droppable(self, even_begun: bool) -> Iterator[_Entry]:
        for entry in self._on_host.values():
            is_on_its_way = entry.index is not None or entry.identity in self._to_load
            if not entry.num_begun and (entry.is_loaded or not is_on_its_way):
                yield entry
        for entry in self._on_host.values() if even_begun else ():
            if entry.num_begun and entry.is_loaded:  # which will stay there until these are done
                yield entry

    def _evict(self, entry: _Entry) -> None:
        assert self._space is not None
        assert entry.index is not None
        self.counters.evicted_from_device += 1
        self._space.free(entry.identity)
        self._ops.append(Unload(entry.index))
        del self._by_index[entry.index], self._on_device[entry.identity]
        heapq.heappush(self._free_indices, entry.index)
        entry.index, entry.is_loaded, entry.is_draining, entry.is_fresh = None, False, False, False
        if entry.identity in self._to_load and not entry.is_prepared:
            self._to_prepare[entry.identity] = self._to_load.pop(entry.identity)

    def _drop(self, entry: _Entry) -> None:
        self._ops.append(Drop(entry.identity))
        del self._on_host[entry.identity]
        self.host_bytes_used -= entry.num_bytes
        entry.is_prepared, entry.num_bytes = False, 0

    def _leave_if_dismissed(self, entry: _Entry) -> None:
        if entry.is_dismissed and not entry.num_requests:
            self._prefetch.pop(entry.identity, None)
            self._stop_waiting(entry)
            if entry.is_loaded:
                self._evict(entry)
            if entry.is_prepared and entry.index is None:
                self._drop(entry)

    # --- Small things -------------------------------------------------------------------------------------------------

    def _usable(self, identity: str) -> _Entry:
        entry = self._known.get(identity)
        if entry is None:
            raise AdapterError(f"adapter {identity[:64]!r} is not known here any more; name it again")
        if entry.error is not None and entry.state is State.FAILED:
            left = entry.retry_at - self._clock()
            if left > 0:
                error = type(entry.error)(str(entry.error))
                error.retry_after_s = left
                raise error
            entry.error = None
        self._known.move_to_end(identity)
        return entry

    def _fail(self, entry: _Entry, error: LoraxError) -> None:
        self.counters.failed += 1
        entry.error, entry.retry_at = error, self._clock() + self._retry_s
        entry.is_asked_for = False
        self._pin(entry, False)
        self._stop_waiting(entry)
        self._failed.append((entry.identity, error))

    def _pin(self, entry: _Entry, is_pinned: bool) -> None:
        if entry.index is not None:
            self._num_pinned_units += entry.units * (is_pinned - entry.is_pinned)
        entry.is_pinned = is_pinned

    def _touch(self, entry: _Entry) -> None:
        self._on_device[entry.identity] = entry
        self._on_device.move_to_end(entry.identity)
        if entry.identity in self._on_host:
            self._on_host.move_to_end(entry.identity)

    def _forget_some(self) -> None:
        """Of those that are nowhere but on disk, the longest unnamed."""
        while len(self._known) > MAX_KNOWN:
            identity, entry = next(iter(self._known.items()))
            if entry.num_requests or entry.is_asked_for or entry.state not in (State.DISK, State.FAILED):
                self._known.move_to_end(identity)
                return
            del self._known[identity]
            self._prefetch.pop(identity, None)
