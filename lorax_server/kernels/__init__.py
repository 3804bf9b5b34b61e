"""The operations of a forward. `reference` is their specification, and runs on every device."""

from lorax_server.kernels.ops import (
    MAX_RANK,
    NUM_OFFSETS,
    Activation,
    AttentionSpec,
    CosSin,
    EmbeddingTarget,
    Field,
    HostLengths,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    Ops,
    PagedBatch,
)
from lorax_server.kernels.select import find_max_rank, select_ops

__all__ = [
    "MAX_RANK",
    "NUM_OFFSETS",
    "Activation",
    "AttentionSpec",
    "CosSin",
    "EmbeddingTarget",
    "Field",
    "HostLengths",
    "LayerCache",
    "LinearWeights",
    "LoraBatch",
    "LoraTarget",
    "Ops",
    "PagedBatch",
    "find_max_rank",
    "select_ops",
]
