// All kernels, once for each instruction set: `ISA` is its name, `VL` the number of floats in one of its vectors.

// The digest of the sources, so that Python can tell whether they are those of today.
extern "C" __attribute__((visibility("default"))) const char* digest() { return DIGEST; }

namespace ISA {
#include "abi.h"
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
