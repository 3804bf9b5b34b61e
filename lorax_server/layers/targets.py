"""The layers are the map of what adapters can change."""

from torch import nn

from lorax_server.adapters.target import AdapterTarget
from lorax_server.layers.embedding import TensorParallelEmbedding
from lorax_server.layers.linear import (
    MultiAdapterHead,
    TensorParallelAdapterRowLinear,
    TensorParallelMultiAdapterLinear,
)
from lorax_server.layers.norm import LayerNorm, RMSNorm


def adapter_targets(model: nn.Module) -> dict[str, AdapterTarget]:
    """Every place of a model that an adapter can change, by its name in transformers."""
    adaptable = (
        TensorParallelMultiAdapterLinear,
        TensorParallelAdapterRowLinear,
        MultiAdapterHead,
        TensorParallelEmbedding,
        RMSNorm,
        LayerNorm,
    )
    layers = (module for module in model.modules() if isinstance(module, adaptable))
    return {target.name: target for layer in layers for target in layer.targets}
