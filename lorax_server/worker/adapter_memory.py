"""Manages the device memory for a rank's adapters. The engine decides where each adapter is stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.kernels import NUM_OFFSETS
from lorax_server.kernels.device import allocate_zeros, is_host, write
from lorax_server.worker.copier import Copier, CopyHandle

# Chunk size for overlapping moves, in units. Limits the size of the temporary buffer.
MOVE_UNITS = 65536
PINNED_ROWS = 32  # about the number of adapters that can load while steps are in flight


@dataclass(frozen=True)
class _LoadedAdapter:
    """Metadata of a loaded adapter. The weights are in the device buffer."""

    table: torch.Tensor
    scales: torch.Tensor
    num_elements: int
    copy_handle: CopyHandle | None  # None if the copy was synchronous


class AdapterMemory:
    """A buffer for all adapter weights, divided into units, and a table with the offsets of each adapter's weights.

    Adapters are not padded to a maximum rank. Index 0 is the base model.

    On a GPU, a copier copies weights while steps run. Table updates and moves run on the caller's stream, which must be
    the step stream. Each step therefore reads the table as it was when the step was submitted, and an index can be
    reused immediately. Without a copier (on CPUs), weights are copied synchronously.
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
        """Allocate the buffer, and a table with `num_rows` rows: one row for each adapter index and the base model.

        Only rank 0 reports finished steps and loads to the engine. On the other ranks (`is_follower`), these steps and
        loads may still be running, so loads wait for earlier steps, and steps wait for the loads that they need.
        """
        self._is_follower = is_follower
        self.num_units = num_units
        self._unit = UNIT_BYTES // dtype.itemsize
        self._empty_row = empty_table(len(targets))
        self._base_vocab = next((t.outputs.full for t in targets.values() if t.kind is TargetKind.HEAD), 0)
        self._loaded: dict[int, _LoadedAdapter] = {}
        table = self._empty_row.repeat(num_rows, 1, 1)
        features = [size for target in targets.values() for size in (target.inputs.size, target.outputs.size)]
        # Kernels may read up to 16 rows of a LoRA factor that has fewer rows.
        padding = 0 if is_host(device) else 16 * max(features, default=0)
        self.arena = AdapterArena(
            allocate_zeros([num_units * self._unit + padding], dtype, device),
            table.to(device),
            torch.zeros(num_rows, len(targets), device=device),
            table,
            [self._base_vocab] * num_rows,
            targets,
        )
        self._copier = copier
        if copier is not None:
            copier.wait_for_caller_stream()  # the caller's stream zeroes the buffer
        # Allocated now, because a move during a step must not allocate memory.
        self._spare = torch.empty(min(MOVE_UNITS, num_units) * self._unit, dtype=dtype, device=device)
        if not is_host(device):
            _reserve_pinned_rows(table[0], self.arena.scales[0].cpu())

    def on_loaded(self, notify: Callable[[], None]) -> None:
        """Register a callback. It is called on any thread when an asynchronous load completes."""
        if self._copier is not None:
            self._copier.notify = notify

    def close(self) -> None:
        """Stop the copier."""
        if self._copier is not None:
            self._copier.close()

    def load(self, index: int, adapter: HostAdapter, first_unit: int) -> None:
        """Start copying an adapter to the buffer, at `first_unit`. Steps in flight must not read these units."""
        assert index > 0, "index 0 is the base model"
        assert index < len(self.arena.host_table), f"index {index} is outside the table"
        assert index not in self._loaded, f"index {index} is in use"
        assert 0 <= first_unit <= self.num_units - adapter.units, "units are outside the buffer"
        start = first_unit * self._unit
        units = self.arena.buffer[start : start + adapter.buffer.numel()]
        copy_handle = None
        if self._copier is None:
            units.copy_(adapter.buffer)
        else:
            if self._is_follower:
                self._copier.wait_for_caller_stream()
            copy_handle = self._copier.start(units, adapter.buffer)
        self._loaded[index] = _LoadedAdapter(adapter.table, adapter.scales, adapter.buffer.numel(), copy_handle)
        self._write_table_row(index, start)
        self.arena.vocab_sizes[index] = adapter.vocab_size
        write(self.arena.scales[index], adapter.scales)

    def wait_for(self, index: int) -> None:
        """Make later steps wait, on the device, until the adapter is loaded."""
        copy_handle = self._loaded[index].copy_handle
        if copy_handle is not None and self._copier is not None:
            self._copier.wait_for(copy_handle)

    def is_loaded(self, index: int) -> bool:
        """Return True if the adapter is loaded. Raise EngineError if the copier has failed."""
        resident = self._loaded.get(index)
        if resident is None or resident.copy_handle is None or resident.copy_handle.is_done:
            return resident is not None
        assert self._copier is not None
        self._copier.check()
        return False

    def unload(self, index: int) -> None:
        """Free an adapter index. No later step may use it, because the table on the device keeps the old values."""
        self.wait_for(index)  # the pending copy must not overwrite the next adapter
        del self._loaded[index]
        self.arena.host_table[index] = self._empty_row
        self.arena.vocab_sizes[index] = self._base_vocab

    def move(self, index: int, source: int, target: int) -> None:
        """Move an adapter from unit `source` down to unit `target`. The two ranges may overlap."""
        self.wait_for(index)
        assert 0 <= target < source, "adapters can only move to lower units"
        buffer, count = self.arena.buffer, self._loaded[index].num_elements
        old, new = source * self._unit, target * self._unit
        is_far = source - target >= MOVE_UNITS  # no chunk overlaps its target
        piece = old - new if is_far else MOVE_UNITS * self._unit
        for done in range(0, count, piece):
            stop = min(done + piece, count)
            content = buffer[old + done : old + stop]
            buffer[new + done : new + stop] = content if is_far else self._spare[: stop - done].copy_(content)
        self._write_table_row(index, new)

    def _write_table_row(self, index: int, start: int) -> None:
        row = self._loaded[index].table.clone()
        offsets = row[:, :NUM_OFFSETS]
        offsets.add_(offsets >= 0, alpha=start)
        self.arena.host_table[index] = row
        if self.arena.table is not self.arena.host_table:
            write(self.arena.table[index], row)


def _reserve_pinned_rows(*rows: torch.Tensor) -> None:
    """Fill torch's cache of pinned memory with table rows, because pinning memory during a load is slow."""
    held = [row.pin_memory() for row in rows for _ in range(PINNED_ROWS)]  # all alive, so that memory is not reused
    del held
