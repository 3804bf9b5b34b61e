"""The parts of models: they load their own weights, know their shard, and apply adapters."""
