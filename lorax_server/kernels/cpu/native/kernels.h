// All kernels, once for each instruction set: `ISA` is its name, `VL` the number of floats in one of its vectors.

#define JOIN_AGAIN(a, b) a##_##b
#define JOIN(a, b) JOIN_AGAIN(a, b)
#define EXPORT(name) extern "C" __attribute__((visibility("default"))) void JOIN(name, ISA)

namespace ISA {
#include "simd.h"
#include "linear.h"
#include "norm.h"
#include "activation.h"
#include "sampling.h"
#include "best.h"
#include "draw.h"
}  // namespace ISA
