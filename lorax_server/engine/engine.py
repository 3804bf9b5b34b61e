"""The engine accepts requests, schedules steps, runs them on an executor, and returns the outputs."""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import numpy as np

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.resolver import AdapterResolver
from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.scheduler import Scheduler
from lorax_server.engine.step_builder import SubmittedStep
from lorax_server.errors import AdapterError, EngineError, LoraxError, NotSupportedError
from lorax_server.plan import Capabilities, PrepareResult, StepMasks, StepPlan, StepResult
from lorax_server.structured_output.manager import StructuredOutput
from lorax_server.structured_output.matcher import GrammarState
from lorax_server.structured_output.vocabulary import TokenMask
from lorax_server.types import (
    AdapterRef,
    AdapterStage,
    AdapterState,
    EngineStatus,
    Merge,
    Output,
    Request,
    ResolvedAdapter,
)

MASK_WAIT_S = 0.005  # maximum wait for late token masks if other sequences in the batch are ready
BLOCKED_MASK_WAIT_S = 0.05  # maximum wait for late token masks if no other sequence in the batch is ready
MAX_IDLE_WAIT_S = 0.05  # limits the delay if another thread has cleared `wake`
TIERS = ("device", "host", "disk")  # adapter weight locations, fastest first
_TIER_OF_STATE = {AdapterStage.DEVICE: "device", AdapterStage.LOADING: "host", AdapterStage.HOST: "host"}


