// Kernels for x86 CPUs with AVX2 (since 2013).
#if defined(__x86_64__)
#include "system_headers.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA avx2
#define VL 8
#include "all_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
