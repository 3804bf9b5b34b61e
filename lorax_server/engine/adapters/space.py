"""The place of each adapter in the one flat device buffer, counted in units of 256 bytes.

The engine numbers its steps; several may be in flight, and they run in order. Three kinds of access meet in the buffer:

- a step reads what was loaded when it was submitted, at any time until it is completed;
- a load writes its extent at any time from `allocate` to `loaded`, in no order with the steps;
- a move runs in order, just before the step that carries it, which is the next one submitted after it was planned.

Completed and loaded mean: on every rank. The rules that follow:

1. Space given up, by `free` or by a move, may still be read by the steps in flight and touched by the moves of the next
   one. It is a hole, which a load may write, only when the last of these steps is completed.
2. A move may write such space at once, for it runs after all of them.
3. A load keeps no order, so an extent that is being loaded is not moved, not moved over and not freed.
4. A move goes down (`target < source`) and never over another adapter, moves before it in the list being done. It may
   overlap its own source: copy from the lowest unit up, or in pieces of at most `source - target` units.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slide:
    """A copy of an adapter's units from `source` down to `target`."""

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
    """Gives every adapter one contiguous extent, and moves extents down when the holes between them are too small.

    If `allocate` returns None: free adapters until `num_free_units` is enough, `compact`, and try again after the next
    `completed` or `loaded`. Moves are rare and short if a few percent more than needed are kept free.
    """

    def __init__(self, num_units: int, most_moved: int | None = None) -> None:
        """One step moves at most `most_moved` units, though always an adapter; the next steps move the others."""
        assert num_units >= 0, num_units
        self.num_units = num_units
        self._most_moved = num_units if most_moved is None else most_moved
        self.num_free_units = num_units  # not held by an adapter, though steps may still read there
        self._extents: dict[Hashable, _Extent] = {}
        self._holes = [(0, num_units)] if num_units else []  # (start, stop) by address, no two touching
        self._vacated: deque[tuple[int, int, int]] = deque()  # (last step that touches it, start, stop), by step
        self._moves: list[Slide] = []  # for the next step
        self._num_submitted = 0
        self._num_completed = 0
        self._last_step = 0  # that touches what is resident: the last one submitted, or the next once it has moves

    @property
    def largest_hole(self) -> int:
        """Return the most units that `allocate` can give now."""
        return max((stop - start for start, stop in self._holes), default=0)

    @property
    def needs_step(self) -> bool:
        """Tell whether moves wait for a step, so that one must be submitted even if it computes nothing."""
        return self._last_step > self._num_submitted

    def allocate(self, key: Hashable, units: int) -> int | None:
        """Return the first unit of a new extent, to be loaded from now on; None if it does not fit now."""
        assert key not in self._extents, f"{key} has an extent already"
        assert 0 < units <= self.num_units, f"{units} of {self.num_units} units"
        fitting = [(stop - start, start) for start, stop in self._holes if stop - start >= units]
        if not fitting:
            return None
        size, start = min(fitting)  # the best fit: measured to need fewer moves than the first
        index = bisect_left(self._holes, (start, start))
        self._holes[index : index + 1] = [(start + units, start + size)] if size > units else []
        self._extents[key] = _Extent(key, start, units, is_loading=True)
        self.num_free_units -= units
        return start

    def loaded(self, key: Hashable) -> None:
        """Note that a load has ended, well or badly: nothing writes to the extent any more, and steps may read it."""
        assert self._extents[key].is_loading, f"{key} is loaded already"
        self._extents[key].is_loading = False

    def free(self, key: Hashable) -> None:
        """Give up an adapter: no step submitted from now on reads it."""
        assert not self._extents[key].is_loading, f"{key} is being loaded"
        extent = self._extents.pop(key)
        self.num_free_units += extent.units
        self._moves = [move for move in self._moves if move.key != key]
        self._vacate(extent.start, extent.stop)

    def submit(self) -> tuple[int, list[Slide]]:
        """Return the number of the step that goes out now, and the moves to be done before it, in this order."""
        self._num_submitted += 1
        self._last_step = self._num_submitted
        moves, self._moves = self._moves, []
        return self._num_submitted, moves

    def completed(self, step: int) -> None:
        """Note that a step has ended; steps end in order."""
        assert step == self._num_completed + 1 <= self._num_submitted, f"step {step} is not the next to end"
        self._num_completed = step
        while self._vacated and self._vacated[0][0] <= step:
            _, start, stop = self._vacated.popleft()
            self._add_hole(start, stop)

    def compact(self, units: int) -> None:
        """Plan the fewest units of moves that bring `units` together, if it takes moves and no load is in the way.

        Where that is more than one step may move, the next call plans more.
        """
        assert 0 < units <= self.num_units, f"{units} of {self.num_units} units"
        if units > self.num_free_units or units <= self.largest_hole:
            return  # the usual answers need no search
        if any(stop - start >= units for _, start, stop in self._vacated):
            return
        start, extents, stop = self._cheapest_slide(units)
        count = self._count_movable(extents)
        if count < len(extents):
            extents, stop = extents[:count], extents[count].start
        if not extents:
            return
        self._last_step = self._num_submitted + 1
        self._holes = [hole for hole in self._holes if not start <= hole[0] < stop]
        self._vacated = deque(space for space in self._vacated if not start <= space[1] < stop)
        for extent in extents:
            self._moves.append(Slide(extent.key, extent.start, start, extent.units))
            extent.start = start
            start = extent.stop
        self._vacate(start, stop)

    def _count_movable(self, extents: list[_Extent]) -> int:
        """Count the extents, from the first, that the next step may move."""
        num_moved = sum(move.units for move in self._moves)
        for count, extent in enumerate(extents):
            if num_moved and num_moved + extent.units > self._most_moved:
                return count
            num_moved += extent.units
        return len(extents)

    def _cheapest_slide(self, units: int) -> tuple[int, list[_Extent], int]:
        """Find neighbours to slide down to `start` so that `units` are free between the last of them and `stop`."""
        end = _Extent(None, self.num_units, 0, is_loading=False)
        extents = [*sorted(self._extents.values(), key=lambda extent: extent.start), end]
        gaps: list[int] = []  # below each of them
        best: tuple[int, list[_Extent], int] = (0, [], 0)
        below, fewest = 0, self.num_units
        first = num_free = num_moved = 0  # extents[first:last] slide, and the gaps from first to last become one
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
        """Make a stretch a hole as soon as no step can touch it any more."""
        if self._last_step == self._num_completed:
            self._add_hole(start, stop)
        else:
            self._vacated.append((self._last_step, start, stop))

    def _add_hole(self, start: int, stop: int) -> None:
        """Add a hole, joined with the holes that it touches."""
        index = bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, stop))
