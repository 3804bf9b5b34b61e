"""LoRA adapters: their config, tensors, identity and merges, and batches that mix many of them."""
