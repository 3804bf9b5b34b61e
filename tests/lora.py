"""Hand-made adapters: random factors for every target of a model, and the arena that holds them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorax_server.adapters.batch import AdapterArena
from lorax_server.adapters.target import AdapterTarget

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]  # target: A [rank, in], B [out, rank], as PEFT has them


def random_factors(targets: Mapping[str, AdapterTarget], rank: int, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(rank, target.inputs.full, generator=generator) * 0.3,
            torch.randn(target.outputs.full, rank, generator=generator) * 0.3,
        )
        for name, target in targets.items()
    }


def make_arena(
    targets: Mapping[str, AdapterTarget], adapters: Sequence[tuple[Factors, float]], device: torch.device
) -> AdapterArena:
    """Adapter `i` of the list gets index `i + 1`. An odd gap between factors, so that nothing depends on alignment."""
    names = list(targets)
    table = torch.zeros(len(adapters) + 1, len(names), 3, dtype=torch.long)
    scales = torch.zeros(len(adapters) + 1, len(names))
    pieces, offset = [], 0

    def place(factor: torch.Tensor) -> int:
        nonlocal offset
        pieces.extend([factor.flatten(), torch.zeros(7)])
        offset += factor.numel() + 7
        return offset - factor.numel() - 7

    for index, (factors, scale) in enumerate(adapters, start=1):
        for name, (lora_a, lora_b) in factors.items():
            local_a, local_b = targets[name].cut(lora_a, lora_b)
            column = names.index(name)
            table[index, column] = torch.tensor([place(local_a), place(local_b), len(lora_a)])
            scales[index, column] = scale
    buffer = torch.cat(pieces)
    columns = {name: column for column, name in enumerate(names)}
    return AdapterArena(buffer.to(device), table.to(device), scales.to(device), columns)


@torch.no_grad()
def merged(oracle: Any, factors: Factors, scale: float) -> Any:
    """The oracle with an adapter added to its matrices."""
    model = deepcopy(oracle)
    for name, (lora_a, lora_b) in factors.items():
        module = model.get_submodule(name)
        delta = (lora_b @ lora_a * scale).to(module.weight.device)
        delta = delta.t() if isinstance(module, Conv1D) else delta
        module.weight = nn.Parameter(module.weight + delta)  # a tied head gets a matrix of its own
    return model
