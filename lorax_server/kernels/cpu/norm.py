"""Norms on a CPU. The caller must pass weights that match the width and the dtype of the rows.

Python overhead matters here: the kernels take only microseconds in a decode step.
"""

from collections.abc import Sequence

import torch

from lorax_server.kernels.cpu.library import DTYPES, Library
from lorax_server.kernels.cpu.structs import lora_struct
from lorax_server.kernels.ops import LoraBatch, LoraTarget


class CpuNorms:
    """Norms for CPUs, and the op that applies output scales and output biases."""

    _library: Library

    def rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: torch.Tensor,
        lora: LoraBatch | None = None,
        targets: Sequence[LoraTarget] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = x.shape[-1]
        is_wide = weight.dtype == torch.float32
        if not is_wide:
            _check(x, size, weight)
        elif weight.shape != (size,):
            raise ValueError(f"the norm weight must have shape ({size},) (got {tuple(weight.shape)})")
        total, added, sums = x, None, None
        if residual is not None:
            if residual.numel() != x.numel() or residual.dtype != x.dtype:
                raise ValueError("the residual of rms_norm must have the shape and dtype of x")
            x, residual = x.contiguous(), residual.contiguous()
            total = torch.empty_like(x)
            added, sums = residual.data_ptr(), total.data_ptr()
        x, normed, token_stride, head_stride, tokens, heads = _as_rows(x, size)
        adapters, target = (None, 0) if lora is None or not targets else _target_args(x, lora, targets)
        self._library.rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            token_stride,
            head_stride,
            added,
            weight.data_ptr(),
            is_wide,
            eps.data_ptr(),
            normed.data_ptr(),
            sums,
            tokens,
            heads,
            size,
            adapters,
            target,
        )
        return normed, total

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        lora: LoraBatch | None = None,
        targets: Sequence[LoraTarget] = (),
    ) -> torch.Tensor:
        size = x.shape[-1]
        _check(x, size, weight, bias)
        x, normed, token_stride, head_stride, tokens, heads = _as_rows(x, size)
        adapters, target = (None, 0) if lora is None or not targets else _target_args(x, lora, targets)
        self._library.layer_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            token_stride,
            head_stride,
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            eps,
            normed.data_ptr(),
            tokens,
            heads,
            size,
            adapters,
            target,
        )
        return normed

    def scale_and_shift(self, out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        if not lora.has_vectors(targets):
            return
        adapters = lora_struct(lora)
        if out.shape[0] != adapters.tokens or out.stride(1) != 1 or out.dtype != lora.buffer.dtype:
            raise ValueError(
                f"`out` must be {adapters.tokens} rows of {lora.buffer.dtype} with unit stride (got {tuple(out.shape)})"
            )
        self._library.scale_and_shift(
            DTYPES[out.dtype],
            out[:, targets[0].columns.start :].data_ptr(),
            out.stride(0),
            adapters.tokens,
            adapters.address,
            targets[0].index,
            targets[-1].index,
        )


def _check(x: torch.Tensor, size: int, *vectors: torch.Tensor | None) -> None:
    for vector in vectors:
        if vector is not None and (vector.shape != (size,) or vector.dtype != x.dtype):
            raise ValueError(f"norm weights must be ({size},) {x.dtype} (got {tuple(vector.shape)} {vector.dtype})")


def _as_rows(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """Return `x` (copied if necessary), an output tensor, the token and head strides, and the token and head counts.

    Rows can be strided, for example query heads in a fused QKV output.
    """
    if not x.is_contiguous():
        normed = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.dim() == 2 and x.stride(1) == 1:
            return x, normed, x.stride(0), 0, x.shape[0], 1
        if x.dim() == 3 and x.stride(2) == 1:
            return x, normed, x.stride(0), x.stride(1), x.shape[0], x.shape[1]
        x = x.contiguous()
    return x, torch.empty_like(x), size, 0, x.numel() // size, 1


def _target_args(x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> tuple[int, int]:
    """Return the address of the `Lora` struct and the norm's index in the adapter table, as native arguments."""
    (target,) = targets
    tokens, size = x.shape
    adapters = lora_struct(lora)
    if target.columns != slice(0, size) or tokens != adapters.tokens:
        raise ValueError(
            f"a norm target must cover all columns of {adapters.tokens} rows (got {target.columns} of {tuple(x.shape)})"
        )
    return adapters.address, target.index
