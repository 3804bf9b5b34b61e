"""API keys, rate limits, and resolution of model and adapter names."""
