"""Adapter space: examples, then random loads, moves and steps at all legal timings."""

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorax_server.engine.adapters.space import AdapterSpace, ExtentMove
from tests.grids import slow_except


def filled(num_units: int, *sizes: int) -> AdapterSpace:
    """Load adapters "a", "b", ... in order, starting at unit 0."""
    space = AdapterSpace(num_units)
    for key, units in zip("abcdefgh", sizes, strict=False):
        load(space, key, units)
    return space


def load(space: AdapterSpace, key: str, units: int) -> int | None:
    start = space.allocate(key, units)
    if start is not None:
        space.finish_loading(key)
    return start


def run_step(space: AdapterSpace) -> list[ExtentMove]:
    step, moves = space.submit()
    space.complete_step(step)
    return moves


def test_extents_are_contiguous() -> None:
    space = AdapterSpace(10)
    assert [space.allocate(key, 3) for key in "abc"] == [0, 3, 6]
    assert space.num_free_units == space.largest_hole == 1
    assert space.allocate("d", 2) is None
    assert space.allocate("d", 1) == 9
    assert space.num_free_units == space.largest_hole == 0


def test_space_not_read_by_steps_is_free_immediately() -> None:
    space = filled(10, 5, 5)
    run_step(space)
    space.free("a")
    assert space.allocate("c", 5) == 0


def test_space_is_free_after_last_reading_step() -> None:
    space = filled(10, 5, 5)
    first, _ = space.submit()
    second, _ = space.submit()
    space.free("a")
    assert space.num_free_units == 5
    assert space.largest_hole == 0
    space.complete_step(first)
    assert space.allocate("c", 5) is None
    space.complete_step(second)
    assert space.allocate("c", 5) == 0


def test_later_step_does_not_delay_freed_space() -> None:
    space = filled(10, 5, 5)
    before, _ = space.submit()
    space.free("a")
    space.submit()
    space.complete_step(before)
    assert space.allocate("c", 5) == 0


def test_adjacent_holes_are_merged() -> None:
    space = filled(12, 3, 3, 3, 3)
    for key in "acb":
        space.free(key)
    assert space.largest_hole == 9
    space.free("d")
    assert space.allocate("e", 12) == 0


def test_allocate_uses_best_fit() -> None:
    space = filled(20, 6, 1, 3, 1, 4, 5)
    for key in "ace":
        space.free(key)
    assert space.allocate("g", 3) == 7
    assert space.allocate("h", 3) == 11
    assert space.allocate("i", 3) == 0


def test_compact_joins_holes() -> None:
    space = filled(10, 2, 3, 2, 3)
    space.free("a")
    space.free("c")
    assert space.allocate("e", 4) is None
    space.compact(4)
    assert space._extents["b"].start == 0
    assert run_step(space) == [ExtentMove("b", 2, 0, 3)]
    assert space.allocate("e", 4) == 3
    assert space._extents["d"].start == 7


def test_compact_moves_fewest_units() -> None:
    space = filled(30, 2, 9, 2, 4, 2, 3, 2, 6)
    for key in "aceg":
        space.free(key)
    space.compact(4)
    assert run_step(space) == [ExtentMove("f", 19, 17, 3)]
    assert space.largest_hole == 4


def test_moves_are_in_address_order() -> None:
    space = filled(12, 2, 3, 2, 3, 2)
    for key in "ace":
        space.free(key)
    space.compact(6)
    assert run_step(space) == [ExtentMove("b", 2, 0, 3), ExtentMove("d", 7, 3, 3)]
    assert space.allocate("f", 6) == 6


def test_large_moves_take_several_steps() -> None:
    space = AdapterSpace(16, max_moved_units=5)
    for key, units in zip("abcdef", (2, 3, 2, 3, 2, 4), strict=True):
        load(space, key, units)
    for key in "ace":
        space.free(key)
    space.compact(6)
    space.compact(6)  # the next step has a new limit
    assert run_step(space) == [ExtentMove("b", 2, 0, 3)]
    assert space.largest_hole == 4
    space.compact(6)
    assert run_step(space) == [ExtentMove("d", 7, 3, 3)]
    assert space.allocate("g", 6) == 6


def test_adapter_above_step_limit_moves_alone() -> None:
    space = AdapterSpace(12, max_moved_units=2)
    for key, units in zip("abcde", (2, 3, 2, 3, 2), strict=True):
        load(space, key, units)
    for key in "ace":
        space.free(key)
    for expected in (ExtentMove("b", 2, 0, 3), ExtentMove("d", 7, 3, 3)):
        space.compact(6)
        assert run_step(space) == [expected]
    assert space.largest_hole == 6


