// Kernels for x86 CPUs with AVX-512.
#if defined(__x86_64__)
#include "system_headers.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define ISA avx512
#define VL 16
#include "all_kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
