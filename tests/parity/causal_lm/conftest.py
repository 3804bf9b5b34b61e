"""Fixture: tiny models, created once per session."""

from tests.models.conftest import zoo

__all__ = ["zoo"]
