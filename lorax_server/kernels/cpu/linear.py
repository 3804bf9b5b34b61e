"""Linear layers on a CPU. One native call computes the matrix product, the adapters and the gate."""

import ctypes
from collections.abc import Iterable, Sequence

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.block_panels import BlockPanels, to_block_panels
from lorax_server.kernels.cpu.abi import ActivationKind, Dtype
from lorax_server.kernels.cpu.activation import KINDS, CpuActivations, apply_to_rows
from lorax_server.kernels.cpu.library import DTYPES
from lorax_server.kernels.cpu.structs import Matrix, NativeStruct, lora_struct
from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.ops import (
    Activation,
    ExpertMatrices,
    ExpertWeights,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    RouterSpec,
    Routing,
)
from lorax_server.kernels.panels import PanelMatrix, to_paired_panels, to_panels
from lorax_server.kernels.quantized import BlockMatrix, QuantizedMatrix

EXPERT_KINDS = KINDS | {"clamped_swiglu": ActivationKind.CLAMPED_SWIGLU}


class CpuLinears(CpuActivations):
    """Linear layers, activations and embedding lookups for CPUs."""

    keeps_quantized = staticmethod(reference.keeps_quantized)

    def make_linear(self, weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None) -> LinearWeights:
        matrix: StoredMatrix
        if weight.dtype not in DTYPES or (isinstance(weight, BlockMatrix) and weight.rounds_inputs):
            return reference.make_linear(weight, bias)
        if isinstance(weight, BlockMatrix):
            matrix = to_block_panels(weight, self._library.panel, self._library.weight_bias)
        elif isinstance(weight, QuantizedMatrix):
            return LinearWeights(weight, bias)
        elif weight.dtype == torch.bfloat16 and self._library.has_tiles:
            matrix = to_paired_panels(weight, self._library.panel)
        else:
            matrix = to_panels(weight, self._library.panel, self._library.narrow_dtypes)
        return LinearWeights(matrix, None if bias is None else bias.contiguous())

    def look_up_rows(self, weight: torch.Tensor | StoredMatrix, ids: torch.Tensor) -> torch.Tensor:
        """Return the embedding rows for `ids`. If the matrix is shared with a tied LM head, it is stored in panels."""
        if not isinstance(weight, PanelMatrix | BlockPanels) or not ids.numel():
            return reference.look_up_rows(weight, ids)
        rows = ids.to(torch.int64).contiguous().view(-1)
        numbers, (count, inputs) = rows.tolist(), weight.shape
        if not 0 <= min(numbers) <= max(numbers) < count:
            raise IndexError(f"row indices must be in [0, {count}) (got {min(numbers)} to {max(numbers)})")
        matrix, out = self._make_struct(weight, None), torch.empty(*ids.shape, inputs, dtype=weight.dtype)
        self._library.look_up_rows(
            ctypes.addressof(matrix), weight.start, rows.data_ptr(), len(numbers), out.data_ptr()
        )
        return out

    def linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
        gate: ActivationKind = ActivationKind.NONE,
    ) -> torch.Tensor:
        """Implement `Ops.linear` or, with a gate, `Ops.gated_linear`. Matrices without panels use the reference ops."""
        if not isinstance(weights.weight, PanelMatrix | BlockPanels):
            return reference.linear(x, weights, lora, targets)
        address = weights.cached("cpu", self._make_matrix, weights).address
        stride, step = x.stride()
        if step != 1:
            x = x.contiguous()
            stride = x.shape[1]
        rows, (outputs, inputs) = x.shape[0], weights.weight.shape
        if x.shape[1] != inputs or x.dtype != weights.weight.dtype:
            raise ValueError(
                f"x must have {inputs} columns of {weights.weight.dtype} (got {tuple(x.shape)}, {x.dtype})"
            )
        batch, first = (None, 0) if lora is None else (_lora_address(lora, x), targets[0].index)
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
        gate = KINDS.get(activation.name)
        has_panels = isinstance(weights.weight, PanelMatrix | BlockPanels)
        if gate and has_panels and len(weights.weight) % (2 * self._library.panel) == 0:
            return self.linear(x, weights, lora, targets, gate)
        both = self.linear(x, weights, lora, targets)
        if gate and both.dtype in DTYPES:
            return self.apply_gate(both, gate)
        return apply_to_rows(lambda row: activation.apply_gate(*row.chunk(2, dim=-1)), both)

    def make_experts(self, count: int, matrices: Iterable[ExpertMatrices], activation: Activation) -> ExpertWeights:
        return reference.make_experts(count, matrices, activation, self.make_linear)

    def route(self, logits: torch.Tensor, top_k: int, spec: RouterSpec, bias: torch.Tensor | None = None) -> Routing:
        return reference.route(logits, top_k, spec, bias, self.activate)

    def run_experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        experts: ExpertWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        gate = EXPERT_KINDS.get(experts.activation.name)
        if gate is None or not isinstance(experts.down[0].weight, PanelMatrix | BlockPanels):
            return reference.loop_over_experts(x, routing, experts, lora, targets, self.linear, self.gated_linear)
        gate_up, down = experts.cached("cpu", self._make_matrices, experts)
        rows, hidden = x.shape
        if (hidden, x.dtype) != (len(experts.down[0].weight), experts.down[0].weight.dtype):
            raise ValueError(f"x must have the hidden size and dtype of the experts (got {tuple(x.shape)}, {x.dtype})")
        chosen, weights, x = routing.experts.contiguous(), routing.weights.float().contiguous(), x.contiguous()
        batch, first = (None, 0) if lora is None else (_lora_address(lora, x), targets[0].index)
        out = torch.empty(rows, hidden, dtype=x.dtype)
        self._library.run_experts(
            *(gate_up.address, down.address, len(experts.down), x.data_ptr(), hidden, rows),
            *(chosen.data_ptr(), weights.data_ptr(), chosen.shape[1], out.data_ptr(), batch, first, gate),
            *(experts.activation.parameters or (0.0, 0.0)),
        )
        return out

    def _make_matrices(self, experts: ExpertWeights) -> tuple[NativeStruct, NativeStruct]:
        """Return arrays of C++ structs: the gate and up matrices, and the down matrices."""
        arrays = []
        for linears in (experts.gate_up, experts.down):
            owned = [self._make_matrix(linear) for linear in linears]
            array = (Matrix * len(owned))(*(Matrix.from_address(struct.address) for struct in owned))
            arrays.append(NativeStruct(ctypes.addressof(array), (array, *owned)))
        return arrays[0], arrays[1]

    def _make_matrix(self, weights: LinearWeights) -> NativeStruct:
        matrix, bias = weights.weight, weights.bias
        assert isinstance(matrix, PanelMatrix | BlockPanels)
        if matrix.start:
            raise ValueError(f"a product with rows {matrix.start} to {matrix.stop} of panels is not supported")
        if bias is not None and (bias.dtype != matrix.dtype or len(bias) != len(matrix)):
            raise ValueError(f"bias must be {len(matrix)} x {matrix.dtype} (got {len(bias)} x {bias.dtype})")
        struct = self._make_struct(matrix, bias)
        return NativeStruct(ctypes.addressof(struct), (struct, matrix, bias))

    def _make_struct(self, matrix: PanelMatrix | BlockPanels, bias: torch.Tensor | None) -> Matrix:
        pointers = matrix.panels.data_ptr(), None if bias is None else bias.data_ptr()
        if isinstance(matrix, PanelMatrix):
            stored = Dtype.BFLOAT16_PAIRS if matrix.is_paired else DTYPES[matrix.panels.dtype]
            return Matrix(*pointers, *matrix.shape, stored, DTYPES[matrix.dtype])
        kind = matrix.format
        has_wide_scales = kind.scale_dtype == torch.float32
        flags = kind.bits, kind.block, kind.has_offsets, has_wide_scales, self._library.has_dot
        return Matrix(*pointers, *matrix.shape, Dtype.QUANTIZED, DTYPES[matrix.dtype], *flags)


def _lora_address(lora: LoraBatch, x: torch.Tensor) -> int:
    """Return the address of the C++ struct for a LoRA batch. Its number of tokens must be the number of rows of `x`."""
    adapters = lora_struct(lora)
    if adapters.tokens != len(x) or lora.buffer.dtype != x.dtype:
        raise ValueError(
            f"the LoRA batch must have {len(x)} tokens of {x.dtype} (got {adapters.tokens}, {lora.buffer.dtype})"
        )
    return adapters.address
