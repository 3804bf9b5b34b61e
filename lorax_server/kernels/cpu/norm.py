"""Norms of the native kernels. Weights are as wide as rows and of their dtype: the layers have seen to that.

Little is done in Python here: it would take longer than the kernels take for a decode step.
"""

from collections.abc import Sequence

import torch

from lorax_server.kernels.cpu.library import DTYPES, Library
from lorax_server.kernels.cpu.structs import describe_lora
from lorax_server.kernels.ops import LoraBatch, LoraTarget


class CpuNorms:
    """The norms, and the factors and shifts of adapters."""

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
            raise ValueError(f"a norm of {size} numbers needs a weight of as many, not {weight.shape}")
        total, added, sums = x, None, None
        if residual is not None:
            if residual.numel() != x.numel() or residual.dtype != x.dtype:
                raise ValueError("rms_norm needs a residual of the same shape and dtype")
            x, residual = x.contiguous(), residual.contiguous()
            total = torch.empty_like(x)
            added, sums = residual.data_ptr(), total.data_ptr()
        x, normed, token_stride, head_stride, tokens, heads = _lay_out(x, size)
        adapters, target = (None, 0) if lora is None or not targets else _find_target(x, lora, targets)
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
        x, normed, token_stride, head_stride, tokens, heads = _lay_out(x, size)
        adapters, target = (None, 0) if lora is None or not targets else _find_target(x, lora, targets)
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
        adapters = describe_lora(lora)
        if out.shape[0] != adapters.tokens or out.stride(1) != 1 or out.dtype != lora.buffer.dtype:
            raise ValueError(
                f"adapters of {adapters.tokens} tokens, {lora.buffer.dtype}, cannot change {tuple(out.shape)}"
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
            raise ValueError(f"a norm of {size} numbers, {x.dtype}, needs a vector of as many, not {vector.shape}")


def _lay_out(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, int, int, int, int]:
    """Return `x`, or a copy that the kernels can read, room for its norm, its strides by token and by head, and how
    many there are of both.

    Rows may lie apart, as the heads of queries do in the output of one linear for queries, keys and values.
    """
    if not x.is_contiguous():
        normed = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.dim() == 2 and x.stride(1) == 1:
            return x, normed, x.stride(0), 0, x.shape[0], 1
        if x.dim() == 3 and x.stride(2) == 1:
            return x, normed, x.stride(0), x.stride(1), x.shape[0], x.shape[1]
        x = x.contiguous()
    return x, torch.empty_like(x), size, 0, x.numel() // size, 1


def _find_target(x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> tuple[int, int]:
    """Return the address of the adapters and the number of a norm's one target."""
    (target,) = targets
    tokens, size = x.shape
    adapters = describe_lora(lora)
    if target.columns != slice(0, size) or tokens != adapters.tokens:
        raise ValueError(f"adapters of {adapters.tokens} tokens cannot change {target.columns} of {tuple(x.shape)}")
    return adapters.address, target.index
