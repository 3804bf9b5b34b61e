"""What decides: which adapters and sequences are where, and what each step computes."""
