"""LoRA adapters: configuration, tensors, identity, merging, and batches that mix adapters."""
