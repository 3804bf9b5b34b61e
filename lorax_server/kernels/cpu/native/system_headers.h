// System headers. Included before an instruction set is enabled, so inline library functions stay portable.

#include <omp.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>
