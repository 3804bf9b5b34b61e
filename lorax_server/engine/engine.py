"""The engine: takes requests, decides each step, hands it to an executor, and tells what came out."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapter_table import AdapterTable
from lorax_server.engine.blocks import BlockPool
from lorax_server.engine.resolver import AdapterResolver
from lorax_server.engine.scheduler import Scheduler
from lorax_server.errors import AdapterError, EngineError, LoraxError
from lorax_server.plan import Capabilities, Prepared, StepPlan, StepResult
from lorax_server.types import AdapterRef, AdapterState, EngineStatus, Merge, Output, Request, Resolved

IDLE_S = 0.05


class Executor(Protocol):
    """Runs plans in the order in which they are submitted."""

    @property
    def capabilities(self) -> Capabilities: ...

    def on_prepared(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on any thread, when there is something for `take_prepared`."""

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """Wait for the oldest step."""

    def take_prepared(self) -> list[Prepared]: ...

    def close(self) -> None: ...


class Engine:
    """One thread calls it. What happens elsewhere (an adapter is fetched, another is ready) sets `wake` and is taken
    up by the next `step`."""

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
        self._resolved: deque[tuple[Future[tuple[AdapterSpec, Resolved]], Future[Resolved]]] = deque()
        self._loads: dict[str, list[Future[None]]] = {}  # by identity
        executor.on_prepared(self.wake.set)

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
        """Who these names mean now. Its adapter begins to move up, since a request is about to come."""
        answer: Future[Resolved] = Future()
        found = self._resolver.resolve(refs, merge)
        found.add_done_callback(lambda done: self._take_later(done, answer))
        return answer

    def add(self, request: Request) -> None:
        """Take a request, or refuse it."""
        self._scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Let go of a request; nothing is told of it any more."""
        self._scheduler.abort(request_id)

    def load(self, identity: str, pin: bool | None = None) -> "Future[None]":
        """Bring an adapter, whose name has been resolved, to the device. If it is pinned it stays there; None: as it
        was."""
        done: Future[None] = Future()
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
        self._table.dismiss(identity)
        for done in self._loads.pop(identity, ()):
            _settle(done, AdapterError("the adapter was unloaded before it was there"))

    def forget(self, source: str, name: str) -> None:
        """Ask the source again the next time that this name is resolved."""
        self._resolver.forget(source, name)

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        """Describe those of the adapters that are known."""
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
        while self._resolved:
            self._register(*self._resolved.popleft())

    @property
    def _moved(self) -> bool:
        """Whether adapters have to be told about, or heard of."""
        table = self._table
        return bool(self._resolved) or table.needs_step or table.is_loading or table.has_news

    def _take_later(self, found: "Future[tuple[AdapterSpec, Resolved]]", answer: "Future[Resolved]") -> None:
        self._resolved.append((found, answer))
        self.wake.set()

    def _take_news(self) -> None:
        while self._resolved:
            self._register(*self._resolved.popleft())
        for prepared in self._executor.take_prepared():
            self._table.prepared(prepared)
        self._table.advance()
        for identity in self._table.take_arrived():
            self._scheduler.adapter_arrived(identity)
            for done in self._loads.pop(identity, ()):
                _settle(done, None)
        for identity, error in self._table.take_failed():
            self._scheduler.adapter_failed(identity, error)
            for done in self._loads.pop(identity, ()):
                _settle(done, error)

    def _register(self, found: "Future[tuple[AdapterSpec, Resolved]]", answer: "Future[Resolved]") -> None:
        if not answer.set_running_or_notify_cancel():
            return  # nobody waits any more
        try:
            spec, resolved = found.result()
            self._table.register(spec)
        except BaseException as error:  # whatever it is, it belongs to who asked
            answer.set_exception(error)
        else:
            answer.set_result(resolved)


def _settle(done: "Future[None]", error: LoraxError | None) -> None:
    if done.set_running_or_notify_cancel():
        done.set_exception(error) if error is not None else done.set_result(None)