def test_vacated_space_is_free_after_move_step() -> None:
    space = filled(10, 2, 3, 2, 3)
    in_flight, _ = space.submit()
    space.free("a")
    space.free("c")
    space.compact(4)
    space.complete_step(in_flight)
    assert space.largest_hole == 0
    assert space.needs_step
    carrier, moves = space.submit()
    assert moves
    assert space.largest_hole == 0
    space.complete_step(carrier)
    assert space.largest_hole == 4


def test_move_may_overwrite_space_in_use_by_earlier_steps() -> None:
    space = filled(10, 4, 2, 4)
    space.submit()
    space.free("a")
    space.free("c")
    space.compact(8)
    assert space.submit() == (2, [ExtentMove("b", 4, 0, 2)])


def test_compact_plans_no_unnecessary_moves() -> None:
    space = filled(10, 4, 2, 4)
    space.submit()
    space.free("a")
    space.compact(4)
    assert not space.needs_step
    space.compact(5)
    assert not space.needs_step


def test_second_compact_reuses_first_result() -> None:
    space = filled(10, 2, 3, 2, 3)
    space.free("a")
    space.free("c")
    space.compact(4)
    space.compact(4)
    assert space.submit() == (1, [ExtentMove("b", 2, 0, 3)])
    space.compact(4)
    assert not space.needs_step


def test_loading_adapter_is_not_moved() -> None:
    space = filled(10, 2, 2, 2)
    assert space.allocate("loading", 2) == 6
    for key in "ac":
        space.free(key)
    space.compact(4)
    assert run_step(space) == [ExtentMove("b", 2, 0, 2)]
    assert space._extents["loading"].start == 6
    space.compact(6)
    assert not space.needs_step
    space.finish_loading("loading")
    space.compact(6)
    assert run_step(space) == [ExtentMove("loading", 6, 2, 2)]
    assert space.allocate("d", 6) == 4


def test_free_cancels_move_but_waits_for_step() -> None:
    space = filled(10, 2, 3, 2, 3)
    space.free("a")
    space.free("c")
    space.compact(4)
    space.free("b")
    assert space.needs_step
    assert space.largest_hole == 0
    assert run_step(space) == []
    assert space.largest_hole == 7


@pytest.mark.parametrize(
    "calls",
    [
        [("allocate", "b", 0)],
        [("allocate", "b", -1)],
        [("allocate", "b", 11)],
        [("allocate", "a", 1)],
        [("compact", 0)],
        [("compact", 11)],
        [("finish_loading", "a")],
        [("allocate", "b", 1), ("free", "b")],
        [("complete_step", 1)],
        [("submit",), ("submit",), ("complete_step", 2)],
        [("submit",), ("complete_step", 1), ("complete_step", 1)],
    ],
)
def test_misuse_raises_assertion_error(calls: list[tuple[str, ...]]) -> None:
    space = filled(10, 5)
    *legal, (method, *arguments) = calls
    for name, *rest in legal:
        getattr(space, name)(*rest)
    with pytest.raises(AssertionError):
        getattr(space, method)(*arguments)


def test_zero_units_are_allowed() -> None:
    space = AdapterSpace(0)
    assert space.num_free_units == space.largest_hole == 0
    assert space.submit() == (1, [])
    space.complete_step(1)
    assert not space.needs_step
    with pytest.raises(AssertionError):
        AdapterSpace(-1)


@pytest.mark.parametrize("method", [AdapterSpace.free, AdapterSpace.finish_loading])
def test_unknown_adapter_raises_key_error(method: Callable[[AdapterSpace, str], object]) -> None:
    with pytest.raises(KeyError):
        method(filled(10, 5), "b")


@pytest.mark.parametrize("seed", range(5))
def test_allocation_succeeds_below_95_percent_usage(seed: int) -> None:
    """Adapters have up to 5 % of the space and are freed at random. Allocation fails only if free units are too few."""
    rng = random.Random(seed)
    space = AdapterSpace(10_000)
    resident: list[str] = []
    for number in range(1000):
        key, units = str(number), rng.randint(1, 500)
        while load(space, key, units) is None:
            space.compact(units)
            run_step(space)
            if space.largest_hole < units:
                assert space.num_free_units < 500
                space.free(resident.pop(rng.randrange(len(resident))))
        resident.append(key)
    for key in resident:
        space.free(key)
    assert space.largest_hole == 10_000


