"""The op table in Triton, for NVIDIA GPUs. Nothing here is imported where there is no GPU."""
