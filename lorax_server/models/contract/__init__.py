"""LoRAX's padded batches, messages and models (see docs/seed-contract.md). The server does not use these classes."""