CHOICES = st.integers(0, 59)  # random choices use the remainder


@dataclass(frozen=True)
class Content:
    """The content of one load. Loading a key again creates new content."""

    key: Hashable
    load: int
    start: int
    units: int

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.units)

    @property
    def written(self) -> list[int]:
        return list(range(self.load * 100, self.load * 100 + self.units))


@dataclass
class Worker:
    """A fake worker that applies loads and moves to a buffer, and checks that each step reads the correct adapters.

    A load is written between `allocate` and `loaded`. Steps run in order, between `submit` and `completed`. A step
    first executes its moves and then reads its adapters until it is completed.
    """

    loads_early: bool
    steps_early: bool
    buffer: list[int]
    loads: dict[Hashable, Content] = field(default_factory=dict)
    waiting: deque[tuple[list[ExtentMove], list[Content]]] = field(default_factory=deque)
    reading: list[Content] = field(default_factory=list)

    def allocate(self, content: Content) -> None:
        self.loads[content.key] = content
        if self.loads_early:
            self.write(content.key)

    def write(self, key: Hashable) -> None:
        content = self.loads.pop(key)
        self.buffer[content.place] = content.written

    def loaded(self, key: Hashable) -> None:
        if key in self.loads:
            self.write(key)

    def submit(self, moves: list[ExtentMove], reads: list[Content]) -> None:
        self.waiting.append((moves, reads))
        if self.steps_early:
            self.run_next()

    def run_next(self) -> None:
        self.finish_reading()
        moves, self.reading = self.waiting.popleft()
        for move in moves:
            units = self.buffer[move.source : move.source + move.units]
            self.buffer[move.target : move.target + move.units] = units
        self.read()

    def read(self) -> None:
        for content in self.reading:
            assert self.buffer[content.place] == content.written

    def finish_reading(self) -> None:
        self.read()
        self.reading = []

    def completed(self, num_in_flight: int) -> None:
        """Complete the oldest step in flight. Later steps may have run too."""
        if len(self.waiting) == num_in_flight:
            self.run_next()
        if len(self.waiting) == num_in_flight - 1:
            self.finish_reading()


