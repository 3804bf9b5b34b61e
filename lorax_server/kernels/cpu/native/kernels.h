// All kernels, once for each instruction set: `ISA` is its name, `VL` the number of floats in one of its vectors.

#define JOIN_AGAIN(a, b) a##_##b
#define JOIN(a, b) JOIN_AGAIN(a, b)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, ISA)

// The text that this library was made of, so that a test can tell whether it is that of today.
extern "C" __attribute__((visibility("default"))) const char* digest() { return DIGEST; }

namespace ISA {
#include "simd.h"
#include "threads.h"
#include "product.h"
#include "blocks.h"
#include "tiles.h"
#include "pairs.h"
#include "linear.h"
#include "rows.h"
#include "norm.h"
#include "activation.h"
#include "sampling.h"
#include "cache.h"
#include "scores.h"
#include "attention.h"
#include "best.h"
#include "program.h"

// Kernels as Python calls them. They return 1 if memory could not be allocated: no exception may reach Python.
template <auto kernel>
struct Guarded;
template <class... A, void (*kernel)(A...)>
struct Guarded<kernel> {
  static int call(A... arguments) {
    try {
      kernel(arguments...);
      return 0;
    } catch (const std::bad_alloc&) {
      return 1;
    }
  }
};

using namespace attention;
#define GUARD(kernel) \
  __attribute__((visibility("default"))) void* JOIN(guarded_##kernel, ISA) = (void*)&Guarded<&JOIN(kernel, ISA)>::call;

extern "C" {
GUARD(linear)
GUARD(use_tiles)
GUARD(look_up)
GUARD(rms_norm)
GUARD(layer_norm)
GUARD(scale_and_shift)
GUARD(gate)
GUARD(choose_greedy)
GUARD(find_logprobs)
GUARD(find_best)
GUARD(rotary)
GUARD(write_kv)
GUARD(decode_attention)
GUARD(prefill_attention)
GUARD(run_program)
}
}  // namespace ISA
