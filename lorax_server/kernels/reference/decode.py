"""Decode: one query per sequence, over the blocks of its sequence.

Each block of a sequence is attended to on its own, in place where the batch owns most of a stretch of the cache; the
results are then weighed by the softmax mass of their blocks. Nothing is padded to the longest sequence.
"""

from dataclasses import dataclass

import torch

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch
from lorax_server.kernels.reference.cache import dequantize


def decode_attention(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = cache[0].shape[1]
    tiles = batch.once(("decode", spec.window), lambda: _plan_tiles(batch, spec.window, cache[0]))
    # The heads that share a key and value head are rows of one small product.
    grouped = q.float().view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    queries = grouped.expand(len(tiles.rows), -1, -1, -1) if num_seqs == 1 else grouped.index_select(0, tiles.rows)
    k = _read_tiles(cache[0], tiles, spec.k_scale)
    v = _read_tiles(cache[1], tiles, spec.v_scale)
    mask = tiles.mask
    if spec.slopes is not None:
        mask = mask + spec.slopes.view(num_kv_heads, -1, 1) * tiles.distances
    out, mass = _attend_with_mass(queries, k, v, mask, spec)
    out, mass, rows = out.reshape(-1, num_heads, head_dim), mass.reshape(-1, num_heads), tiles.rows
    if tiles.owned is not None:
        out, mass, rows = (x.index_select(0, tiles.owned) for x in (out, mass, rows))
    return _merge_tiles(out, mass, rows, num_seqs).to(q.dtype)


@dataclass(frozen=True)
class _Tiles:
    """The blocks to attend to: a stretch of the cache, or a list of its blocks."""

    rows: torch.Tensor  # [num_tiles] the sequence a tile belongs to
    mask: torch.Tensor  # [num_tiles, 1, 1, block_size] added to the scores
    distances: torch.Tensor  # likewise, of keys from the query that comes after them: not above 0
    blocks: torch.Tensor
    stretch: tuple[int, int] | None = None
    owned: torch.Tensor | None = None  # which tiles of a stretch are this batch's; None for all


def _plan_tiles(batch: PagedBatch, window: int | None, cache: torch.Tensor) -> _Tiles:
    block_size = cache.shape[2]
    lengths = batch.input_lengths + batch.cache_lengths
    first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    start, stop = first // block_size, -(-lengths // block_size)
    counts = stop - start
    rows = torch.repeat_interleave(counts)
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows] + start[rows]
    blocks = batch.block_tables[rows, columns].long()
    positions = columns[:, None] * block_size + torch.arange(block_size, device=rows.device)
    hidden = (positions >= lengths[rows, None]) | (positions < first[rows, None])
    mask = torch.zeros(positions.shape, device=rows.device).masked_fill_(hidden, torch.finfo(torch.float32).min)
    distances = (positions + 1 - lengths[rows, None]).clamp(max=0).to(mask.dtype)
    stretch = _find_stretch(blocks, cache)
    if stretch is None:
        return _Tiles(rows, mask[:, None, None], distances[:, None, None], blocks)
    low, high = stretch
    owned = blocks - low

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(high - low, *x.shape[1:]).index_copy_(0, owned, x)

    is_whole = len(blocks) == high - low
    masks = spread(mask)[:, None, None], spread(distances)[:, None, None]
    return _Tiles(spread(rows), *masks, blocks, stretch, None if is_whole else owned)


def _find_stretch(blocks: torch.Tensor, cache: torch.Tensor) -> tuple[int, int] | None:
    """Find the stretch of the cache that holds these blocks, if at least half of it is theirs and none is shared."""
    if cache.device.type != "cpu" or cache.dtype != torch.float32:
        return None
    low, high = int(blocks.min()), int(blocks.max()) + 1
    if 2 * len(blocks) < high - low or len(blocks.unique()) < len(blocks):
        return None
    return low, high


def _read_tiles(cache: torch.Tensor, tiles: _Tiles, scale: float) -> torch.Tensor:
    if tiles.stretch is not None:
        return cache[slice(*tiles.stretch)]
    return dequantize(cache.index_select(0, tiles.blocks), torch.float32, scale)


def _attend_with_mass(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `[tiles, kv_heads, queries, head_dim]` and the log of its softmax mass, in float32."""
    if q.device.type == "cpu" and spec.soft_cap is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=spec.scale)  # type: ignore[no-any-return]
    scores = score(q, k, spec) + mask
    mass = scores.logsumexp(-1)
    return (scores - mass[..., None]).exp() @ v, mass


def score(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return `[..., queries, keys]`, squeezed by the soft cap where there is one."""
    scores = q @ k.transpose(-1, -2) * spec.scale
    return scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap)


def _merge_tiles(out: torch.Tensor, mass: torch.Tensor, rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """Join the tiles of each sequence: `out` `[tiles, heads, head_dim]`, `mass` `[tiles, heads]`."""
    if num_seqs == 1:
        return (out * mass.softmax(0)[..., None]).sum(0, keepdim=True)
    highest = mass.new_full((num_seqs, mass.shape[1]), torch.finfo(torch.float32).min)
    highest.scatter_reduce_(0, rows[:, None].expand_as(mass), mass, "amax")
    weights = (mass - highest.index_select(0, rows)).exp_()
    total = torch.zeros_like(highest).index_add_(0, rows, weights)
    joined = out.new_zeros(num_seqs, *out.shape[1:])
    joined.index_add_(0, rows, out * weights[..., None])
    return joined / total[..., None]
