"""Attention over the paged cache, one sequence after the other, in float32."""

import torch

from lorax_server.kernels.ops import AttentionSpec, CosSin, LayerCache, PagedBatch

MAX_SCORES = 2**27  # of one product: a long prompt attends in pieces, whose scores fit in memory


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: CosSin | None,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> torch.Tensor:
    if angles is not None:
        rotary(q, *angles)
        rotary(k, *angles)
    write_kv(k, v, cache, batch, spec)
    if batch.cu_seqlens is None:
        return decode_attention(q, cache, batch, spec)
    return prefill_attention(q, k, v, cache, batch, spec)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate, in place, the first n dimensions of each head of `[num_tokens, heads, head_dim]`.

    The angles are `[num_tokens, n / 2]`; dimension i turns with dimension i + n / 2.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    rotated = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> None:
    """Store this forward's keys and values in their slots, in the cache's dtype."""
    tokens = (batch.slots >= 0).nonzero()[:, 0]
    slots, block_size = batch.slots[tokens], cache[0].shape[2]
    if batch.stored is not None:
        tokens = batch.stored[tokens]
    for new, blocks, scale in ((k, cache[0], spec.k_scale), (v, cache[1], spec.v_scale)):
        blocks[slots // block_size, :, slots % block_size] = _quantize(new[tokens], blocks.dtype, scale)


def decode_attention(q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> torch.Tensor:
    """Attend from one token per sequence, whose key and value are in the cache, to its sequence."""
    out = torch.zeros_like(q)
    for row, (new, cached) in enumerate(zip(*batch.read_lengths(), strict=True)):
        if new:
            out[row : row + 1] = _attend(q[row : row + 1], *_read(cache, batch, row, new + cached, spec), spec)
    return out


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
) -> torch.Tensor:
    """Attend causally from any number of tokens per sequence to the cached tokens and to each other."""
    out, stop = torch.zeros_like(q), 0
    for row, (new, cached) in enumerate(zip(*batch.read_lengths(), strict=True)):
        tokens = slice(stop, stop + new)
        stop += new
        if new:
            keys, values = _read(cache, batch, row, cached, spec)
            keys = torch.cat([keys, _round(k[tokens], cache[0].dtype, spec.k_scale)])
            values = torch.cat([values, _round(v[tokens], cache[1].dtype, spec.v_scale)])
            out[tokens] = _attend(q[tokens], keys, values, spec)
    return out


def score(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return `[..., queries, keys]`, squeezed by the soft cap where there is one."""
    scores = q @ k.transpose(-1, -2) * spec.scale
    return scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Attend from the last tokens of a sequence to all of it, each `[tokens, heads, head_dim]`."""
    num_keys, num_heads = len(keys), q.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(num_heads // x.shape[1], dim=0) for x in (keys, values))
    positions = torch.arange(num_keys, device=q.device)
    count = max(1, MAX_SCORES // (num_heads * num_keys))
    pieces = []
    for queries, at in zip(q.split(count), positions[num_keys - len(q) :].split(count), strict=True):
        scores = score(queries.float().transpose(0, 1), keys, spec)  # [heads, queries, keys]
        distances = positions - at[:, None]
        if spec.slopes is not None:
            scores += spec.slopes[:, None, None] * distances
        scores.masked_fill_((distances > 0) | (distances <= -spec.reach), -torch.inf)
        pieces.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(pieces).to(q.dtype)


def _read(
    cache: LayerCache, batch: PagedBatch, row: int, length: int, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence's first keys and values, `[length, kv_heads, head_dim]` float32."""
    blocks = batch.block_tables[row, : -(-length // cache[0].shape[2])].long()
    keys, values = (x[blocks].transpose(1, 2).flatten(0, 1)[:length] for x in cache)
    return _dequantize(keys, spec.k_scale), _dequantize(values, spec.v_scale)


def _round(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Round as the cache does, so that a token looks the same in the forward that writes it and in later ones."""
    return _dequantize(_quantize(x, dtype, scale), scale)


def _quantize(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Convert to the dtype of a cache."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _dequantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Convert from the dtype of a cache to float32; only float8 is scaled."""
    return x.float() * scale if x.dtype.itemsize == 1 else x.float()
