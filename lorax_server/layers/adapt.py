"""The changes that adapters make to the scores of a head: rows of their own, and tokens of their own."""

import torch
import torch.nn.functional as F

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget


def replace_scores(
    logits: torch.Tensor, x: torch.Tensor, target: AdapterTarget, adapter_data: AdapterBatchData
) -> None:
    """Score again, in place, the tokens of this rank for which an adapter has a row of its own."""
    for tokens, _, adapter in adapter_data.runs(target.name):
        if len(adapter.row_ids):
            logits[tokens].index_copy_(1, adapter.row_ids.long(), x[tokens] @ adapter.rows.t())


def resize_scores(
    logits: torch.Tensor, x: torch.Tensor, target: AdapterTarget, adapter_data: AdapterBatchData
) -> torch.Tensor:
    """Widen scores to the largest vocabulary of the batch; tokens that an adapter does not know score -inf."""
    vocab_size, sizes = target.outputs.full, adapter_data.arena.vocab_sizes
    used = [sizes[index] for index in adapter_data.meta.segment_indices]
    if all(size == vocab_size for size in used):
        return logits
    logits = F.pad(logits, (0, max(vocab_size, *used) - vocab_size), value=-torch.inf)
    for tokens, index, adapter in adapter_data.runs(target.name):
        if len(adapter.new_rows):
            logits[tokens, vocab_size : vocab_size + len(adapter.new_rows)] = x[tokens] @ adapter.new_rows.t()
        logits[tokens, sizes[index] :] = -torch.inf
    return logits
