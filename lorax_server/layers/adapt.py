"""The changes that adapters make to the output of a layer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.adapters.target import AdapterTarget
from lorax_server.kernels import Ops


def adapt(
    out: torch.Tensor,
    x: torch.Tensor | None,
    targets: Sequence[AdapterTarget],
    adapter_data: AdapterBatchData | None,
    ops: Ops,
) -> None:
    """Change, in place, the output that a layer computed from `x`; without `x`, by factors and shifts alone."""
    if adapter_data is None:
        return
    lora_targets = adapter_data.find(targets)
    if x is not None and adapter_data.has_low_rank(lora_targets):
        ops.add_lora(out, x, adapter_data.lora, lora_targets)
    if adapter_data.has_vectors(lora_targets):
        ops.scale_and_shift(out, adapter_data.lora, lora_targets)


def adapt_embedding(
    out: torch.Tensor,
    ids: torch.Tensor,
    target: AdapterTarget,
    adapter_data: AdapterBatchData,
    ops: Ops,
) -> None:
    """Change, in place, the rows looked up for `ids`. Rows of other ranks are zero."""
    (vocab_start, vocab_stop), vocab_size = target.inputs.ranges[0], target.inputs.full
    local = ids - vocab_start
    held = (ids >= vocab_start) & (ids < vocab_stop)
    new_rows = []
    for tokens, _, adapter in adapter_data.runs(target.name):
        if len(adapter.row_ids):
            position = torch.searchsorted(adapter.row_ids, local[tokens]).clamp(max=len(adapter.row_ids) - 1)
            has_row = adapter.row_ids[position] == local[tokens]
            out[tokens] = torch.where(has_row[:, None], adapter.rows[position], out[tokens])
        if adapter.lora_a.numel():  # none where a rank has no part of a small vocabulary
            lora_a = adapter.lora_a.view(-1, len(adapter.lora_b))
            low_rank = F.embedding(local[tokens].where(held[tokens], 0), lora_a) * held[tokens, None]
            out[tokens] += (low_rank * adapter.scale[None]).to(out.dtype) @ adapter.lora_b
        if len(adapter.new_rows) and target.adds_once:
            new_rows.append((tokens, adapter.new_rows))
    adapt(out, None, [target], adapter_data, ops)
    for tokens, rows in new_rows:  # after factors and shifts, which are not for them
        new = (ids[tokens] - vocab_size).clamp(0, len(rows) - 1)
        out[tokens] = torch.where(ids[tokens, None] >= vocab_size, rows[new], out[tokens])


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
