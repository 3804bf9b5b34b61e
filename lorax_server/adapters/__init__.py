"""Adapters: their configuration, tensors, identity and sources, merging, and batches that mix adapters."""