class Executor(Protocol):
    """Runs step plans in submission order."""

    @property
    def capabilities(self) -> Capabilities: ...

    def on_event(self, notify: Callable[[], None]) -> None:
        """Register a callback. It is called on any thread when `pop_prepared` or `pop_loaded` has results."""

    def submit(self, plan: StepPlan) -> LoraxError | None:
        """Start a step. If the device runs out of memory, run the step without sequences and return the error."""

    def mask(self, masks: StepMasks) -> LoraxError | None:
        """Sample the tokens of the last submitted step with these masks. Return the same errors as `submit`."""

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return its result."""

    def pack(self, spec: AdapterSpec) -> PrepareResult | None:
        """Pack an in-memory adapter in device memory, on the calling thread, and return its sizes. Return None if
        `PrepareOp` must prepare the adapter. Any thread may call this.
        """

    def pop_prepared(self) -> list[PrepareResult]: ...

    def pop_loaded(self) -> list[int]:
        """Return the indices of loaded adapters that no step result has reported yet."""

    def close(self) -> None: ...


class Engine:
    """Schedules requests. Only one thread may use it, except for `resolve`, `forget` and `pack`.

    Events on other threads, such as a prepared adapter, set `wake` and are handled in the next `step`.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        pool: BlockPool,
        table: AdapterTable,
        resolver: AdapterResolver,
        structured_output: StructuredOutput | None = None,
    ) -> None:
        """Create the engine. Without `structured_output`, requests with a grammar are rejected."""
        self.wake = threading.Event()
        self.start_seconds: Mapping[str, float] = {}  # startup time by phase
        self.capabilities = executor.capabilities
        self._executor = executor
        self._scheduler = scheduler
        self._pool = pool
        self._table = table
        self._resolver = resolver
        self._structured_output = structured_output
        self._resolved: deque[AdapterSpec] = deque()  # adapters to add to the table; any thread may append
        self._expert_imbalance = 0.0
        self._loads: dict[str, list[Future[None]]] = {}  # pending loads by adapter identity
        executor.on_event(self.wake.set)
        if structured_output is not None:
            structured_output.on_event = self.wake.set

    @property
    def is_busy(self) -> bool:
        """Return True if `step` has work. Otherwise the engine sleeps until `wake` is set or a deadline expires."""
        scheduler, table = self._scheduler, self._table
        has_events = self._structured_output is not None and self._structured_output.has_events
        has_sequences = scheduler.in_flight or scheduler.num_running or scheduler.num_ready
        return bool(has_sequences or self._resolved or table.needs_step or table.has_events or has_events)

    @property
    def deadline_s(self) -> float | None:
        """Return the seconds until `step` must be called even if `wake` is not set, or None if there is no deadline."""
        deadlines = (self._scheduler.queues.deadline_s, self._table.deadline_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def wait(self) -> None:
        """Sleep until there may be work, for at most `MAX_IDLE_WAIT_S`, and clear `wake`."""
        if not self.is_busy:
            deadline_s = self.deadline_s
            self.wake.wait(MAX_IDLE_WAIT_S if deadline_s is None else min(MAX_IDLE_WAIT_S, deadline_s))
        self.wake.clear()

    @property
    def has_work(self) -> bool:
        """Return True if any request is unfinished, including requests waiting for an adapter."""
        return self._scheduler.has_work

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> "Future[ResolvedAdapter]":
        """Resolve adapter names to an identity, and start to prepare the adapter.

        The future completes on the resolver's thread. The other methods accept the identity after that.
        """
        future: Future[ResolvedAdapter] = Future()
        self._resolver.resolve(refs, merge).add_done_callback(lambda done: self._settle_resolve(done, future))
        return future

    def add(self, request: Request) -> None:
        """Queue a request. Raise if it cannot be served."""
        self._register_resolved()
        if request.structure is None:
            self._scheduler.add(request)
            return
        if self._structured_output is None:
            raise NotSupportedError("structured output is not supported by this engine")
        # The token masks enforce `min_new_tokens` as long as the grammar allows more tokens.
        self._scheduler.add(replace(request, stop=replace(request.stop, min_new_tokens=0)))
        try:
            self._structured_output.start(request, self.capabilities.vocab_size if self.capabilities.can_chunk else 0)
        except BaseException:
            self.abort(request.request_id)
            raise

    def abort(self, request_id: int) -> None:
        """Drop a request, which then produces no more outputs."""
        self._scheduler.abort(request_id)
        if self._structured_output is not None:
            self._structured_output.finish(request_id)

    def load(self, identity: str, pin: bool | None = None) -> "Future[None]":
        """Load a resolved adapter to the device, and return a future that completes when the adapter is loaded.

        A pinned adapter is not evicted. `pin=None` leaves the pin unchanged.
        """
        done: Future[None] = Future()
        self._register_resolved()
        try:
            self._table.request_load(identity, pin)
        except LoraxError as error:
            done.set_exception(error)
        else:
            self._loads.setdefault(identity, []).append(done)
        self.wake.set()
        return done

    def pack(self, spec: AdapterSpec) -> PrepareResult | None:
        """Pack an in-memory adapter in device memory, and return the argument for `load_packed`. Return None if the
        adapter must be registered and loaded like other adapters. This may run concurrently with steps.
        """
        return self._executor.pack(spec)

    def load_packed(self, spec: AdapterSpec, packed: PrepareResult, pin: bool | None = None) -> "Future[None]":
        """Register and load an adapter after `pack`. If the device has space, the future is already done, and the next
        step can use the adapter.
        """
        self._table.add_packed(spec, packed)
        loading = self.load(spec.identity, pin)
        self._table.advance()
        self._report_loads()
        return loading

    def unload(self, identity: str) -> None:
        """Unload an adapter as soon as no request uses it, even if it is pinned."""
        self._register_resolved()
        self._table.unload_when_idle(identity)
        self._settle_loads(identity, AdapterError("the adapter was unloaded before it finished loading"))

    def find_spec(self, identity: str) -> AdapterSpec | None:
        """Return the spec of a resolved adapter, or None if the adapter is unknown."""
        self._register_resolved()
        return self._table.find_spec(identity)

    def register(self, spec: AdapterSpec) -> None:
        """Register an adapter that has no name in a source. Raise if it can never be used."""
        if (problem := self._table.find_error(spec)) is not None:
            raise problem
        self._resolved.append(spec)
        self.wake.set()

    def move(self, request_ids: Sequence[int], identity: str) -> None:
        """Continue running and waiting requests with another loaded adapter, starting with the next step.

        Keys and values that were already computed stay unchanged.
        """
        self._scheduler.move(request_ids, identity)

    def forget(self, source: str, name: str) -> None:
        """Drop the cached resolution of an adapter name, so that the next request queries the source."""
        self._resolver.forget(source, name)

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        """Return the states of these adapters. Unknown adapters are omitted."""
        self._register_resolved()
        return self._table.list_adapters(identities)

    def step(self) -> list[Output]:
        """Submit the next step, collect the oldest step if `max_steps_in_flight` is reached, and return the outputs."""
        self._process_adapter_events()
        self._process_grammar_events()
        plan = self._scheduler.schedule()
        outputs = self._pop_failed()
        if plan is None and self._scheduler.in_flight:  # submit the next step before the outputs are processed
            outputs += self._collect()
            plan = self._scheduler.schedule()
            outputs += self._pop_failed()
        if plan is not None:
            problem = self._executor.submit(plan)
            if problem is None and plan.is_masked:
                while len(self._scheduler.in_flight) > 1:  # masks depend on all previous tokens
                    outputs += self._collect()
                problem = self._submit_masks()
            if problem is not None:
                self._scheduler.rollback(problem)
                outputs += self._pop_failed()
        self._scheduler.learn()
        num_in_flight = len(self._scheduler.in_flight)
        if num_in_flight and (plan is None or num_in_flight >= self.capabilities.max_steps_in_flight):
            outputs += self._collect()
        self._report_loads()  # without waiting for the next step
        return outputs

    def _collect(self) -> list[Output]:
        result = self._executor.collect()
        if result.expert_imbalance is not None:
            self._expert_imbalance = result.expert_imbalance
        chosen = self._scheduler.in_flight[0].list_grammar_tokens(result)
        if chosen and self._structured_output is not None:  # before `update`, to compute the next masks in parallel
            self._structured_output.advance(chosen)
        outputs = self._scheduler.update(result)
        self._release_grammars(outputs)
        return outputs

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            waiting_for_adapters=self._scheduler.queues.num_waiting_for_adapters,
            free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            cache_evictions=self._pool.num_evictions,
            adapters_fetching=self._resolver.num_fetching,
            adapters_preparing=self._table.num_preparing,
            adapters_on_host=self._table.num_on_host,
            adapters_on_device=self._table.num_on_device,
            expert_imbalance=self._expert_imbalance,
            **vars(self._scheduler.counters),
            **vars(self._table.counters),
        )

    def close(self) -> None:
        """Stop all threads and workers, and fail pending adapter loads."""
        self._resolver.close()
        if self._structured_output is not None:
            self._structured_output.close()
        self._executor.close()
        for identity in list(self._loads):
            self._settle_loads(identity, EngineError("the engine is stopped"))

    def _settle_resolve(
        self, done: "Future[tuple[AdapterSpec, ResolvedAdapter]]", future: "Future[ResolvedAdapter]"
    ) -> None:
        """Complete `future` on the resolver's thread, after queueing the adapter for registration.

        The engine thread registers the adapter, because only that thread may change the table.
        """
        if not future.set_running_or_notify_cancel():
            return  # cancelled by the caller
        try:
            spec, resolved = done.result()
            problem = self._table.find_error(spec)
            if problem is not None:
                raise problem
            if resolved.stale is not None and self._tier_of(spec.identity) == TIERS[-1]:
                raise resolved.stale.to_error()  # the previous version is no longer in memory
            resolved = resolved._replace(tier=resolved.tier or self._find_tier(spec))
        except BaseException as error:  # report every error to the caller
            future.set_exception(error)
        else:
            self._resolved.append(spec)
            future.set_result(resolved)
        self.wake.set()

    def _find_tier(self, spec: AdapterSpec) -> str:
        """Return the adapter's tier. For a merge that is not in memory, return the slowest tier of its adapters."""
        tier = self._tier_of(spec.identity)
        if tier != TIERS[-1] or spec.merge is None:
            return tier
        return max((self._tier_of(part.identity) for part in spec.checkpoints), key=TIERS.index)

    def _tier_of(self, identity: str) -> str:
        state = self._table.state(identity)
        return _TIER_OF_STATE.get(state, TIERS[-1]) if state is not None else TIERS[-1]

    def _register_resolved(self) -> None:
        while self._resolved:
            self._table.register(self._resolved.popleft())

    def _process_adapter_events(self) -> None:
        self._register_resolved()
        for prepared in self._executor.pop_prepared():
            self._table.process_prepared(prepared)
        if self._table.is_loading and not self._scheduler.in_flight:  # step results also report finished loads
            self._table.process_loaded(self._executor.pop_loaded())
        self._table.advance()
        self._report_loads()

    def _report_loads(self) -> None:
        for identity in self._table.pop_loaded():
            self._scheduler.queues.adapter_loaded(identity)
            self._settle_loads(identity, None)
        for identity, error in self._table.pop_failed():
            self._scheduler.queues.adapter_failed(identity, error)
            self._settle_loads(identity, error)

    # --- Structured output --------------------------------------------------------------------------------------------

    def _process_grammar_events(self) -> None:
        if self._structured_output is None or not self._structured_output.has_events:
            return
        for request_id, error in self._structured_output.pop_results():
            if error is None:
                self._scheduler.grammar_ready(request_id)
            else:
                self._scheduler.fail(request_id, error)

    def _pop_failed(self) -> list[Output]:
        failed = self._scheduler.pop_failed()
        self._release_grammars(failed)
        return failed

    def _release_grammars(self, outputs: Sequence[Output]) -> None:
        """Release the grammars of finished requests."""
        if self._structured_output is not None:
            for output in outputs:
                if output.finish_reason is not None or output.failure is not None:
                    self._structured_output.finish(output.request_id)

    def _submit_masks(self) -> LoraxError | None:
        """Sample the last step with its token masks. Return an error if the device runs out of memory.

        Sampling is deferred for sequences whose mask is late.
        """
        assert self._structured_output is not None
        step = self._scheduler.in_flight[-1]
        masked = step.list_masked()
        wait_s = MASK_WAIT_S if self.capabilities.can_chunk else math.inf  # a padded step cannot be repeated
        ids, num_unmasked = [request_id for _, request_id in masked], step.count_unfinished() - len(masked)
        found = self._structured_output.collect_masks(ids, wait_s, BLOCKED_MASK_WAIT_S, num_unmasked)
        ready = [(number, found[request_id]) for number, request_id in masked if request_id in found]
        late = [number for number, request_id in masked if request_id not in found]
        masks = _build_masks(ready, step, self._structured_output.max_forced)
        problem = self._executor.mask(masks)
        if problem is None:
            step.append_forced_tokens(masks.forced)
            step.defer_sampling(late)
        return problem

    def _settle_loads(self, identity: str, error: LoraxError | None) -> None:
        for done in self._loads.pop(identity, ()):
            if done.set_running_or_notify_cancel():
                done.set_exception(error) if error is not None else done.set_result(None)


def _build_masks(ready: Sequence[tuple[int, GrammarState]], step: SubmittedStep, max_forced: int) -> StepMasks:
    """Return the token masks for a step, and truncate drafts before the first token that the grammar does not allow."""
    rows, masks, forced = list[int](), list[TokenMask](), []
    for number, state in ready:
        draft = step.drafts.get(number, ())
        found, following = state.mask_draft(draft if state.compiled.is_fast else (), max_forced)
        first, last = step.first_row(number), len(found) - 1
        rows += range(first, first + len(found))
        masks += found
        if last < len(draft):
            step.cut_draft(number, last)
        if following := following[: step.max_forced_tokens(number, len(found))]:
            forced.append((first + last, tuple(following)))
    return StepMasks(np.array(rows, np.int64), masks, tuple(forced))
