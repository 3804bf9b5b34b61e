"""The adapter of each token of a batch, and the weights of all adapters on the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from lorax_server.adapters.target import AdapterTarget
from lorax_server.kernels import Field, LoraBatch, LoraTarget


def find_segments(adapter_indices: torch.Tensor) -> tuple[list[int], list[int]]:
    """Find runs of one adapter. Return their boundaries, one more than there are runs, and the adapter of each."""
    if adapter_indices.numel() == 0:
        return [0], []
    values, counts = torch.unique_consecutive(adapter_indices, return_counts=True)
    return [0, *counts.cumsum(0).tolist()], values.tolist()


@dataclass(frozen=True)
class AdapterBatchMetadata:
    """The adapter of every token. Index 0 is the base model."""

    adapter_indices: torch.Tensor  # [num_tokens]
    adapter_segments: list[int]
    segment_indices: list[int]

    @classmethod
    def from_indices(cls, adapter_indices: torch.Tensor) -> "AdapterBatchMetadata":
        return cls(adapter_indices, *find_segments(adapter_indices))


@dataclass(frozen=True)
class AdapterArena:
    """Every resident adapter in one flat buffer, each factor at its true rank. Row 0 of the tables is the base model.

    Adapters come and go inside it: the buffer and the tables keep their places.
    """

    buffer: torch.Tensor  # [num_elements] in the model's dtype
    table: torch.Tensor  # [num_adapters, num_targets, len(Field)]
    scales: torch.Tensor  # [num_adapters, num_targets] float32
    host_table: torch.Tensor  # a copy of `table` in the CPU's memory: reading a GPU's would wait for it
    vocab_sizes: list[int]  # by adapter; the base model's unless the adapter changes it
    targets: Mapping[str, AdapterTarget]

    @cached_property
    def lora_targets(self) -> dict[str, LoraTarget]:
        return {name: LoraTarget(i, target.columns) for i, (name, target) in enumerate(self.targets.items())}

    @cached_property
    def widths(self) -> torch.Tensor:
        """Return the inputs and outputs of this rank, [num_targets, 2]."""
        sizes = [(target.inputs.size, target.outputs.size) for target in self.targets.values()]
        return torch.tensor(sizes, device=self.table.device).view(-1, 2)

    def head_rows(self, adapter: int, name: str) -> "HeadRows":
        """Return the rows of its own that one adapter has at the head."""
        target, index = self.targets[name], self.lora_targets[name].index
        fields: list[int] = self.host_table[adapter, index].tolist()
        count, new, size = fields[Field.NUM_ROWS], fields[Field.NUM_NEW_ROWS], target.inputs.size
        return HeadRows(
            self._take(fields[Field.ROW_IDS], count * 4 // self.buffer.itemsize).view(torch.int32),
            self._take(fields[Field.ROWS], count * size).view(count, size),
            self._take(fields[Field.NEW_ROWS], new * size).view(new, size),
        )

    def _take(self, offset: int, count: int) -> torch.Tensor:
        return self.buffer[offset : offset + count] if count else self.buffer[:0]


class HeadRows(NamedTuple):
    """Views of the buffer; empty where the adapter has nothing."""

    row_ids: torch.Tensor  # tokens of this rank's vocabulary that have a row of their own, ascending
    rows: torch.Tensor  # [rows, size]
    new_rows: torch.Tensor  # [new rows, size] tokens that come after the base model's vocabulary


@dataclass(frozen=True)
class AdapterBatchData:
    """The adapter of each token and the weights of all adapters, as the layers get them."""

    meta: AdapterBatchMetadata
    arena: AdapterArena
    in_graph: bool = False  # whether a graph is replayed with other adapters, so that the host knows none of them

    @cached_property
    def lora(self) -> LoraBatch:
        arena, meta = self.arena, self.meta
        return LoraBatch(
            arena.buffer,
            arena.table,
            arena.scales,
            arena.widths,
            meta.adapter_indices.int(),
            arena.host_table,
            meta.adapter_segments,
            meta.segment_indices,
            self.in_graph,
        )

    def find(self, targets: Sequence[AdapterTarget]) -> list[LoraTarget]:
        """Return the positions of a layer's targets in the tables."""
        return [self.arena.lora_targets[target.name] for target in targets]

    def runs(self, name: str) -> Iterator[tuple[slice, int, HeadRows]]:
        """Yield the tokens of each run, their adapter, and its rows at the head."""
        bounds = self.meta.adapter_segments
        for adapter, start, stop in zip(self.meta.segment_indices, bounds, bounds[1:], strict=False):
            if adapter != 0:
                yield slice(start, stop), adapter, self.arena.head_rows(adapter, name)

    def select(self, tokens: torch.Tensor) -> "AdapterBatchData":
        """Return the batch of some of the tokens, as the head needs it."""
        return AdapterBatchData(AdapterBatchMetadata.from_indices(self.meta.adapter_indices[tokens]), self.arena)
