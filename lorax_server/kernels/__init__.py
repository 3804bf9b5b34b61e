"""Kernel backends. Each backend implements the same ops. `reference` is the specification and runs on every device."""

from lorax_server.kernels.matrix import StoredMatrix
from lorax_server.kernels.ops import (
    MAX_RANK,
    NUM_OFFSETS,
    Activation,
    AttentionSpec,
    CosSin,
    EmbeddingTarget,
    ExpertMatrices,
    ExpertWeights,
    Field,
    HostLengths,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    Ops,
    PagedBatch,
    RecordedGraph,
    Routing,
    UnrecordableError,
)
from lorax_server.kernels.quantized import BlockMatrix, QuantizedMatrix, concat_matrices, quantize_blocks
from lorax_server.kernels.select import select_ops

__all__ = [
    "MAX_RANK",
    "NUM_OFFSETS",
    "Activation",
    "AttentionSpec",
    "BlockMatrix",
    "CosSin",
    "EmbeddingTarget",
    "ExpertMatrices",
    "ExpertWeights",
    "Field",
    "HostLengths",
    "LayerCache",
    "LinearWeights",
    "LoraBatch",
    "LoraTarget",
    "Ops",
    "PagedBatch",
    "QuantizedMatrix",
    "RecordedGraph",
    "Routing",
    "StoredMatrix",
    "UnrecordableError",
    "concat_matrices",
    "quantize_blocks",
    "select_ops",
]
