"""C++ kernels for CPUs. Without a compiled library, the reference ops are used."""
