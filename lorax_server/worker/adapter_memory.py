"""The adapters of one rank in device memory: bytes are copied to where the engine says, and the table follows."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.kernels import NUM_OFFSETS

# An adapter is moved in pieces of this size, so that moving one over itself needs little room.
MOVE_UNITS = 65536


class AdapterMemory:
    """One flat buffer for all adapters, counted in units, and the table that says what lies where.

    There is no largest rank and no number of slots: an adapter takes the bytes it has. Index 0 is the base model.
    """

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        dtype: torch.dtype,
        device: torch.device,
        num_units: int,
        num_rows: int = 64,
    ) -> None:
        """`num_rows` is how many rows the tables have at first; they double when an index lies beyond."""
        self.num_units = num_units
        self._unit = UNIT_BYTES // dtype.itemsize
        self._nothing = empty_table(len(targets))
        self._base_vocab = next((t.outputs.full for t in targets.values() if t.kind is Kind.HEAD), 0)
        self._adapters: dict[int, HostAdapter] = {}
        # Loading runs beside the model; on a CPU there is nothing to run beside.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._loads: dict[int, torch.cuda.Event] = {}
        buffer = torch.zeros(num_units * self._unit, dtype=dtype, device=device)
        table = self._nothing.repeat(num_rows, 1, 1)
        self.arena = AdapterArena(
            buffer,
            table.to(device),
            torch.zeros(num_rows, len(targets), device=device),
            table,
            [self._base_vocab] * num_rows,
            targets,
        )

    def load(self, index: int, adapter: HostAdapter, first_unit: int) -> None:
        """Begin to copy an adapter in. No step that is under way may read these units or this index."""
        assert index > 0, "index 0 is the base model"
        assert 0 <= first_unit <= self.num_units - adapter.units, "outside of the buffer"
        self._make_room(index)
        start = first_unit * self._unit
        with self._loading():
            self.arena.buffer[start : start + adapter.buffer.numel()].copy_(adapter.buffer, non_blocking=True)
            self.arena.scales[index].copy_(adapter.scales, non_blocking=True)
            self._point(index, adapter, start)
            if self._stream is not None:
                self._loads[index] = self._stream.record_event()
        self._adapters[index] = adapter

    def is_loaded(self, index: int) -> bool:
        """Whether the copy has arrived, so that a step may use it."""
        load = self._loads.get(index)
        return index in self._adapters and (load is None or load.query())

    def unload(self, index: int) -> None:
        """No step from the next on uses this index. Its row on the device stays, which nobody reads."""
        del self._adapters[index]
        self._loads.pop(index, None)
        self.arena.host_table[index] = self._nothing
        self.arena.vocab_sizes[index] = self._base_vocab

    def move(self, index: int, source: int, target: int) -> None:
        """Move an adapter to a lower place, in order with the steps, possibly over its own old one."""
        assert 0 <= target < source, "adapters move down only"
        adapter, buffer = self._adapters[index], self.arena.buffer
        for done in range(0, adapter.units, MOVE_UNITS):
            count = min(MOVE_UNITS, adapter.units - done) * self._unit
            old, new = (source + done) * self._unit, (target + done) * self._unit
            buffer[new : new + count] = buffer[old : old + count].clone()
        self._point(index, adapter, target * self._unit)

    def _loading(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _point(self, index: int, adapter: HostAdapter, start: int) -> None:
        row = adapter.table.clone()
        offsets = row[:, :NUM_OFFSETS]
        offsets[offsets >= 0] += start
        self.arena.host_table[index] = row
        self.arena.vocab_sizes[index] = adapter.vocab_size
        if self.arena.table is not self.arena.host_table:
            self.arena.table[index] = row.to(self.arena.table.device)

    def _make_room(self, index: int) -> None:
        """More rows, from what the CPU knows: on the device, loads may be on their way into the old ones."""
        old = self.arena
        rows = len(old.host_table)
        if index < rows:
            return
        more = max(index + 1 - rows, rows)
        table = torch.cat([old.host_table, self._nothing.repeat(more, 1, 1)])
        scales = torch.zeros(rows + more, len(old.targets))
        for loaded, adapter in self._adapters.items():
            scales[loaded] = adapter.scales
        self.arena = AdapterArena(
            old.buffer,
            table.to(old.table.device),
            scales.to(old.scales.device),
            table,
            [*old.vocab_sizes, *[self._base_vocab] * more],
            old.targets,
        )
