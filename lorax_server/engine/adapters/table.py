"""Moves adapters from disk to host memory and to the device, for waiting requests.

Entries are keyed by identity, so a replaced adapter has a new entry. The table makes the decisions, and the workers
prepare, copy and drop adapters.

Waiting adapters are served in order. An adapter that has waited longer than `eviction_delay_s` is overdue, and the
tiers may evict adapters with requests for it (see `host_tier` and `device_tier`). The delay limits the wait, and
prevents the early eviction of adapters in use.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.device_tier import DeviceTier, EvictionCandidates
from lorax_server.engine.adapters.host_tier import HostTier
from lorax_server.engine.adapters.registry import AdapterEntry, AdapterRegistry
from lorax_server.engine.sequence import NEVER
from lorax_server.errors import AdapterError, LoraxError
from lorax_server.plan import AdapterOp, Capabilities, PrepareOp, PrepareResult
from lorax_server.types import AdapterCounters, AdapterStage, AdapterState

BASE_MODEL = ""
MAX_PREPARING = 4  # maximum concurrent preparations; enough to keep workers busy without a long queue


class AdapterTable:
    """Tracks all adapters in an engine. Only the engine thread may use the table, except for `find_error` and
    `state`.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        host_bytes: int,
        eviction_delay_s: float = 1.0,
        retry_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = AdapterCounters()
        self._capabilities = capabilities
        self._eviction_delay_s = eviction_delay_s
        self._retry_s = retry_s
        self._clock = clock
        self._ops: list[AdapterOp] = []  # operations for the next step
        self._host = HostTier(host_bytes, capabilities.itemsize, self.counters, self._ops)
        self._device = DeviceTier(capabilities, self.counters, self._ops)
        self._registry = AdapterRegistry()
        self._to_prepare: OrderedDict[str, AdapterEntry] = OrderedDict()  # wanted on the device, in order of arrival
        self._to_load: OrderedDict[str, AdapterEntry] = OrderedDict()  # prepared and wanted, in order of arrival
        self._prefetch: OrderedDict[str, AdapterEntry] = OrderedDict()  # prepared only if host memory is free
        self._advanced_at = -math.inf  # time of the last `advance`
        self._has_changed = False  # True if `advance` may make progress
        self._newly_loaded: list[str] = []
        self._failed: list[tuple[str, LoraxError]] = []

    # --- For the engine -----------------------------------------------------------------------------------------------

    def find_error(self, spec: AdapterSpec) -> AdapterError | None:
        """Return an error if the adapter can never be used."""
        if not self._capabilities.num_adapter_units:
            return AdapterError(f"adapter {spec.name!r}: this model does not support adapters")
        return self._host.find_error(spec)

    def register(self, spec: AdapterSpec, prefetch: bool = True) -> None:
        """Register an adapter. With `prefetch`, prepare it in host memory when space is free."""
        problem = self.find_error(spec)
        if problem is not None:
            raise problem
        entry, forgotten = self._registry.add(spec)
        for identity in forgotten:
            self._prefetch.pop(identity, None)
        entry.should_unload = False
        self._has_changed = True
        if prefetch and entry.state is AdapterStage.DISK:
            self._prefetch[spec.identity] = entry

    def add_packed(self, spec: AdapterSpec, result: PrepareResult) -> None:
        """Register an adapter that `Executor.pack` has packed. If host memory is full, the adapter is prepared later,
        like other adapters.
        """
        self.register(spec, prefetch=False)
        if self._host.start_preparing(self._registry[spec.identity], is_overdue=False, is_packed=True):
            self.process_prepared(result)

    @property
    def num_preparing(self) -> int:
        return self._host.num_preparing

    @property
    def num_on_host(self) -> int:
        return len(self._host)

    @property
    def num_on_device(self) -> int:
        return len(self._device)

    def find_spec(self, identity: str) -> AdapterSpec | None:
        entry = self._registry.get(identity)
        return None if entry is None else entry.spec

    def state(self, identity: str) -> AdapterStage | None:
        """Return an adapter's stage, or None if the adapter is unknown."""
        entry = self._registry.get(identity)
        return None if entry is None else entry.state

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        return self._registry.describe(identities, self._capabilities.itemsize)

    def request_load(self, identity: str, pin: bool | None = None) -> None:
        """Request an adapter load. `pop_loaded` or `pop_failed` reports the result. Pinned adapters are not
        evicted.

        `pin=None` leaves the pin unchanged.
        """
        entry = self._registry.find_usable(identity, self._clock())
        self._device.pin(entry, entry.is_pinned if pin is None else pin)
        entry.should_unload = False
        if entry.is_loaded and entry.is_pinned:
            self._mark_loaded(entry)  # pinned, so it stops draining
        elif entry.is_loaded:
            self._newly_loaded.append(identity)
        else:
            entry.is_load_requested = True
            self.ensure_loaded(identity)

    def unload_when_idle(self, identity: str) -> None:
        """Unload an adapter as soon as no request uses it, even if it is pinned."""
        entry = self._registry.get(identity)
        if entry is not None:
            self._device.pin(entry, False)
            entry.is_load_requested = False
            entry.should_unload = True
            self._unload_if_idle(entry)
            self._has_changed = True

    def process_prepared(self, result: PrepareResult) -> None:
        """Record that an adapter has been prepared or could not be prepared."""
        entry = self._registry[result.identity]
        self._has_changed = True
        self._host.finish_preparing(entry, result)
        if result.error is None:
            if entry.is_wanted:
                self._to_load[entry.identity] = entry
            self._unload_if_idle(entry)
            self._host.free_space(0, is_overdue=False)  # the adapter may be larger than estimated
        elif entry.spec == entry.preparing_spec:
            self._fail(entry, result.error)
        elif entry.is_wanted:  # its files moved during preparation
            self._to_prepare[entry.identity] = entry

    def advance(self) -> None:
        """Start to prepare and load waiting adapters, as long as there is space.

        Adapters are processed in order of arrival, so freed space goes to the adapter that has waited longest.
        """
        now = self._advanced_at = self._clock()
        self._has_changed = False
        candidates = self._device.find_eviction_candidates(now)
        while self._to_load and self._start_loading(next(iter(self._to_load.values())), candidates, now):
            pass
        while self._to_prepare and self.num_preparing < MAX_PREPARING:
            entry = next(iter(self._to_prepare.values()))
            if not self._start_preparing(entry, self._is_overdue(entry, now)):
                break
        while self._prefetch and not self._to_prepare and self.num_preparing < MAX_PREPARING:
            identity, entry = next(iter(self._prefetch.items()))
            if entry.state is AdapterStage.DISK and not self._start_preparing(entry, is_overdue=False):
                break
            self._prefetch.pop(identity, None)

    @property
    def has_events(self) -> bool:
        """Return True if adapters were loaded or failed, or `advance` may make progress."""
        waiting = self._to_load or self._to_prepare or self._prefetch
        return bool(self._newly_loaded or self._failed or (self._has_changed and waiting))

    @property
    def deadline_s(self) -> float | None:
        """Return the seconds until the first waiting adapter becomes overdue, or None if no adapter is waiting.

        No deadline is needed for the end of a new adapter's eviction protection: a sequence with the adapter is ready,
        so the engine is running steps.
        """
        firsts = [next(iter(queue.values())) for queue in (self._to_load, self._to_prepare) if queue]
        # Compare with the last `advance`, because an adapter that became overdue after it needs another `advance`.
        not_overdue = [entry for entry in firsts if not self._is_overdue(entry, self._advanced_at)]
        now = self._clock()
        return min(
            (max(0.0, entry.waiting_since + self._eviction_delay_s - now) for entry in not_overdue), default=None
        )

    def pop_loaded(self) -> list[str]:
        """Return the identities of adapters that became usable since the last call."""
        loaded, self._newly_loaded = self._newly_loaded, []
        return loaded

    def pop_failed(self) -> list[tuple[str, LoraxError]]:
        """Return the identities and errors of adapters that failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    # --- For the scheduler: each `add_request` needs a `remove_request`, and each `acquire` a `release` ---------------

    def index_of(self, identity: str, has_started: bool) -> int | None:
        """Return the adapter's index in step plans, or None if a sequence cannot run with the adapter now."""
        if identity == BASE_MODEL:
            return 0
        entry = self._registry[identity]
        return entry.index if entry.is_loaded and (has_started or not entry.is_draining) else None

    def is_merged(self, identity: str) -> bool:
        """Return True if the adapter is a merge, whose weights the request specifies."""
        return self._registry.is_merged(identity)

    def vocab_size(self, identity: str) -> int:
        """Return the vocabulary size of the model with this adapter. The adapter must be loaded."""
        return self._capabilities.vocab_size if identity == BASE_MODEL else self._registry[identity].vocab_size

    def find_starts(self, identity: str, prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Return the first prompt token that a loaded adapter applies to, and the first token whose keys and values it
        changes. Both are indices, or `NEVER` if there is no such token.
        """
        if identity == BASE_MODEL:
            return NEVER, NEVER
        entry = self._registry[identity]
        tokens = entry.spec.invocation_tokens
        start = find_invocation(tokens, prompt_ids) if tokens else 0
        return start, start if entry.changes_kv else NEVER

    def add_request(self, identity: str) -> None:
        """Count a new request for an adapter. Raise if the adapter is unknown or has just failed."""
        if identity != BASE_MODEL:
            entry = self._registry.find_usable(identity, self._clock())
            entry.num_requests += 1
            entry.num_uses += 1
            entry.should_unload = False

    def remove_request(self, identity: str, has_started: bool) -> None:
        if identity != BASE_MODEL:
            entry = self._registry[identity]
            entry.num_requests -= 1
            entry.num_started -= has_started
            self._has_changed = True
            if entry.num_requests == 0:
                entry.protected_until = -math.inf
                if not entry.is_load_requested:
                    self._cancel_wait(entry)
            self._unload_if_idle(entry)

    def ensure_loaded(self, identity: str) -> None:
        """Queue an adapter for loading. `pop_loaded` or `pop_failed` reports the result."""
        entry = self._registry[identity]
        if entry.is_wanted:
            return
        entry.is_wanted, entry.waiting_since = True, self._clock()
        self._has_changed = True
        if entry.is_loaded or entry.state is AdapterStage.HOST:
            self._to_load[identity] = entry
        elif entry.index is None and not entry.is_preparing:  # it is not being prepared or loaded yet
            self._to_prepare[identity] = entry

    def start_request(self, identity: str) -> None:
        """Count a request that runs for the first time. Its adapter stays in memory until the request finishes."""
        if identity != BASE_MODEL:
            self._registry[identity].num_started += 1

    def acquire(self, identity: str) -> None:
        """Keep an adapter on the device while a running sequence uses it."""
        if identity != BASE_MODEL:
            entry = self._registry[identity]
            assert entry.is_loaded, f"{identity} is {entry.state.value}"
            entry.num_running += 1
            entry.protected_until = -math.inf
            self._touch(entry)

    def release(self, identity: str) -> None:
        if identity != BASE_MODEL:
            entry = self._registry[identity]
            entry.num_running -= 1
            self._has_changed = True
            self._touch(entry)

    @property
    def needs_step(self) -> bool:
        """Return True if a step must run to execute adapter operations, even if the step has no sequences."""
        return bool(self._ops) or self._device.needs_step

    @property
    def is_loading(self) -> bool:
        return self._device.is_loading

    def submit(self) -> tuple[AdapterOp, ...]:
        """Return the worker operations to execute before the next step, and clear the list."""
        ops = (*self._device.submit(), *self._ops)
        for op in self._ops:
            if isinstance(op, PrepareOp) and op.is_packed and (entry := self._registry.get(op.spec.identity)):
                # It was not loaded yet. Later, its host copy may replace the device copy, and steps would wait for it.
                entry.is_packed_on_device = False
        self._ops.clear()
        return ops

    def complete_step(self, step: int, loaded: Iterable[int]) -> None:
        """Record a finished step and the loads that it reports."""
        self._has_changed = True
        self._device.complete_step(step)
        self.process_loaded(loaded)

    def process_loaded(self, indices: Iterable[int]) -> None:
        """Record finished loads, given as adapter indices."""
        for entry in self._device.finish_loading(indices, self._clock()):
            self._has_changed = True
            if entry.is_wanted:
                self._mark_loaded(entry)
            self._unload_if_idle(entry)

    # --- Loading ------------------------------------------------------------------------------------------------------

    def _is_overdue(self, entry: AdapterEntry, now: float) -> bool:
        return now - entry.waiting_since >= self._eviction_delay_s

    def _start_preparing(self, entry: AdapterEntry, is_overdue: bool) -> bool:
        """Start preparing an adapter. Return False if host memory is full."""
        if not self._host.start_preparing(entry, is_overdue):
            return False
        self._to_prepare.pop(entry.identity, None)
        self._prefetch.pop(entry.identity, None)
        return True

    def _start_loading(self, entry: AdapterEntry, candidates: EvictionCandidates, now: float) -> bool:
        """Start loading an adapter, mark it as loaded, or fail it. Return False if it must wait for device memory."""
        if entry.is_loaded:
            self._mark_loaded(entry)
            return True
        problem = self._device.find_error(entry)
        if problem is not None:
            self._host.drop(entry)
            self._fail(entry, problem)
            return True
        if not self._device.load(entry):
            for evicted in self._device.free_space(entry.units, self._is_overdue(entry, now), candidates):
                if evicted.is_wanted and not evicted.is_prepared:  # without a host copy, it must be prepared again
                    self._to_prepare[evicted.identity] = self._to_load.pop(evicted.identity)
            if not self._device.load(entry):
                return False
        del self._to_load[entry.identity]
        self._host.touch(entry)
        if entry.is_packed_on_device:
            assert entry.index is not None
            self.process_loaded([entry.index])
        return True

    def _mark_loaded(self, entry: AdapterEntry) -> None:
        entry.is_draining = entry.is_load_requested = False
        self._cancel_wait(entry)
        self._newly_loaded.append(entry.identity)

    def _fail(self, entry: AdapterEntry, error: LoraxError) -> None:
        self.counters.adapters_failed += 1
        entry.error, entry.retry_at = error, self._clock() + self._retry_s
        entry.is_load_requested = False
        self._device.pin(entry, False)
        self._cancel_wait(entry)
        self._failed.append((entry.identity, error))

    def _cancel_wait(self, entry: AdapterEntry) -> None:
        entry.is_wanted = False
        self._to_prepare.pop(entry.identity, None)
        self._to_load.pop(entry.identity, None)

    def _unload_if_idle(self, entry: AdapterEntry) -> None:
        if entry.should_unload and not entry.num_requests:
            self._prefetch.pop(entry.identity, None)
            self._cancel_wait(entry)
            if entry.is_loaded:
                self._device.evict(entry)
            if entry.is_prepared and entry.index is None:
                self._host.drop(entry)
            if entry.spec.is_in_memory and entry.state in (AdapterStage.DISK, AdapterStage.FAILED):
                self._registry.remove(entry.identity)  # releases its tensors

    def _touch(self, entry: AdapterEntry) -> None:
        self._device.touch(entry)
        self._host.touch(entry)


def find_invocation(tokens: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """Return the start of the last occurrence of aLoRA's invocation tokens in the prompt. Return `NEVER` if the prompt
    does not contain them, because PEFT then uses the base model.
    """
    prompt = np.array(prompt_ids, np.int64)
    starts = np.arange(max(0, len(prompt) - len(tokens) + 1))
    for offset, token in enumerate(tokens):
        starts = starts[prompt[starts + offset] == token]
        if not len(starts):
            return NEVER
    return int(starts[-1])
