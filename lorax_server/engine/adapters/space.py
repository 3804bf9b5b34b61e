"""Allocates extents in the device buffer for adapters, in units of 256 bytes.

Steps are numbered and run in order; several may be in flight. Three kinds of access overlap in the buffer:

- a step reads the adapters that were loaded when it was submitted, until it completes;
- a load writes its extent at any time between `allocate` and `loaded`, unordered relative to steps;
- a move runs in order, just before the first step submitted after it was planned.

"Completed" and "loaded" mean on all ranks. These rules follow:

1. Freed or vacated space may still be read by steps in flight and by moves of the next step. It becomes a hole,
   available to loads, when the last of these steps completes.
2. A move may overwrite such space immediately, because it runs after all these steps and moves.
3. An extent that is loading is not moved, overwritten by moves, or freed.
4. A move copies an extent down (`target < source`). After all earlier moves, its target overlaps no other adapter. It
   may overlap its source: copy from the lowest unit up, or in pieces of at most `source - target` units.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExtentMove:
    """A planned move of an adapter's units from `source` down to `target`."""

    key: Hashable
    source: int
    target: int
    units: int


@dataclass(slots=True)
class _Extent:
    key: Hashable
    start: int
    units: int
    is_loading: bool

    @property
    def stop(self) -> int:
        return self.start + self.units


class AdapterSpace:
    """Allocates one contiguous extent per adapter, and plans moves to lower addresses if holes are too small.

    If `allocate` returns None, free adapters until `num_free_units` is large enough, call `compact`, and retry after
    the next `completed` or `loaded`. If a few percent of the space are kept free, moves are rare and short.
    """

    def __init__(self, num_units: int, max_moved_units: int | None = None) -> None:
        """Create the space. A step moves at most `max_moved_units` units, but at least one adapter."""
        assert num_units >= 0, num_units
        self.num_units = num_units
        self._max_moved_units = num_units if max_moved_units is None else max_moved_units
        self.num_free_units = num_units  # unallocated units; steps in flight may still read them
        self._extents: dict[Hashable, _Extent] = {}
        self._holes = [(0, num_units)] if num_units else []  # (start, stop), sorted and not adjacent
        self._vacated: deque[tuple[int, int, int]] = deque()  # (last step with access, start, stop), sorted by step
        self._moves: list[ExtentMove] = []  # to execute before the next step
        self._num_submitted = 0
        self._num_completed = 0
        self._last_step = 0  # last step that accesses loaded extents: the last submitted, or the next if it has moves

    @property
    def largest_hole(self) -> int:
        """The size of the largest hole, in units."""
        return max((stop - start for start, stop in self._holes), default=0)

    @property
    def needs_step(self) -> bool:
        """Return True if a step must run to execute planned moves, even if it has no sequences."""
        return self._last_step > self._num_submitted

    def allocate(self, key: Hashable, units: int) -> int | None:
        """Allocate an extent for loading. Return its first unit, or None if no hole is large enough."""
        assert key not in self._extents, f"{key} already has an extent"
        assert 0 < units <= self.num_units, f"{units} of {self.num_units} units"
        fitting = [(stop - start, start) for start, stop in self._holes if stop - start >= units]
        if not fitting:
            return None
        size, start = min(fitting)  # best fit needs fewer moves than first fit (measured)
        index = bisect_left(self._holes, (start, start))
        self._holes[index : index + 1] = [(start + units, start + size)] if size > units else []
        self._extents[key] = _Extent(key, start, units, is_loading=True)
        self.num_free_units -= units
        return start

    def finish_loading(self, key: Hashable) -> None:
        """Record a finished or failed load. Steps may read the extent from now on."""
        assert self._extents[key].is_loading, f"{key} is already loaded"
        self._extents[key].is_loading = False

    def free(self, key: Hashable) -> None:
        """Free an adapter's extent. Steps that are submitted later do not read the adapter."""
        assert not self._extents[key].is_loading, f"{key} is being loaded"
        extent = self._extents.pop(key)
        self.num_free_units += extent.units
        self._moves = [move for move in self._moves if move.key != key]
        self._vacate(extent.start, extent.stop)

    def submit(self) -> tuple[int, list[ExtentMove]]:
        """Record a submitted step. Return its number, and the moves to execute before the step, in order."""
        self._num_submitted += 1
        self._last_step = self._num_submitted
        moves, self._moves = self._moves, []
        return self._num_submitted, moves

    def complete_step(self, step: int) -> None:
        """Record a finished step. Steps finish in order."""
        assert step == self._num_completed + 1 <= self._num_submitted, f"step {step} is not the next to finish"
        self._num_completed = step
        while self._vacated and self._vacated[0][0] <= step:
            _, start, stop = self._vacated.popleft()
            self._add_hole(start, stop)

    def compact(self, units: int) -> None:
        """Plan the cheapest moves that create a hole of `units` units, if moves are necessary and possible.

        If the moves exceed the limit per step, the next call plans more moves.
        """
        assert 0 < units <= self.num_units, f"{units} of {self.num_units} units"
        if units > self.num_free_units or units <= self.largest_hole:
            return  # too few free units, or no moves needed
        if any(stop - start >= units for _, start, stop in self._vacated):
            return
        start, extents, stop = self._find_cheapest_move(units)
        count = self._count_movable(extents)
        if count < len(extents):
            extents, stop = extents[:count], extents[count].start
        if not extents:
            return
        self._last_step = self._num_submitted + 1
        self._holes = [hole for hole in self._holes if not start <= hole[0] < stop]
        self._vacated = deque(space for space in self._vacated if not start <= space[1] < stop)
        for extent in extents:
            self._moves.append(ExtentMove(extent.key, extent.start, start, extent.units))
            extent.start = start
            start = extent.stop
        self._vacate(start, stop)

    def _count_movable(self, extents: list[_Extent]) -> int:
        """Return the number of leading extents that fit into the next step's move limit."""
        num_moved = sum(move.units for move in self._moves)
        for count, extent in enumerate(extents):
            if num_moved and num_moved + extent.units > self._max_moved_units:
                return count
            num_moved += extent.units
        return len(extents)

    def _find_cheapest_move(self, units: int) -> tuple[int, list[_Extent], int]:
        """Return (start, extents, stop). Moving the extents down to `start` frees `units` units before `stop`."""
        end = _Extent(None, self.num_units, 0, is_loading=False)
        extents = [*sorted(self._extents.values(), key=lambda extent: extent.start), end]
        gaps: list[int] = []  # free units below each extent
        best: tuple[int, list[_Extent], int] = (0, [], 0)
        below, fewest = 0, self.num_units
        first = num_free = num_moved = 0  # moving extents[first:last] down joins gaps[first : last + 1]
        for last, extent in enumerate(extents):
            gaps.append(extent.start - below)
            below = extent.stop
            num_free += gaps[last]
            while num_free - gaps[first] >= units:
                num_free -= gaps[first]
                num_moved -= extents[first].units
                first += 1
            if num_free >= units and num_moved < fewest:
                best = extents[first].start - gaps[first], extents[first:last], extent.start
                fewest = num_moved
            num_moved += extent.units
            if extent.is_loading:
                first, num_free, num_moved = last + 1, 0, 0
        return best

    def _vacate(self, start: int, stop: int) -> None:
        """Turn a range of units into a hole as soon as no step can access the range."""
        if self._last_step == self._num_completed:
            self._add_hole(start, stop)
        else:
            self._vacated.append((self._last_step, start, stop))

    def _add_hole(self, start: int, stop: int) -> None:
        """Add a hole, and merge it with adjacent holes."""
        index = bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, stop))
