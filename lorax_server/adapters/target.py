"""Describes the base model modules that adapters can change."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from lorax_server.distributed import Shard
from lorax_server.kernels import ReorderedMatrix, StoredMatrix


class TargetKind(Enum):
    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    EXPERTS = "experts"  # the same matrix of all experts in a layer
    CLASSIFIER = "classifier"  # a layer of a classification head, which adapters replace as a whole
    INPUT = "input"  # not a module: the input to a linear layer, which IA3 can scale


class ExpertTarget(NamedTuple):
    """The names that PEFT uses for a target of kind `EXPERTS`."""

    num_experts: int
    top_k: int  # experts per token
    module: str  # module that contains all experts
    matrix: str  # name of the matrix in modules for one expert, `MODULE.0.MATRIX`
    parameter: str  # parameter of `module` that contains this matrix of all experts
    outputs: slice  # outputs of this matrix in the parameter


@dataclass(frozen=True, eq=False)
class AdapterTarget:
    """A base model module that adapters can change, with this rank's shard of its weights. Its name is the name in
    transformers.

    For embeddings, the inputs are the vocabulary and the weight is `[inputs, outputs]`.
    """

    name: str
    kind: TargetKind
    inputs: Shard
    outputs: Shard
    columns: slice  # output columns within the fused layer
    # This rank's shard of the base model weight: [outputs, inputs], or [outputs] for a norm.
    weight: torch.Tensor | StoredMatrix | None
    bias: torch.Tensor | None
    # If rank outputs are summed, only one rank adds the bias and the rows of added tokens.
    adds_bias: bool = True
    offset: float = 0.0  # added to a norm weight from the checkpoint, e.g. 1 for Gemma
    # The weight's shape in the checkpoint if it differs: a transposed linear weight, or a norm with one row per head.
    checkpoint_shape: tuple[int, ...] | None = None
    # The preceding target that produces this module's inputs, and the first of its outputs that is an input. IA3 input
    # scales are applied to these outputs.
    input_scale_target: tuple[str, int] | None = None
    # Only for the kind `EXPERTS`. `inputs` and `outputs` are then the sizes of one expert.
    experts: ExpertTarget | None = None
    is_resizable: bool = False  # adapters may replace the layer with another number of outputs

    @property
    def input_order(self) -> torch.Tensor | None:
        """The order in which the inputs of the weight and of LoRA A are stored, or None if it is the original order."""
        return self.weight.order if isinstance(self.weight, ReorderedMatrix) else None

    def read(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the given rows of this rank's base model weight."""
        assert self.weight is not None
        part = self.weight[rows]
        return part.read() if isinstance(part, StoredMatrix) else part

    def to_linear_layout(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a checkpoint weight in the layout `[outputs, inputs]`, or `[outputs]` for a norm."""
        if self.checkpoint_shape is None:
            return weight
        return weight.t() if self.kind is TargetKind.LINEAR else weight.flatten()

    def shard_factors(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shard of PEFT's factors `[rank, in]` and `[out, rank]`, in the layout of `Field`.

        Factors for experts have an additional first dimension for the experts.
        """
        local_a, local_b = self.inputs.select(lora_a, dim=-1), self.outputs.select(lora_b, dim=-2).mT
        return (local_a.t() if self.kind is TargetKind.EMBEDDING else local_a), local_b
