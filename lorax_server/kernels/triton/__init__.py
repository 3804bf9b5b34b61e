"""Triton kernels for NVIDIA GPUs. Only this package imports triton."""
