"""Store keys and values in blocks, in the cache's dtype. One program stores one token."""

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> None:
    keys, values = cache
    _, num_kv_heads, block_size, head_dim = keys.shape
    stored = batch.slots if batch.stored is None else batch.stored  # not read where it is None
    if not all(x.is_contiguous() for x in (*cache, batch.slots, stored)) or not k.stride(2) == v.stride(2) == 1:
        raise ValueError("write_kv needs caches, slots, and heads of k and v without gaps")
    if not batch.slots.numel():
        return
    # The reference does not divide where nothing is converted.
    is_converted = k.dtype != keys.dtype
    _write_kernel[(batch.slots.shape[0],)](
        k,
        v,
        keys,
        values,
        batch.slots,
        stored,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        spec.k_scale,
        spec.v_scale,
        LIMIT=torch.finfo(keys.dtype).max if is_converted else None,
        HAS_STORED=batch.stored is not None,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(num_kv_heads),
        DIM=triton.next_power_of_2(head_dim),
    )


# The runner's small tensors lie anywhere in a larger one, so their alignment must not choose a kernel.
@triton.jit(do_not_specialize=["slots", "stored"])
def _write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slots: tl.tensor,
    stored: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    LIMIT: tl.constexpr,
    HAS_STORED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    slot = tl.load(slots + index).to(tl.int64)
    token = index.to(tl.int64)
    if HAS_STORED:
        token = tl.load(stored + index).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, DIM)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM) & (slot >= 0)
    places = ((slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dims
    key = tl.load(k + token * k_token + heads * k_head + dims, mask=mask, other=0.0)
    value = tl.load(v + token * v_token + heads * v_head + dims, mask=mask, other=0.0)
    if LIMIT is not None:
        key = _fit(key, k_scale, LIMIT)
        value = _fit(value, v_scale, LIMIT)
    tl.store(k_cache + places, key.to(k_cache.dtype.element_ty), mask=mask)
    tl.store(v_cache + places, value.to(v_cache.dtype.element_ty), mask=mask)


@triton.jit
def _fit(x: tl.tensor, scale: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """Divide by the scale, exactly, and limit to what the cache's dtype can hold. A NaN stays."""
    scaled = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
    return tl.where(scaled > LIMIT, LIMIT, tl.where(scaled < -LIMIT, -LIMIT, scaled))
