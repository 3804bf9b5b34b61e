"""The op table in Triton. Up to `DECODE_ROWS` tokens are a decode step, more are a prompt; nothing else decides.

A decode step reads only the device's tensors, so it can be captured in a graph and replayed with other adapters. A
prompt may read the host's side of a batch. One step is in flight at a time, on one stream: steps share their scratch.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lorax_server.kernels import reference
from lorax_server.kernels.ops import (
    MAX_RANK,
    Activation,
    AttentionSpec,
    ChooseRows,
    CosSin,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    PagedBatch,
)
from lorax_server.kernels.triton import decode, gate, prompt, vectors
from lorax_server.kernels.triton.attention import decode_attention
from lorax_server.kernels.triton.cache import rotate_and_write
from lorax_server.kernels.triton.embedding import adapt_embedding
from lorax_server.kernels.triton.norm import layer_norm, rms_norm
from lorax_server.kernels.triton.prefill import prefill_attention
from lorax_server.kernels.triton.tiles import DECODE_ROWS, plan_decode, plan_prompt


class TritonOps:
    """The ops, and the scratch memory of decode steps.

    A kernel is compiled when it is first called with a layer's widths, a dtype and a class of tokens; adapters, their
    ranks and their number make no difference. So three forwards compile all of LoRA, if their adapters have low rank,
    factors and rows at all targets: one of up to `DECODE_ROWS` tokens, one of up to `prompt.SHORT_PROMPT`, one of more.
    The first of them compiles the gate of forwards without adapters too.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.device, int], torch.Tensor] = {}

    records_graphs = True
    has_fast_bfloat16 = True
    max_lora_rank: int | None = MAX_RANK
    choose_rows: ChooseRows | None = None
    make_recorder = staticmethod(reference.make_recorder)
    make_linear = staticmethod(reference.make_linear)
    look_up = staticmethod(reference.look_up)
    choose_greedy = staticmethod(reference.choose_greedy)
    find_logprobs = staticmethod(reference.find_logprobs)
    find_best = staticmethod(reference.find_best)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    adapt_embedding = staticmethod(adapt_embedding)

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

    def prepare(self, linears: Sequence[LinearWeights], with_lora: bool) -> None:
        """Compile nothing yet: Triton does when a kernel is first launched."""

    def linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        if lora is None or not len(x):
            return F.linear(x, weights.plain, weights.bias)
        if len(x) <= DECODE_ROWS:
            out = F.linear(x, weights.plain, weights.bias)
            self._adapt_rows(out, x, lora, targets, with_vectors=True)
        else:
            out = prompt.linear(x, weights, lora, targets)
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
        if lora is not None and len(x) > DECODE_ROWS and gate.can_fuse(weights, activation, targets):
            if lora.has_low_rank(targets) or lora.has_vectors(targets):
                return gate.gated_linear(x, weights, activation, lora, targets)
            lora = None
        return gate.gate(self.linear(x, weights, lora, targets), activation)

    def add_lora(self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        if 0 < len(x) <= DECODE_ROWS:
            self._adapt_rows(out, x, lora, targets, with_vectors=False)
        elif lora.has_low_rank(targets):
            prompt.expand(out, prompt.shrink(x, lora, targets), lora, targets, adds=True)

    def scale_and_shift(self, out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        if lora.has_vectors(targets):
            vectors.scale_and_shift(out, lora, targets)

    def plan_lora(self, lora: LoraBatch, current: LoraBatch) -> None:
        if len(lora.adapter_indices) <= DECODE_ROWS:
            plan_decode(lora)
        else:
            plan_prompt(lora, current)

    def _adapt_rows(
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
            self._scratch[key] = decode.make_scratch(*key)
        decode.adapt_rows(out, x, lora, targets, self._scratch[key], with_vectors=with_vectors)
