"""The op table in C++ for CPUs. What is rare is left to the reference."""

from collections.abc import Callable, Sequence

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.cpu import attention, linear, norm, sampling
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.program import KernelProgram, Recorder, RunBuffers
from lorax_server.kernels.cpu.structs import plan_lora
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
from lorax_server.kernels.panels import PanelMatrix
from lorax_server.kernels.steps import attend_in_steps


class CpuOps:
    """The ops, on all threads of torch."""

    def __init__(self, library: Library | None = None) -> None:
        """Load the library of this CPU, if none is given; an error says why there is none."""
        self._library = library or Library()

    @property
    def has_fast_bfloat16(self) -> bool:
        """Tell whether this CPU multiplies bfloat16 faster than float32."""
        return self._library.has_tiles

    # Adapters of embeddings, and those with token rows of their own at the head, which are rare.
    add_lora = staticmethod(reference.add_lora)
    adapt_embedding = staticmethod(reference.adapt_embedding)
    plan_lora = staticmethod(plan_lora)
    prepare = staticmethod(reference.prepare)  # there is nothing to compile

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
        return attend_in_steps(self, q, k, v, angles, cache, batch, spec)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> None:
        attention.write_kv(self._library, k, v, cache, batch, spec)

    def prefill_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        batch: PagedBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        return attention.prefill_attention(self._library, q, k, v, cache, batch, spec)

    def decode_attention(
        self, q: torch.Tensor, cache: LayerCache, batch: PagedBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        return attention.decode_attention(self._library, q, cache, batch, spec)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        attention.rotary(self._library, x, cos, sin)

    def rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: torch.Tensor,
        lora: LoraBatch | None = None,
        targets: Sequence[LoraTarget] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.rms_norm(self._library, x, residual, weight, eps, lora, targets)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        lora: LoraBatch | None = None,
        targets: Sequence[LoraTarget] = (),
    ) -> torch.Tensor:
        return norm.layer_norm(self._library, x, weight, bias, eps, lora, targets)

    def scale_and_shift(self, out: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget]) -> None:
        norm.scale_and_shift(self._library, out, lora, targets)

    # --- beside the table: programs, and what sampling asks of a CPU ---

    def record(self, run: Callable[[], torch.Tensor], rows: int, buffers: RunBuffers) -> KernelProgram:
        """Record what a run over so many rows calls, without calling it. Raise `UnrecordableError` if that cannot be.

        It is called again with whatever is then in the places that it reads. Only one thread may use these ops now.
        """
        library, recorder = self._library, Recorder(self._library, buffers, rows)
        self._library = recorder.notes
        try:
            with recorder:
                output = run()
        finally:
            self._library = library
        return recorder.finish(output)

    def choose_greedy(
        self, logits: torch.Tensor, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sampling.choose_greedy(self._library, logits, words, numbers)

    def find_logprobs(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        words: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return sampling.find_logprobs(self._library, logits, token_ids, temperatures, words, numbers)

    def find_best(
        self, logits: torch.Tensor, count: int, words: torch.Tensor | None = None, numbers: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sampling.find_best(self._library, logits, count, words, numbers)

    # --- linears ---

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights:
        return linear.make_linear(self._library, weight, bias)

    def look_up(self, weight: torch.Tensor | PanelMatrix, ids: torch.Tensor) -> torch.Tensor:
        return linear.look_up(self._library, weight, ids)

    def linear(
        self, x: torch.Tensor, weights: LinearWeights, lora: LoraBatch | None, targets: Sequence[LoraTarget]
    ) -> torch.Tensor:
        return linear.linear(self._library, x, weights, lora, targets)

    def gated_linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        activation: Activation,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
    ) -> torch.Tensor:
        return linear.gated_linear(self._library, x, weights, activation, lora, targets)
