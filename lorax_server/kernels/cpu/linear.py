"""Linears by native kernels: the product, and all that adapters change of it, in one call."""

import ctypes
from collections.abc import Sequence

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.cpu.activation import Gate, open_gate
from lorax_server.kernels.cpu.library import DTYPES, PAIRS, Library
from lorax_server.kernels.cpu.structs import Described, Matrix, describe_lora
from lorax_server.kernels.ops import Activation, LinearWeights, LoraBatch, LoraTarget
from lorax_server.kernels.panels import PanelMatrix, cut_pairs, cut_panels

GATES = {"silu": Gate.SILU, "swish": Gate.SILU, "gelu_tanh": Gate.GELU_TANH}


def make_linear(library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights:
    if weight.dtype not in DTYPES:
        return LinearWeights(weight, bias)
    if weight.dtype == torch.bfloat16 and library.has_tiles:
        matrix = cut_pairs(weight, library.panel)
    else:
        matrix = cut_panels(weight, library.panel, library.narrow_dtypes)
    return LinearWeights(matrix, None if bias is None else bias.contiguous())


def look_up(library: Library, weight: torch.Tensor | PanelMatrix, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of a matrix, which lies in panels if a head has the same one."""
    if not isinstance(weight, PanelMatrix) or not ids.numel():
        return reference.look_up(weight, ids)
    rows = ids.to(torch.int64).contiguous().view(-1)
    numbers, (count, inputs) = rows.tolist(), weight.shape
    if not 0 <= min(numbers) <= max(numbers) < count:
        raise IndexError(f"a matrix of {count} rows has no row {min(numbers)} or {max(numbers)}")
    panels, out = weight.panels, torch.empty(*ids.shape, inputs, dtype=weight.dtype)
    library.look_up(
        *(panels.data_ptr(), _find_storage(weight), inputs, weight.start),
        *(rows.data_ptr(), len(numbers), DTYPES[out.dtype], out.data_ptr()),
    )
    return out


def linear(
    library: Library,
    x: torch.Tensor,
    weights: LinearWeights,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
    gate: int = 0,
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
        raise ValueError(f"{tuple(x.shape)} of {x.dtype} cannot be multiplied by {inputs} of {weights.weight.dtype}")
    batch, first = None, 0
    if lora is not None:
        adapters = describe_lora(lora)
        if adapters.tokens != rows or lora.buffer.dtype != x.dtype:
            raise ValueError(f"adapters of {adapters.tokens} tokens, {lora.buffer.dtype}, are not those of {rows} rows")
        batch, first = adapters.address, targets[0].index
    out = torch.empty(rows, outputs // 2 if gate else outputs, dtype=x.dtype)
    library.linear(address, x.data_ptr(), stride, rows, out.data_ptr(), batch, first, len(targets), gate)
    return out


def gated_linear(
    library: Library,
    x: torch.Tensor,
    weights: LinearWeights,
    activation: Activation,
    lora: LoraBatch | None,
    targets: Sequence[LoraTarget],
) -> torch.Tensor:
    gate = GATES.get(activation.name)
    if gate and isinstance(weights.weight, PanelMatrix) and len(weights.weight) % (2 * library.panel) == 0:
        return linear(library, x, weights, lora, targets, gate)
    both = linear(library, x, weights, lora, targets)
    if gate and both.dtype in DTYPES:
        return open_gate(library, both, gate)
    left, right = both.chunk(2, dim=-1)
    return activation(left) * right


def _describe(weights: LinearWeights) -> Described:
    matrix, bias = weights.weight, weights.bias
    assert isinstance(matrix, PanelMatrix)
    if bias is not None and (bias.dtype != matrix.dtype or len(bias) != len(matrix)):
        raise ValueError(f"a bias of {len(bias)} numbers, {bias.dtype}, is not that of {len(matrix)}, {matrix.dtype}")
    address = None if bias is None else bias.data_ptr()
    struct = Matrix(matrix.panels.data_ptr(), address, *matrix.shape, _find_storage(matrix), DTYPES[matrix.dtype])
    return Described(ctypes.addressof(struct), (struct, matrix, bias))


def _find_storage(matrix: PanelMatrix) -> int:
    return PAIRS if matrix.is_paired else DTYPES[matrix.panels.dtype]
