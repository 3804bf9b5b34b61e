// Vectors of floats, and the numbers that memory holds. `VL` is the number of floats in a vector of this instruction set.
//
// Only the compiler's own vectors are used, so one text serves all instruction sets; but for what moves half precision on
// ARM, which compilers of today do number by number. Sums and products are float32, whatever the numbers in memory are.

using F = float __attribute__((vector_size(VL * 4)));
using I = int32_t __attribute__((vector_size(VL * 4)));
using U = uint32_t __attribute__((vector_size(VL * 4)));
using U16 = uint16_t __attribute__((vector_size(VL * 2)));

struct Bf16 {
  uint16_t bits;
};
#if defined(__aarch64__)  // where older compilers of C++ know the type by this name alone
using Half = __fp16;
#else
using Half = _Float16;
#endif
using H = Half __attribute__((vector_size(VL * 2)));

// The codes of dtypes, as Python has them.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

static inline F load(const float* p) {
  F v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline F load(const Bf16* p) {
  U16 v;
  memcpy(&v, p, sizeof v);
#if VL == 4 && defined(__aarch64__)
  return (F)vshll_n_u16((uint16x4_t)v, 16);
#else
  return (F)(__builtin_convertvector(v, U) << 16);
#endif
}
static inline F load(const Half* p) {
  H v;
  memcpy(&v, p, sizeof v);
#if VL == 4 && defined(__aarch64__)
  return (F)vcvt_f32_f16((float16x4_t)v);
#else
  return __builtin_convertvector(v, F);
#endif
}

static inline float read(const float* p) { return *p; }
static inline float read(const Bf16* p) {
  uint32_t bits = (uint32_t)p->bits << 16;
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
static inline float read(const Half* p) { return (float)*p; }

static inline void store(float* p, F v) { memcpy(p, &v, sizeof v); }
static inline void store(Bf16* p, F v) {
  U bits = (U)v;
  U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  U nan = (bits >> 16) | 0x40;  // rounding could turn a NaN into an infinity
  U16 narrow = __builtin_convertvector((v != v) ? nan : rounded, U16);
  memcpy(p, &narrow, sizeof narrow);
}
static inline void store(Half* p, F v) {
#if VL == 4 && defined(__aarch64__)
  H narrow = (H)vcvt_f16_f32((float32x4_t)v);
#else
  H narrow = __builtin_convertvector(v, H);
#endif
  memcpy(p, &narrow, sizeof narrow);
}

static inline void write(float* p, float v) { *p = v; }
static inline void write(Bf16* p, float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  p->bits = v != v ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline void write(Half* p, float v) { *p = (Half)v; }

static inline F spread(float v) { return v - F{}; }

// The last numbers of a row, where they do not fill a vector; `rest` stands in the other places.
template <class T>
static inline F load_some(const T* p, int64_t count, float rest = 0.0f) {
  float copy[VL];
  for (int i = 0; i < VL; i++) copy[i] = i < count ? read(p + i) : rest;
  return load(copy);
}
template <class T>
static inline void store_some(T* p, F v, int64_t count) {
  T copy[VL];
  store(copy, v);
  memcpy(p, copy, count * sizeof(T));
}

// The sum of a vector's floats, always in the same order.
static inline float sum(F v) {
  float parts[VL];
  memcpy(parts, &v, sizeof v);
  for (int width = VL / 2; width; width /= 2)
    for (int i = 0; i < width; i++) parts[i] += parts[i + width];
  return parts[0];
}
static inline float largest(F v) {
  float best = v[0];
  for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
  return best;
}
static inline F larger(F a, F b) { return (a > b) ? a : b; }

// e to the power of each, to about 1e-7 of its size; 0 below -87.7, infinity above 88.3; NaN stays NaN.
static inline F exponential(F x) {
  x = (x < spread(-88.0f)) ? spread(-88.0f) : x;  // whose exponent's bits are all 0
  x = (x > spread(89.0f)) ? spread(89.0f) : x;    // whose exponent's bits are all 1
  const F shifted = x * 1.44269504f + 12582912.0f;  // the nearest integer stands in its last bits
  const F whole = shifted - 12582912.0f;
  const F rest = x - whole * 0.693359375f + whole * 2.12194440e-4f, square = rest * rest;
  // In pairs, which do not wait for each other.
  F p = (rest * 1.9875691500e-4f + 1.3981999507e-3f) * square + (rest * 8.3334519073e-3f + 4.1665795894e-2f);
  p = p * square + (rest * 1.6666665459e-1f + 5.0000001201e-1f);
  p = p * square + (rest + 1.0f);
  return p * (F)(((U)shifted + 127) << 23);
}

static inline F silu(F x) { return x / (1.0f + exponential(-x)); }
// 0.5 * x * (1 + tanh(y)) is x / (1 + exp(-2 * y)).
static inline F gelu_tanh(F x) { return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x))); }

// Memory of a thread that only grows: `make` returns at least `count` items, whatever they hold.
struct Scratch {
  std::vector<char> bytes;
  template <class T>
  T* make(int64_t count) {
    if ((int64_t)bytes.size() < count * (int64_t)sizeof(T) + 64) bytes.resize(count * sizeof(T) + 64);
    return (T*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
  }
};

// Cut `count` items into even parts; return the bounds of this thread's.
struct Range {
  int64_t begin, end;
};
static inline Range part_of(int64_t count, int64_t thread, int64_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// Call `work(thread, threads)` in several threads, or in this one alone: OpenMP takes microseconds even for one thread.
template <class Work>
static inline void in_threads(bool several, Work work) {
  if (!several || omp_get_max_threads() == 1) return work((int64_t)0, (int64_t)1);
#pragma omp parallel
  work((int64_t)omp_get_thread_num(), (int64_t)omp_get_num_threads());
}
