"""Linears by native kernels: the product, and all that adapters change of it, in one call."""

import ctypes
from collections.abc import Sequence

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.cpu.abi import Dtype, Gate
from lorax_server.kernels.cpu.library import DTYPES, Library
from lorax_server.kernels.cpu.structs import Described, Matrix, describe_lora
from lorax_server.kernels.ops import Activation, LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.panels import PanelMatrix, cut_pairs, cut_panels

GATES = {"silu": Gate.SILU, "swish": Gate.SILU, "gelu_tanh": Gate.GELU_TANH}


class CpuLinears:
    """The linears, and the gates behind them."""

    _library: Library

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights:
        if weight.dtype not in DTYPES:
            return LinearWeights(weight, bias)
        if weight.dtype == torch.bfloat16 and self._library.has_tiles:
            matrix = cut_pairs(weight, self._library.panel)
        else:
            matrix = cut_panels(weight, self._library.panel, self._library.narrow_dtypes)
        return LinearWeights(matrix, None if bias is None else bias.contiguous())

    def look_up(self, weight: torch.Tensor | PanelMatrix, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a matrix, which lies in panels if a head has the same one."""
        if not isinstance(weight, PanelMatrix) or not ids.numel():
            return reference.look_up(weight, ids)
        rows = ids.to(torch.int64).contiguous().view(-1)
        numbers, (count, inputs) = rows.tolist(), weight.shape
        if not 0 <= min(numbers) <= max(numbers) < count:
            raise IndexError(f"a matrix of {count} rows has no row {min(numbers)} or {max(numbers)}")
        panels, out = weight.panels, torch.empty(*ids.shape, inputs, dtype=weight.dtype)
        self._library.look_up(
            *(panels.data_ptr(), _find_storage(weight), inputs, weight.start),
            *(rows.data_ptr(), len(numbers), DTYPES[out.dtype], out.data_ptr()),
        )
        return out

    def linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
        gate: Gate = Gate.NONE,
    ) -> torch.Tensor:
        """Multiply; with a gate, return `activation(gate) * up` of the two halves. A plain matrix is left to torch."""
        if not isinstance(weights.weight, PanelMatrix):
            return reference.linear(x, weights, lora, targets)
        address = weights.once("cpu", _describe, weights).address
        stride, step = x.stride()
        if step != 1:
            x = x.contiguous()
            stride = x.shape[1]
        rows, (outputs, inputs) = x.shape[0], weights.weight.shape
        if x.shape[1] != inputs or x.dtype != weights.weight.dtype:
            raise ValueError(
                f"{tuple(x.shape)} of {x.dtype} cannot be multiplied by {inputs} of {weights.weight.dtype}"
            )
        batch, first = None, 0
        if lora is not None:
            adapters = describe_lora(lora)
            if adapters.tokens != rows or lora.buffer.dtype != x.dtype:
                raise ValueError(
                    f"adapters of {adapters.tokens} tokens, {lora.buffer.dtype}, are not those of {rows} rows"
                )
            batch, first = adapters.address, targets[0].index
        out = torch.empty(rows, outputs // 2 if gate else outputs, dtype=x.dtype)
        self._library.linear(address, x.data_ptr(), stride, rows, out.data_ptr(), batch, first, len(targets), gate)
        return out

    def gated_linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        activation: Activation,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        gate = GATES.get(activation.name)
        if gate and isinstance(weights.weight, PanelMatrix) and len(weights.weight) % (2 * self._library.panel) == 0:
            return self.linear(x, weights, lora, targets, gate)
        both = self.linear(x, weights, lora, targets)
        if gate and both.dtype in DTYPES:
            return self.open_gate(both, gate)
        left, right = both.chunk(2, dim=-1)
        return activation(left) * right

    def open_gate(self, x: torch.Tensor, kind: Gate) -> torch.Tensor:
        """Return `activation(left) * right` of the two halves of each row of `[rows, 2 * width]`."""
        rows, both = x.shape
        if both % 2:
            raise ValueError(f"{both} numbers have no two halves")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(rows, both // 2, dtype=x.dtype)
        self._library.gate(DTYPES[x.dtype], kind, x.data_ptr(), x.stride(0), out.data_ptr(), rows, both // 2)
        return out


def _describe(weights: LinearWeights) -> Described:
    matrix, bias = weights.weight, weights.bias
    assert isinstance(matrix, PanelMatrix)
    if bias is not None and (bias.dtype != matrix.dtype or len(bias) != len(matrix)):
        raise ValueError(f"a bias of {len(bias)} numbers, {bias.dtype}, is not that of {len(matrix)}, {matrix.dtype}")
    address = None if bias is None else bias.data_ptr()
    struct = Matrix(matrix.panels.data_ptr(), address, *matrix.shape, _find_storage(matrix), DTYPES[matrix.dtype])
    return Described(ctypes.addressof(struct), (struct, matrix, bias))


def _find_storage(matrix: PanelMatrix) -> int:
    return Dtype.BFLOAT16_PAIRS if matrix.is_paired else DTYPES[matrix.panels.dtype]
