"""Token embeddings, cut by vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.distributed import shard_vocab
from lorax_server.weights import Weights


class TensorParallelEmbedding(nn.Module):
    """Each rank looks up the tokens it holds; the others' rows are zero, and the ranks' rows are summed.

    Ids must be within the vocabulary: over several ranks one outside it is no one's, and would be a row of zeros.
    """

    def __init__(self, weights: Weights, name: str, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.process_group = weights.process_group
        shard = shard_vocab(self.process_group, vocab_size)
        self.start, self.stop = shard.ranges[0]
        self.weight = weights.get_sharded(f"{name}.weight", 0, shard, (vocab_size, dim))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.process_group.size() == 1:
            return F.embedding(input_ids, self.weight)
        mine = (input_ids >= self.start) & (input_ids < self.stop)
        rows = self.weight.new_zeros(*input_ids.shape, self.weight.shape[1])
        rows[mine] = F.embedding(input_ids[mine] - self.start, self.weight)
        return self.process_group.all_reduce(rows)
