// For ARM: every 64-bit one has NEON.
#if defined(__aarch64__)
#include "std.h"
#define ISA neon
#define VL 4
#include "kernels.h"
#endif
