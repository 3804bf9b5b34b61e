"""Fake workers that execute plans on a memory model with any legal timing and detect invalid use."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from lorax_server.adapters.config import parse_config
from lorax_server.adapters.spec import AdapterCheckpoint, AdapterSpec
from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.engine.admission import Limits
from lorax_server.engine.block_pool import BlockPool
from lorax_server.engine.engine import Engine
from lorax_server.engine.scheduler import Scheduler
from lorax_server.errors import AdapterError, BusyError, LoraxError
from lorax_server.plan import (
    Capabilities,
    DropOp,
    LoadOp,
    MoveOp,
    PrepareOp,
    PrepareResult,
    StepPlan,
    StepResult,
    UnloadOp,
)
from lorax_server.types import (
    AdapterRef,
    AdapterStage,
    Merge,
    Output,
    Request,
    ResolvedAdapter,
    SamplingParams,
    StopParams,
)

VOCAB = 7
SIZE = 4  # tokens per block
UNIT_BYTES = 4
MODULUS = 2**61 - 1
RAW = parse_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}, "any")


@cache
def seed_of(identity: str) -> int:
    return int.from_bytes(sha256(identity.encode()).digest()[:7], "big")


def chain(before: int, token: int, identity: str) -> int:
    """Return the keys of a token. They depend on the keys before it, and on the adapter that computes the token."""
    return (before * 1_000_003 + token + 1 + seed_of(identity)) % MODULUS


def token_after(chained: int) -> int:
    return (chained >> 9) % VOCAB


def expected_tokens(identity: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the expected tokens of a request."""
    chained, tokens = 0, list[int]()
    for token in prompt:
        chained = chain(chained, token, identity)
    for _ in range(num_tokens):
        tokens.append(token_after(chained))
        chained = chain(chained, tokens[-1], identity)
    return tokens


class Computation(NamedTuple):
    """The adapters that compute a request's keys, from some generated token on."""

    first_token: int  # index of the first generated token that depends on these keys
    segments: tuple[tuple[int, str], ...]  # position of the first token that an adapter computes, and its identity


