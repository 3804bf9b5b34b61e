"""Follows the engine: holds the model and the adapters of one rank, and runs the steps of plans."""
