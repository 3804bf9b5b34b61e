"""Norms and RoPE. One program normalizes one row (or several narrow rows), or rotates a few heads of one token."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import Field, LoraBatch, LoraTarget

OUTPUT_SCALE, OUTPUT_BIAS = tl.constexpr(int(Field.OUTPUT_SCALE)), tl.constexpr(int(Field.OUTPUT_BIAS))
ELEMENTS_PER_WARP = 1024
MIN_ELEMENTS_PER_PROGRAM = 1024  # narrow rows share a program
MAX_ROTATED_PAIRS = 1024  # maximum per program


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: torch.Tensor,
    lora: LoraBatch | None = None,
    targets: Sequence[LoraTarget] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride(-1) != 1 or (residual is not None and (residual.shape != x.shape or residual.stride(-1) != 1)):
        raise ValueError("rms_norm needs rows with unit stride, and a residual with the shape of x")
    adapters, constants = _kernel_args(x, eps, lora, targets)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if not normed.numel():
        return normed, total
    added = x if residual is None else residual
    num_rows = normed.numel() // x.shape[-1]
    _rms_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
        *(x, added, weight, eps, normed, total, *adapters, num_rows),
        *(x.stride(0), x.stride(-2), added.stride(0), added.stride(-2)),
        HAS_RESIDUAL=residual is not None,
        **constants,
    )
    return normed, total


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    lora: LoraBatch | None = None,
    targets: Sequence[LoraTarget] = (),
) -> torch.Tensor:
    if x.stride(-1) != 1:
        raise ValueError("layer_norm needs rows with unit stride")
    adapters, constants = _kernel_args(x, x, lora, targets)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not normed.numel():
        return normed
    num_rows = normed.numel() // x.shape[-1]
    _layer_kernel[(triton.cdiv(num_rows, constants["ROWS"]),)](
        *(x, x if weight is None else weight, x if bias is None else bias, normed, *adapters, num_rows),
        *(x.stride(0), x.stride(-2), eps),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        **constants,
    )
    return normed


def _kernel_args(
    x: torch.Tensor, unused: torch.Tensor, lora: LoraBatch | None, targets: Sequence[LoraTarget]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a norm kernel's adapter arguments and its compile-time constants."""
    target = _find_target(x, targets) if lora is not None else None
    adapters: tuple[Any, ...] = (unused, unused, unused, 0, 0, 0)
    if lora is not None and target is not None:
        strides = lora.table.stride(0), lora.table.stride(1)
        adapters = lora.adapter_indices, lora.table, lora.buffer, target.index, *strides
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    rows = max(1, MIN_ELEMENTS_PER_PROGRAM // block)
    return adapters, {
        "HAS_TARGET": target is not None,
        "HEADS": x.shape[1] if x.dim() == 3 else 1,
        "SIZE": size,
        "BLOCK": block,
        "ROWS": rows,
        "num_warps": min(16, max(1, rows * block // ELEMENTS_PER_WARP)),
    }


def _find_target(x: torch.Tensor, targets: Sequence[LoraTarget]) -> LoraTarget | None:
    """Return the norm's target, or None. Raise `ValueError` if the target does not cover whole rows."""
    if not targets:
        return None
    (target,) = targets
    if x.dim() != 2 or range(x.shape[1])[target.columns] != range(x.shape[1]):
        raise ValueError(f"a norm target must cover whole rows (got columns {target.columns} of {tuple(x.shape)})")
    return target


# `target_index` differs between layers, and the alignment of small tensors varies. Neither must trigger recompilation.
UNSPECIALIZED = ["adapter_indices", "table", "target_index", "table_adapter", "table_target", "num_rows"]


@triton.jit(do_not_specialize=["eps", *UNSPECIALIZED])
def _rms_kernel(
    x, residual, weight, eps, normed, total, adapter_indices, table, buffer, target_index, table_adapter, table_target,
    num_rows, x_token, x_head, residual_token, residual_head, HAS_RESIDUAL: tl.constexpr, HAS_TARGET: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, columns = _row_and_column_indices(BLOCK, ROWS)
    is_column = columns < SIZE
    mask = (rows < num_rows) & is_column
    dtype: tl.constexpr = x.dtype.element_ty
    token, head = rows // HEADS, rows % HEADS
    wide = tl.load(x + token * x_token + head * x_head + columns, mask=mask, other=0.0).to(tl.float32)
    # Load early, to overlap with the reduction.
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    small = tl.load(eps)
    if HAS_RESIDUAL:
        added = tl.load(residual + token * residual_token + head * residual_head + columns, mask=mask, other=0.0)
        rounded = (wide + added.to(tl.float32)).to(dtype)
        tl.store(total + rows * SIZE + columns, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + small)[:, None]
    result = wide * scale
    if weight.dtype.element_ty == dtype:
        result = result.to(dtype).to(tl.float32)
    result = (result * factor).to(dtype)
    if HAS_TARGET:
        fields = _target_fields(adapter_indices, table, token, num_rows, table_adapter, target_index * table_target)
        result = _scale_and_shift(result, buffer + columns, fields, mask)
    tl.store(normed + rows * SIZE + columns, result, mask=mask)


@triton.jit(do_not_specialize=["eps", *UNSPECIALIZED])
def _layer_kernel(
    x, weight, bias, normed, adapter_indices, table, buffer, target_index, table_adapter, table_target, num_rows,
    x_token, x_head, eps, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TARGET: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows, columns = _row_and_column_indices(BLOCK, ROWS)
    is_column = columns < SIZE
    mask = (rows < num_rows) & is_column
    token, head = rows // HEADS, rows % HEADS
    wide = tl.load(x + token * x_token + head * x_head + columns, mask=mask, other=0.0).to(tl.float32)
    factor, shift = 1.0, 0.0
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    mean = tl.sum(wide, axis=1)[:, None] / SIZE
    centred = tl.where(is_column, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / SIZE + eps)[:, None]
    result = (centred * scale * factor + shift).to(x.dtype.element_ty)
    if HAS_TARGET:
        fields = _target_fields(adapter_indices, table, token, num_rows, table_adapter, target_index * table_target)
        result = _scale_and_shift(result, buffer + columns, fields, mask)
    tl.store(normed + rows * SIZE + columns, result, mask=mask)


@triton.jit
def _row_and_column_indices(BLOCK: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """Return the indices of the program's rows as a column vector, and all column indices as a row vector."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows[:, None], tl.arange(0, BLOCK)[None, :]


@triton.jit
def _target_fields(
    adapter_indices: tl.tensor,
    table: tl.tensor,
    token: tl.tensor,
    num_rows: tl.tensor,
    table_adapter: tl.tensor,
    target_offset: tl.tensor,
) -> tl.tensor:
    """Return pointers to the table fields of each token's adapter. Norms with adapters have one head per token."""
    return table + tl.load(adapter_indices + token, mask=token < num_rows, other=0) * table_adapter + target_offset


@triton.jit
def _scale_and_shift(x: tl.tensor, buffer: tl.tensor, fields: tl.tensor, mask: tl.tensor) -> tl.tensor:
    scale_at, bias_at = tl.load(fields + OUTPUT_SCALE), tl.load(fields + OUTPUT_BIAS)
    scale = tl.load(buffer + scale_at, mask=mask & (scale_at >= 0), other=1.0).to(tl.float32)
    bias = tl.load(buffer + bias_at, mask=mask & (bias_at >= 0), other=0.0).to(tl.float32)
    return ((x.to(tl.float32) * scale).to(x.dtype).to(tl.float32) + bias).to(x.dtype)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    num_tokens, num_heads, _ = x.shape
    half = cos.shape[-1]
    if x.stride(2) != 1 or cos.stride() != sin.stride() or (half > 1 and cos.stride(1) != 1):
        raise ValueError("rotary needs heads and angles with unit stride")
    if not x.numel() or not half:
        return
    block = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_heads), max(1, MAX_ROTATED_PAIRS // block))
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
    pointers = x + token * x_token + heads * x_head
    rotate(pointers, cos + token * angle_token, sin + token * angle_token, heads < NUM_HEADS, HALF, BLOCK)


@triton.jit
def rotate(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, mask: tl.tensor, HALF: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Rotate heads of one token in place, and return both halves. `x` and `mask` have one row per head."""
    pairs = tl.arange(0, BLOCK)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    is_rotated = pairs < HALF
    c = tl.load(cos + pairs, mask=is_rotated, other=0.0).to(dtype).to(tl.float32)
    s = tl.load(sin + pairs, mask=is_rotated, other=0.0).to(dtype).to(tl.float32)
    first = tl.load(x + pairs, mask=mask & is_rotated, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + pairs, mask=mask & is_rotated, other=0.0).to(tl.float32)
    # Round the cosine product before adding, as the reference does.
    rotated_first = ((first * c).to(dtype).to(tl.float32) - second * s).to(dtype)
    rotated_second = ((second * c).to(dtype).to(tl.float32) + first * s).to(dtype)
    tl.store(x + pairs, rotated_first, mask=mask & is_rotated)
    tl.store(x + HALF + pairs, rotated_second, mask=mask & is_rotated)
    return rotated_first, rotated_second
