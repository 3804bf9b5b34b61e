"""All ops in Triton. LoRA uses the decode kernels for up to `DECODE_ROWS` tokens and the prompt kernels for more.

Decode kernels read only device tensors, so graphs can replay them with different adapters. Prompt kernels can use host
fields. All steps share the scratch memory, so run one step at a time on one stream.
"""

from collections.abc import Sequence

import torch

from lorax_server.kernels import reference, whole_sequences
from lorax_server.kernels.ops import (
    MAX_RANK,
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
    SampleTokens,
)
from lorax_server.kernels.quantized import BlockMatrix, QuantizedMatrix
from lorax_server.kernels.triton import decode_lora, gated_activation, prompt_lora, quantized, router, scale_shift
from lorax_server.kernels.triton.decode_attention import decode_attention
from lorax_server.kernels.triton.embedding import adapt_embedding
from lorax_server.kernels.triton.experts import make_experts, run_experts
from lorax_server.kernels.triton.kv_cache import rotate_and_write
from lorax_server.kernels.triton.lora_tiles import DECODE_ROWS, refresh_decode_tiles, refresh_prompt_tiles
from lorax_server.kernels.triton.norm import layer_norm, rms_norm
from lorax_server.kernels.triton.prefill_attention import prefill_attention


class TritonOps:
    """All ops in Triton, with scratch memory for decode steps.

    Triton compiles a kernel at its first call with new layer widths, dtype or tile sizes; adapters and ranks do not
    matter. Three forward passes with adapters at all targets compile all LoRA kernels: with up to `DECODE_ROWS` tokens,
    up to `prompt_lora.SHORT_PROMPT_TOKENS` tokens, and more.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.device, int], torch.Tensor] = {}

    name = "Triton"
    records_graphs = True
    has_fast_bfloat16 = True
    max_lora_rank: int | None = MAX_RANK
    sample_tokens: SampleTokens | None = None
    make_recorder = staticmethod(reference.make_recorder)
    activate = staticmethod(reference.activate)
    look_up_rows = staticmethod(reference.look_up_rows)
    choose_greedy = staticmethod(reference.choose_greedy)
    gather_logprobs = staticmethod(reference.gather_logprobs)
    top_k_scores = staticmethod(reference.top_k_scores)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    adapt_embedding = staticmethod(adapt_embedding)
    make_experts = staticmethod(make_experts)
    route = staticmethod(router.route)

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
        rotate_and_write(q, k, v, angles, cache, batch, spec)
        if batch.cu_seqlens is None:
            return decode_attention(q, cache, batch, spec)
        return prefill_attention(q, k, v, cache, batch, spec)

    def attend_sequences(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        angles: CosSin | None,
        lengths: Sequence[int],
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if spec.soft_cap is not None or spec.sinks is not None:
            return reference.attend_sequences(q, k, v, angles, lengths, spec)
        if angles is not None:
            reference.rotary(q, *angles)
            reference.rotary(k, *angles)
        return whole_sequences.attend(q, k, v, lengths, spec)

    def keeps_quantized(self, matrix: QuantizedMatrix) -> bool:  # noqa: ARG002 - all formats have kernels
        return True

    def make_linear(self, weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None) -> LinearWeights:
        if not isinstance(weight, BlockMatrix):
            return LinearWeights(weight, bias)
        return LinearWeights(quantized.make_matrix(weight), bias, weight.rounds_inputs)

    def prepare(self, linears: Sequence[LinearWeights], with_lora: bool) -> None:  # noqa: ARG002
        """Compile the kernels for quantized matrices. Triton compiles the other kernels at their first launch."""
        for weights in linears:
            quantized.compile_products(weights)

    def multiply_base(self, x: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
        """Return `x @ weight.T + bias` without adapters."""
        return quantized.multiply_base(x, weights)

    def linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        if lora is None or not len(x):
            return self.multiply_base(x, weights)
        if len(x) <= DECODE_ROWS:
            out = self.multiply_base(x, weights)
            self._apply_adapters(out, x, lora, targets, with_vectors=True)
        elif weights.rounds_inputs:  # LoRA needs the exact activations
            out = self.multiply_base(x, weights)
            self.add_lora(out, x, lora, targets)
            self.scale_and_shift(out, lora, targets)
        else:
            out = prompt_lora.linear(x, weights, lora, targets)
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
        if lora is not None and len(x) > DECODE_ROWS and gated_activation.can_fuse_gate(weights, activation, targets):
            if lora.has_low_rank(targets) or lora.has_vectors(targets):
                return gated_activation.gated_linear(x, weights, activation, lora, targets)
            lora = None
        return gated_activation.apply_gate(self.linear(x, weights, lora, targets), activation)

    def run_experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        experts: ExpertWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        return run_experts(x, routing, experts, lora, targets)

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        if 0 < len(x) <= DECODE_ROWS:
            self._apply_adapters(out, x, lora, targets, with_vectors=False)
        elif lora.has_low_rank(targets):
            prompt_lora.expand(out, prompt_lora.shrink(x, lora, targets), lora, targets, adds=True)

    def scale_and_shift(self, out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        if lora.has_vectors(targets):
            scale_shift.scale_and_shift(out, lora, targets)

    def refresh_lora_plan(self, lora: LoraBatch, current: LoraBatch) -> None:
        if len(lora.adapter_indices) <= DECODE_ROWS:
            refresh_decode_tiles(lora)
        else:
            refresh_prompt_tiles(lora, current)

    def _apply_adapters(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        lora: LoraBatch,
        targets: Sequence[LoraTarget],
        *,
        with_vectors: bool,
    ) -> None:
        key = out.device, len(targets)
        if key not in self._scratch:
            self._scratch[key] = decode_lora.make_scratch(*key)
        decode_lora.apply_adapters(out, x, lora, targets, self._scratch[key], with_vectors=with_vectors)
