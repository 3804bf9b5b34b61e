"""The operations a forward is made of. `reference` is their specification and the path on a CPU."""

from lorax_server.kernels.ops import NUM_OFFSETS, AttentionSpec, Field, LoraBatch, LoraTarget, Ops, PagedBatch
from lorax_server.kernels.select import select_ops

__all__ = [
    "NUM_OFFSETS",
    "AttentionSpec",
    "Field",
    "LoraBatch",
    "LoraTarget",
    "Ops",
    "PagedBatch",
    "select_ops",
]
