"""Apply adapter output scales and output biases in a separate launch, for norms and prompts."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import LoraBatch, LoraTarget
from lorax_server.kernels.triton.lora_math import ALIGNMENT, OUTPUT_BIAS, OUTPUT_SCALE, find_fields, find_slice

HEIGHT, BLOCK_N = 16, 256


def scale_and_shift(out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
    """Implement `Ops.scale_and_shift`. Each row reads its adapter index on the device, so graphs can be replayed."""
    if not len(out):
        return
    widths = tuple(target.columns.stop - target.columns.start for target in targets)
    blocks = sum(-(-width // BLOCK_N) for width in widths)
    _scale_and_shift[(blocks, triton.cdiv(len(out), HEIGHT))](
        out[:, targets[0].columns.start :], lora.adapter_indices, lora.buffer, lora.table,
        lora.table.shape[1], targets[0].index, len(out), out.stride(0),
        WIDTHS=widths, SLICES=len(targets), HEIGHT=HEIGHT, BLOCK_N=BLOCK_N,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_targets", "first_target", "num_rows"],
    do_not_specialize_on_alignment=["adapters", "table"],
)
def _scale_and_shift(
    out, adapters, buffer, table, num_targets, first_target, num_rows, stride,
    WIDTHS: tl.constexpr, SLICES: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    index, width, slice_start, start = find_slice(tl.program_id(0), WIDTHS, SLICES, BLOCK_N)
    rows = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    adapter = tl.load(adapters + rows, mask=rows < num_rows, other=0)
    fields = find_fields(table, adapter, num_targets, first_target + index)
    output_scale, output_bias = tl.load(fields + OUTPUT_SCALE), tl.load(fields + OUTPUT_BIAS)
    is_row = rows < num_rows
    has_scale, has_bias = (output_scale >= 0) & is_row, (output_bias >= 0) & is_row
    is_changed = has_scale | has_bias
    if tl.max(is_changed.to(tl.int32), 0) == 0:
        return
    columns = start + tl.arange(0, BLOCK_N)
    is_column = (columns < width)[None, :]
    pointers = out + rows.to(tl.int64)[:, None] * stride + (slice_start + columns)[None, :]
    value = tl.load(pointers, mask=is_changed[:, None] & is_column, other=0.0).to(tl.float32)
    at_scale = buffer + tl.multiple_of(output_scale, ALIGNMENT)[:, None] + columns[None, :]
    value *= tl.load(at_scale, mask=has_scale[:, None] & is_column, other=1.0).to(tl.float32)
    at_bias = buffer + tl.multiple_of(output_bias, ALIGNMENT)[:, None] + columns[None, :]
    value += tl.load(at_bias, mask=has_bias[:, None] & is_column, other=0.0).to(tl.float32)
    tl.store(pointers, value.to(out.dtype.element_ty), mask=is_changed[:, None] & is_column)
