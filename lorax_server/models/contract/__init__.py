"""The seed contract: LoRAX's padded batches, messages and padded model classes. Serving does not import it."""
