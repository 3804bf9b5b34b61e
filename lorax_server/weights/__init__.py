"""Lazy access to base model checkpoints. Each rank reads only its shard."""

from lorax_server.weights.checkpoint import Placement, StoredTensor, Weights, estimate_bytes, open_tensors, open_weights
from lorax_server.weights.progress import LoadProgress

__all__ = ["LoadProgress", "Placement", "StoredTensor", "Weights", "estimate_bytes", "open_tensors", "open_weights"]
