"""Embeddings: the runs of each adapter's tokens, one after the other."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from lorax_server.kernels.ops import EmbeddingTarget, Field, LoraBatch, LoraTarget
from lorax_server.kernels.panels import PanelMatrix
from lorax_server.kernels.reference.lora import scale_and_shift


def look_up(weight: torch.Tensor | PanelMatrix, ids: torch.Tensor) -> torch.Tensor:
    return weight.look_up(ids) if isinstance(weight, PanelMatrix) else F.embedding(ids, weight)


def adapt_embedding(out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
    width = out.shape[1]
    for tokens, adapter, fields in _runs(lora, target.index):
        local = ids[tokens] - target.vocab.start
        if count := fields[Field.NUM_ROWS]:
            row_ids = _take(lora, fields[Field.ROW_IDS], count * 4 // lora.buffer.itemsize).view(torch.int32)
            rows = _take(lora, fields[Field.ROWS], count * width).view(count, width)
            position = torch.searchsorted(row_ids, local).clamp(max=count - 1)
            has_row = row_ids[position] == local
            out[tokens] = torch.where(has_row[:, None], rows[position], out[tokens])
        rank = fields[Field.RANK]
        if rank and len(target.vocab):  # nothing where a rank has no part of a small vocabulary
            lora_a = _take(lora, fields[Field.A], len(target.vocab) * rank).view(-1, rank)
            lora_b = _take(lora, fields[Field.B], rank * width).view(rank, width)
            held = (local >= 0) & (local < len(target.vocab))
            low_rank = F.embedding(local.where(held, 0), lora_a) * held[:, None]
            out[tokens] += (low_rank * lora.scales[adapter, target.index]).to(out.dtype) @ lora_b
    scale_and_shift(out, lora, [LoraTarget(target.index, slice(0, width))])
    if target.adds_new_rows:  # after factors and shifts, which are not for them
        _set_new_rows(out, ids, lora, target)


def _set_new_rows(out: torch.Tensor, ids: torch.Tensor, lora: LoraBatch, target: EmbeddingTarget) -> None:
    width = out.shape[1]
    for tokens, _, fields in _runs(lora, target.index):
        if count := fields[Field.NUM_NEW_ROWS]:
            rows = _take(lora, fields[Field.NEW_ROWS], count * width).view(count, width)
            new = (ids[tokens] - target.vocab_size).clamp(0, count - 1)
            out[tokens] = torch.where(ids[tokens, None] >= target.vocab_size, rows[new], out[tokens])


def _runs(lora: LoraBatch, index: int) -> Iterator[tuple[slice, int, list[int]]]:
    """Yield the tokens of each run, their adapter, and its fields at a target."""
    for adapter, start, stop in zip(lora.adapters, lora.bounds, lora.bounds[1:], strict=False):
        if adapter != 0:
            yield slice(start, stop), adapter, lora.host_table[adapter, index].tolist()


def _take(lora: LoraBatch, offset: int, count: int) -> torch.Tensor:
    return lora.buffer[offset : offset + count]
