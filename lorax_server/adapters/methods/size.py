"""The memory that an adapter takes, as far as its header tells."""

import math
from collections.abc import Mapping

from lorax_server.adapters.checkpoint import TensorInfo, find_projections
from lorax_server.adapters.config import AdapterConfig
from lorax_server.adapters.methods.fields import Method


def count_elements(config: AdapterConfig, tensors: Mapping[str, TensorInfo], max_inputs: int) -> int:
    """Return about the most elements of the model's dtype that an adapter has in memory, prepared or while it is being
    prepared. `max_inputs` is the largest number of inputs of any matrix of the base model."""
    stored = sum(math.prod(info.shape) for info in tensors.values())
    if config.use_kasa:  # the base model's singular values, beside the factors
        return 2 * stored
    if config.modules_to_save or config.method is Method.LN_TUNING:
        # A matrix of a linear has an identity beside it.
        matrices = [info for key, info in tensors.items() if key.endswith(".weight") and ".lora_" not in key]
        stored += sum(min(info.shape) ** 2 for info in matrices if len(info.shape) == 2)
    return stored + (_count_vera(config, tensors, max_inputs) if config.method is Method.VERA else 0)


def _count_vera(config: AdapterConfig, tensors: Mapping[str, TensorInfo], max_inputs: int) -> int:
    """Count the projections, and the pair of factors that each module gets of them.

    The projections are in float32, which is two elements in half precision. So are the pairs: all of them where the
    file is read at once, else one, beside those that were cast before it.
    """
    projection = find_projections(tensors, config.name).get("A")
    inputs = max_inputs if projection is None else max(tensors[projection].shape, default=0)
    outputs = [math.prod(info.shape) for key, info in tensors.items() if ".vera_lambda_b" in key]
    widest = inputs + max(outputs, default=0)
    pairs = sum(inputs + size for size in outputs)
    return config.r * (2 * widest + max(2 * pairs, pairs + 2 * widest))
