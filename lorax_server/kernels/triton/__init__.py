"""The op table in Triton, for GPUs. Only the modules of this folder import triton."""
