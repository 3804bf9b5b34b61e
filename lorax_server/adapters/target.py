"""The places of a model that an adapter can change."""

from dataclasses import dataclass
from enum import Enum

import torch

from lorax_server.distributed import Shard


class Kind(Enum):
    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"


@dataclass(frozen=True, eq=False)
class AdapterTarget:
    """A module of the base model, known by its name in transformers, and the part of it that this rank holds.

    An embedding is a matrix from the vocabulary, its inputs, to its outputs, though its weight is `[inputs, outputs]`.
    """

    name: str
    kind: Kind
    inputs: Shard
    outputs: Shard
    columns: slice
    """Where its outputs lie in the output of the layer that holds it."""
    weight: torch.Tensor | None
    """This rank's part of the base model's; a linear's is `[outputs, inputs]`, a norm's `[outputs]`."""
    bias: torch.Tensor | None
    """This rank's part of the base model's."""
    adds_once: bool = True
    """Whether this rank adds what must come once, bias and rows of new tokens: only one does where ranks are summed."""

    def cut(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of PEFT's factors, `[rank, in]` and `[out, rank]`, as the table of adapters has them."""
        local_a, local_b = self.inputs.take(lora_a, dim=1), self.outputs.take(lora_b, dim=0).t()
        return (local_a.t() if self.kind is Kind.EMBEDDING else local_a), local_b
