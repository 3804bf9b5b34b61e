"""The adapters of one rank in device memory, at the places that the engine chooses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.kernels import NUM_OFFSETS
from lorax_server.kernels.device import allocate_zeros, is_host, write
from lorax_server.worker.copier import Arrival, Copier

# An adapter is moved over itself in pieces of this size, so that it needs little room.
MOVE_UNITS = 65536
PINNED_ROWS = 32  # about as many adapters may be loaded in the steps that are under way


@dataclass(frozen=True)
class _Resident:
    """A loaded adapter: all but its bytes, which are in the device's buffer."""

    table: torch.Tensor
    scales: torch.Tensor
    num_elements: int
    arrival: Arrival | None  # None: it was copied at once


class AdapterMemory:
    """One flat buffer for all adapters, counted in units, and the table that says what lies where.

    There is no largest rank and no number of slots: an adapter takes the bytes it has. Index 0 is the base model.

    A copier brings an adapter's bytes to a GPU beside the steps of the model. Everything else (the tables, moves)
    happens on the caller's stream, which must be that of the steps: then a step sees the table as it was when the step
    was submitted, and an index can be used for another adapter at once. Without a copier, as on a CPU, there is nothing
    to run beside, and the bytes are copied at once.
    """

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        dtype: torch.dtype,
        device: torch.device,
        num_units: int,
        num_rows: int = 64,
        is_follower: bool = False,
        copier: Copier | None = None,
    ) -> None:
        """The tables have `num_rows` rows, so the highest index is one less: they keep their places on the device.

        The engine hears from the first rank that steps and loads have ended. On all others, the followers, they may
        still be under way. So there a load waits for the steps before it, and a step for the loads it needs.
        """
        self._is_follower = is_follower
        self.num_units = num_units
        self._unit = UNIT_BYTES // dtype.itemsize
        self._nothing = empty_table(len(targets))
        self._base_vocab = next((t.outputs.full for t in targets.values() if t.kind is TargetKind.HEAD), 0)
        self._residents: dict[int, _Resident] = {}
        table = self._nothing.repeat(num_rows, 1, 1)
        widths = [size for target in targets.values() for size in (target.inputs.size, target.outputs.size)]
        # A kernel may read 16 rows of a factor where it has fewer.
        room = 0 if is_host(device) else 16 * max(widths, default=0)
        self.arena = AdapterArena(
            allocate_zeros([num_units * self._unit + room], dtype, device),
            table.to(device),
            torch.zeros(num_rows, len(targets), device=device),
            table,
            [self._base_vocab] * num_rows,
            targets,
        )
        self._copier = copier
        if copier is not None:
            copier.follow_caller()  # which fills the buffer with zeros
        # For moves: a step must not look for memory.
        self._spare = torch.empty(min(MOVE_UNITS, num_units) * self._unit, dtype=dtype, device=device)
        if not is_host(device):
            _pin_room(table[0], self.arena.scales[0].cpu())

    def on_arrival(self, notify: Callable[[], None]) -> None:
        """Call `notify`, on any thread, when a load has ended that did not end at once."""
        if self._copier is not None:
            self._copier.notify = notify

    def close(self) -> None:
        """End the copies that are under way."""
        if self._copier is not None:
            self._copier.close()

    def load(self, index: int, adapter: HostAdapter, first_unit: int) -> None:
        """Begin to copy an adapter in. No step that is under way may read these units."""
        assert index > 0, "index 0 is the base model"
        assert index < len(self.arena.host_table), f"index {index} is beyond the tables"
        assert index not in self._residents, f"index {index} is in use"
        assert 0 <= first_unit <= self.num_units - adapter.units, "outside of the buffer"
        start = first_unit * self._unit
        units = self.arena.buffer[start : start + adapter.buffer.numel()]
        arrival = None
        if self._copier is None:
            units.copy_(adapter.buffer)
        else:
            if self._is_follower:
                self._copier.follow_caller()
            arrival = self._copier.begin(units, adapter.buffer)
        self._residents[index] = _Resident(adapter.table, adapter.scales, adapter.buffer.numel(), arrival)
        self._point(index, start)
        self.arena.vocab_sizes[index] = adapter.vocab_size
        write(self.arena.scales[index], adapter.scales)

    def wait_for(self, index: int) -> None:
        """Let the steps from now on wait, on the device, until all of an adapter has arrived."""
        arrival = self._residents[index].arrival
        if arrival is not None and self._copier is not None:
            self._copier.wait_for(arrival)

    def is_loaded(self, index: int) -> bool:
        """Return whether all of an adapter has arrived, so that a step may use it. Raise if it never will."""
        resident = self._residents.get(index)
        if resident is None or resident.arrival is None or resident.arrival.is_there:
            return resident is not None
        assert self._copier is not None
        self._copier.check()
        return False

    def unload(self, index: int) -> None:
        """Free an index that no later step uses. Its row on the device stays, and is never read."""
        self.wait_for(index)  # the next adapter in its place must not meet its last bytes
        del self._residents[index]
        self.arena.host_table[index] = self._nothing
        self.arena.vocab_sizes[index] = self._base_vocab

    def move(self, index: int, source: int, target: int) -> None:
        """Move an adapter to a lower place, which may overlap its old one."""
        self.wait_for(index)
        assert 0 <= target < source, "adapters move down only"
        buffer, count = self.arena.buffer, self._residents[index].num_elements
        old, new = source * self._unit, target * self._unit
        is_far = source - target >= MOVE_UNITS  # so that a piece does not meet itself
        piece = old - new if is_far else MOVE_UNITS * self._unit
        for done in range(0, count, piece):
            stop = min(done + piece, count)
            content = buffer[old + done : old + stop]
            buffer[new + done : new + stop] = content if is_far else self._spare[: stop - done].copy_(content)
        self._point(index, new)

    def _point(self, index: int, start: int) -> None:
        row = self._residents[index].table.clone()
        offsets = row[:, :NUM_OFFSETS]
        offsets.add_(offsets >= 0, alpha=start)
        self.arena.host_table[index] = row
        if self.arena.table is not self.arena.host_table:
            write(self.arena.table[index], row)


def _pin_room(*rows: torch.Tensor) -> None:
    """Let torch pin memory for the rows of loads, which it keeps for them: to pin it then would take long."""
    held = [row.pin_memory() for row in rows for _ in range(PINNED_ROWS)]  # at once, or it would be the same
    del held
