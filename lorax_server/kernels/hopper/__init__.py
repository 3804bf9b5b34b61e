"""CUDA C++ kernels for Hopper GPUs. A linear layer and its LoRA run as one fused kernel."""
