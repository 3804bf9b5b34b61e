"""Obeys the engine: holds the model and the adapters of one rank, and runs what it is told."""
