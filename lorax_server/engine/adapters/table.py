"""Which adapters are needed where, and who is next: the queues of those that move up, and what is told when they come.

Adapters are known by their identity, so one that is replaced under its name is another one here, and nothing that is
cached of an adapter can become wrong. The table decides and counts; the workers prepare, copy and forget what it says.

An adapter that somebody waits for moves up as the tiers make room, and they do more for one that has waited for longer
than `patience_s`: `host_tier` and `device_tier` say what leaves then. So those who wait are served in the order in
which they came, each within a bounded time, and until then what is resident is used first.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.device_tier import DeviceTier
from lorax_server.engine.adapters.entry import AdapterEntry, State
from lorax_server.engine.adapters.host_tier import HostTier
from lorax_server.engine.counters import AdapterCounters
from lorax_server.errors import AdapterError, InputError, LoraxError
from lorax_server.plan import AdapterOp, Capabilities, Prepared
from lorax_server.types import AdapterState

BASE_MODEL = ""
MAX_KNOWN = 100_000  # adapters that are remembered though they are nowhere but on disk
MAX_MERGES = 1000  # of these: merged by requests. Who names one again gets it again, made of its parts
MAX_LISTED = 2000  # described at once: no step waits longer, however many adapters there are
MAX_PREPARING = 4  # at once: enough to keep the workers busy, and few enough that a new one does not wait for many


class AdapterTable:
    """One engine's adapters. Only the engine's loop calls it, but for `find_problem` and `state`, which look at nothing
    that is in between."""

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
        self._capabilities = capabilities
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._clock = clock
        self._host = HostTier(host_bytes, capabilities.itemsize, self.counters)
        self._device = DeviceTier(capabilities, self.counters)
        self._known: OrderedDict[str, AdapterEntry] = OrderedDict()  # by when they were named last
        self._merges: OrderedDict[str, AdapterEntry] = OrderedDict()  # of these: those that are merged
        self._to_prepare: OrderedDict[str, AdapterEntry] = OrderedDict()  # wanted on the device, by who came first
        self._to_load: OrderedDict[str, AdapterEntry] = OrderedDict()  # likewise
        self._prefetch: OrderedDict[str, AdapterEntry] = OrderedDict()  # to be in host memory, where there is room
        self._advanced_at = -math.inf  # when the last `advance` was
        self._is_stirred = False  # something has happened since
        self._arrived: list[str] = []
        self._failed: list[tuple[str, LoraxError]] = []

    # --- What the engine does with it ---------------------------------------------------------------------------------

    def find_problem(self, spec: AdapterSpec) -> AdapterError | None:
        """The error of an adapter that can never be used here, if it is one."""
        if not self._capabilities.num_adapter_units:
            return AdapterError(f"adapter {spec.name!r}: this model is served without adapters")
        return self._host.find_problem(spec)

    def register(self, spec: AdapterSpec, prefetch: bool = True) -> None:
        """Know an adapter from now on. A request that names it is about to come, so it is prepared where room is."""
        problem = self.find_problem(spec)
        if problem is not None:
            raise problem
        entry = self._known.get(spec.identity)
        if entry is None:
            entry = self._known[spec.identity] = AdapterEntry(spec)
            if spec.merge is not None:
                self._merges[spec.identity] = entry
            self._forget_some(self._known, MAX_KNOWN)
            self._forget_some(self._merges, MAX_MERGES)
        if spec.parts != entry.spec.parts:  # the same content in another place: the old one may be gone
            entry.spec, entry.error = spec, None
        entry.is_dismissed = False
        self._keep(spec.identity)
        self._is_stirred = True
        if prefetch and entry.state is State.DISK:
            self._prefetch[spec.identity] = entry

    @property
    def num_preparing(self) -> int:
        return self._host.num_preparing

    @property
    def num_on_host(self) -> int:
        return len(self._host)

    @property
    def num_on_device(self) -> int:
        return len(self._device)

    def state(self, identity: str) -> State | None:
        """None if it is not known."""
        entry = self._known.get(identity)
        return None if entry is None else entry.state

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        """Describe those of the adapters that are known."""
        if len(identities) > MAX_LISTED:
            raise InputError(f"at most {MAX_LISTED} adapters are described at once, not {len(identities)}")
        entries = (self._known.get(identity) for identity in identities)
        return [_describe(entry, self._capabilities.itemsize) for entry in entries if entry is not None]

    def ask_for(self, identity: str, pin: bool | None = None) -> None:
        """Bring an adapter to the device. One that is pinned stays there; None: as it is."""
        entry = self._usable(identity)
        self._device.pin(entry, entry.is_pinned if pin is None else pin)
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
            self._device.pin(entry, False)
            entry.is_asked_for = False
            entry.is_dismissed = True
            self._leave_if_dismissed(entry)
            self._is_stirred = True

    def prepared(self, result: Prepared) -> None:
        """The workers have prepared an adapter, or could not."""
        entry = self._known[result.identity]
        self._is_stirred = True
        self._host.settle(entry, result)
        if result.error is None:
            if entry.is_wanted:
                self._to_load[entry.identity] = entry
            self._leave_if_dismissed(entry)
            self._host.trim()
        elif entry.spec == entry.spec_in_work:
            self._fail(entry, result.error)
        elif entry.is_wanted:  # it lies elsewhere by now, which was not known when this was begun
            self._to_prepare[entry.identity] = entry

    def advance(self) -> None:
        """Do what can be done now for those who wait, in the order in which they came: nobody overtakes one who waits
        for room, since what is freed is for that one."""
        now = self._advanced_at = self._clock()
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
        """When `advance` can do more though nothing has happened: when the patience of a first one ends. The end of an
        adapter's freshness needs no deadline: whoever it was loaded for is ready to run, so that the engine steps."""
        firsts = [next(iter(queue.values())) for queue in (self._to_load, self._to_prepare) if queue]
        # Not by the clock: one whose patience has ended since the last `advance` is to be looked at now.
        patient = [entry for entry in firsts if not self._has_waited(entry, self._advanced_at)]
        now = self._clock()
        return min((max(0.0, entry.waits_since + self._patience_s - now) for entry in patient), default=None)

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

    def is_merged(self, identity: str) -> bool:
        return identity in self._merges

    def vocab_size(self, identity: str) -> int:
        """Of an adapter that is there."""
        return self._capabilities.vocab_size if identity == BASE_MODEL else self._known[identity].vocab_size

    def add_request(self, identity: str) -> None:
        """A request needs it. Refused if it is not known or has just failed."""
        if identity != BASE_MODEL:
            entry = self._usable(identity)
            entry.num_requests += 1
            entry.num_uses += 1
            entry.is_dismissed = False

    def end_request(self, identity: str, has_begun: bool) -> None:
        if identity != BASE_MODEL:
            entry = self._known[identity]
            entry.num_requests -= 1
            entry.num_begun -= has_begun
            self._is_stirred = True
            if entry.num_requests == 0:
                entry.fresh_until = -math.inf
                if not entry.is_asked_for:
                    self._stop_waiting(entry)
            self._leave_if_dismissed(entry)

    def bring(self, identity: str) -> None:
        """Somebody waits for it to be on the device."""
        entry = self._known[identity]
        if entry.is_wanted:
            return
        entry.is_wanted, entry.waits_since = True, self._clock()
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
            entry.fresh_until = -math.inf
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
        return self._device.has_ops or self._host.has_ops

    @property
    def is_loading(self) -> bool:
        return self._device.is_loading

    def submit(self) -> tuple[AdapterOp, ...]:
        """A step goes out; what is to be done before it. In which order the tiers come does not matter: what is being
        loaded is not dropped, and what is dropped is not loaded before it was prepared again."""
        return (*self._device.submit(), *self._host.take_ops())

    def completed(self, step: int, loaded: Iterable[int]) -> None:
        """A step has ended, and these loads have."""
        self._is_stirred = True
        self._device.completed(step)
        self.loaded(loaded)

    def loaded(self, indices: Iterable[int]) -> None:
        """These loads have ended."""
        for entry in self._device.loaded(indices, self._clock()):
            self._is_stirred = True
            if entry.is_wanted:
                self._arrive(entry)
            self._leave_if_dismissed(entry)

    # --- Moving up ----------------------------------------------------------------------------------------------------

    def _has_waited(self, entry: AdapterEntry, now: float) -> bool:
        return now - entry.waits_since >= self._patience_s

    def _prepare(self, entry: AdapterEntry, has_waited: bool) -> bool:
        """False if it has to wait for room."""
        if not self._host.begin(entry, has_waited):
            return False
        self._to_prepare.pop(entry.identity, None)
        self._prefetch.pop(entry.identity, None)
        return True

    def _load(self, entry: AdapterEntry, now: float) -> bool:
        """False if it has to wait for room."""
        if entry.is_loaded:
            self._arrive(entry)
            return True
        problem = self._device.find_problem(entry)
        if problem is not None:
            self._host.drop(entry)
            self._fail(entry, problem)
            return True
        if not self._device.load(entry):
            self._make_room_on_device(entry, now)
            if not self._device.load(entry):
                return False
        del self._to_load[entry.identity]
        self._host.touch(entry)
        return True

    def _make_room_on_device(self, entry: AdapterEntry, now: float) -> None:
        for left in self._device.make_room(entry.units, self._has_waited(entry, now), now):
            if left.is_wanted and not left.is_prepared:  # its copy has gone meanwhile
                self._to_prepare[left.identity] = self._to_load.pop(left.identity)

    def _arrive(self, entry: AdapterEntry) -> None:
        entry.is_draining = entry.is_asked_for = False
        self._stop_waiting(entry)
        self._arrived.append(entry.identity)

    def _stop_waiting(self, entry: AdapterEntry) -> None:
        entry.is_wanted = False
        self._to_prepare.pop(entry.identity, None)
        self._to_load.pop(entry.identity, None)

    def _leave_if_dismissed(self, entry: AdapterEntry) -> None:
        if entry.is_dismissed and not entry.num_requests:
            self._prefetch.pop(entry.identity, None)
            self._stop_waiting(entry)
            if entry.is_loaded:
                self._device.evict(entry)
            if entry.is_prepared and entry.index is None:
                self._host.drop(entry)

    # --- Small things -------------------------------------------------------------------------------------------------

    def _usable(self, identity: str) -> AdapterEntry:
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
        self._keep(identity)
        return entry

    def _fail(self, entry: AdapterEntry, error: LoraxError) -> None:
        self.counters.adapters_failed += 1
        entry.error, entry.retry_at = error, self._clock() + self._retry_s
        entry.is_asked_for = False
        self._device.pin(entry, False)
        self._stop_waiting(entry)
        self._failed.append((entry.identity, error))

    def _touch(self, entry: AdapterEntry) -> None:
        self._device.touch(entry)
        self._host.touch(entry)

    def _keep(self, identity: str) -> None:
        """It is named, so that others are forgotten before it."""
        self._known.move_to_end(identity)
        if identity in self._merges:
            self._merges.move_to_end(identity)

    def _forget_some(self, among: OrderedDict[str, AdapterEntry], limit: int) -> None:
        """Of those that are nowhere but on disk, the longest unnamed."""
        while len(among) > limit:
            identity, entry = next(iter(among.items()))
            if entry.num_requests or entry.is_asked_for or entry.state not in (State.DISK, State.FAILED):
                among.move_to_end(identity)
                return
            del self._known[identity]
            self._merges.pop(identity, None)
            self._prefetch.pop(identity, None)


def _describe(entry: AdapterEntry, itemsize: int) -> AdapterState:
    num_bytes = entry.num_bytes or entry.spec.num_elements * itemsize
    error = None if entry.error is None or entry.state is not State.FAILED else str(entry.error)
    return AdapterState(
        entry.identity,
        entry.spec.name,
        entry.state.value,
        num_bytes,
        entry.is_pinned,
        entry.num_requests,
        entry.num_uses,
        error,
    )
