"""Adapters at linears, norms and embeddings: the runs of each adapter's tokens, one after the other."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import EmbeddingTarget, Field, LoraBatch, LoraTarget


def add_lora(out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_low_rank(targets):
        return
    for target in targets:
        for tokens, adapter, fields in _find_runs(lora, target.index):
            if rank := fields[Field.RANK]:
                local = out[tokens, target.columns]
                lora_a, lora_b = (
                    _read(lora, fields[field], rank, width)
                    for field, width in ((Field.A, x.shape[1]), (Field.B, local.shape[1]))
                )
                low_rank = x[tokens] @ lora_a.t() * lora.scales[adapter, target.index]
                local += low_rank.to(x.dtype) @ lora_b


def scale_and_shift(out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_vectors(targets):
        return
    for target in targets:
        for tokens, _, fields in _find_runs(lora, target.index):
            local = out[tokens, target.columns]
            if fields[Field.FACTOR] >= 0:
                local *= _read(lora, fields[Field.FACTOR], 1, local.shape[1])
            if fields[Field.SHIFT] >= 0:
                local += _read(lora, fields[Field.SHIFT], 1, local.shape[1])


def adapt_embedding(out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
    width, num_held = out.shape[1], len(target.vocab)
    for tokens, adapter, fields in _find_runs(lora, target.index):
        local = ids[tokens] - target.vocab.start
        if count := fields[Field.NUM_ROWS]:
            row_ids = _read(lora, fields[Field.ROW_IDS], 1, count * 4 // lora.buffer.itemsize)[0].view(torch.int32)
            position = torch.searchsorted(row_ids, local).clamp(max=count - 1)
            has_row = row_ids[position] == local
            rows = _read(lora, fields[Field.ROWS], count, width)
            out[tokens] = torch.where(has_row[:, None], rows[position], out[tokens])
        rank = fields[Field.RANK]
        if rank and num_held:  # nothing where a rank has no part of a small vocabulary
            held = (local >= 0) & (local < num_held)
            low_rank = F.embedding(local.where(held, 0), _read(lora, fields[Field.A], num_held, rank)) * held[:, None]
            low_rank = (low_rank * lora.scales[adapter, target.index]).to(out.dtype)
            out[tokens] += low_rank @ _read(lora, fields[Field.B], rank, width)
    scale_and_shift(out, lora, [LoraTarget(target.index, slice(0, width))])
    for tokens, _, fields in _find_runs(lora, target.index) if target.adds_new_rows else ():
        if count := fields[Field.NUM_NEW_ROWS]:  # after factors and shifts, which are not for them
            new = (ids[tokens] - target.vocab_size).clamp(0, count - 1)
            rows = _read(lora, fields[Field.NEW_ROWS], count, width)
            out[tokens] = torch.where(ids[tokens, None] >= target.vocab_size, rows[new], out[tokens])


def plan_lora(lora: LoraBatch, current: LoraBatch) -> None:  # noqa: ARG001 - the op table names it
    lora.derived.clear()


def _find_runs(lora: LoraBatch, index: int) -> Iterator[tuple[slice, int, list[int]]]:
    """Yield the tokens of each run, their adapter, and its fields at a target."""
    for adapter, start, stop in zip(lora.adapters, lora.bounds, lora.bounds[1:], strict=False):
        if adapter != 0:
            yield slice(start, stop), adapter, lora.host_table[adapter, index].tolist()


def _read(lora: LoraBatch, offset: int, rows: int, width: int) -> torch.Tensor:
    """Return a matrix of the adapters' buffer."""
    return lora.buffer[offset : offset + rows * width].view(rows, width)
