"""Executes the engine's step plans on one rank: model, KV cache, adapters and sampling."""
