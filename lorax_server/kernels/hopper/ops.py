"""All ops for Hopper GPUs. They use CUDA C++ kernels for half precision, and Triton kernels in other cases."""

from collections.abc import Sequence

import torch

from lorax_server.kernels.hopper import norm_gate, prompt_lora, sampling
from lorax_server.kernels.hopper.decode_attention import DecodeAttention
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.linear import MAX_ROWS, FusedLinear
from lorax_server.kernels.hopper.linear_settings import ONE_BLOCK_STAGES
from lorax_server.kernels.hopper.packed import PackedMatrix, pack
from lorax_server.kernels.hopper.prefill_attention import PrefillAttention
from lorax_server.kernels.hopper.sources import (
    ACTIVATIONS,
    CUDA_TYPES,
    HEIGHTS,
    AddLoraVariant,
    GateVariant,
    LinearVariant,
    PlanVariant,
    PromptLoraVariant,
    Variant,
)
from lorax_server.kernels.ops import (
    Activation,
    AttentionSpec,
    CosSin,
    ExpertWeights,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    PagedBatch,
    Routing,
)
from lorax_server.kernels.quantized import BlockMatrix, QuantizedMatrix
from lorax_server.kernels.sampling import SampledTokens, SamplingBatch, SamplingInputs
from lorax_server.kernels.triton import prefill_attention
from lorax_server.kernels.triton.experts import run_experts
from lorax_server.kernels.triton.kv_cache import rotate_and_write
from lorax_server.kernels.triton.ops import TritonOps

PROMPT_STEPS = ("sum_parts", "expand_prompt", "add_prompt")
MAX_FUSED_LORA_ROWS = HEIGHTS[-1]  # larger batches use cuBLAS and a separate LoRA kernel
MAX_FUSED_LORA_OUTPUTS = 65536  # an LM head would need hundreds of megabytes of scratch memory
MAX_FUSED_BASE_ROWS = 64  # without adapters; cuBLAS is faster for larger batches
MAX_QUANTIZED_ROWS = 256  # for larger batches, dequantized weights and cuBLAS are faster


