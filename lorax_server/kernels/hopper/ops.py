"""The op table on Hopper: CUDA C++ in half precision, from linears to sampling; Triton for all else."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lorax_server.kernels.hopper import prompt, sampling, small
from lorax_server.kernels.hopper.decode import DecodeAttention
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.linear import MAX_ROWS, FusedLinear
from lorax_server.kernels.hopper.prefill import PrefillAttention
from lorax_server.kernels.hopper.settings import LONG_STAGES
from lorax_server.kernels.hopper.sources import (
    ACTIVATIONS,
    HEIGHTS,
    NUMBERS,
    GateVariant,
    LinearVariant,
    PlanVariant,
    PromptVariant,
    Variant,
)
from lorax_server.kernels.ops import (
    Activation,
    AttentionSpec,
    CosSin,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    PagedBatch,
)
from lorax_server.kernels.sampling import ChosenRows, RowBatch, RowInputs
from lorax_server.kernels.triton import prefill
from lorax_server.kernels.triton.cache import rotate_and_write
from lorax_server.kernels.triton.ops import TritonOps

FUSED_ROWS = HEIGHTS[-1]  # with adapters: above, cuBLAS and LoRA after it are faster
FUSED_OUTPUTS = 65536  # with adapters: a head would need hundreds of megabytes of scratch memory
PLAIN_ROWS = 64  # without: above, cuBLAS is faster


class HopperOps(TritonOps):
    """The ops of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Compile two kernels, to find out here whether the others can be compiled."""
        super().__init__()
        self._kernels = Kernels(device)
        self._kernels.compile(
            [PlanVariant(), LinearVariant(torch.bfloat16, HEIGHTS[0], LONG_STAGES[HEIGHTS[0]], 2, True)]
        )
        self._decode = DecodeAttention(self._kernels)
        self._prefill = PrefillAttention(self._kernels)
        self._fused = {dtype: FusedLinear(self._kernels, dtype) for dtype in NUMBERS}

    def prepare(self, linears: Sequence[LinearWeights], with_lora: bool) -> None:
        variants: set[Variant] = set()
        for weights in linears:
            fused = self._fused.get(weights.plain.dtype)
            if fused is not None and fused.fits(weights, ()):
                outputs, inputs = weights.plain.shape
                variants |= fused.variants(inputs, outputs, with_lora)
                if with_lora and outputs <= FUSED_OUTPUTS:
                    fused.reserve(outputs)
                variants.add(small.norm_variant(fused.dtype, inputs))
        for dtype in {weights.plain.dtype for weights in linears} & NUMBERS.keys():
            variants |= {GateVariant(dtype, name) for name in ACTIVATIONS}
            if with_lora:
                variants |= {PromptVariant(dtype, step) for step in ("sum_parts", "expand_prompt")}
                variants |= {PromptVariant(dtype, "gate_prompt", name) for name in ACTIVATIONS}
        for dtype in {weights.plain.dtype for weights in linears} & sampling.LOGITS.keys():
            variants |= {sampling.SampleVariant(dtype, step) for step in ("change", "choose")}
        self._kernels.compile(sorted(variants, key=str))

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
        if spec.slopes is not None:  # the kernels here have none
            return super().attend(q, k, v, angles, cache, batch, spec)
        if not len(q) or not (is_decode or batch.stores_all) or not self._decode.fits(q, k, v, cache, batch):
            return super().attend(q, k, v, angles, cache, batch, spec)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if is_decode:
            self._decode(out, q, k, v, angles, cache, batch, spec, stores=True)
            return out
        rotate_and_write(q, k, v, angles, cache, batch, spec)
        attend_prompts = self._prefill if self._prefill.fits(q, cache, spec) else prefill.attend_prompts
        attend_prompts(out, q, cache, batch, spec)
        if batch.in_graph or batch.once("has singles", _has_singles, batch):
            self._decode(out, q, k, v, None, cache, batch, spec, stores=False)
        return out

    def linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        rows, fused = len(x), self._fused.get(x.dtype)
        if not rows or fused is None or not x.is_contiguous() or not fused.fits(weights, targets):
            return super().linear(x, weights, lora, targets)
        if rows > MAX_ROWS:
            return self._prompt_linear(x, weights, lora, targets)
        is_wide = lora is not None and weights.plain.shape[0] > FUSED_OUTPUTS
        if rows <= (PLAIN_ROWS if lora is None else FUSED_ROWS) and not is_wide:
            return fused.linear(x, weights, lora, targets)
        out = F.linear(x, weights.plain, weights.bias)
        if lora is not None:
            fused.add_lora(out, x, lora, targets)
            self.scale_and_shift(out, lora, targets)
        return out

    def _prompt_linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        if lora is None or not lora.has_low_rank(targets):
            out = F.linear(x, weights.plain, weights.bias)
        else:
            out = prompt.linear(self._kernels, x, weights, lora, targets)
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
        can_gate = activation.name in ACTIVATIONS and weights.plain.shape[0] % 16 == 0
        if not len(x) or fused is None or not can_gate or not fused.fits(weights, targets):
            return super().gated_linear(x, weights, activation, lora, targets)
        if len(x) > MAX_ROWS and lora is not None and len(targets) == 2 and lora.changes(targets):
            return prompt.gated_linear(self._kernels, x, weights, activation.name, lora, targets)
        return small.gate(self._kernels, self.linear(x, weights, lora, targets), activation.name)

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
        is_narrow = weight.dtype == x.dtype  # the kernel here reads no others
        if not (is_narrow and 0 < len(x) <= MAX_ROWS) or fused is None or not small.can_norm(x, residual):
            return super().rms_norm(x, residual, weight, eps, lora, targets)
        adapters = (lora, fused.plan(lora), targets[0]) if lora is not None and targets else None
        return small.rms_norm(self._kernels, x, residual, weight, eps, adapters)

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        fused = self._fused.get(x.dtype)
        if 0 < len(x) <= MAX_ROWS and fused is not None and x.is_contiguous() and fused.can_add(out, targets):
            fused.add_lora(out, x, lora, targets)
        else:
            super().add_lora(out, x, lora, targets)

    def choose_rows(self, batch: RowBatch, inputs: RowInputs) -> ChosenRows:
        return sampling.choose_rows(self._kernels, batch, inputs)

    def plan_lora(self, lora: LoraBatch, current: LoraBatch) -> None:
        if len(lora.adapter_indices) <= MAX_ROWS and lora.buffer.dtype in self._fused:
            self._fused[lora.buffer.dtype].replan(lora)
        super().plan_lora(lora, current)


def _has_singles(batch: PagedBatch) -> bool:
    """Return whether any sequence has one new token."""
    return 1 in batch.read_lengths().inputs
