"""LoRA: a long run of one adapter's tokens is multiplied on its own, the short ones all at once.

Whatever mix of adapters and ranks a batch has, its short runs cost two products per target. For that the rows of their
factors are gathered in tiles of equal height: a tile holds some rows of one run's factor, and one that would reach past
its end repeats the last row at weight 0. The tiles of all targets are worked out together, once per batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lorax_server.kernels.ops import Field, LoraBatch, LoraTarget

# Runs of one adapter's tokens from this length on are worth a matrix product of their own.
LONG_RUN = 8
# Height of a tile where ranks differ; where all are equal, a tile is a whole factor.
TILE = 8
# Gathered rows are used while they are still in a core's cache.
PIECE_BYTES = 2 << 20


def add_lora(out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_low_rank(targets):
        return
    runs = lora.once("runs", lambda: _find_runs(lora))
    for run in runs.long:
        for target in targets:
            _add_long(out[run.tokens, target.columns], x[run.tokens], lora.buffer, run, target.index)
    tiles = runs.tiles
    first, last = tiles.bounds[targets[0].index], tiles.bounds[targets[-1].index + 1]
    if first == last:
        return
    inputs = x.index_select(0, tiles.tokens[first:last].flatten()).view(last - first, -1, x.shape[1])
    low_rank = inputs.new_empty(*inputs.shape[:2], tiles.a_rows.shape[1])  # [tiles, tokens, ranks]
    for piece in _pieces(last - first, tiles.a_rows.shape[1] * x.shape[1] * x.itemsize):
        factors = _rows(lora.buffer, tiles.a_rows[first:last][piece], x.shape[1])
        torch.bmm(inputs[piece], factors.transpose(1, 2), out=low_rank[piece])
    low_rank = (low_rank * tiles.weights[first:last]).to(x.dtype)
    for target in targets:
        start, stop = tiles.bounds[target.index], tiles.bounds[target.index + 1]
        if start < stop:
            tokens = None if tiles.is_in_order[target.index] else tiles.tokens[start:stop]
            products = low_rank[start - first : stop - first]
            _expand(out[:, target.columns], products, tokens, lora.buffer, tiles.b_rows[start:stop])


def _expand(
    out: torch.Tensor,
    low_rank: torch.Tensor,
    tokens: torch.Tensor | None,
    buffer: torch.Tensor,
    b_rows: torch.Tensor,
) -> None:
    """Add the tiles' products with B; without `tokens`, the tiles hold the tokens of `out` in order."""
    width = out.shape[1]
    if tokens is None:
        total = out.unflatten(0, (len(b_rows), -1))
    elif out.dtype == torch.float32:
        total = out
    else:  # the sum of several tiles of a token is rounded once, not tile by tile
        total = torch.zeros_like(out, dtype=torch.float32)
    for piece in _pieces(len(b_rows), b_rows.shape[1] * width * out.itemsize):
        factors = _rows(buffer, b_rows[piece], width)
        if tokens is None:
            total[piece].baddbmm_(low_rank[piece], factors)
        else:
            deltas = torch.bmm(low_rank[piece], factors).flatten(0, 1)
            total.index_add_(0, tokens[piece].flatten(), deltas.to(total.dtype))
    if tokens is not None and total is not out:
        out += total.to(out.dtype)


def plan_lora(lora: LoraBatch, current: LoraBatch) -> None:  # noqa: ARG001 - the op table names it
    lora.derived.clear()


