"""The adapters of one rank in device memory, at the places that the engine chooses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.kernels import NUM_OFFSETS

# An adapter is moved in pieces of this size, so that moving one over itself needs little room.
MOVE_UNITS = 65536


@dataclass(frozen=True)
class _Resident:
    """A loaded adapter: all but its bytes, which are in the device's buffer."""

    table: torch.Tensor
    scales: torch.Tensor
    num_elements: int
    arrived: torch.cuda.Event | None


class AdapterMemory:
    """One flat buffer for all adapters, counted in units, and the table that says what lies where.

    There is no largest rank and no number of slots: an adapter takes the bytes it has. Index 0 is the base model.

    On a GPU an adapter's bytes are copied on a stream of their own, beside the steps of the model. Everything else (the
    tables, moves) happens on the caller's stream, which must be that of the steps: then a step sees the table as it was
    when the step was submitted, and an index can be used for another adapter at once.
    """

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        dtype: torch.dtype,
        device: torch.device,
        num_units: int,
        num_rows: int = 64,
        is_follower: bool = False,
    ) -> None:
        """The tables have `num_rows` rows, so the highest index is one less: they keep their places on the device.

        The engine hears from the first rank that steps and loads have ended. On all others, the followers, they may
        still be under way. So there a load waits for the steps before it, and a step for the loads it needs.
        """
        self._is_follower = is_follower
        self.num_units = num_units
        self._unit = UNIT_BYTES // dtype.itemsize
        self._nothing = empty_table(len(targets))
        self._base_vocab = next((t.outputs.full for t in targets.values() if t.kind is Kind.HEAD), 0)
        self._residents: dict[int, _Resident] = {}
        table = self._nothing.repeat(num_rows, 1, 1)
        widths = [size for target in targets.values() for size in (target.inputs.size, target.outputs.size)]
        # A kernel may read 16 rows of a factor where it has fewer.
        room = 16 * max(widths, default=0) if device.type == "cuda" else 0
        self.arena = AdapterArena(
            torch.zeros(num_units * self._unit + room, dtype=dtype, device=device),
            table.to(device),
            torch.zeros(num_rows, len(targets), device=device),
            table,
            [self._base_vocab] * num_rows,
            targets,
        )
        self._unordered: set[int] = set()  # indices that the stream of the steps has not waited for
        self._stream: torch.cuda.Stream | None = None  # on a CPU there is nothing to run beside
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def load(self, index: int, adapter: HostAdapter, first_unit: int) -> torch.cuda.Event | None:
        """Begin to copy an adapter in. Return the event of its arrival, or None if it is there.

        No step that is under way may read these units.
        """
        assert index > 0, "index 0 is the base model"
        assert index < len(self.arena.host_table), f"index {index} is beyond the tables"
        assert index not in self._residents, f"index {index} is in use"
        assert 0 <= first_unit <= self.num_units - adapter.units, "outside of the buffer"
        start = first_unit * self._unit
        units = self.arena.buffer[start : start + adapter.buffer.numel()]
        arrived = None
        if self._stream is None:
            units.copy_(adapter.buffer)
        else:
            self._unordered.add(index)
            if self._is_follower:
                self._stream.wait_stream(torch.cuda.current_stream(units.device))
            with torch.cuda.stream(self._stream):
                units.copy_(adapter.buffer, non_blocking=True)
                arrived = self._stream.record_event(torch.cuda.Event(blocking=True))  # a thread that waits sleeps
        self._residents[index] = _Resident(adapter.table, adapter.scales, adapter.buffer.numel(), arrived)
        self._point(index, start)
        self.arena.vocab_sizes[index] = adapter.vocab_size
        _write(self.arena.scales[index], adapter.scales)
        return arrived

    def wait_for(self, index: int) -> None:
        """Let the steps from now on wait, on the device, until all of an adapter has arrived."""
        resident = self._residents[index]
        if resident.arrived is not None and index in self._unordered:
            torch.cuda.current_stream(self.arena.buffer.device).wait_event(resident.arrived)
            self._unordered.remove(index)

    def is_loaded(self, index: int) -> bool:
        """Return whether all of an adapter has arrived, so that a step may use it."""
        resident = self._residents.get(index)
        return resident is not None and (resident.arrived is None or resident.arrived.query())

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
        buffer, piece = self.arena.buffer, MOVE_UNITS * self._unit
        old, new = source * self._unit, target * self._unit
        for done in range(0, self._residents[index].num_elements, piece):
            count = min(piece, self._residents[index].num_elements - done)
            buffer[new + done : new + done + count] = buffer[old + done : old + done + count].clone()
        self._point(index, new)

    def _point(self, index: int, start: int) -> None:
        row = self._residents[index].table.clone()
        offsets = row[:, :NUM_OFFSETS]
        offsets[offsets >= 0] += start
        self.arena.host_table[index] = row
        if self.arena.table is not self.arena.host_table:
            _write(self.arena.table[index], row)


def _write(row: torch.Tensor, values: torch.Tensor) -> None:
    """Write to the device without waiting for it, which takes pinned memory."""
    row.copy_(values.pin_memory() if row.is_cuda else values, non_blocking=row.is_cuda)
