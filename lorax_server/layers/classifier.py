"""Linear layers of classification heads, which adapters replace as a whole (PEFT's `modules_to_save`)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.target import AdapterTarget, TargetKind
from lorax_server.distributed import make_full_shard
from lorax_server.weights import Weights


class ClassifierLinear(nn.Module):
    """A linear layer that runs on the tokens of one sequence at a time, with the weights of the sequence's adapter.

    If the base model lacks the layer, only sequences whose adapter has the layer can be classified.
    """

    def __init__(self, weights: Weights, name: str, in_features: int, out_features: int | None, *, bias: bool) -> None:
        """Load the layer if the checkpoint contains it. If `out_features` is None, the checkpoint and the adapters
        determine the number of outputs.
        """
        super().__init__()
        self.name = name
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if weights.has(f"{name}.weight"):
            size = out_features or weights.get_shape(f"{name}.weight")[0]
            self.weight = weights.get_tensor(f"{name}.weight", (size, in_features))
            self.bias = weights.get_tensor(f"{name}.bias", (size,)) if bias else None
        outputs = make_full_shard(out_features or (0 if self.weight is None else len(self.weight)))
        self.targets = (
            AdapterTarget(
                name,
                TargetKind.CLASSIFIER,
                make_full_shard(in_features),
                outputs,
                slice(0, 0),
                self.weight,
                self.bias,
                is_resizable=out_features is None,
            ),
        )

    def forward(self, x: torch.Tensor, adapter: int, arena: AdapterArena | None) -> torch.Tensor:
        """Return the outputs for one sequence. If neither the base model nor the adapter has weights, return no
        outputs.
        """
        weight: Any = self.weight
        bias = self.bias
        if adapter and arena is not None:
            replaced = arena.classifier(adapter, self.name)
            weight, bias = (weight, bias) if replaced is None else replaced
        return x[:, :0] if weight is None else F.linear(x, weight, bias)
