"""Norm and rotation. One program normalises one row; one program rotates some heads of one token."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import Field, LoraBatch, LoraTarget

FACTOR, SHIFT = tl.constexpr(int(Field.FACTOR)), tl.constexpr(int(Field.SHIFT))
ELEMENTS_PER_WARP = 512
ROTATED_AT_ONCE = 1024  # pairs of one program


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: torch.Tensor,
    lora: LoraBatch | None = None,
    targets: Sequence[LoraTarget] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    target = _find_target(x, targets) if lora is not None else None
    if x.stride(-1) != 1 or (residual is not None and (residual.shape != x.shape or residual.stride(-1) != 1)):
        raise ValueError("rms_norm needs rows without gaps, and a residual of the same shape")
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if not normed.numel():
        return normed, total
    added = x if residual is None else residual
    adapters = (eps, eps, weight, 0, 0, 0)  # which are not read
    if lora is not None and target is not None:
        strides = lora.table.stride(0), lora.table.stride(1)
        adapters = lora.adapter_indices, lora.table, lora.buffer, target.index, *strides
    block = triton.next_power_of_2(size)
    _norm_kernel[(normed.numel() // size,)](
        *(x, added, weight, eps, normed, total, *adapters),
        *(x.stride(0), x.stride(-2), added.stride(0), added.stride(-2)),
        HAS_RESIDUAL=residual is not None,
        HAS_TARGET=target is not None,
        HEADS=x.shape[1] if x.dim() == 3 else 1,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // ELEMENTS_PER_WARP)),
    )
    return normed, total


def _find_target(x: torch.Tensor, targets: Sequence[LoraTarget]) -> LoraTarget | None:
    """Return the one target of a norm, whose vectors are as wide as a row."""
    if not targets:
        return None
    (target,) = targets
    if x.dim() != 2 or range(x.shape[1])[target.columns] != range(x.shape[1]):
        raise ValueError(f"an adapter scales whole rows of a norm, not columns {target.columns} of {tuple(x.shape)}")
    return target


# Layers differ in `target_index`, and the runner's small tensors lie anywhere in a larger one: neither must choose a
# kernel.
@triton.jit(do_not_specialize=["eps", "adapter_indices", "table", "target_index", "table_adapter", "table_target"])
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    adapter_indices: tl.tensor,
    table: tl.tensor,
    buffer: tl.tensor,
    target_index: tl.tensor,
    table_adapter: tl.tensor,
    table_target: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    residual_token: tl.tensor,
    residual_head: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + token * x_token + head * x_head + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + token * residual_token + head * residual_head + columns, mask=mask, other=0.0)
        rounded = (wide + added.to(tl.float32)).to(dtype)
        tl.store(total + row * SIZE + columns, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + tl.load(eps))
    result = (wide * scale).to(dtype).to(tl.float32)
    result = (result * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    if HAS_TARGET:
        fields = table + tl.load(adapter_indices + token) * table_adapter + target_index * table_target
        result = _scale_and_shift(result, buffer + columns, tl.load(fields + FACTOR), tl.load(fields + SHIFT), mask)
    tl.store(normed + row * SIZE + columns, result, mask=mask)


@triton.jit
def _scale_and_shift(
    x: tl.tensor, buffer: tl.tensor, factor_at: tl.tensor, shift_at: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    factor = tl.load(buffer + factor_at, mask=mask & (factor_at >= 0), other=1.0).to(tl.float32)
    shift = tl.load(buffer + shift_at, mask=mask & (shift_at >= 0), other=0.0).to(tl.float32)
    return ((x.to(tl.float32) * factor).to(x.dtype).to(tl.float32) + shift).to(x.dtype)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    num_tokens, num_heads, _ = x.shape
    half = cos.shape[-1]
    if x.stride(2) != 1 or cos.stride() != sin.stride() or (half > 1 and cos.stride(1) != 1):
        raise ValueError("rotary needs heads and angles without gaps")
    if not x.numel() or not half:
        return
    block = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_heads), max(1, ROTATED_AT_ONCE // block))
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x,
        cos,
        sin,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        NUM_HEADS=num_heads,
        HALF=half,
        HEADS=heads,
        BLOCK=block,
    )


@triton.jit
def _rotary_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    angle_token: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK)
    dtype: tl.constexpr = x.dtype.element_ty
    turns = dims < HALF
    c = tl.load(cos + token * angle_token + dims, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    s = tl.load(sin + token * angle_token + dims, mask=turns, other=0.0).to(dtype).to(tl.float32)[None, :]
    mask = (heads < NUM_HEADS) & turns[None, :]
    firsts = x + token * x_token + heads * x_head + dims[None, :]
    first = tl.load(firsts, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(firsts + HALF, mask=mask, other=0.0).to(tl.float32)
    # Each product by a cosine is rounded before the other is added, as in the reference.
    tl.store(firsts, ((first * c).to(dtype).to(tl.float32) - second * s).to(dtype), mask=mask)
    tl.store(firsts + HALF, ((second * c).to(dtype).to(tl.float32) + first * s).to(dtype), mask=mask)
