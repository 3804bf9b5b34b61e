// Kernels for 64-bit ARM CPUs, which all have NEON.
#if defined(__aarch64__)
#include "system_headers.h"
#define ISA neon
#define VL 4
#include "all_kernels.h"
#endif
