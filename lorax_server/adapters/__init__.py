"""What a LoRA adapter is, and how a batch mixes many."""
