"""C++ kernels for CPUs. If there is no compiled library, the reference ops are used."""
