"""Models: one class per architecture, found by the type in a checkpoint's config."""

from lorax_server.models.registry import get_model

__all__ = ["get_model"]
