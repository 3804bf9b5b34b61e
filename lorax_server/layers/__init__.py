"""Layers that models are built from. Each layer loads its shard of the weights and applies adapters."""
