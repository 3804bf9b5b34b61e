"""Keys and values in blocks: storing them, and the numbers they are stored as."""

from dataclasses import dataclass

import torch

from lorax_server.kernels.ops import AttentionSpec, PagedBatch


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> None:
    writes = batch.once("writes", lambda: plan_writes(batch, k_cache.shape[2]))
    for new, cache, scale in ((k, k_cache, spec.k_scale), (v, v_cache, spec.v_scale)):
        # Attention hides what lies past a sequence's end by a weight of 0, and 0 times a NaN that the block's last
        # owner left behind would be a NaN.
        if len(writes.fresh):
            cache[writes.fresh] = 0
        kept = new if writes.tokens is None else new[writes.tokens]
        stored = quantize(kept, cache.dtype, scale)
        if cache.dtype.itemsize == 1:  # float8 lacks index_copy_ on a CPU
            cache[writes.blocks, :, writes.offsets] = stored
        else:
            rows = batch.once("rows", lambda: _rows(writes, k_cache.shape))
            cache.view(-1, cache.shape[3]).index_copy_(0, rows, stored.reshape(-1, cache.shape[3]))


@dataclass(frozen=True)
class Writes:
    """Which tokens of a forward are stored, and where."""

    tokens: torch.Tensor | None  # None for all
    blocks: torch.Tensor  # [number stored]
    offsets: torch.Tensor  # [number stored]
    fresh: torch.Tensor  # the blocks among them that held nothing of their sequence before


def plan_writes(batch: PagedBatch, block_size: int) -> Writes:
    """A slot of -1 stores nothing."""
    tokens, slots = batch.written, batch.slots
    stored = slots >= 0
    if not bool(stored.all()):
        tokens = stored.nonzero()[:, 0] if tokens is None else tokens[stored]
        slots = slots[stored]
    blocks = slots // block_size
    rows = torch.repeat_interleave(batch.input_lengths)
    starts = batch.input_lengths.cumsum(0) - batch.input_lengths
    cached = batch.cache_lengths[rows]
    positions = cached + torch.arange(len(rows), device=rows.device) - starts[rows]
    if tokens is not None:
        cached, positions = cached[tokens], positions[tokens]
    begun = positions // block_size * block_size
    fresh = blocks[begun >= cached]
    if len(fresh) > 1:
        fresh = fresh.unique()
    return Writes(tokens, blocks, slots % block_size, fresh)


def _rows(writes: Writes, shape: torch.Size) -> torch.Tensor:
    """Where each head of each stored token lies in a cache seen as rows of `head_dim`."""
    heads = torch.arange(shape[1], device=writes.blocks.device)
    return ((writes.blocks[:, None] * shape[1] + heads) * shape[2] + writes.offsets[:, None]).flatten()


def quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """As it is stored in a cache of `dtype`."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def dequantize(x: torch.Tensor, stored_as: torch.dtype, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Back from a cache of another type than the model's, or only widened."""
    return (x.float() * scale).to(dtype) if stored_as.itemsize == 1 else x.to(dtype)
