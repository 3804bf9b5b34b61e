// Linears as AMX computes them, in plain C++: for tests on any CPU.
#include "std.h"
#define VL 16
#define EMULATED_TILES
#define EXPORT(name) extern "C" void name##_emulated
namespace emulated_cpu {
#include "simd.h"
#include "threads.h"
#include "product.h"
#include "tiles.h"
#include "pairs.h"
#include "linear.h"
#include "rows.h"
}  // namespace emulated_cpu
