"""Batches of sequences in random blocks, and caches whose every other value is a NaN."""

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
    """Give sequences of so many new and cached tokens blocks in random places; return also the number of blocks.

    A sequence of no tokens is padding. Tables are `width` blocks wide at least.
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


def fill(batch: PagedBatch, shape: Sequence[int], dtype: torch.dtype, *, bad: float, seed: int) -> LayerCache:
    """Make caches of random values where the batch has tokens, and of `bad` everywhere else."""
    _, num_kv_heads, block_size, head_dim = shape
    keys, values = (torch.full(tuple(shape), bad) for _ in range(2))
    for row, length in enumerate((batch.input_lengths + batch.cache_lengths).tolist()):
        blocks, offsets = places_of(batch, row, length, block_size)
        for cache, offset in ((keys, 0), (values, 1000)):
            cache[blocks, :, offsets] = normal(length, num_kv_heads, head_dim, seed=seed + row + offset)
    return keys.to(dtype), values.to(dtype)


def places_of(batch: PagedBatch, row: int, length: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of a sequence's first tokens, and their offsets there."""
    positions = torch.arange(length)
    return batch.block_tables[row, positions // block_size].long(), positions % block_size


def attend_plainly(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    """Restate attention in float64, one sequence at a time; all of its tokens are in the cache, on a CPU."""
    block_size = cache[0].shape[2]
    out, start = torch.zeros(q.shape, dtype=torch.float64), 0
    lengths = zip(batch.input_lengths.tolist(), batch.cache_lengths.tolist(), strict=True)
    for row, (new, cached) in enumerate(lengths):
        blocks, offsets = places_of(batch, row, new + cached, block_size)
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
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[start : start + new] = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
        start += new
    return out


def without_bad(cache: LayerCache) -> LayerCache:
    """Return the caches with zeros for NaNs: the reference asks that of its caches."""
    keys, values = (torch.where(x.float().isnan(), 0.0, x.float()).to(x.dtype) for x in cache)
    return keys, values


def move(batch: PagedBatch, device: torch.device) -> PagedBatch:
    """Return the batch on a device, with nothing derived."""
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
    """Compare bits, so that a NaN is equal to itself."""
    assert torch.equal(found.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


BAD = math.nan
