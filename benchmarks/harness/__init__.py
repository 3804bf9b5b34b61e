"""Shared benchmark code: models and adapters, load generation, GPU timing, reports."""
