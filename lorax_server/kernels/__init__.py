"""Kernel backends. Each backend implements the same ops. `reference` is the specification and runs on every device."""

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
    RecordedGraph,
    UnrecordableError,
)
from lorax_server.kernels.panels import PanelMatrix
from lorax_server.kernels.select import select_ops

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
    "PanelMatrix",
    "RecordedGraph",
    "UnrecordableError",
    "select_ops",
]
