"""Maps the tokens in a batch to adapters, and stores the weights of all adapters on the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from lorax_server.adapters.target import AdapterTarget
from lorax_server.kernels import Field, LoraBatch, LoraTarget


def find_segments(adapter_indices: torch.Tensor) -> tuple[list[int], list[int]]:
    """Group consecutive tokens by adapter. Return the segment boundaries and the adapter indices."""
    if adapter_indices.numel() == 0:
        return [0], []
    values, counts = torch.unique_consecutive(adapter_indices, return_counts=True)
    return [0, *counts.cumsum(0).tolist()], values.tolist()


@dataclass(frozen=True)
class AdapterBatchMetadata:
    """The adapter index of each token. Index 0 is the base model."""

    adapter_indices: torch.Tensor  # [num_tokens]
    adapter_segments: list[int]
    segment_indices: list[int]

    @classmethod
    def from_indices(cls, adapter_indices: torch.Tensor) -> "AdapterBatchMetadata":
        return cls(adapter_indices, *find_segments(adapter_indices))


@dataclass(frozen=True)
class AdapterArena:
    """The memory for all adapters on the device: one flat buffer without rank padding, and the adapter tables. Table
    row 0 is the base model.

    The buffer and the tables are never reallocated, so recorded graphs stay valid when adapters are loaded or evicted.
    """

    buffer: torch.Tensor  # [num_elements] in the model's dtype
    table: torch.Tensor  # [num_adapters, num_targets, len(Field)]
    scales: torch.Tensor  # [num_adapters, num_targets] float32
    host_table: torch.Tensor  # CPU copy of `table`: reading the device table would synchronize
    vocab_sizes: list[int]  # vocabulary size of each adapter (usually the base model's)
    targets: Mapping[str, AdapterTarget]

    @cached_property
    def lora_targets(self) -> dict[str, LoraTarget]:
        return {name: LoraTarget(i, target.columns) for i, (name, target) in enumerate(self.targets.items())}

    @cached_property
    def features(self) -> torch.Tensor:
        """Return each target's input and output sizes on this rank, `[num_targets, 2]`."""
        sizes = [(target.inputs.size, target.outputs.size) for target in self.targets.values()]
        return torch.tensor(sizes, device=self.table.device).view(-1, 2)

    def head_rows(self, adapter: int, name: str) -> "HeadRows":
        """Return the LM head rows that an adapter replaces or adds. `name` is the module name of the LM head."""
        target, index = self.targets[name], self.lora_targets[name].index
        fields: list[int] = self.host_table[adapter, index].tolist()
        count, new, size = fields[Field.NUM_ROWS], fields[Field.NUM_NEW_ROWS], target.inputs.size
        return HeadRows(
            self._view(fields[Field.ROW_IDS], count * 4 // self.buffer.itemsize).view(torch.int32),
            self._view(fields[Field.ROWS], count * size).view(count, size),
            self._view(fields[Field.NEW_ROWS], new * size).view(new, size),
        )

    def classifier(self, adapter: int, name: str) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the weight and the bias with which an adapter replaces a classification layer, or None."""
        target, index = self.targets[name], self.lora_targets[name].index
        fields: list[int] = self.host_table[adapter, index].tolist()
        count, size = fields[Field.NUM_NEW_ROWS], target.inputs.size
        if not count:
            return None
        bias = None if fields[Field.OUTPUT_BIAS] < 0 else self._view(fields[Field.OUTPUT_BIAS], count)
        return self._view(fields[Field.NEW_ROWS], count * size).view(count, size), bias

    def _view(self, offset: int, count: int) -> torch.Tensor:
        return self.buffer[offset : offset + count] if count else self.buffer[:0]


class HeadRows(NamedTuple):
    """The LM head rows that an adapter replaces or adds, as views into the arena buffer. There may be no rows."""

    row_ids: torch.Tensor  # IDs of replaced tokens, relative to this rank's vocabulary shard, ascending
    rows: torch.Tensor  # [rows, size]
    new_rows: torch.Tensor  # [new rows, size] rows for tokens added after the base model's vocabulary


@dataclass(frozen=True)
class AdapterBatchData:
    """The adapter inputs of the model layers: the adapter of each token, and the arena with the weights of all
    adapters.
    """

    meta: AdapterBatchMetadata
    arena: AdapterArena
    in_graph: bool = False  # a graph is replayed with varying adapters, so segments are unknown on the host

    @cached_property
    def lora(self) -> LoraBatch:
        arena, meta = self.arena, self.meta
        return LoraBatch(
            arena.buffer,
            arena.table,
            arena.scales,
            arena.features,
            meta.adapter_indices.int(),
            arena.host_table,
            meta.adapter_segments,
            meta.segment_indices,
            self.in_graph,
        )

    def find_targets(self, targets: Sequence[AdapterTarget]) -> list[LoraTarget]:
        """Return the adapter table indices and output columns of the given targets."""
        return [self.arena.lora_targets[target.name] for target in targets]

    def iterate_segments(self, name: str) -> Iterator[tuple[slice, int, HeadRows]]:
        """Yield the token slice, adapter index and LM head rows of each segment that uses an adapter."""
        bounds = self.meta.adapter_segments
        for adapter, start, stop in zip(self.meta.segment_indices, bounds, bounds[1:], strict=False):
            if adapter != 0:
                yield slice(start, stop), adapter, self.arena.head_rows(adapter, name)

    def select(self, tokens: torch.Tensor) -> "AdapterBatchData":
        """Return adapter inputs for a subset of the batch's tokens."""
        return AdapterBatchData(AdapterBatchMetadata.from_indices(self.meta.adapter_indices[tokens]), self.arena)
