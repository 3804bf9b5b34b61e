// Linears as AMX computes them, in plain C++: for tests on any CPU.
#include "std.h"
#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#endif
#define VL 16
#define EMULATED_TILES
#define ISA emulated
namespace emulated_cpu {
#include "abi.h"
#include "simd.h"
#include "threads.h"
#include "product.h"
#include "blocks.h"
#include "tiles.h"
#include "pairs.h"
#include "linear.h"
#include "rows.h"
}  // namespace emulated_cpu
#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute pop
#endif
