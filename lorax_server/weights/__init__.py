"""Checkpoints: tensors by name, read lazily, each rank only its part."""

from lorax_server.weights.checkpoint import Placement, StoredTensor, Weights, open_tensors, open_weights, weight_bytes

__all__ = ["Placement", "StoredTensor", "Weights", "open_tensors", "open_weights", "weight_bytes"]
