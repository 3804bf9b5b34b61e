"""Kernels for CPUs, in C++. Without them, e.g. where there was no compiler, the reference serves."""
