"""Batches of sequences in random blocks, and caches whose every other value is a NaN."""

import math
from collections.abc import Sequence

import torch

from lorax_server.kernels import LayerCache, PagedBatch

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
        for cache, offset in ((keys, 0), (values, 1000)):
            tokens = normal(length, num_kv_heads, head_dim, seed=seed + row + offset)
            for position in range(length):
                cache[batch.block_tables[row, position // block_size], :, position % block_size] = tokens[position]
    return keys.to(dtype), values.to(dtype)


def without_bad(cache: LayerCache) -> LayerCache:
    """Return the caches with zeros for NaNs: the reference asks that of its caches."""
    keys, values = (torch.where(x.float().isnan(), 0.0, x.float()).to(x.dtype) for x in cache)
    return keys, values


def move(batch: PagedBatch, device: torch.device) -> PagedBatch:
    stored = None if batch.stored is None else batch.stored.to(device)
    return PagedBatch(
        block_tables=batch.block_tables.to(device),
        input_lengths=batch.input_lengths.to(device),
        cache_lengths=batch.cache_lengths.to(device),
        slots=batch.slots.to(device),
        stored=stored,
        cu_seqlens=batch.cu_seqlens,
        host_lengths=batch.host_lengths,
    )


def move_cache(cache: LayerCache, device: torch.device) -> LayerCache:
    return cache[0].to(device), cache[1].to(device)


def check_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits, so that a NaN is equal to itself."""
    assert torch.equal(found.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


BAD = math.nan
