"""Moves adapters up, from disk to host memory to the device, for the requests that wait for them.

Adapters are known by their identity: one that is replaced under its name is another one here, and no cache of an
adapter can become wrong. The table decides and counts. The workers prepare, copy and drop adapters as it says.

An adapter that requests wait for moves up as the tiers make room. They make more room for one that has waited longer
than `patience_s`: `host_tier` and `device_tier` say what leaves then. So waiting adapters are served in the order in
which they came, each within a bounded time, and until then the resident ones are used first.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.device_tier import DeviceTier, Leaving
from lorax_server.engine.adapters.host_tier import HostTier
from lorax_server.engine.adapters.registry import AdapterEntry, AdapterRegistry
from lorax_server.errors import AdapterError, LoraxError
from lorax_server.plan import AdapterOp, Capabilities, Prepared
from lorax_server.types import AdapterCounters, AdapterStage, AdapterState

BASE_MODEL = ""
MAX_PREPARING = 4  # at once: enough to keep the workers busy, and few enough that a new one does not wait for many


class AdapterTable:
    """One engine's adapters. Only the engine's loop calls it, except for `find_problem` and `state`, which any thread
    may call: they read nothing that changes in several steps."""

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
        self._ops: list[AdapterOp] = []  # for the next step
        self._host = HostTier(host_bytes, capabilities.itemsize, self.counters, self._ops)
        self._device = DeviceTier(capabilities, self.counters, self._ops)
        self._registry = AdapterRegistry()
        self._to_prepare: OrderedDict[str, AdapterEntry] = OrderedDict()  # wanted on the device, in order of arrival
        self._to_load: OrderedDict[str, AdapterEntry] = OrderedDict()  # likewise
        self._prefetch: OrderedDict[str, AdapterEntry] = OrderedDict()  # for host memory, where there is room
        self._advanced_at = -math.inf  # the time of the last `advance`
        self._has_changed = False  # since then
        self._arrived: list[str] = []
        self._failed: list[tuple[str, LoraxError]] = []

    # --- For the engine -----------------------------------------------------------------------------------------------

    def find_problem(self, spec: AdapterSpec) -> AdapterError | None:
        """Return the error of an adapter that can never be used here, if it is one."""
        if not self._capabilities.num_adapter_units:
            return AdapterError(f"adapter {spec.name!r}: this model is served without adapters")
        return self._host.find_problem(spec)

    def register(self, spec: AdapterSpec, prefetch: bool = True) -> None:
        """Know an adapter from now on. A request for it is about to come, so prepare it where there is room."""
        problem = self.find_problem(spec)
        if problem is not None:
            raise problem
        entry, forgotten = self._registry.add(spec)
        for identity in forgotten:
            self._prefetch.pop(identity, None)
        entry.is_dismissed = False
        self._has_changed = True
        if prefetch and entry.state is AdapterStage.DISK:
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

    def state(self, identity: str) -> AdapterStage | None:
        """Return an adapter's state; None if it is not known."""
        entry = self._registry.get(identity)
        return None if entry is None else entry.state

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        return self._registry.describe(identities, self._capabilities.itemsize)

    def ask_for(self, identity: str, pin: bool | None = None) -> None:
        """Bring an adapter to the device. A pinned one stays there; None keeps its pin as it is."""
        entry = self._registry.find_usable(identity, self._clock())
        self._device.pin(entry, entry.is_pinned if pin is None else pin)
        entry.is_dismissed = False
        if entry.is_loaded and entry.is_pinned:
            self._arrive(entry)  # it will not leave, so it need not drain
        elif entry.is_loaded:
            self._arrived.append(identity)
        else:
            entry.is_asked_for = True
            self.bring(identity)

    def dismiss(self, identity: str) -> None:
        """Let an adapter go, pinned or not, as soon as no request needs it."""
        entry = self._registry.get(identity)
        if entry is not None:
            self._device.pin(entry, False)
            entry.is_asked_for = False
            entry.is_dismissed = True
            self._leave_if_dismissed(entry)
            self._has_changed = True

    def prepared(self, result: Prepared) -> None:
        """Note that the workers have prepared an adapter, or have failed to."""
        entry = self._registry[result.identity]
        self._has_changed = True
        self._host.settle(entry, result)
        if result.error is None:
            if entry.is_wanted:
                self._to_load[entry.identity] = entry
            self._leave_if_dismissed(entry)
            self._host.make_room(0, has_waited=False)  # it may have taken more than was expected
        elif entry.spec == entry.spec_in_work:
            self._fail(entry, result.error)
        elif entry.is_wanted:  # it was found in another folder since the preparation began
            self._to_prepare[entry.identity] = entry

    def advance(self) -> None:
        """Move waiting adapters up as far as there is room, in the order in which they came. None overtakes one that
        waits for room: what is freed is for that one."""
        now = self._advanced_at = self._clock()
        self._has_changed = False
        leaving = self._device.find_leaving(now)
        while self._to_load and self._load(next(iter(self._to_load.values())), leaving, now):
            pass
        while self._to_prepare and self.num_preparing < MAX_PREPARING:
            entry = next(iter(self._to_prepare.values()))
            if not self._prepare(entry, self._has_waited(entry, now)):
                break
        while self._prefetch and not self._to_prepare and self.num_preparing < MAX_PREPARING:
            identity, entry = next(iter(self._prefetch.items()))
            if entry.state is AdapterStage.DISK and not self._prepare(entry, has_waited=False):
                break
            self._prefetch.pop(identity, None)

    @property
    def has_news(self) -> bool:
        """Tell whether adapters have arrived or failed, or `advance` may do more than the last time."""
        waiting = self._to_load or self._to_prepare or self._prefetch
        return bool(self._arrived or self._failed or (self._has_changed and waiting))

    @property
    def deadline_s(self) -> float | None:
        """Seconds until `advance` can do more though nothing has happened: the patience of a first one ends.

        The end of an adapter's freshness needs no deadline: the sequence that it was loaded for is ready to run, so
        that the engine steps.
        """
        firsts = [next(iter(queue.values())) for queue in (self._to_load, self._to_prepare) if queue]
        # Not by the clock: one whose patience has ended since the last `advance` needs a look now.
        patient = [entry for entry in firsts if not self._has_waited(entry, self._advanced_at)]
        now = self._clock()
        return min((max(0.0, entry.waits_since + self._patience_s - now) for entry in patient), default=None)

    def take_arrived(self) -> list[str]:
        """Return the adapters that can be used from now on."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_failed(self) -> list[tuple[str, LoraxError]]:
        """Return the adapters that cannot be used, with their errors."""
        failed, self._failed = self._failed, []
        return failed

    # --- For the scheduler: each call for a request or sequence has its counterpart when that one goes ----------------

    def index_of(self, identity: str, has_begun: bool) -> int | None:
        """Return the index that steps use; None if a sequence cannot begin, or go on, with the adapter now."""
        if identity == BASE_MODEL:
            return 0
        entry = self._registry[identity]
        return entry.index if entry.is_loaded and (has_begun or not entry.is_draining) else None

    def is_merged(self, identity: str) -> bool:
        """Tell whether it is a merge, with weights that a request chose."""
        return self._registry.is_merged(identity)

    def vocab_size(self, identity: str) -> int:
        """Return the size of a loaded adapter's vocabulary."""
        return self._capabilities.vocab_size if identity == BASE_MODEL else self._registry[identity].vocab_size

    def add_request(self, identity: str) -> None:
        """Count a request; raise if the adapter is not known or has just failed."""
        if identity != BASE_MODEL:
            entry = self._registry.find_usable(identity, self._clock())
            entry.num_requests += 1
            entry.num_uses += 1
            entry.is_dismissed = False

    def end_request(self, identity: str, has_begun: bool) -> None:
        if identity != BASE_MODEL:
            entry = self._registry[identity]
            entry.num_requests -= 1
            entry.num_begun -= has_begun
            self._has_changed = True
            if entry.num_requests == 0:
                entry.fresh_until = -math.inf
                if not entry.is_asked_for:
                    self._stop_waiting(entry)
            self._leave_if_dismissed(entry)

    def bring(self, identity: str) -> None:
        """Bring an adapter to the device; `Queues.adapter_arrived` or `adapter_failed` is called then."""
        entry = self._registry[identity]
        if entry.is_wanted:
            return
        entry.is_wanted, entry.waits_since = True, self._clock()
        self._has_changed = True
        if entry.is_loaded or entry.state is AdapterStage.HOST:
            self._to_load[identity] = entry
        elif entry.index is None and not entry.is_preparing:  # else it is on its way
            self._to_prepare[identity] = entry

    def begin(self, identity: str) -> None:
        """Count a request that runs for the first time: from now on the adapter stays on the device or the host."""
        if identity != BASE_MODEL:
            self._registry[identity].num_begun += 1

    def hold(self, identity: str) -> None:
        """Keep an adapter on the device while a sequence runs with it."""
        if identity != BASE_MODEL:
            entry = self._registry[identity]
            assert entry.is_loaded, f"{identity} is {entry.state.value}"
            entry.num_running += 1
            entry.fresh_until = -math.inf
            self._touch(entry)

    def release(self, identity: str) -> None:
        if identity != BASE_MODEL:
            entry = self._registry[identity]
            entry.num_running -= 1
            self._has_changed = True
            self._touch(entry)

    @property
    def needs_step(self) -> bool:
        """Tell whether the workers have operations to do, even if there is nothing to compute."""
        return bool(self._ops) or self._device.needs_step

    @property
    def is_loading(self) -> bool:
        return self._device.is_loading

    def submit(self) -> tuple[AdapterOp, ...]:
        """Return the operations for the workers before the step that goes out now."""
        ops = (*self._device.submit(), *self._ops)
        self._ops.clear()
        return ops

    def completed(self, step: int, loaded: Iterable[int]) -> None:
        """Note that a step has ended, and these loads have."""
        self._has_changed = True
        self._device.completed(step)
        self.loaded(loaded)

    def loaded(self, indices: Iterable[int]) -> None:
        """Note that these loads have ended."""
        for entry in self._device.loaded(indices, self._clock()):
            self._has_changed = True
            if entry.is_wanted:
                self._arrive(entry)
            self._leave_if_dismissed(entry)

    # --- Moving up ----------------------------------------------------------------------------------------------------

    def _has_waited(self, entry: AdapterEntry, now: float) -> bool:
        return now - entry.waits_since >= self._patience_s

    def _prepare(self, entry: AdapterEntry, has_waited: bool) -> bool:
        """Begin to prepare an adapter; False if it has to wait for room."""
        if not self._host.begin(entry, has_waited):
            return False
        self._to_prepare.pop(entry.identity, None)
        self._prefetch.pop(entry.identity, None)
        return True

    def _load(self, entry: AdapterEntry, leaving: Leaving, now: float) -> bool:
        """Begin to load an adapter; False if it has to wait for room."""
        if entry.is_loaded:
            self._arrive(entry)
            return True
        problem = self._device.find_problem(entry)
        if problem is not None:
            self._host.drop(entry)
            self._fail(entry, problem)
            return True
        if not self._device.load(entry):
            for evicted in self._device.make_room(entry.units, self._has_waited(entry, now), leaving):
                if evicted.is_wanted and not evicted.is_prepared:  # its copy in host memory has gone meanwhile
                    self._to_prepare[evicted.identity] = self._to_load.pop(evicted.identity)
            if not self._device.load(entry):
                return False
        del self._to_load[entry.identity]
        self._host.touch(entry)
        return True

    def _arrive(self, entry: AdapterEntry) -> None:
        entry.is_draining = entry.is_asked_for = False
        self._stop_waiting(entry)
        self._arrived.append(entry.identity)

    def _fail(self, entry: AdapterEntry, error: LoraxError) -> None:
        self.counters.adapters_failed += 1
        entry.error, entry.retry_at = error, self._clock() + self._retry_s
        entry.is_asked_for = False
        self._device.pin(entry, False)
        self._stop_waiting(entry)
        self._failed.append((entry.identity, error))

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

    def _touch(self, entry: AdapterEntry) -> None:
        self._device.touch(entry)
        self._host.touch(entry)
