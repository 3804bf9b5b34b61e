"""Store keys and values in blocks, in the cache's dtype."""

from dataclasses import dataclass

import torch

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> None:
    shape = cache[0].shape
    writes = batch.once("writes", lambda: plan_writes(batch, shape[2]))
    for new, blocks, scale in ((k, cache[0], spec.k_scale), (v, cache[1], spec.v_scale)):
        # Attention hides what lies past a sequence's end by a weight of 0, and 0 times a NaN that the block's last
        # owner left behind would be a NaN.
        if len(writes.fresh):
            blocks[writes.fresh] = 0
        stored = quantize(new if writes.tokens is None else new[writes.tokens], blocks.dtype, scale)
        if blocks.dtype.itemsize == 1:  # float8 lacks index_copy_ on a CPU
            blocks[writes.blocks, :, writes.offsets] = stored
        else:
            rows = batch.once("rows", lambda: _find_rows(writes, shape))
            blocks.view(-1, shape[3]).index_copy_(0, rows, stored.reshape(-1, shape[3]))


@dataclass(frozen=True)
class Writes:
    """The tokens of a forward that are stored, and their places."""

    tokens: torch.Tensor | None  # None for all
    blocks: torch.Tensor  # [num_stored]
    offsets: torch.Tensor  # [num_stored]
    fresh: torch.Tensor  # the blocks among them that held nothing of their sequence before


def plan_writes(batch: PagedBatch, block_size: int) -> Writes:
    tokens, slots = batch.stored, batch.slots
    has_slot = slots >= 0
    if not bool(has_slot.all()):
        tokens = has_slot.nonzero()[:, 0] if tokens is None else tokens[has_slot]
        slots = slots[has_slot]
    blocks = slots // block_size
    rows = torch.repeat_interleave(batch.input_lengths)
    starts = batch.input_lengths.cumsum(0) - batch.input_lengths
    cached = batch.cache_lengths[rows]
    positions = cached + torch.arange(len(rows), device=rows.device) - starts[rows]
    if tokens is not None:
        cached, positions = cached[tokens], positions[tokens]
    fresh = blocks[positions // block_size * block_size >= cached]
    if len(fresh) > 1:
        fresh = fresh.unique()
    return Writes(tokens, blocks, slots % block_size, fresh)


def _find_rows(writes: Writes, shape: torch.Size) -> torch.Tensor:
    """Return the places of each head of each stored token in a cache seen as rows of `head_dim`."""
    heads = torch.arange(shape[1], device=writes.blocks.device)
    return ((writes.blocks[:, None] * shape[1] + heads) * shape[2] + writes.offsets[:, None]).flatten()


def quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert to the dtype of a cache."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def dequantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert from the dtype of a cache; only float8 is scaled."""
    return (x.float() * scale).to(dtype) if x.dtype.itemsize == 1 else x.to(dtype)
