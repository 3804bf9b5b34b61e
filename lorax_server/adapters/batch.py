"""Which adapter each token of a batch uses, and where that adapter's weights lie."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lorax_server.kernels import LoraSegments


def find_segments(adapter_indices: torch.Tensor) -> tuple[list[int], list[int]]:
    """Runs of one adapter: their boundaries, one more than there are runs, and the adapter of each."""
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
    """Every resident adapter in one flat buffer, each factor at its true rank. Row 0 of the tables is all zeros."""

    buffer: torch.Tensor  # [num_elements] in the model's dtype
    table: torch.Tensor  # [num_adapters, num_targets, 3]: first element of A, of B, and the rank (0: not adapted)
    scales: torch.Tensor  # [num_adapters, num_targets]
    target_index: Mapping[str, int]  # checkpoint name to column of the tables


@dataclass(frozen=True)
class AdapterBatchData:
    """What the layers are handed: who each token belongs to, and the weights of all."""

    meta: AdapterBatchMetadata
    arena: AdapterArena

    def segments(self, target: str) -> LoraSegments | None:
        """The factors of this batch's tokens at a target; None where no token has any."""
        column = self.arena.target_index.get(target)
        if column is None or not any(self.meta.segment_indices):
            return None
        adapters = torch.tensor(self.meta.segment_indices, device=self.arena.table.device)
        a_offsets, b_offsets, ranks = self.arena.table[adapters, column].unbind(-1)
        if not bool(ranks.any()):
            return None
        return LoraSegments(
            buffer=self.arena.buffer,
            a_offsets=a_offsets,
            b_offsets=b_offsets,
            ranks=ranks,
            scales=self.arena.scales[adapters, column],
            bounds=self.meta.adapter_segments,
        )

    def select(self, tokens: torch.Tensor) -> "AdapterBatchData":
        """The same for some of the tokens, as the head needs it."""
        return AdapterBatchData(AdapterBatchMetadata.from_indices(self.meta.adapter_indices[tokens]), self.arena)
