"""KV cache writes: one program stores one token, converted to the cache dtype.

`rotate_and_write` also applies RoPE to queries and keys in the same launch.
"""

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import AttentionSpec, LayerCache, PagedBatch
from lorax_server.kernels.triton.norm import MAX_ROTATED_PAIRS, rotary, rotate


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec) -> None:
    keys, values = cache
    _, num_kv_heads, block_size, head_dim = keys.shape
    stored = batch.slots if batch.stored is None else batch.stored  # unused without `batch.stored`
    if not all(x.is_contiguous() for x in (*cache, batch.slots, stored)) or not k.stride(2) == v.stride(2) == 1:
        raise ValueError("write_kv needs contiguous caches and slots, and unit head strides")
    if not batch.slots.numel():
        return
    # Like the reference, scale only if the dtype changes.
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
        DTYPE_MAX=torch.finfo(keys.dtype).max if is_converted else None,
        HAS_STORED=batch.stored is not None,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(num_kv_heads),
        DIM=triton.next_power_of_2(head_dim),
    )


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    cache: LayerCache,
    batch: PagedBatch,
    spec: AttentionSpec,
) -> None:
    """Apply RoPE to queries and keys in place, and store keys and values in the KV cache, in one launch."""
    if angles is None or not angles[0].shape[-1]:
        return write_kv(k, v, cache, batch, spec)
    if batch.stored is not None:  # slots are not indexed by token
        for x in (q, k):
            rotary(x, *angles)
        return write_kv(k, v, cache, batch, spec)
    cos, sin = angles
    if not all(x.is_contiguous() for x in (*cache, batch.slots)) or not q.stride(2) == k.stride(2) == v.stride(2) == 1:
        raise ValueError("rotate_and_write needs contiguous caches and slots, and unit head strides")
    half = cos.shape[-1]
    if cos.stride() != sin.stride() or (half > 1 and cos.stride(1) != 1) or len(batch.slots) != len(q):
        raise ValueError("rotate_and_write needs contiguous angles, and a slot for each token")
    if not len(q):
        return None
    _, num_kv_heads, block_size, head_dim = cache[0].shape
    block = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(q.shape[1]), max(1, MAX_ROTATED_PAIRS // block))
    groups, kv_groups = triton.cdiv(q.shape[1], heads), triton.cdiv(num_kv_heads, heads)
    _rotate_and_write_kernel[(len(q), groups + kv_groups)](
        *(q, k, v, cos, sin, *cache, batch.slots, q.stride(0), q.stride(1), k.stride(0), k.stride(1)),
        *(v.stride(0), v.stride(1), cos.stride(0), spec.k_scale, spec.v_scale),
        DTYPE_MAX=torch.finfo(cache[0].dtype).max if k.dtype != cache[0].dtype else None,
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=half,
        HEADS=heads,
        GROUPS=groups,
        BLOCK=block,
        UNROTATED=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        DIM=triton.next_power_of_2(head_dim),
    )


# `slots` is a view into a larger tensor: its alignment varies and must not trigger recompilation.
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
    DTYPE_MAX: tl.constexpr,
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
    cache_offsets = ((slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dims
    key = tl.load(k + token * k_token + heads * k_head + dims, mask=mask, other=0.0)
    value = tl.load(v + token * v_token + heads * v_head + dims, mask=mask, other=0.0)
    _store(k_cache + cache_offsets, key, k_scale, mask, DTYPE_MAX)
    _store(v_cache + cache_offsets, value, v_scale, mask, DTYPE_MAX)


@triton.jit(do_not_specialize=["slots"])
def _rotate_and_write_kernel(
    q, k, v, cos, sin, k_cache, v_cache, slots, q_token, q_head, k_token, k_head, v_token, v_head, angle_token, k_scale,
    v_scale, DTYPE_MAX: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    UNROTATED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Rotate one group of query heads, or rotate and store one group of key heads and store their values."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * angle_token
    sin += token * angle_token
    if group < GROUPS:
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        rotate(q + token * q_token + heads * q_head, cos, sin, heads < NUM_HEADS, HALF, BLOCK)
        return
    heads = (group - GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = heads < NUM_KV_HEADS
    slot = tl.load(slots + token).to(tl.int64)
    is_stored = is_head & (slot >= 0)
    cache_offsets = ((slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    keys = k + token * k_token + heads * k_head
    first, second = rotate(keys, cos, sin, is_head, HALF, BLOCK)
    pairs = tl.arange(0, BLOCK)[None, :]
    is_rotated = is_stored & (pairs < HALF)
    _store(k_cache + cache_offsets + pairs, first, k_scale, is_rotated, DTYPE_MAX)
    _store(k_cache + cache_offsets + HALF + pairs, second, k_scale, is_rotated, DTYPE_MAX)
    if HEAD_DIM > 2 * HALF:
        unrotated = 2 * HALF + tl.arange(0, UNROTATED)[None, :]
        mask = is_stored & (unrotated < HEAD_DIM)
        _store(
            k_cache + cache_offsets + unrotated,
            tl.load(keys + unrotated, mask=mask, other=0.0),
            k_scale,
            mask,
            DTYPE_MAX,
        )
    dims = tl.arange(0, DIM)[None, :]
    mask = is_stored & (dims < HEAD_DIM)
    value = tl.load(v + token * v_token + heads * v_head + dims, mask=mask, other=0.0)
    _store(v_cache + cache_offsets + dims, value, v_scale, mask, DTYPE_MAX)


@triton.jit
def _store(pointers: tl.tensor, x: tl.tensor, scale: tl.tensor, mask: tl.tensor, DTYPE_MAX: tl.constexpr) -> None:
    """Store keys or values. `DTYPE_MAX` is the cache dtype's largest finite value, or None if `x` has this dtype."""
    if DTYPE_MAX is not None:
        x = _scale_and_clamp(x, scale, DTYPE_MAX)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _scale_and_clamp(x: tl.tensor, scale: tl.tensor, DTYPE_MAX: tl.constexpr) -> tl.tensor:
    """Return `x / scale`, correctly rounded and clamped to the range of the cache dtype. NaN stays NaN."""
    scaled = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
    return tl.where(scaled > DTYPE_MAX, DTYPE_MAX, tl.where(scaled < -DTYPE_MAX, -DTYPE_MAX, scaled))