class HopperOps(TritonOps):
    """Implements all ops for one Hopper GPU."""

    name = "Hopper (CUDA)"

    def __init__(self, device: torch.device) -> None:
        """Create the ops. Two kernels are compiled immediately, so that compiler problems raise an error here."""
        super().__init__()
        self._kernels = Kernels(device)
        self._kernels.compile(
            [PlanVariant(), LinearVariant(torch.bfloat16, HEIGHTS[0], ONE_BLOCK_STAGES[HEIGHTS[0]], 2, True)]
        )
        self._decode = DecodeAttention(self._kernels)
        self._prefill = PrefillAttention(self._kernels)
        self._fused = {dtype: FusedLinear(self._kernels, dtype) for dtype in CUDA_TYPES}

    def prepare(self, linears: Sequence[LinearWeights], with_lora: bool) -> None:
        super().prepare(linears, with_lora)
        variants: set[Variant] = set()
        for weights in linears:
            fused = self._fused.get(weights.weight.dtype)
            if fused is not None and fused.supports(weights, ()):
                outputs, inputs = weights.shape
                if isinstance(weights.weight, PackedMatrix):
                    variants |= fused.quantized_variants(
                        weights.weight, with_lora and outputs <= MAX_FUSED_LORA_OUTPUTS
                    )
                    variants |= fused.rounding_variants() if weights.rounds_inputs else set()
                    variants |= {PlanVariant(), AddLoraVariant(fused.dtype)} if with_lora else set()
                elif not weights.is_quantized:
                    variants |= fused.variants(inputs, outputs, with_lora)
                elif with_lora:
                    variants |= {PlanVariant(), AddLoraVariant(fused.dtype)}
                if with_lora and outputs <= MAX_FUSED_LORA_OUTPUTS:
                    fused.reserve_deltas(outputs)
                variants.add(norm_gate.norm_variant(fused.dtype, inputs))
        for dtype in {weights.weight.dtype for weights in linears} & CUDA_TYPES.keys():
            variants |= {GateVariant(dtype, name) for name in ACTIVATIONS}
            if with_lora:
                variants |= {PromptLoraVariant(dtype, step) for step in PROMPT_STEPS}
                variants |= {PromptLoraVariant(dtype, "gate_prompt", name) for name in ACTIVATIONS}
        for dtype in {weights.weight.dtype for weights in linears} & sampling.LOGITS_CUDA_TYPES.keys():
            variants |= {sampling.SampleVariant(dtype, step) for step in ("apply_penalties", "sample")}
        self._kernels.compile(sorted(variants, key=str))

    def make_linear(self, weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None) -> LinearWeights:
        packed = pack(weight, self._kernels) if isinstance(weight, BlockMatrix) else None
        if packed is None:
            return super().make_linear(weight, bias)
        return LinearWeights(packed, bias, isinstance(weight, BlockMatrix) and weight.rounds_inputs)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: CosSin | None,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        is_decode = batch.cu_seqlens is None
        if spec.slopes is not None or spec.sinks is not None:  # not supported by the CUDA kernels
            return super().attend(q, k, v, angles, cache, batch, spec)
        if not len(q) or not (is_decode or batch.stores_all) or not self._decode.supports(q, k, v, cache, batch):
            return super().attend(q, k, v, angles, cache, batch, spec)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if is_decode:
            self._decode(out, q, k, v, angles, cache, batch, spec, stores=True)
            return out
        rotate_and_write(q, k, v, angles, cache, batch, spec)
        attend_prefill = self._prefill if self._prefill.supports(q, cache, spec) else prefill_attention.attend_prefill
        attend_prefill(out, q, cache, batch, spec)
        if batch.in_graph or batch.cached("has singles", _has_decode_rows, batch):
            self._decode(out, q, k, v, None, cache, batch, spec, stores=False)
        return out

    def linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        rows, fused = len(x), self._fused.get(x.dtype)
        if not rows or fused is None or not x.is_contiguous() or not fused.supports(weights, targets):
            return super().linear(x, weights, lora, targets)
        if rows > MAX_ROWS:
            return self._prompt_linear(x, weights, lora, targets)
        is_packed = isinstance(weights.weight, PackedMatrix)
        has_many_outputs = lora is not None and weights.shape[0] > MAX_FUSED_LORA_OUTPUTS
        max_rows = MAX_FUSED_BASE_ROWS if lora is None and not is_packed else MAX_FUSED_LORA_ROWS
        if rows <= max_rows and not has_many_outputs and (is_packed or not weights.is_quantized):
            multiply = fused.quantized_linear if is_packed else fused.linear
            return multiply(x, weights, lora, targets)
        out = self.multiply_base(x, weights)
        if lora is not None:
            fused.add_lora(out, x, lora, targets)
            self.scale_and_shift(out, lora, targets)
        return out

    def multiply_base(self, x: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
        fused = self._fused.get(x.dtype)
        matrix = weights.weight
        if fused is None or not isinstance(matrix, PackedMatrix):
            return super().multiply_base(x, weights)
        if weights.rounds_inputs and len(x) > MAX_FUSED_LORA_ROWS and fused.can_multiply_float8(matrix):
            return fused.float8_linear(x.contiguous(), weights)
        if not 0 < len(x) <= (MAX_QUANTIZED_ROWS if matrix.format.can_use_wgmma else MAX_FUSED_LORA_ROWS):
            return super().multiply_base(x, weights)
        return fused.quantized_linear(x.contiguous(), weights, None, ())

    def _prompt_linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        adapters = lora if lora is not None and lora.has_low_rank(targets) else None
        if adapters is not None and not weights.rounds_inputs:
            out = prompt_lora.linear(self._kernels, x, weights, adapters, targets)
        else:
            out = self.multiply_base(x, weights)
            if adapters is not None:
                prompt_lora.add_lora(self._kernels, out, x, adapters, targets)
        if lora is not None:
            self.scale_and_shift(out, lora, targets)
        return out

    def gated_linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        activation: Activation,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        fused = self._fused.get(x.dtype)
        can_gate = activation.name in ACTIVATIONS and weights.shape[0] % 16 == 0
        if not len(x) or fused is None or not can_gate or not fused.supports(weights, targets):
            return super().gated_linear(x, weights, activation, lora, targets)
        if len(x) > MAX_ROWS and lora is not None and len(targets) == 2 and lora.changes(targets):
            gate_up = self.multiply_base(x, weights)
            return prompt_lora.gated_linear(self._kernels, x, gate_up, activation.name, lora, targets)
        return norm_gate.apply_gate(self._kernels, self.linear(x, weights, lora, targets), activation.name)

    def run_experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        experts: ExpertWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        return run_experts(x, routing, experts, lora, targets, can_use_wide_tiles=x.itemsize == 2)

    def rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: torch.Tensor,
        lora: LoraBatch | None = None,
        targets: Sequence[LoraTarget] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fused = self._fused.get(x.dtype)
        is_narrow = weight.dtype == x.dtype  # the CUDA kernel requires the dtype of x
        if not (is_narrow and 0 < len(x) <= MAX_ROWS) or fused is None or not norm_gate.can_norm(x, residual):
            return super().rms_norm(x, residual, weight, eps, lora, targets)
        adapters = (lora, fused.plan(lora), targets[0]) if lora is not None and targets else None
        return norm_gate.rms_norm(self._kernels, x, residual, weight, eps, adapters)

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        fused = self._fused.get(x.dtype)
        if 0 < len(x) <= MAX_ROWS and fused is not None and x.is_contiguous() and fused.can_add_lora(out, targets):
            fused.add_lora(out, x, lora, targets)
        else:
            super().add_lora(out, x, lora, targets)

    def sample_tokens(self, batch: SamplingBatch, inputs: SamplingInputs) -> SampledTokens:
        return sampling.sample_tokens(self._kernels, batch, inputs)

    def refresh_lora_plan(self, lora: LoraBatch, current: LoraBatch) -> None:
        if len(lora.adapter_indices) <= MAX_ROWS and lora.buffer.dtype in self._fused:
            self._fused[lora.buffer.dtype].refresh_plan(lora)
        super().refresh_lora_plan(lora, current)


def _has_decode_rows(batch: PagedBatch) -> bool:
    """Return True if any sequence has exactly one new token."""
    return 1 in batch.read_lengths().inputs
