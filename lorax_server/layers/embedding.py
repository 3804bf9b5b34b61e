"""Token embeddings, cut by vocabulary."""

from dataclasses import replace

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, Kind
from lorax_server.distributed import shard_vocab, whole
from lorax_server.kernels import EmbeddingTarget, PanelMatrix
from lorax_server.weights import Weights


class TensorParallelEmbedding(nn.Module):
    """Each rank looks up the tokens it holds; the others' rows are zero, and the ranks' rows are summed.

    Ids must be within the vocabulary, the base model's or that of the token's adapter: over several ranks no rank holds
    one outside of it, and its row would be zeros.
    """

    def __init__(self, weights: Weights, name: str, vocab_size: int, dim: int, target_name: str | None = None) -> None:
        """Adapters call it `target_name`, if not by its tensor's name."""
        super().__init__()
        self.process_group = weights.process_group
        self.ops = weights.ops
        shard = shard_vocab(self.process_group, vocab_size)
        self.start, self.stop = shard.ranges[0]
        self.weight: torch.Tensor | PanelMatrix = weights.get_sharded(f"{name}.weight", 0, shard, (vocab_size, dim))
        self.targets: tuple[AdapterTarget, ...] = (
            AdapterTarget(
                target_name or name,
                Kind.EMBEDDING,
                shard,
                whole(dim),
                slice(0, dim),
                self.weight,
                None,
                adds_once=self.process_group.rank() == 0,
            ),
        )

    def share(self, weight: torch.Tensor | PanelMatrix) -> None:
        """Take the same matrix from a tied head, so that it is held once, as the head needs it."""
        self.weight = weight
        self.targets = tuple(replace(target, weight=weight) for target in self.targets)

    def forward(self, input_ids: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        is_adapted = adapter_data is not None and self._is_adapted(adapter_data)
        is_alone = self.process_group.size() == 1
        if is_alone and not is_adapted:
            return self.ops.look_up(self.weight, input_ids)
        rows = self._held_rows(input_ids)
        if adapter_data is not None and is_adapted:
            self.ops.adapt_embedding(rows, input_ids, adapter_data.lora, self._place(adapter_data))
        return rows if is_alone else self.process_group.all_reduce(rows)

    def _held_rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.start == self.stop:  # no part of a small vocabulary
            shape = (*input_ids.shape, self.weight.shape[1])
            return torch.zeros(shape, dtype=self.weight.dtype, device=self.weight.device)
        is_held = (input_ids >= self.start) & (input_ids < self.stop)
        rows = self.ops.look_up(self.weight, (input_ids - self.start).where(is_held, 0))
        return rows.masked_fill_(~is_held[..., None], 0)

    def _is_adapted(self, adapter_data: AdapterBatchData) -> bool:
        targets = adapter_data.find(self.targets)
        return adapter_data.lora.has_low_rank(targets) or adapter_data.lora.has_rows(targets[0].index)

    def _place(self, adapter_data: AdapterBatchData) -> EmbeddingTarget:
        (target,), (place,) = self.targets, adapter_data.find(self.targets)
        return EmbeddingTarget(place.index, range(self.start, self.stop), target.inputs.full, target.adds_once)
