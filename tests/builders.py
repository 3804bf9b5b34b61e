"""Weights and adapters in memory, for tests of layers and models."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import select_ops
from lorax_server.weights import Weights

CPU = torch.device("cpu")
ops_of = cache(select_ops)  # a library is loaded once, not for each of thousands of models


def weight_options(*, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return keyword arguments for `Weights`: a single CPU rank without communication."""
    group = FakeGroup(rank, ranks)
    return {"device": CPU, "dtype": dtype, "process_group": group, "ops": ops_of(CPU)}


def memory_weights(tensors: Mapping[str, torch.Tensor], **options: Any) -> Weights:
    return Weights(tensors, **weight_options(**options))


def adapter_batch(indices: Sequence[int], arena: AdapterArena) -> AdapterBatchData:
    return AdapterBatchData(AdapterBatchMetadata.from_indices(torch.tensor(indices, dtype=torch.long)), arena)
