"""API keys, rate limits, and the lookup of model and adapter names."""
