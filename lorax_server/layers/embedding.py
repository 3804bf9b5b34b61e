"""Token embeddings, sharded over the vocabulary."""

from dataclasses import replace

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import make_full_shard, shard_vocab
from lorax_server.kernels import EmbeddingTarget, StoredMatrix
from lorax_server.weights import Weights


class TensorParallelEmbedding(nn.Module):
    """A vocabulary-sharded embedding: each rank looks up its tokens, and an all-reduce combines the results.

    Token IDs must be inside the vocabulary of the base model or of the token's adapter. With several ranks, other IDs
    silently produce zeros.
    """

    def __init__(self, weights: Weights, name: str, vocab_size: int, dim: int, target_name: str | None = None) -> None:
        """Load this rank's shard. `target_name` is the module name in adapters, if it differs from the tensor name."""
        super().__init__()
        self.process_group = weights.process_group
        self.ops = weights.ops
        shard = shard_vocab(self.process_group, vocab_size)
        self.start, self.stop = shard.ranges[0]
        matrix = weights.get_matrix(f"{name}.weight", shard, make_full_shard(dim), min_bits=8)
        self.weight: torch.Tensor | StoredMatrix = matrix
        self.targets: tuple[AdapterTarget, ...] = (
            AdapterTarget(
                target_name or name,
                TargetKind.EMBEDDING,
                shard,
                make_full_shard(dim),
                slice(0, dim),
                self.weight,
                None,
                adds_bias=self.process_group.rank() == 0,
            ),
        )

    def replace_weight(self, weight: torch.Tensor | StoredMatrix) -> None:
        """Replace the loaded matrix with `weight`, for example with the matrix of a tied LM head."""
        self.weight = weight
        self.targets = tuple(replace(target, weight=weight) for target in self.targets)

    def forward(self, input_ids: torch.Tensor, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        is_adapted = adapter_data is not None and self._is_adapted(adapter_data)
        is_single_rank = self.process_group.size() == 1
        if is_single_rank and not is_adapted:
            return self.ops.look_up_rows(self.weight, input_ids)
        rows = self._look_up_local(input_ids)
        if adapter_data is not None and is_adapted:
            self.ops.adapt_embedding(rows, input_ids, adapter_data.lora, self._lora_target(adapter_data))
        return rows if is_single_rank else self.process_group.all_reduce(rows)

    def _look_up_local(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.start == self.stop:  # a small vocabulary can leave ranks without tokens
            shape = (*input_ids.shape, self.weight.shape[1])
            return torch.zeros(shape, dtype=self.weight.dtype, device=self.weight.device)
        is_held = (input_ids >= self.start) & (input_ids < self.stop)
        rows = self.ops.look_up_rows(self.weight, (input_ids - self.start).where(is_held, 0))
        return rows.masked_fill_(~is_held[..., None], 0)

    def _is_adapted(self, adapter_data: AdapterBatchData) -> bool:
        targets = adapter_data.find_targets(self.targets)
        return adapter_data.lora.has_low_rank(targets) or adapter_data.lora.has_rows(targets[0].index)

    def _lora_target(self, adapter_data: AdapterBatchData) -> EmbeddingTarget:
        (target,), (lora_target,) = self.targets, adapter_data.find_targets(self.targets)
        return EmbeddingTarget(lora_target.index, range(self.start, self.stop), target.inputs.full, target.adds_bias)
