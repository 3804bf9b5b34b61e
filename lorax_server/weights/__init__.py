"""Provides lazy access to base model checkpoints, so that each rank reads only its shard."""

from lorax_server.weights.checkpoint import (
    LINEAR_BITS,
    QUANTIZATION_BLOCK_SIZE,
    Placement,
    StoredTensor,
    Weights,
    estimate_bytes,
    open_file,
    open_tensors,
    open_weights,
)
from lorax_server.weights.progress import LoadProgress

__all__ = [
    "LINEAR_BITS",
    "QUANTIZATION_BLOCK_SIZE",
    "LoadProgress",
    "Placement",
    "StoredTensor",
    "Weights",
    "estimate_bytes",
    "open_file",
    "open_tensors",
    "open_weights",
]