class SpaceStateMachine(RuleBasedStateMachine):
    """Runs random engine operations on workers with the earliest, latest and random timing."""

    NUM_UNITS = 32
    DEPTH = 3
    MOST_MOVED: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.space = AdapterSpace(self.NUM_UNITS, self.MOST_MOVED)
        self.workers = [
            Worker(loads_early, steps_early, [0] * self.NUM_UNITS)
            for loads_early in (False, True)
            for steps_early in (False, True)
        ]
        self.wanderer = Worker(False, False, [0] * self.NUM_UNITS)
        self.workers.append(self.wanderer)
        self.contents: dict[Hashable, Content] = {}  # in the order of steps and moves
        self.loading: list[Hashable] = []
        self.in_flight: deque[int] = deque()
        self.num_loads = 0

    @property
    def loaded(self) -> list[Hashable]:
        return [key for key in self.contents if key not in self.loading]

    @initialize(choices=st.lists(CHOICES, min_size=8, max_size=16))
    def fill(self, choices: list[int]) -> None:
        """Load adapters, and free every second one."""
        for which in choices:
            self.allocate(which)
        while self.loading:
            self.finish_load(0)
        for which in range(len(self.loaded) // 2):
            self.free(which)

    @rule(which=CHOICES)
    def allocate(self, which: int) -> None:
        key = next(key for key in range(self.NUM_UNITS + 1) if key not in self.contents)
        largest = self.space.largest_hole
        assert largest == self.NUM_UNITS or self.space.allocate(key, largest + 1) is None
        if largest == 0:
            return
        units = min(1 + which % 6, largest)
        start = self.space.allocate(key, units)
        assert start is not None
        self.num_loads += 1
        self.contents[key] = Content(key, self.num_loads, start, units)
        self.loading.append(key)
        for worker in self.workers:
            worker.allocate(self.contents[key])

    @rule(which=CHOICES)
    def finish_load(self, which: int) -> None:
        if self.loading:
            key = self.loading.pop(which % len(self.loading))
            self.space.finish_loading(key)
            for worker in self.workers:
                worker.loaded(key)

    @rule(which=CHOICES)
    def free(self, which: int) -> None:
        if self.loaded:
            key = self.loaded[which % len(self.loaded)]
            del self.contents[key]
            self.space.free(key)

    @rule(which=CHOICES)
    def compact(self, which: int) -> None:
        """Join all free units into one hole after steps finish. A load in the way prevents moves."""
        num_free = self.space.num_free_units
        num_scattered = num_free - self.space.largest_hole
        if num_scattered == 0:
            return
        units = num_free - which % num_scattered
        had_moves = self.space.needs_step
        self.space.compact(units)
        is_certain = not self.loading or (self.space.needs_step and not had_moves)
        if is_certain and which % 5 == 0:
            self.end_all_steps()
            while self.MOST_MOVED is not None and not self.loading and self.space.largest_hole < units:
                self.space.compact(units)
                assert self.space.needs_step  # otherwise the run would not terminate
                self.end_all_steps()
            assert (self.MOST_MOVED is not None and self.loading) or self.space.largest_hole >= units

    @rule(which=CHOICES)
    def step(self, which: int) -> None:
        if which % 2 and len(self.in_flight) < self.DEPTH:
            self.submit()
        elif self.in_flight:
            self.complete()

    @rule(which=CHOICES)
    def advance_random_worker(self, which: int) -> None:
        keys = list(self.wanderer.loads)
        if which % 2 and keys:
            self.wanderer.write(keys[which % len(keys)])
        elif self.wanderer.waiting:
            self.wanderer.run_next()

    def submit(self) -> None:
        step, moves = self.space.submit()
        self.in_flight.append(step)
        if self.MOST_MOVED is not None:
            assert len(moves) <= 1 or sum(move.units for move in moves) <= self.MOST_MOVED
        for move in moves:
            self.apply_move(move)
        reads = [self.contents[key] for key in self.loaded]
        for worker in self.workers:
            worker.submit(moves, reads)

    def apply_move(self, move: ExtentMove) -> None:
        """Apply a move. It must go down and overlap no other adapter."""
        content = self.contents.pop(move.key)
        assert (content.start, content.units) == (move.source, move.units)
        assert 0 <= move.target < move.source
        for other in self.contents.values():
            assert other.start >= move.target + move.units or other.start + other.units <= move.target
        self.contents[move.key] = replace(content, start=move.target)

    def complete(self) -> None:
        for worker in self.workers:
            worker.completed(len(self.in_flight))
        self.space.complete_step(self.in_flight.popleft())

    def end_all_steps(self) -> None:
        if self.space.needs_step:
            self.submit()
        while self.in_flight:
            self.complete()

    @invariant()
    def extents_do_not_overlap(self) -> None:
        extents = sorted((self.space._extents[key].start, content.units) for key, content in self.contents.items())
        bounds = [(0, 0), *extents, (self.NUM_UNITS, 0)]
        assert all(below + units <= above for (below, units), (above, _) in pairwise(bounds))
        assert self.space.num_free_units == self.NUM_UNITS - sum(units for _, units in extents)
        assert self.space.largest_hole <= self.space.num_free_units

    @invariant()
    def running_steps_read_their_adapters(self) -> None:
        for worker in self.workers:
            worker.read()

    def teardown(self) -> None:
        """Free all adapters and finish all steps. The space must be one hole."""
        while self.loading:
            self.finish_load(0)
        while self.contents:
            self.free(0)
        self.end_all_steps()
        assert self.space.largest_hole == self.NUM_UNITS


TestMachine = SpaceStateMachine.TestCase
TestMachine.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=50)

RULES = [
    SpaceStateMachine.allocate,
    SpaceStateMachine.finish_load,
    SpaceStateMachine.free,
    SpaceStateMachine.compact,
    SpaceStateMachine.step,
    SpaceStateMachine.advance_random_worker,
]


class SlowSpaceStateMachine(SpaceStateMachine):
    """A `SpaceStateMachine` with a small limit for moves per step."""

    MOST_MOVED = 4


@pytest.mark.parametrize("kind", [SpaceStateMachine, SlowSpaceStateMachine])
@pytest.mark.parametrize("seed", slow_except(range(3), range(10)))
def test_random_operations_keep_invariants(seed: int, kind: type[SpaceStateMachine]) -> None:
    """Run the state machine's rules in random mixes, much faster than hypothesis."""
    rng = random.Random(seed)
    for _ in range(50):
        machine = kind()
        machine.fill(rng.choices(range(60), k=12))
        for play in rng.choices(RULES, weights=[0.02 + rng.random() for _ in RULES], k=100):
            play(machine, rng.randrange(60))
            machine.extents_do_not_overlap()
            machine.running_steps_read_their_adapters()
        machine.teardown()
