"""The engine: takes requests, decides each step, hands it to an executor, and returns the outputs."""

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
from lorax_server.plan import Capabilities, Prepared, StepMasks, StepPlan, StepResult
from lorax_server.structured_output.manager import Next, StructuredOutput
from lorax_server.types import AdapterRef, AdapterStage, AdapterState, EngineStatus, Merge, Output, Request, Resolved

MASK_WAIT_S = 0.005  # for late masks, while other sequences of the batch could take a token
ALONE_MASK_WAIT_S = 0.05  # while none could
IDLE_S = 0.05  # the longest wait: another thread may have taken what woke it
TIERS = ("device", "host", "disk")  # where an adapter's weights can be, the best first
_TIER_OF_STATE = {AdapterStage.DEVICE: "device", AdapterStage.LOADING: "host", AdapterStage.HOST: "host"}


class Executor(Protocol):
    """Runs plans in the order of their submission."""

    @property
    def capabilities(self) -> Capabilities: ...

    def on_news(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on any thread, when `take_prepared` or `take_loaded` has something to return."""

    def submit(self, plan: StepPlan) -> LoraxError | None:
        """Start a step. Return an error if there is no memory for its sequences: its result will be that of a step
        without any."""

    def mask(self, masks: StepMasks) -> LoraxError | None:
        """Let the sequences of the last step, which is masked, choose their tokens. Errors are those of `submit`."""

    def collect(self) -> StepResult:
        """Wait for the oldest step."""

    def take_prepared(self) -> list[Prepared]: ...

    def take_loaded(self) -> list[int]:
        """Return the adapter indices whose load has ended and that no result of a step has reported."""

    def close(self) -> None: ...


class Engine:
    """Belongs to one thread, except for `resolve` and `forget`, which any thread may call.

    Events on other threads (an adapter is found, another one is ready) set `wake`. The next call handles them.
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
        """Without `structured_output`, requests with a grammar are rejected."""
        self.wake = threading.Event()
        self.start_seconds: Mapping[str, float] = {}  # that the start took, by phase
        self.capabilities = executor.capabilities
        self._executor = executor
        self._scheduler = scheduler
        self._pool = pool
        self._table = table
        self._resolver = resolver
        self._structured_output = structured_output
        self._resolved: deque[AdapterSpec] = deque()  # from any thread: adapters that the table has to know of
        self._loads: dict[str, list[Future[None]]] = {}  # by identity
        executor.on_news(self.wake.set)
        if structured_output is not None:
            structured_output.on_news = self.wake.set

    @property
    def is_busy(self) -> bool:
        """Tell whether `step` has something to do. Else nothing happens until `wake` is set, or time passes."""
        scheduler, table = self._scheduler, self._table
        has_news = self._structured_output is not None and self._structured_output.has_news
        has_sequences = scheduler.in_flight or scheduler.num_running or scheduler.num_ready
        return bool(has_sequences or self._resolved or table.needs_step or table.has_news or has_news)

    @property
    def deadline_s(self) -> float | None:
        """Seconds until `step` must be called even if it is not busy and nothing happens; None: never."""
        deadlines = (self._scheduler.queues.deadline_s, self._table.deadline_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def wait(self) -> None:
        """Wait until there may be something to do, and not for long. Any later event sets `wake` again."""
        if not self.is_busy:
            deadline_s = self.deadline_s
            self.wake.wait(IDLE_S if deadline_s is None else min(IDLE_S, deadline_s))
        self.wake.clear()

    @property
    def has_work(self) -> bool:
        """Tell whether there are requests, also those that wait for an adapter."""
        return self._scheduler.has_work

    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> "Future[Resolved]":
        """Find out which adapter these names mean now. It begins to move up, since a request is about to come.

        The future is settled on the thread that finds the adapter, during any step. From then on all other methods
        know the adapter's identity.
        """
        future: Future[Resolved] = Future()
        self._resolver.resolve(refs, merge).add_done_callback(lambda done: self._settle_resolve(done, future))
        return future

    def add(self, request: Request) -> None:
        """Take a request. Raise if it cannot be served."""
        self._register_resolved()
        if request.structure is None:
            self._scheduler.add(request)
            return
        if self._structured_output is None:
            raise NotSupportedError("structured output is not supported by this engine")
        # Masks keep `min_new_tokens`, which gives way where the structure has come to its end.
        self._scheduler.add(replace(request, stop=replace(request.stop, min_new_tokens=0)))
        try:
            self._structured_output.begin(request, self.capabilities.vocab_size if self.capabilities.can_chunk else 0)
        except BaseException:
            self.abort(request.request_id)
            raise

    def abort(self, request_id: int) -> None:
        """Drop a request; it has no more outputs."""
        self._scheduler.abort(request_id)
        if self._structured_output is not None:
            self._structured_output.end(request_id)

    def load(self, identity: str, pin: bool | None = None) -> "Future[None]":
        """Bring a resolved adapter to the device. A pinned one stays there; None keeps its pin as it is."""
        done: Future[None] = Future()
        self._register_resolved()
        try:
            self._table.ask_for(identity, pin)
        except LoraxError as error:
            done.set_exception(error)
        else:
            self._loads.setdefault(identity, []).append(done)
        self.wake.set()
        return done

    def unload(self, identity: str) -> None:
        """Let an adapter go, pinned or not, as soon as no request needs it."""
        self._register_resolved()
        self._table.dismiss(identity)
        self._settle_loads(identity, AdapterError("the adapter was unloaded before it was there"))

    def forget(self, source: str, name: str) -> None:
        """Ask the source again the next time that this name is resolved."""
        self._resolver.forget(source, name)

    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        """Describe those of the adapters that the engine knows."""
        self._register_resolved()
        return self._table.list_adapters(identities)

    def step(self) -> list[Output]:
        """Submit the next step, and collect the one before, or the one before that."""
        self._handle_adapter_news()
        self._handle_grammar_news()
        plan = self._scheduler.schedule()
        outputs = self._take_failed()
        if plan is not None:
            problem = self._executor.submit(plan)
            if problem is None and plan.is_masked:
                while len(self._scheduler.in_flight) > 1:  # masks follow the tokens that were chosen before
                    outputs += self._collect()
                problem = self._mask()
            if problem is not None:
                self._scheduler.take_back(problem)
                outputs += self._take_failed()
        num_in_flight = len(self._scheduler.in_flight)
        if num_in_flight and (plan is None or num_in_flight >= self.capabilities.depth):
            outputs += self._collect()
        return outputs

    def _collect(self) -> list[Output]:
        result = self._executor.collect()
        chosen = self._scheduler.in_flight[0].list_chosen(result)
        if chosen and self._structured_output is not None:  # before all else: the next masks are computed meanwhile
            self._structured_output.advance(chosen)
        outputs = self._scheduler.update(result)
        self._end_grammars(outputs)
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
            **vars(self._scheduler.counters),
            **vars(self._table.counters),
        )

    def close(self) -> None:
        """Stop the threads and workers, and fail all that still waits for an adapter."""
        self._resolver.close()
        if self._structured_output is not None:
            self._structured_output.close()
        self._executor.close()
        for identity in list(self._loads):
            self._settle_loads(identity, EngineError("the engine is stopped"))

    def _settle_resolve(self, done: "Future[tuple[AdapterSpec, Resolved]]", future: "Future[Resolved]") -> None:
        """Answer on the thread that has found the adapter. Before that, leave its spec for the engine's thread, which
        owns the table."""
        if not future.set_running_or_notify_cancel():
            return  # the caller has cancelled
        try:
            spec, resolved = done.result()
            problem = self._table.find_problem(spec)
            if problem is not None:
                raise problem
            if resolved.stale is not None and self._tier_of(spec.identity) == TIERS[-1]:
                raise resolved.stale.to_error()  # the previous adapter is in memory no longer
            resolved = resolved._replace(tier=resolved.tier or self._find_tier(spec))
        except BaseException as error:  # whatever it is, it belongs to the caller
            future.set_exception(error)
        else:
            self._resolved.append(spec)
            future.set_result(resolved)
        self.wake.set()

    def _find_tier(self, spec: AdapterSpec) -> str:
        """Return where an adapter is. A merged adapter that is nowhere yet is where the worst of its parts is."""
        tier = self._tier_of(spec.identity)
        if tier != TIERS[-1] or spec.merge is None:
            return tier
        return max((self._tier_of(part.identity) for part in spec.parts), key=TIERS.index)

    def _tier_of(self, identity: str) -> str:
        state = self._table.state(identity)
        return _TIER_OF_STATE.get(state, TIERS[-1]) if state is not None else TIERS[-1]

    def _register_resolved(self) -> None:
        while self._resolved:
            self._table.register(self._resolved.popleft())

    def _handle_adapter_news(self) -> None:
        self._register_resolved()
        for prepared in self._executor.take_prepared():
            self._table.prepared(prepared)
        if self._table.is_loading and not self._scheduler.in_flight:  # else the result of the step reports it
            self._table.loaded(self._executor.take_loaded())
        self._table.advance()
        for identity in self._table.take_arrived():
            self._scheduler.queues.adapter_arrived(identity)
            self._settle_loads(identity, None)
        for identity, error in self._table.take_failed():
            self._scheduler.queues.adapter_failed(identity, error)
            self._settle_loads(identity, error)

    # --- Structured output --------------------------------------------------------------------------------------------

    def _handle_grammar_news(self) -> None:
        if self._structured_output is None or not self._structured_output.has_news:
            return
        for request_id, error in self._structured_output.take_settled():
            if error is None:
                self._scheduler.structure_ready(request_id)
            else:
                self._scheduler.fail(request_id, error)

    def _take_failed(self) -> list[Output]:
        failed = self._scheduler.take_failed()
        self._end_grammars(failed)
        return failed

    def _end_grammars(self, outputs: Sequence[Output]) -> None:
        """Forget the grammars of requests that have finished."""
        if self._structured_output is not None:
            for output in outputs:
                if output.finish_reason is not None or output.failure is not None:
                    self._structured_output.end(output.request_id)

    def _mask(self) -> LoraxError | None:
        """Give the last step its masks. A sequence whose mask is late takes its token in a later step."""
        assert self._structured_output is not None
        step = self._scheduler.in_flight[-1]
        masked = step.list_masked()
        wait_s = MASK_WAIT_S if self.capabilities.can_chunk else math.inf  # a padded step cannot be repeated
        ids, num_others = [request_id for _, request_id in masked], step.count_continuing() - len(masked)
        found = self._structured_output.gather(ids, wait_s, ALONE_MASK_WAIT_S, num_others)
        ready = [(number, found[request_id]) for number, request_id in masked if request_id in found]
        late = [number for number, request_id in masked if request_id not in found]
        masks = _list_masks(ready, step)
        problem = self._executor.mask(masks)
        if problem is None:
            step.force(masks.forced)
            step.postpone(late)
        return problem

    def _settle_loads(self, identity: str, error: LoraxError | None) -> None:
        for done in self._loads.pop(identity, ()):
            if done.set_running_or_notify_cancel():
                done.set_exception(error) if error is not None else done.set_result(None)


def _list_masks(ready: Sequence[tuple[int, Next]], step: SubmittedStep) -> StepMasks:
    """Put masks together. Of forced tokens, the first is chosen, since its mask allows no other; the others follow."""
    words, forced = [], []
    for number, (mask, tokens) in ready:
        if not tokens:
            words.append(mask)
            continue
        only = np.zeros_like(mask)
        only.view(np.uint32)[tokens[0] // 32] = 1 << tokens[0] % 32
        words.append(only)
        if following := tuple(tokens[1 : 1 + step.find_room(number)]):
            forced.append((number, following))
    return StepMasks(np.array([number for number, _ in ready], np.int64), words, tuple(forced))