def scale_and_shift(out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    if not lora.has_vectors(targets):
        return
    runs = lora.once("runs", lambda: _find_runs(lora))
    for target in targets:
        local = out[:, target.columns]
        width = local.shape[1]
        for field, apply in ((Field.FACTOR, torch.Tensor.mul_), (Field.SHIFT, torch.Tensor.add_)):
            for run in runs.long:
                offset = run.table[target.index][field]
                if offset >= 0:
                    apply(local[run.tokens], lora.buffer[offset : offset + width])
            if target.index in runs.vectors[field]:
                tokens, offsets = runs.vectors[field][target.index]
                vectors = _rows(lora.buffer, offsets, width)
                local.index_copy_(0, tokens, apply(local.index_select(0, tokens), vectors))


@dataclass(frozen=True)
class LongRun:
    tokens: slice
    table: list[list[int]]  # the adapter's fields, by target
    scales: list[float]


@dataclass(frozen=True)
class Tiles:
    """The short runs' factors, all targets one after the other."""

    bounds: list[int]  # target i has tiles bounds[i] to bounds[i + 1]
    tokens: torch.Tensor  # [tiles, run length] the tokens of a tile's run; past its end, its first, at weight 0
    a_rows: torch.Tensor  # [tiles, height] offsets of rows of A
    b_rows: torch.Tensor  # [tiles, height] offsets of rows of B
    weights: torch.Tensor  # [tiles, run length, height] scales and zeros
    is_in_order: list[bool]  # by target: its tiles hold every token of the batch once, one after the other


@dataclass(frozen=True)
class Runs:
    """A batch cut into runs that are multiplied on their own and runs that are gathered."""

    batch: LoraBatch
    long: list[LongRun]
    starts: torch.Tensor  # [short runs] first token
    lengths: torch.Tensor
    adapters: torch.Tensor

    @cached_property
    def table(self) -> torch.Tensor:  # [targets, short runs, fields]
        return self.batch.table[self.adapters].transpose(0, 1)

    @cached_property
    def tiles(self) -> Tiles:
        device, num_runs = self.starts.device, len(self.starts)
        ranks = self.table[..., Field.RANK]
        height = _only_value(ranks) or TILE
        counts = (ranks + height - 1) // height
        # An entry per tile: its target and run, as one number, and its number among the tiles of their factor.
        owners = torch.repeat_interleave(counts.flatten())
        number = torch.arange(len(owners), device=device) - (counts.flatten().cumsum(0) - counts.flatten())[owners]
        target, run = owners // max(num_runs, 1), owners % max(num_runs, 1)
        fields = self.table.flatten(0, 1)[owners]
        row = number[:, None] * height + torch.arange(height, device=device)
        is_row = row < fields[:, Field.RANK, None]
        row = row.minimum(fields[:, Field.RANK, None] - 1)
        position = torch.arange(int(self.lengths.max()) if num_runs else 0, device=device)
        is_token = position < self.lengths[run, None]
        scales = self.batch.scales[self.adapters].t().flatten()[owners]
        widths = self.batch.widths[target]
        # True if the whole batch is short runs of one length.
        is_even = num_runs * len(position) == int(self.lengths.sum()) == self.batch.bounds[-1]
        return Tiles(
            bounds=[0, *counts.sum(1).cumsum(0).tolist()],
            tokens=self.starts[run, None] + position * is_token,
            a_rows=fields[:, Field.A, None] + row * widths[:, :1],
            b_rows=fields[:, Field.B, None] + row * widths[:, 1:],
            weights=is_token[:, :, None] * is_row[:, None, :] * scales[:, None, None],
            is_in_order=[is_even and every for every in (counts == 1).all(1).tolist()],
        )

    @cached_property
    def vectors(self) -> dict[Field, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """By field and target: the tokens of short runs whose adapter has such a vector, and its offset."""
        run_of_token = torch.repeat_interleave(self.lengths)
        firsts = (self.lengths.cumsum(0) - self.lengths)[run_of_token]
        tokens = torch.arange(len(run_of_token), device=firsts.device) - firsts + self.starts[run_of_token]
        vectors: dict[Field, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for field in (Field.FACTOR, Field.SHIFT):
            offsets = self.table[..., field]
            vectors[field] = {}
            for target in (offsets >= 0).any(1).nonzero().flatten().tolist():
                token_offsets = offsets[target, run_of_token]
                has_vector = token_offsets >= 0
                vectors[field][target] = (tokens[has_vector], token_offsets[has_vector])
        return vectors


def _find_runs(batch: LoraBatch) -> Runs:
    device = batch.table.device
    long, short = [], []
    for adapter, start, stop in zip(batch.adapters, batch.bounds, batch.bounds[1:], strict=False):
        if adapter != 0 and stop - start >= LONG_RUN:
            table, scales = batch.host_table[adapter].tolist(), batch.scales[adapter].tolist()
            long.append(LongRun(slice(start, stop), table, scales))
        elif adapter != 0:
            short.append((start, stop - start, adapter))
    starts, lengths, adapters = torch.tensor(short, dtype=torch.long, device=device).view(-1, 3).unbind(1)
    return Runs(batch, long, starts, lengths, adapters)


def _add_long(out: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor, run: LongRun, target: int) -> None:
    fields = run.table[target]
    rank, a, b = fields[Field.RANK], fields[Field.A], fields[Field.B]
    if rank == 0:
        return
    lora_a = buffer[a : a + rank * x.shape[1]].view(rank, x.shape[1])
    lora_b = buffer[b : b + rank * out.shape[1]].view(rank, out.shape[1])
    out.addmm_(x @ lora_a.t(), lora_b, alpha=run.scales[target])


def _only_value(ranks: torch.Tensor) -> int:
    """Return the rank that all factors have, or 0 if they differ."""
    values = ranks[ranks > 0].unique().tolist()
    return values[0] if len(values) == 1 else 0


def _pieces(count: int, size: int) -> Iterator[slice]:
    """Cut `count` items of `size` bytes each into pieces that fit a core's cache."""
    step = max(1, PIECE_BYTES // size)
    return (slice(start, start + step) for start in range(0, count, step))


def _rows(buffer: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
    """Return `[..., width]`, the stretches of a flat buffer that begin at `starts`."""
    windows = buffer.as_strided((buffer.numel() - width + 1, width), (1, 1))
    return windows.index_select(0, starts.flatten()).view(*starts.shape, width)
