"""Paged batches with random blocks, and caches with NaN in unused slots."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from lorax_server.kernels import AttentionSpec, LayerCache, PagedBatch

FP8 = torch.float8_e4m3fn


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def make_batch(
    shapes: Sequence[tuple[int, int]], block_size: int, *, width: int = 0, seed: int = 0, spare: int = 3
) -> tuple[PagedBatch, int]:
    """Make a batch with random block tables, and return it with the number of blocks.

    Sequences without tokens are padding. Block tables have at least `width` columns.
    """
    counts = [-(-(new + cached) // block_size) for new, cached in shapes]
    num_blocks = sum(counts) + spare
    places = iter((torch.randperm(num_blocks - 1, generator=generator(seed)) + 1).tolist())
    tables = torch.zeros(len(shapes), max(width, *counts, 1), dtype=torch.int32)
    slots = []
    for row, (new, cached) in enumerate(shapes):
        tables[row, : counts[row]] = torch.tensor([next(places) for _ in range(counts[row])])
        for position in range(cached, cached + new):
            slots.append(int(tables[row, position // block_size]) * block_size + position % block_size)
        if not new + cached:
            slots.append(-1)
    new_lengths, cached_lengths = (torch.tensor(lengths) for lengths in zip(*shapes, strict=True))
    return PagedBatch(tables, new_lengths, cached_lengths, torch.tensor(slots)), num_blocks


def fill_cache(batch: PagedBatch, shape: Sequence[int], dtype: torch.dtype, *, stale: float, seed: int) -> LayerCache:
    """Make caches with random values for the batch's tokens and `stale` in all other slots."""
    _, num_kv_heads, block_size, head_dim = shape
    keys, values = (torch.full(tuple(shape), stale) for _ in range(2))
    for row, length in enumerate((batch.input_lengths + batch.cache_lengths).tolist()):
        blocks, offsets = block_offsets(batch, row, length, block_size)
        for cache, offset in ((keys, 0), (values, 1000)):
            cache[blocks, :, offsets] = normal(length, num_kv_heads, head_dim, seed=seed + row + offset)
    return keys.to(dtype), values.to(dtype)


def block_offsets(batch: PagedBatch, row: int, length: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks and in-block offsets of a sequence's first `length` tokens."""
    positions = torch.arange(length)
    return batch.block_tables[row, positions // block_size].long(), positions % block_size


def attend_in_float64(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    """Compute attention in float64, sequence by sequence. The cache contains all tokens and is on a CPU."""
    block_size = cache[0].shape[2]
    out, start = torch.zeros(q.shape, dtype=torch.float64), 0
    lengths = zip(batch.input_lengths.tolist(), batch.cache_lengths.tolist(), strict=True)
    for row, (new, cached) in enumerate(lengths):
        blocks, offsets = block_offsets(batch, row, new + cached, block_size)
        keys, values = (x[blocks, :, offsets].double() for x in cache)
        if cache[0].dtype == FP8:
            keys, values = keys * spec.k_scale, values * spec.v_scale
        grouped = q[start : start + new].double().unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        behind = torch.arange(cached, cached + new)[:, None] - torch.arange(cached + new)[None]
        if spec.slopes is not None:
            scores = scores - spec.slopes.cpu().double().view(keys.shape[1], -1, 1, 1) * behind
        hidden = (behind < 0) | (behind >= (spec.window or cached + new))
        scores = scores.masked_fill(hidden, -math.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.cpu().double().view(keys.shape[1], -1, 1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : new + cached]
        out[start : start + new] = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
        start += new
    return out


def nan_to_zero(cache: LayerCache) -> LayerCache:
    """Replace NaN by zero, because the reference requires finite caches."""
    keys, values = (torch.where(x.float().isnan(), 0.0, x.float()).to(x.dtype) for x in cache)
    return keys, values


def move(batch: PagedBatch, device: torch.device) -> PagedBatch:
    """Return the batch on a device, without derived values."""
    return replace(
        batch,
        block_tables=batch.block_tables.to(device),
        input_lengths=batch.input_lengths.to(device),
        cache_lengths=batch.cache_lengths.to(device),
        slots=batch.slots.to(device),
        stored=None if batch.stored is None else batch.stored.to(device),
        cu_seqlens=None if batch.cu_seqlens is None else batch.cu_seqlens.to(device),
        derived={},
    )


def move_cache(cache: LayerCache, device: torch.device) -> LayerCache:
    return cache[0].to(device), cache[1].to(device)


def check_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits, so NaN equals NaN."""
    assert torch.equal(found.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


STALE_VALUE = math.nan
