"""The operations of a forward. `reference` is their specification, and runs on every device."""

from lorax_server.kernels.ops import (
    MAX_RANK,
    NUM_OFFSETS,
    Activation,
    AttentionSpec,
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
from lorax_server.kernels.select import select_ops

__all__ = [
    "MAX_RANK",
    "NUM_OFFSETS",
    "Activation",
    "AttentionSpec",
    "EmbeddingTarget",
    "Field",
    "HostLengths",
    "LayerCache",
    "LinearWeights",
    "LoraBatch",
    "LoraTarget",
    "Ops",
    "PagedBatch",
    "select_ops",
]
