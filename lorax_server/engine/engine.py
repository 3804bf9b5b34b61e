"""The engine: takes requests, decides each step, hands it to an executor, and tells what came out."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.entry import State
from lorax_server.engine.adapters.resolver import AdapterResolver
from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.scheduler import Scheduler
from lorax_server.errors import AdapterError, EngineError, LoraxError
from lorax_server.plan import Capabilities, Prepared, StepPlan, StepResult
from lorax_server.types import AdapterRef, AdapterState, EngineStatus, Merge, Output, Request, Resolved

IDLE_S = 0.05
TIERS = ("device", "host", "disk")  # where an adapter's weights can be, the best first
_TIER_OF_STATE = {State.DEVICE: "device", State.LOADING: "host", State.HOST: "host"}


class Executor(Protocol):
    """Runs plans in the order in which they are submitted."""

    @property
    def capabilities(self) -> Capabilities: ...

    def on_news(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on any thread, when there is something for `take_prepared` or `take_loaded`."""

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """Wait for the oldest step."""

    def take_prepared(self) -> list[Prepared]: ...

    def take_loaded(self) -> list[int]:
        """Adapter indices whose load has ended and that no result of a step has told of."""

    def close(self) -> None: ...


class Engine:
    """One thread calls it, but for `resolve` and `forget`, which any thread may call.

    What happens elsewhere (an adapter is found, another is ready) sets `wake` and is taken up by the next call.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        pool: BlockPool,
        table: AdapterTable,
        resolver: AdapterResolver,
    ) -> None:
        self.wake = threading.Event()
        self.capabilities = executor.capabilities
        self._executor = executor
        self._scheduler = scheduler
        self._pool = pool
        self._table = table
        self._resolver = resolver
        self._num_in_flight = 0
        self._found: deque[AdapterSpec] = deque()  # from any thread: adapters that somebody has been told of
        self._loads: dict[str, list[Future[None]]] = {}  # by identity
        executor.on_news(self.wake.set)

    @property
    def is_busy(self) -> bool:
        """Whether `step` has something to do. Else nothing happens until `wake` is set, or time passes."""
        return bool(self._num_in_flight or self._scheduler.num_running or self._scheduler.num_ready or self._moved)

    @property
    def deadline_s(self) -> float | None:
        """When to `step` even if it is not busy and nothing happens; None: never."""
        deadlines = (self._scheduler.deadline_s, self._table.deadline_s)
        return min((each for each in deadlines if each is not None), default=None)

    def wait(self) -> None:
        """Until there may be something to do. Not for long: another thread may have taken up what woke it."""
        if not self.is_busy:
            deadline_s = self.deadline_s
            self.wake.wait(IDLE_S if deadline_s is None else min(IDLE_S, deadline_s))

    @property
    def has_work(self) -> bool:
        """Whether there are requests, be it that they wait for an adapter."""
        return self._scheduler.has_work

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> "Future[Resolved]":
        """Find out which adapter these names mean now. It begins to move up, since a request is about to come.

        The answer comes on the thread that finds it, whatever the step does. It is safe to name the adapter's identity
        to any other method from then on.
        """
        answer: Future[Resolved] = Future()
        found = self._resolver.resolve(refs, merge)
        found.add_done_callback(lambda done: self._tell(done, answer))
        return answer

    def add(self, request: Request) -> None:
        """Take a request, or refuse it."""
        self._register_found()
        self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Let go of a request; nothing is told of it any more."""
        self._scheduler.abort(request_id)

    def load(self, identity: str, pin: bool | None = None) -> "Future[None]":
        """Bring an adapter, whose name has been resolved, to the device. If it is pinned it stays there; None: as it
        was."""
        done: Future[None] = Future()
        self._register_found()
        try:
            self._table.ask_for(identity, pin)
        except LoraxError as error:
            done.set_exception(error)
        else:
            self._loads.setdefault(identity, []).append(done)
        self.wake.set()
        return done

    def unload(self, identity: str) -> None:
        """Let an adapter go, pinned or not, as soon as nobody needs it."""
        self._register_found()
        self._table.dismiss(identity)
        for done in self._loads.pop(identity, ()):
            _settle(done, AdapterError("the adapter was unloaded before it was there"))

    def forget(self, source: str, name: str) -> None:
        """Ask the source again the next time that this name is resolved."""
        self._resolver.forget(source, name)

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        """Describe those of the adapters that are known."""
        self._register_found()
        return self._table.list_adapters(identities)

    def step(self) -> list[Output]:
        """One turn: submit the next step, and collect the one before, or the one before that."""
        self._take_news()
        plan = self._scheduler.schedule()
        outputs = self._scheduler.take_failed()
        if plan is not None:
            self._executor.submit(plan)
            self._num_in_flight += 1
        if self._num_in_flight and (plan is None or self._num_in_flight >= self.capabilities.depth):
            outputs += self._scheduler.update(self._executor.collect())
            self._num_in_flight -= 1
        return outputs

    def status(self) -> EngineStatus:
        scheduler, table = self._scheduler, self._table
        done, moved = scheduler.counters, table.counters
        return EngineStatus(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_for_adapters=scheduler.num_cold,
            free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            steps=done.steps,
            computed_tokens=done.computed_tokens,
            generated_tokens=done.generated_tokens,
            prefix_tokens=done.prefix_tokens,
            chunks=done.chunks,
            preemptions=done.preemptions,
            rows_taken_back=done.rows_taken_back,
            cache_evictions=self._pool.num_evictions,
            refused=done.refused,
            adapters_fetching=self._resolver.num_fetching,
            adapters_preparing=table.num_preparing,
            adapters_on_host=table.num_on_host,
            adapters_on_device=table.num_on_device,
            adapters_prepared=moved.prepared,
            adapters_loaded=moved.loaded,
            adapters_failed=moved.failed,
            adapters_evicted_from_host=moved.evicted_from_host,
            adapters_evicted_from_device=moved.evicted_from_device,
            adapter_moves=moved.moves,
        )

    def close(self) -> None:
        """Nothing can be asked any more, and who waits for an adapter waits no longer."""
        self._resolver.close()
        self._executor.close()
        for done in [done for loads in self._loads.values() for done in loads]:
            _settle(done, EngineError("the engine is stopped"))
        self._loads.clear()

    @property
    def _moved(self) -> bool:
        """Whether adapters have to be told about, or heard of."""
        table = self._table
        return bool(self._found) or table.needs_step or table.has_news

    def _tell(self, found: "Future[tuple[AdapterSpec, Resolved]]", answer: "Future[Resolved]") -> None:
        """Answer, on the thread that has found it. The table belongs to another thread: what that must know is left for
        it before anybody can ask for the adapter."""
        if not answer.set_running_or_notify_cancel():
            return  # nobody waits any more
        try:
            spec, resolved = found.result()
            problem = self._table.find_problem(spec)
            if problem is not None:
                raise problem
            if resolved.stale is not None and self._tier_of(spec.identity) == TIERS[-1]:
                raise resolved.stale.to_error()  # what was there before is in memory no longer
            resolved = resolved._replace(tier=resolved.tier or self._tier(spec))
        except BaseException as error:  # whatever it is, it belongs to the caller
            answer.set_exception(error)
        else:
            self._found.append(spec)
            answer.set_result(resolved)
        self.wake.set()

    def _tier(self, spec: AdapterSpec) -> str:
        """The place of its weights. A merged adapter that is nowhere yet has that of the worst of its parts."""
        best = self._tier_of(spec.identity)
        if best != TIERS[-1] or spec.merge is None:
            return best
        return max((self._tier_of(part.identity) for part in spec.parts), key=TIERS.index)

    def _tier_of(self, identity: str) -> str:
        state = self._table.state(identity)
        return _TIER_OF_STATE.get(state, TIERS[-1]) if state is not None else TIERS[-1]

    def _register_found(self) -> None:
        while self._found:
            self._table.register(self._found.popleft())

    def _take_news(self) -> None:
        self._register_found()
        for prepared in self._executor.take_prepared():
            self._table.prepared(prepared)
        if self._table.is_loading and not self._num_in_flight:  # else the result of the step tells
            self._table.loaded(self._executor.take_loaded())
        self._table.advance()
        for identity in self._table.take_arrived():
            self._scheduler.adapter_arrived(identity)
            for done in self._loads.pop(identity, ()):
                _settle(done, None)
        for identity, error in self._table.take_failed():
            self._scheduler.adapter_failed(identity, error)
            for done in self._loads.pop(identity, ()):
                _settle(done, error)


def _settle(done: "Future[None]", error: LoraxError | None) -> None:
    if done.set_running_or_notify_cancel():
        done.set_exception(error) if error is not None else done.set_result(None)
