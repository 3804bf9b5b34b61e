"""The op table in C++ for CPUs. What is rare is left to the reference."""

from collections.abc import Sequence

import torch

from lorax_server.kernels import reference
from lorax_server.kernels.cpu import linear
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.ops import Activation, LinearWeights, LoraBatch, LoraTarget


class CpuOps:
    """The ops, on all threads of torch."""

    def __init__(self) -> None:
        """Load the library; an error says why there is none."""
        self._library = Library()

    add_lora = staticmethod(reference.add_lora)
    adapt_embedding = staticmethod(reference.adapt_embedding)
    decode_attention = staticmethod(reference.decode_attention)
    plan_lora = staticmethod(reference.plan_lora)
    prefill_attention = staticmethod(reference.prefill_attention)
    prepare = staticmethod(reference.prepare)
    rms_norm = staticmethod(reference.rms_norm)
    rotary = staticmethod(reference.rotary)
    scale_and_shift = staticmethod(reference.scale_and_shift)
    write_kv = staticmethod(reference.write_kv)

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeights:
        return linear.make_linear(self._library, weight, bias)

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
