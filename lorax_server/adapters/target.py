"""The places of a model that an adapter can change."""

from dataclasses import dataclass

import torch

from lorax_server.distributed import Shard


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix of the base model, known by its name in the checkpoint, and the part of it that this rank holds."""

    name: str
    inputs: Shard
    outputs: Shard
    columns: slice
    """Where its outputs lie in the output of the layer that holds it."""

    def cut(self, lora_a: torch.Tensor, lora_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of PEFT's factors, `[rank, in]` and `[out, rank]`, both as `[rank, ...]`."""
        return self.inputs.take(lora_a, dim=1), self.outputs.take(lora_b, dim=0).t()
