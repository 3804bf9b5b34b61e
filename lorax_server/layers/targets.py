"""The layers are the map of what adapters can change."""

from torch import nn

from lorax_server.adapters.target import AdapterTarget


def adapter_targets(model: nn.Module) -> dict[str, AdapterTarget]:
    """Return every place of a model that an adapter can change, by its name in transformers."""
    return {target.name: target for layer in model.modules() for target in getattr(layer, "targets", ())}