def expected_moved_tokens(history: Sequence[Computation], prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the expected tokens of a request that moved to other adapters."""
    tokens = list(prompt)
    for number in range(num_tokens):
        segments = [each for each in history if each.first_token <= number][-1].segments
        chained = 0
        for position, token in enumerate(tokens):
            chained = chain(chained, token, [identity for start, identity in segments if start <= position][-1])
        tokens.append(token_after(chained))
    return tokens[len(prompt) :]


def make_spec(identity: str, units: int, name: str | None = None) -> AdapterSpec:
    """Create a spec for an adapter with this many units."""
    return AdapterSpec(identity, name or identity.split("@", maxsplit=1)[0], (), units)


def make_capabilities(num_units: int, max_steps_in_flight: int = 1, **more: Any) -> Capabilities:
    values = {"max_num_seqs": 3, "max_length": 40, "num_blocks": 24, "max_step_tokens": 12} | more
    return Capabilities(
        vocab_size=VOCAB,
        block_size=SIZE,
        max_steps_in_flight=max_steps_in_flight,
        num_adapter_units=num_units,
        adapter_unit_bytes=UNIT_BYTES,
        itemsize=UNIT_BYTES,
        **values,
    )


@dataclass
class _LoadedAdapter:
    identity: str
    start: int
    units: int
    is_loaded: bool = False  # and reported to the engine

    @property
    def place(self) -> range:
        return range(self.start, self.start + self.units)


@dataclass
class _Reading:
    identity: str
    place: range


@dataclass
class _Step:
    plan: StepPlan
    moves: list[tuple[int, int, int]]  # source, target, units
    reads: dict[int, _Reading]  # by index
    result: StepResult | None = None


@dataclass
class _Load:
    identity: str
    place: range
    turns_left: int  # until it is reported
    is_written: bool = False


class Workers:
    """A fake `Executor` that runs each operation at a random legal time.

    Steps run in order, between `submit` and `collect`. A step first executes its moves and then reads its adapters
    until it is collected. A load is written at any time after its step is submitted and before the load is reported by
    a step result or by `pop_loaded`. Each unit stores its adapter and its position within the adapter.
    """

    def __init__(self, capabilities: Capabilities, host_bytes: int, rng: random.Random, most_turns: int = 3) -> None:
        self.capabilities = capabilities
        self.host_bytes = host_bytes
        self.rng = rng
        self.most_turns = most_turns
        self.failing: dict[str, int] = {}  # remaining preparation failures by identity
        self.lacks_memory: Callable[[StepPlan], bool] = lambda _: False  # returns True if a step runs out of memory
        self.refused: list[StepPlan] = []  # steps that ran out of memory
        self.host: dict[str, int] = {}  # bytes
        self.residents: dict[int, _LoadedAdapter] = {}
        self.num_unloads = 0
        self._notify: Callable[[], None] = lambda: None
        self._preparing: dict[str, list[int]] = {}  # bytes, turns left
        self._prepared: list[PrepareResult] = []
        self._buffer: list[tuple[str, int] | None] = [None] * capabilities.num_adapter_units
        self._loads: dict[int, _Load] = {}
        self._ordered_loads: list[_Load] = []  # not yet written
        self._loaded: list[int] = []  # not yet reported
        self._steps: deque[_Step] = deque()
        self._tokens: dict[int, list[int]] = {}
        self._chains: dict[int, list[int]] = {}
        self._tables: dict[int, dict[int, int]] = {}
        self._cache: dict[int, int] = {}

    # --- Engine calls -------------------------------------------------------------------------------------------------

    def on_event(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def pack(self, spec: AdapterSpec) -> PrepareResult:
        num_bytes = spec.num_elements * UNIT_BYTES
        return PrepareResult(spec.identity, spec.num_elements, num_bytes, VOCAB, is_on_device=True)

    def pop_prepared(self) -> list[PrepareResult]:
        taken, self._prepared = self._prepared, []
        return taken

    def submit(self, plan: StepPlan) -> LoraxError | None:
        assert len(self._steps) < self.capabilities.max_steps_in_flight
        moves: list[tuple[int, int, int]] = []
        for op in plan.adapter_ops:
            match op:
                case PrepareOp(spec, is_packed=True):
                    assert spec.identity not in self.host, "packed twice"
                    self.host[spec.identity] = spec.num_elements * UNIT_BYTES
                case PrepareOp(spec):
                    self._prepare(spec)
                case LoadOp(identity, index, first_unit, is_ordered):
                    self._load(identity, index, first_unit, is_ordered)
                case MoveOp(index, source, target):
                    moves.append(self._move(index, source, target))
                case UnloadOp(index):
                    assert self.residents[index].is_loaded, "unloaded while it is being written"
                    del self.residents[index]
                    self.num_unloads += 1
                case DropOp(identity):
                    assert not any(load.identity == identity for load in self._loads.values()), "dropped while read"
                    del self.host[identity]
        self._check_host()
        self._check_collisions()
        problem = None
        if len(plan.slots) and self.lacks_memory(plan):
            problem = BusyError("too little memory")
            self.refused.append(plan)
            plan = plan.without_sequences()
        reads = {}
        for index in set(plan.adapter_indices.tolist()) - {0}:
            resident = self.residents[index]
            assert resident.is_loaded, f"{resident.identity} is not there yet"
            reads[index] = _Reading(resident.identity, resident.place)
        self._steps.append(_Step(plan, moves, reads))
        self.tick()
        return problem

    def collect(self) -> StepResult:
        step = self._steps[0]
        if step.result is None:
            self._run(step)
        self._read(step)
        self._steps.popleft()
        assert step.result is not None
        self.tick()
        self._end_loads()
        step.result.loaded.extend(self.pop_loaded())
        return step.result

    def pop_loaded(self) -> list[int]:
        taken, self._loaded = self._loaded, []
        for index in taken:
            self.residents[index].is_loaded = True
        return taken

    def close(self) -> None: ...

    # --- Time ---------------------------------------------------------------------------------------------------------

    @property
    def has_pending_work(self) -> bool:
        """Return True if a preparation or load is running, which will notify the engine."""
        return bool(self._preparing or self._loads)

    def tick(self) -> None:
        """Advance preparations, loads and steps in parallel with the engine."""
        for identity in list(self._preparing):
            self._preparing[identity][1] -= 1
        ready = [identity for identity, (_, left) in self._preparing.items() if left <= 0]
        self.rng.shuffle(ready)
        for identity in ready:
            self._end_preparing(identity)
        for load in self._loads.values():
            if self.rng.random() < 0.3:
                self._write(load)
        if not self._steps:
            self._end_loads()
        waiting = next((step for step in self._steps if step.result is None), None)
        if waiting is not None and self.rng.random() < 0.5:
            self._run(waiting)

    # --- Host memory --------------------------------------------------------------------------------------------------

    def _prepare(self, spec: AdapterSpec) -> None:
        assert spec.identity not in self.host, "prepared twice"
        assert spec.identity not in self._preparing, "prepared twice"
        self._preparing[spec.identity] = [spec.num_elements * UNIT_BYTES, self.rng.randint(0, 2 * self.most_turns)]

    def _end_preparing(self, identity: str) -> None:
        num_bytes, _ = self._preparing.pop(identity)
        if self.failing.get(identity, 0):
            self.failing[identity] -= 1
            self._prepared.append(PrepareResult(identity, error=AdapterError(f"{identity} is damaged")))
        else:
            self.host[identity] = num_bytes
            self._prepared.append(PrepareResult(identity, num_bytes // UNIT_BYTES, num_bytes, VOCAB))
        self._notify()

    def _check_host(self) -> None:
        sizes = [*self.host.values(), *(size for size, _ in self._preparing.values())]
        assert sum(sizes) <= self.host_bytes or len(sizes) == 1, f"{sizes} are more than {self.host_bytes}"

    # --- Device memory ------------------------------------------------------------------------------------------------

    def _load(self, identity: str, index: int, first_unit: int, is_ordered: bool = False) -> None:
        """Start a load. An ordered load is written before the next step and before the next load."""
        self._write_ordered()
        assert index > 0
        assert index not in self.residents, f"index {index} is in use"
        resident = _LoadedAdapter(identity, first_unit, self.host[identity] // UNIT_BYTES)
        assert all(other.identity != identity for other in self.residents.values()), "loaded twice"
        self.residents[index] = resident
        load = _Load(identity, resident.place, self.rng.randint(0, self.most_turns))
        if not is_ordered:
            self._loads[index] = load
            return
        resident.is_loaded = True
        self._ordered_loads.append(load)
        if self.rng.random() < 0.5:
            self._write_ordered()

    def _write_ordered(self) -> None:
        for load in self._ordered_loads:
            for position, unit in enumerate(load.place):
                self._buffer[unit] = load.identity, position
        self._ordered_loads.clear()

    def _move(self, index: int, source: int, target: int) -> tuple[int, int, int]:
        resident = self.residents[index]
        assert resident.is_loaded, "moved while it is being written"
        assert resident.start == source
        assert 0 <= target < source
        resident.start = target
        return source, target, resident.units

    def _check_collisions(self) -> None:
        end = 0
        for resident in sorted(self.residents.values(), key=lambda each: each.start):
            assert resident.start >= end, "two adapters in one place"
            end = resident.place.stop
        assert end <= self.capabilities.num_adapter_units

    def _write(self, load: _Load) -> None:
        if not load.is_written:
            assert load.identity in self.host
            for position, unit in enumerate(load.place):
                self._buffer[unit] = load.identity, position
            load.is_written = True

    def _end_loads(self) -> None:
        """Finish the loads that are due."""
        loaded = []
        for index, load in self._loads.items():
            load.turns_left -= 1
            if load.turns_left < 0:
                self._write(load)
                loaded.append(index)
        for index in loaded:
            del self._loads[index]
        self.rng.shuffle(loaded)
        self._loaded += loaded
        if loaded:
            self._notify()

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _run(self, step: _Step) -> None:
        for before in self._steps:
            if before is step:
                break
            self._read(before)
            before.reads = {}  # steps run in order, so it is complete
        for source, target, units in step.moves:
            self._buffer[target : target + units] = self._buffer[source : source + units]
        self._write_ordered()
        self._read(step)
        step.result = self._compute(step)

    def _read(self, step: _Step) -> None:
        for reading in step.reads.values():
            for position, unit in enumerate(reading.place):
                assert self._buffer[unit] == (reading.identity, position), "another's bytes, or not all of them"

    def _compute(self, step: _Step) -> StepResult:
        plan = step.plan
        for new in plan.new_sequences:
            self._tokens[new.slot], self._chains[new.slot], self._tables[new.slot] = list(new.token_ids), [], {}
        for slot, place, block in plan.new_blocks.tolist():
            assert place not in self._tables[slot], "told twice"
            self._tables[slot][place] = block
        columns = (plan.slots, plan.starts, plan.counts, plan.samples, plan.adapter_indices)
        tokens = []
        parts = list(zip(*(column.tolist() for column in columns), strict=True))
        for slot, start, count, _, index in parts:
            identity = self._read_owner(step.reads[index]) if index else ""
            chains = self._extend_chain(slot, identity, start + count)
            for position in range(start, start + count):
                self._cache[self._kv_slot(slot, position)] = chains[position]
        for slot, start, count, samples, _ in parts:
            chains = self._chains[slot]
            for position in range(start + count):
                assert self._cache[self._kv_slot(slot, position)] == chains[position], "another's keys"
            if samples:
                assert start + count == len(self._tokens[slot])
                tokens.append(token_after(chains[start + count - 1]))
                self._tokens[slot].append(tokens[-1])
        return StepResult(plan.step, tokens, [0.0] * len(tokens))

    def _read_owner(self, reading: _Reading) -> str:
        held = self._buffer[reading.place.start]
        assert held is not None
        return held[0]

    def _extend_chain(self, slot: int, identity: str, length: int) -> list[int]:
        chains, tokens = self._chains[slot], self._tokens[slot]
        while len(chains) < length:
            chains.append(chain(chains[-1] if chains else 0, tokens[len(chains)], identity))
        return chains

    def _kv_slot(self, slot: int, position: int) -> int:
        return self._tables[slot][position // SIZE] * SIZE + position % SIZE


@dataclass
class FakeResolver:
    """A fake resolver with the current spec for each name."""

    specs: dict[str, AdapterSpec] = field(default_factory=dict)
    num_fetching: int = 0
    is_new: bool = False  # their files were downloaded

    def resolve(
        self, refs: Sequence[AdapterRef], merge: Merge | None = None
    ) -> "Future[tuple[AdapterSpec, ResolvedAdapter]]":
        answer: Future[tuple[AdapterSpec, ResolvedAdapter]] = Future()
        specs = [self.specs[ref.name] for ref in refs]
        spec = specs[0]
        if merge is not None:
            parts = tuple(AdapterCheckpoint(Path(), RAW, (), each.identity) for each in specs)
            spec = AdapterSpec("+".join(each.identity for each in specs), "merged", parts, 4, merge)
        answer.set_result((spec, ResolvedAdapter(spec.identity, tier="fetched" if self.is_new else "")))
        return answer

    def close(self) -> None: ...


@dataclass
class SubmittedRequest:
    """A test request, starting with name resolution."""

    request_id: int
    spec: AdapterSpec | None
    prompt: list[int]
    num_tokens: int
    options: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    failure: str | None = None
    is_aborted: bool = False
    history: list[Computation] = field(default_factory=list)  # empty if the request never moved

    @property
    def identity(self) -> str:
        return self.spec.identity if self.spec else ""

    @property
    def is_done(self) -> bool:
        return self.is_aborted or self.failure is not None or len(self.tokens) == self.num_tokens


class EngineSimulation:
    """The real engine, fake workers and the engine loop, with a fake clock.

    As in a server, the engine is called only when it is busy, was woken, or its deadline has expired.
    """

    def __init__(
        self,
        num_units: int,
        host_units: int,
        *,
        max_steps_in_flight: int = 1,
        seed: int = 0,
        eviction_delay_s: float = 1.0,
        most_turns: int = 3,
        limits: dict[str, Any] | None = None,
        **capabilities: Any,
    ) -> None:
        self.now = 0.0
        self.names = FakeResolver()
        self.submitted: dict[int, SubmittedRequest] = {}
        self.open: dict[int, SubmittedRequest] = {}
        self.num_advances = 0
        self.num_moved = 0  # running requests that moved to another adapter
        self._known: set[str] = set()  # identities of all contents
        self._moving: list[tuple[AdapterSpec, Future[None]]] = []
        self._resolving: list[tuple[SubmittedRequest, Future[ResolvedAdapter]]] = []
        of = make_capabilities(num_units, max_steps_in_flight, **capabilities)
        host_bytes = self.host_bytes = host_units * UNIT_BYTES
        self.workers = Workers(of, host_bytes, random.Random(seed), most_turns)
        self.pool = BlockPool(of.num_blocks, of.block_size)
        self.table = AdapterTable(
            of, host_bytes=host_bytes, eviction_delay_s=eviction_delay_s, retry_s=5.0, clock=self.clock
        )
        self.scheduler = Scheduler(Limits(**vars(of), **(limits or {})), self.pool, self.table, clock=self.clock)
        self.engine = Engine(self.workers, self.scheduler, self.pool, self.table, self.names)  # type: ignore[arg-type]
        self._preempt, self.scheduler._preempt = self.scheduler._preempt, self._record_preemption  # type: ignore[method-assign]

    def clock(self) -> float:
        return self.now

    def put(self, name: str, version: int, units: int) -> AdapterSpec:
        """Replace the content of a name."""
        spec = self.names.specs[name] = make_spec(f"{name}@{version}", units)
        self._known.add(spec.identity)
        return spec

    def submit(self, name: str | None, prompt: list[int], num_tokens: int = 4, **options: Any) -> SubmittedRequest:
        spec = self.names.specs[name] if name else None
        submitted = SubmittedRequest(len(self.submitted), spec, prompt, num_tokens, options)
        self.submitted[submitted.request_id] = self.open[submitted.request_id] = submitted
        if name is None:
            self._add(submitted)
        else:
            self._resolving.append((submitted, self.engine.resolve([AdapterRef("local", name)])))
        return submitted

    def move(self, name: str) -> None:
        """Load the present content of a name, and then move all requests for the name to it."""
        spec = self.names.specs[name]
        self.engine.resolve([AdapterRef("local", name)])
        self._moving.append((spec, self.engine.load(spec.identity)))

    def update(self, name: str, version: int, units: int) -> "Future[None]":
        """Replace the content of a name as `LLM.update_adapter` does on a GPU, and move all requests to it."""
        spec = self.put(name, version, units)
        loading = self.engine.load_packed(spec, self.workers.pack(spec))
        self._moving.append((spec, loading))
        self._move_to_loaded()
        return loading

    def _move_to_loaded(self) -> None:
        for spec, loading in [each for each in self._moving if each[1].done()]:
            self._moving.remove((spec, loading))
            if self.table.state(spec.identity) is AdapterStage.DEVICE:
                self._move_to(spec)

    def _move_to(self, spec: AdapterSpec) -> None:
        before = dict(self.scheduler._by_id)
        moving = [each for each in self.open.values() if each.spec is not None and each.spec.name == spec.name]
        moving = [each for each in moving if each.request_id in before and each.identity != spec.identity]
        for submitted in moving:
            sequence = before[submitted.request_id]
            self.num_moved += sequence.slot is not None
            self._record_move(submitted, sequence, spec)
        self.engine.move([each.request_id for each in moving], spec.identity)

    def _record_move(self, submitted: SubmittedRequest, sequence: Any, spec: AdapterSpec) -> None:
        history = submitted.history or [Computation(0, ((0, submitted.identity),))]
        kept = [each for each in history[-1].segments if each[0] < sequence.num_computed]
        segments = (*kept, (sequence.num_computed, spec.identity))
        submitted.history = [*history, Computation(sequence.num_generated + sequence.num_in_flight, segments)]
        submitted.spec = spec

    def _record_preemption(self, sequence: Any) -> None:
        """A preempted request is computed again, with the adapter that it has then."""
        self._preempt(sequence)
        submitted, first = self.submitted[sequence.request.request_id], sequence.num_generated + sequence.num_in_flight
        if submitted.history:
            submitted.history.append(Computation(first, ((0, submitted.identity),)))

    def expect_tokens(self, submitted: SubmittedRequest, num_tokens: int) -> list[int]:
        if submitted.history:
            return expected_moved_tokens(submitted.history, submitted.prompt, num_tokens)
        return expected_tokens(submitted.identity, submitted.prompt, num_tokens)

    def abort(self, submitted: SubmittedRequest) -> None:
        if not submitted.is_done:
            submitted.is_aborted = True
            del self.open[submitted.request_id]
            self.engine.abort(submitted.request_id)

    def advance(self, passes_s: float = 0.1) -> bool:
        """Advance the clock, and call the engine if it is due. Return True if it was called."""
        self.num_advances += 1
        self.now += passes_s
        self.workers.tick()
        engine = self.engine
        is_called = engine.is_busy or engine.wake.is_set()
        if not is_called and engine.deadline_s is not None:
            self.now += engine.deadline_s
            is_called = True
        if is_called:
            engine.wake.clear()
            self._record_outputs(engine.step())
            self._move_to_loaded()
        else:
            assert self.workers.has_pending_work or not engine.has_work, "it sleeps, and nothing will wake it"
        self._add_resolved()
        return is_called

    def _add_resolved(self) -> None:
        for submitted, answer in [each for each in self._resolving if each[1].done()]:
            self._resolving.remove((submitted, answer))
            error = answer.exception()
            if submitted.is_aborted:
                continue
            if isinstance(error, LoraxError):
                assert submitted.spec is not None
                assert submitted.spec.num_elements * UNIT_BYTES > self.host_bytes, error  # the only possible reason
                self._fail(submitted, str(error))
            else:
                assert answer.result().identity == submitted.identity
                self._add(submitted)

    def finish(self, most: int) -> None:
        for _ in range(most):
            if not self.open:
                return
            self.advance()
        raise AssertionError(f"{len(self.open)} requests are not finished after {most} turns")

    def run_until_idle(self, most: int = 200) -> None:
        """Advance the clock until the engine is idle."""
        while self.advance() or self.workers.has_pending_work:
            most -= 1
            assert most > 0, "it never sleeps"

    def _add(self, submitted: SubmittedRequest) -> None:
        stop = StopParams(max_new_tokens=submitted.num_tokens)
        request = Request(
            submitted.request_id,
            submitted.prompt,
            SamplingParams(),
            stop,
            adapter_identity=submitted.identity,
            **submitted.options,
        )
        try:
            self.engine.add(request)
        except LoraxError as error:
            self._fail(submitted, str(error))
        else:
            self.engine.wake.set()

    def _record_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            submitted = self.open[output.request_id]
            if output.failure is not None:
                self._fail(submitted, output.failure.message)
                continue
            submitted.tokens.extend(token.token_id for token in output.tokens)
            is_last = len(submitted.tokens) == submitted.num_tokens
            assert (output.finish_reason is not None) == is_last
            if is_last:
                del self.open[output.request_id]
                assert submitted.tokens == self.expect_tokens(submitted, submitted.num_tokens), "stale tokens"

    def _fail(self, submitted: SubmittedRequest, message: str) -> None:
        submitted.failure = message
        del self.open[submitted.request_id]

    def check_tokens_so_far(self) -> None:
        for submitted in self.open.values():
            assert submitted.tokens == self.expect_tokens(submitted, len(submitted.tokens)), "stale tokens"

    def check_all_memory_is_released(self) -> None:
        """Check that all memory is released once no request needs it."""
        assert not self.open
        self.run_until_idle()
        assert self.pool.num_free == self.pool.num_blocks
        for identity in {submitted.identity for submitted in self.submitted.values()} - {""} | self._known:
            self.engine.unload(identity)
        self.run_until_idle()
        assert not self.workers.host
        assert not self.workers.residents
        assert self.table._host.bytes_used == 0
        assert self.table.num_on_host == self.table.num_on_device == self.table.num_preparing == 0
        self.advance()
