"""Model implementations, one class per architecture. `get_model` selects the class by the config's `model_type`."""

from lorax_server.models.registry import get_model

__all__ = ["get_model"]
