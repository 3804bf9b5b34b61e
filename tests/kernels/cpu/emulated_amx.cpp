// Linears as AMX computes them, in plain C++: for tests on any CPU.
#include "system_headers.h"
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
#include "parallel.h"
#include "product.h"
#include "blocked_product.h"
#include "amx_tiles.h"
#include "amx_product.h"
#include "integer_dot.h"
#include "quantized_product.h"
#include "cpu_features.h"
#include "linear.h"
#include "embedding_lookup.h"
}  // namespace emulated_cpu
#if defined(__clang__) && defined(__x86_64__)
#pragma clang attribute pop
#endif
