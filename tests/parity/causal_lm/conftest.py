"""Tiny models, each made once for all tests."""

from tests.models.conftest import zoo

__all__ = ["zoo"]
