"""Access: keys, rate limits, and the names of models and adapters."""
