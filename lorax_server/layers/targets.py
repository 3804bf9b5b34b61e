"""List the modules of a model that adapters can target."""

from torch import nn

from lorax_server.adapters.target import AdapterTarget


def collect_adapter_targets(model: nn.Module) -> dict[str, AdapterTarget]:
    """Return all adapter targets of a model, keyed by module name in transformers."""
    return {target.name: target for layer in model.modules() for target in getattr(layer, "targets", ())}
