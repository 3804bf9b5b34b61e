"""Adapters of an engine: which there are, where each one is, and what moves them."""
