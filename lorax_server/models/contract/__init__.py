"""Classes of the seed contract: LoRAX's padded batches, messages and models. The server does not use them."""
