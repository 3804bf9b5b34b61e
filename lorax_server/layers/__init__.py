"""The parts models are built from: they pull their own weights, know their shard, and take adapters."""
