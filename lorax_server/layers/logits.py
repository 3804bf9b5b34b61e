"""Post-processes the logits of the LM head: applies the model's multiplier and soft cap, LM head rows that adapters
replace, and tokens that adapters add.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget


class LogitTransform(NamedTuple):
    """The multiplier and the soft cap that a model applies to all logits, in this order."""

    multiplier: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the multiplier and the soft cap to the logits in place, and return the logits."""
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


def replace_row_logits(
    logits: torch.Tensor, x: torch.Tensor, target: AdapterTarget, adapter_data: AdapterBatchData
) -> None:
    """Recompute this rank's logits in place for tokens whose LM head rows are replaced by an adapter."""
    for tokens, _, adapter in adapter_data.iterate_segments(target.name):
        if len(adapter.row_ids):
            ids = adapter.row_ids.long()
            scores = x[tokens] @ adapter.rows.t()
            logits[tokens].index_copy_(1, ids, scores if target.bias is None else scores + target.bias[ids])


def resize_logits(
    logits: torch.Tensor,
    x: torch.Tensor,
    target: AdapterTarget,
    adapter_data: AdapterBatchData,
    transform: LogitTransform | None = None,
) -> torch.Tensor:
    """Return logits padded to the largest vocabulary in the batch. Tokens outside an adapter's vocabulary are -inf.

    The caller has already applied `transform` to the base vocabulary. This function applies it to added tokens.
    """
    vocab_size, sizes = target.outputs.full, adapter_data.arena.vocab_sizes
    used = [sizes[index] for index in adapter_data.meta.segment_indices]
    if all(size == vocab_size for size in used):
        return logits
    logits = F.pad(logits, (0, max(vocab_size, *used) - vocab_size), value=-torch.inf)
    for tokens, index, adapter in adapter_data.iterate_segments(target.name):
        if len(adapter.new_rows):
            scores = x[tokens] @ adapter.new_rows.t()
            scores = scores if transform is None else transform(scores)
            logits[tokens, vocab_size : vocab_size + len(adapter.new_rows)] = scores
        logits[tokens, sizes[index] :] = -torch.inf
    return logits
