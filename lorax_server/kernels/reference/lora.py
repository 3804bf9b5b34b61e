"""LoRA: tokens of one adapter in a run are multiplied together, scattered ones row by row of their factors."""

from dataclasses import dataclass

import torch

from lorax_server.kernels.ops import LoraSegments

# Runs of one adapter's tokens from this length on are worth a matrix product of their own.
LONG_SEGMENT = 8


def lora_shrink(x: torch.Tensor, segments: LoraSegments) -> torch.Tensor:
    width = x.shape[1]
    ranks, offsets = segments.ranks.tolist(), segments.a_offsets.tolist()
    low_rank = x.new_zeros(x.shape[0], max(ranks, default=0))
    for index, start, stop in _long_segments(segments):
        factor = segments.buffer[offsets[index] :][: ranks[index] * width].view(ranks[index], width)
        low_rank[start:stop, : ranks[index]] = x[start:stop] @ factor.t()
    short = _short_rows(segments)
    if short is not None:
        rows = _rows_at(segments.buffer, segments.a_offsets[short.segments] + short.columns * width, width)
        low_rank[short.tokens, short.columns] = (rows * x[short.tokens]).sum(-1)
    return low_rank


def lora_expand(low_rank: torch.Tensor, segments: LoraSegments, out: torch.Tensor) -> None:
    width = out.shape[1]
    ranks, offsets, scales = segments.ranks.tolist(), segments.b_offsets.tolist(), segments.scales.tolist()
    for index, start, stop in _long_segments(segments):
        factor = segments.buffer[offsets[index] :][: ranks[index] * width].view(ranks[index], width)
        out[start:stop] += (low_rank[start:stop, : ranks[index]] @ factor) * scales[index]
    short = _short_rows(segments)
    if short is not None:
        rows = _rows_at(segments.buffer, segments.b_offsets[short.segments] + short.columns * width, width)
        weights = low_rank[short.tokens, short.columns] * segments.scales[short.segments].to(low_rank.dtype)
        out.index_add_(0, short.tokens, rows * weights[:, None])


@dataclass(frozen=True)
class _ShortRows:
    """One entry for each rank of each token of the short segments."""

    segments: torch.Tensor
    tokens: torch.Tensor
    columns: torch.Tensor  # which rank


def _long_segments(segments: LoraSegments) -> list[tuple[int, int, int]]:
    bounds, ranks = segments.bounds, segments.ranks.tolist()
    return [
        (index, bounds[index], bounds[index + 1])
        for index, rank in enumerate(ranks)
        if rank and bounds[index + 1] - bounds[index] >= LONG_SEGMENT
    ]


def _short_rows(segments: LoraSegments) -> _ShortRows | None:
    device = segments.ranks.device
    bounds = torch.tensor(segments.bounds, device=device)
    lengths = bounds.diff()
    lengths = torch.where(lengths < LONG_SEGMENT, lengths, 0)
    segment_of_token = torch.repeat_interleave(lengths)
    tokens = torch.arange(len(segment_of_token), device=device) - (lengths.cumsum(0) - lengths)[segment_of_token]
    tokens = tokens + bounds[segment_of_token]
    counts = segments.ranks[segment_of_token]
    entry = torch.repeat_interleave(counts)
    if len(entry) == 0:
        return None
    columns = torch.arange(len(entry), device=device) - (counts.cumsum(0) - counts)[entry]
    return _ShortRows(segment_of_token[entry], tokens[entry], columns)


def _rows_at(buffer: torch.Tensor, offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of `width` elements that begin anywhere in a flat buffer."""
    windows = buffer.as_strided((buffer.numel() - width + 1, width), (1, 1))
    return windows.index_select(0, offsets)
