"""The operations a forward is made of. `reference` is their specification and the path on a CPU."""

from lorax_server.kernels.ops import AttentionSpec, LoraSegments, Ops, PagedBatch
from lorax_server.kernels.select import select_ops

__all__ = ["AttentionSpec", "LoraSegments", "Ops", "PagedBatch", "select_ops"]
