"""Kernels in CUDA C++ for Hopper GPUs: a linear and the LoRA of its rows in one launch."""
