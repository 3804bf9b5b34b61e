// All kernels, compiled once per instruction set. `ISA` is its name, `VL` the number of floats per vector.

// Hash of the sources, so Python can detect a stale library.
extern "C" __attribute__((visibility("default"))) const char* digest() { return DIGEST; }

namespace ISA {
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
#include "norm.h"
#include "activation.h"
#include "experts.h"
#include "sampling.h"
#include "rotary_kv_cache.h"
#include "attention_math.h"
#include "attention.h"
#include "top_k.h"
#include "graph.h"
}  // namespace ISA
