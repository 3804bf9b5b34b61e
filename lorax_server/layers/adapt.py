"""Changes of the scores of a head: the model's own rule, and adapters' rows and tokens of their own."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget


class LogitRule(NamedTuple):
    """A change of all logits: a factor, then a range that they are squeezed into."""

    multiplier: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Change logits in place."""
        if self.multiplier != 1.0:
            logits.mul_(self.multiplier)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


def replace_scores(
    logits: torch.Tensor, x: torch.Tensor, target: AdapterTarget, adapter_data: AdapterBatchData
) -> None:
    """Score again, in place, the tokens of this rank for which an adapter has a row of its own."""
    for tokens, _, adapter in adapter_data.runs(target.name):
        if len(adapter.row_ids):
            ids = adapter.row_ids.long()
            scores = x[tokens] @ adapter.rows.t()
            logits[tokens].index_copy_(1, ids, scores if target.bias is None else scores + target.bias[ids])


def resize_scores(
    logits: torch.Tensor,
    x: torch.Tensor,
    target: AdapterTarget,
    adapter_data: AdapterBatchData,
    rule: LogitRule | None = None,
) -> torch.Tensor:
    """Widen scores to the largest vocabulary of the batch; tokens that an adapter does not know score -inf.

    `rule` has changed the scores already, and changes those of added tokens.
    """
    vocab_size, sizes = target.outputs.full, adapter_data.arena.vocab_sizes
    used = [sizes[index] for index in adapter_data.meta.segment_indices]
    if all(size == vocab_size for size in used):
        return logits
    logits = F.pad(logits, (0, max(vocab_size, *used) - vocab_size), value=-torch.inf)
    for tokens, index, adapter in adapter_data.runs(target.name):
        if len(adapter.new_rows):
            scores = x[tokens] @ adapter.new_rows.t()
            scores = scores if rule is None else rule(scores)
            logits[tokens, vocab_size : vocab_size + len(adapter.new_rows)] = scores
        logits[tokens, sizes[index] :] = -torch.inf
    return logits
