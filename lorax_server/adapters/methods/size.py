"""Estimates how much memory an adapter needs, based on its file header."""

import math
from collections.abc import Mapping

from lorax_server.adapters.checkpoint import TensorInfo, find_projections
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.methods.fields import BlockDiagonal, Method


def count_elements(config: AdapterConfig, tensors: Mapping[str, TensorInfo], max_inputs: int) -> int:
    """Return an upper bound for the number of elements, in the model's dtype, that loading an adapter requires.

    `max_inputs` is the largest input size of any linear layer in the base model.
    """
    stored = sum(math.prod(info.shape) for info in tensors.values())
    if config.use_kasa:  # factors plus the removed singular components
        return 2 * stored
    if config.block_diagonal is not None:
        stored += _count_block_diagonal(config.block_diagonal, tensors)
    if config.modules_to_save or config.method is Method.LN_TUNING:
        # A replaced linear weight is stored as two factors: the difference and an identity matrix.
        matrices = [info for key, info in tensors.items() if key.endswith(".weight") and ".lora_" not in key]
        stored += sum(min(info.shape) ** 2 for info in matrices if len(info.shape) == 2)
    return stored + (_count_vera(config, tensors, max_inputs) if config.method is Method.VERA else 0)


def _count_block_diagonal(blocks: BlockDiagonal, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the peak number of elements in memory while BD-LoRA factors are expanded to dense matrices.

    The file stores only the diagonal blocks. The peak is the larger of (a) all dense factors plus a copy, and (b) all
    dense factors plus the largest factor in float32 (counted as two half-precision factors).
    """
    expanded = [
        math.prod(info.shape) * blocks.blocks
        for key, info in tensors.items()
        for names, factors in (
            (blocks.a, (".lora_A", ".lora_embedding_A")),
            (blocks.b, (".lora_B", ".lora_embedding_B")),
        )
        if any(factor in key for factor in factors) and any(name in key for name in names)
    ]
    return max(2 * sum(expanded), sum(expanded) + 2 * max(expanded, default=0))


def _count_vera(config: AdapterConfig, tensors: Mapping[str, TensorInfo], max_inputs: int) -> int:
    """Return the number of elements for VeRA's shared projections and the factors that each module derives from them.

    A float32 element counts as two half-precision elements. The peak is either all factors in float32 (if the file is
    read in one block), or one pair of factors in float32 plus all pairs in half precision.
    """
    projection = find_projections(tensors, config.name).get("A")
    inputs = max_inputs if projection is None else max(tensors[projection].shape, default=0)
    outputs = [math.prod(info.shape) for key, info in tensors.items() if ".vera_lambda_b" in key]
    widest = inputs + max(outputs, default=0)
    pairs = sum(inputs + size for size in outputs)
    return config.r * (2 * widest + max(2 * pairs, pairs + 2 * widest))
