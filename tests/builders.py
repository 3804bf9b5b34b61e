"""Weights and adapters in memory, for tests of what is built from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.adapters.target import AdapterTarget
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import select_ops
from lorax_server.weights import TensorWeights

CPU = torch.device("cpu")
Factors = tuple[torch.Tensor, torch.Tensor, float]  # A [rank, in] and B [out, rank] as PEFT stores them, and the scale


def how(*, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32, pack: bool = False) -> dict[str, Any]:
    """What `Weights` asks for besides tensors: one rank of a group that does not communicate, on a CPU."""
    group = FakeGroup(rank, ranks)
    return {"device": CPU, "dtype": dtype, "process_group": group, "ops": select_ops(CPU), "pack": pack}


def memory_weights(tensors: Mapping[str, torch.Tensor], **options: Any) -> TensorWeights:
    return TensorWeights(tensors, **how(**options))


def build_arena(targets: Mapping[str, AdapterTarget], adapters: Sequence[Mapping[str, Factors]]) -> AdapterArena:
    """One rank's part of some adapters, which get the indices 1, 2, ..."""
    index = {name: column for column, name in enumerate(targets)}
    table = torch.zeros(len(adapters) + 1, len(targets), 3, dtype=torch.long)
    scales = torch.zeros(len(adapters) + 1, len(targets))
    pieces, size = [], 0
    for row, adapter in enumerate(adapters, start=1):
        for name, (lora_a, lora_b, scale) in adapter.items():
            a, b = targets[name].cut(lora_a, lora_b)
            table[row, index[name]] = torch.tensor([size, size + a.numel(), len(a)])
            scales[row, index[name]] = scale
            pieces += [a.flatten(), b.flatten()]
            size += a.numel() + b.numel()
    return AdapterArena(torch.cat(pieces), table, scales, index)


def adapter_batch(indices: Sequence[int], arena: AdapterArena) -> AdapterBatchData:
    return AdapterBatchData(AdapterBatchMetadata.from_indices(torch.tensor(indices, dtype=torch.long)), arena)
