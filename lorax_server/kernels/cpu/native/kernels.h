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
}  // namespace ISA
