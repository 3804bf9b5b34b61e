"""The modules of a model that an adapter can change."""

from dataclasses import dataclass
from enum import Enum

import torch

from lorax_server.distributed import Shard
from lorax_server.kernels import PanelMatrix


class Kind(Enum):
    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    INPUT = "input"  # no module: the numbers that a matrix reads, which have a factor here


@dataclass(frozen=True, eq=False)
class AdapterTarget:
    """A module of the base model, known by its name in transformers, and the part of it that this rank holds.

    An embedding is a matrix from the vocabulary, its inputs, to its outputs, though its weight is `[inputs, outputs]`.
    """

    name: str
    kind: Kind
    inputs: Shard
    outputs: Shard
    columns: slice  # of its outputs in the output of the layer that holds it
    # This rank's parts of the base model's: [outputs, inputs], a norm's [outputs].
    weight: torch.Tensor | PanelMatrix | None
    bias: torch.Tensor | None
    # True on the one rank that adds the bias and the rows of new tokens, where the outputs of ranks are summed.
    adds_once: bool = True
    offset: float = 0.0  # added to what a checkpoint stores as a norm's weight
    # The weight's shape in a checkpoint, where it is another: a linear's turned round, or heads of their own in a norm.
    stored_shape: tuple[int, ...] | None = None
    # The target whose outputs, from this one on, a factor scales as it would scale this module's inputs.
    scaled_at: tuple[str, int] | None = None

    def read(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return some rows of the base model's weight."""
        assert self.weight is not None
        part = self.weight[rows]
        return part.read() if isinstance(part, PanelMatrix) else part

    def arrange(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight of a checkpoint as `[outputs, inputs]`, a norm's as `[outputs]`."""
        if self.stored_shape is None:
            return weight
        return weight.t() if self.kind is Kind.LINEAR else weight.flatten()

    def cut(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of PEFT's factors `[rank, in]` and `[out, rank]`, in the layout of the arena."""
        local_a, local_b = self.inputs.take(lora_a, dim=1), self.outputs.take(lora_b, dim=0).t()
        return (local_a.t() if self.kind is Kind.EMBEDDING else local_a), local_b
