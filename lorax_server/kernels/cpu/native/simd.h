// Float vectors and dtype conversions. `VL` is the number of floats per vector.
//
// GCC vector extensions serve all instruction sets; only conversions are written per instruction set. All arithmetic is
// float32.

using F = float __attribute__((vector_size(VL * 4)));
using I = int32_t __attribute__((vector_size(VL * 4)));
using U = uint32_t __attribute__((vector_size(VL * 4)));

struct Bf16 {
  uint16_t bits;
};
// Raw bits, because not every compiler has a float16 type.
struct Half {
  uint16_t bits;
};

// Dtype codes shared with Python. BFLOAT16_PAIRS is the AMX weight layout. QUANTIZED is the layout of quantized weights.
ENUM(Dtype, FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, BFLOAT16_PAIRS = 3, QUANTIZED = 4);

static inline float read(const float* p) { return *p; }
static inline float read(const Bf16* p) {
  uint32_t bits = (uint32_t)p->bits << 16;
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
#if defined(__aarch64__)
static inline float read(const Half* p) {
  __fp16 v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void write(Half* p, float v) {
  const __fp16 narrow = (__fp16)v;
  memcpy(p, &narrow, sizeof narrow);
}
#else
static inline float read(const Half* p) { return _cvtsh_ss(p->bits); }
static inline void write(Half* p, float v) { p->bits = _cvtss_sh(v, 0); }
#endif

static inline void write(float* p, float v) { *p = v; }
static inline void write(Bf16* p, float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  p->bits = v != v ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Not memcpy: some compilers split such a load if lanes are used separately.
using UnalignedVector = float __attribute__((vector_size(VL * 4), aligned(4), may_alias));
static inline F load(const float* p) { return *(const UnalignedVector*)p; }
#if VL == 4
static inline F load(const Bf16* p) { return (F)vshll_n_u16(vld1_u16(&p->bits), 16); }
static inline F load(const Half* p) { return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
static inline void store_low_halves(Bf16* p, U v) { vst1_u16(&p->bits, vmovn_u32((uint32x4_t)v)); }
static inline void store(Half* p, F v) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
static inline F fused_multiply_add(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#elif VL == 8 && defined(__x86_64__)
static inline F load(const Bf16* p) {
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
static inline F load(const Half* p) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store_low_halves(Bf16* p, U v) {
  const __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v);  // packs within 128-bit halves
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
}
static inline void store(Half* p, F v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0)); }
static inline F fused_multiply_add(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__x86_64__) && !defined(EMULATED_TILES)
static inline F load(const Bf16* p) {
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
static inline F load(const Half* p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store_low_halves(Bf16* p, U v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v)); }
static inline void store(Half* p, F v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0)); }
static inline F fused_multiply_add(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else  // scalar fallback, to test x86 vector widths and AMX emulation on any CPU
static inline F load(const Bf16* p) {
  F v;
  for (int i = 0; i < VL; i++) v[i] = read(p + i);
  return v;
}
static inline F load(const Half* p) {
  F v;
  for (int i = 0; i < VL; i++) v[i] = read(p + i);
  return v;
}
static inline void store_low_halves(Bf16* p, U v) {
  for (int i = 0; i < VL; i++) p[i].bits = (uint16_t)v[i];
}
static inline void store(Half* p, F v) {
  for (int i = 0; i < VL; i++) write(p + i, v[i]);
}
static inline F fused_multiply_add(F a, F b, F c) {
  for (int i = 0; i < VL; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#endif

struct VectorPair {
  F first, second;
};
template <class T>
static inline VectorPair load_two(const T* p) {
  return {load(p), load(p + VL)};
}
#if VL == 4  // one 16-byte load for both vectors
static inline VectorPair load_two(const Bf16* p) {
  const uint16x8_t v = vld1q_u16(&p->bits);
  return {(F)vshll_n_u16(vget_low_u16(v), 16), (F)vshll_high_n_u16(v, 16)};
}
static inline VectorPair load_two(const Half* p) {
  const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
  return {(F)vcvt_f32_f16(vget_low_f16(v)), (F)vcvt_high_f32_f16(v)};
}
#endif

static inline void store(float* p, F v) { *(UnalignedVector*)p = v; }
static inline void store(Bf16* p, F v) {
  const U bits = (U)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U nan = (bits >> 16) | 0x40;  // rounding could turn NaN into infinity
  store_low_halves(p, (v != v) ? nan : rounded);
}

static inline F broadcast(float v) { return v - F{}; }

// Load or store the last `count` elements of a row. Missing lanes are `rest`.
template <class T>
static inline F load_partial(const T* p, int64_t count, float rest = 0.0f) {
  float copy[VL];
  for (int i = 0; i < VL; i++) copy[i] = i < count ? read(p + i) : rest;
  return load(copy);
}
template <class T>
static inline void store_partial(T* p, F v, int64_t count) {
  T copy[VL];
  store(copy, v);
  memcpy(p, copy, count * sizeof(T));
}

// Sum the lanes by repeatedly adding the upper half to the lower half. Templates, because compilers do not unroll a loop
// over halves.
template <int COUNT>
static inline float sum_floats(const float* parts) {
  if constexpr (COUNT == 2) {
    return parts[0] + parts[1];
  } else {
    typedef float Part __attribute__((vector_size(COUNT * 2), aligned(4), may_alias));
    float halves[COUNT / 2];
    *(Part*)halves = *(const Part*)parts + *(const Part*)(parts + COUNT / 2);
    return sum_floats<COUNT / 2>(halves);
  }
}
static inline float sum(F v) {
  float parts[VL];
  store(parts, v);
  return sum_floats<VL>(parts);
}
static inline float largest(F v) {
  float best = v[0];
  for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
  return best;
}
// larger: maximum, or `b` if `a` is NaN. clamp: NaN stays NaN.
#if VL == 4  // single instructions
static inline F larger(F a, F b) { return (F)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b); }
static inline F clamp(F x, float low, float high) {
  return (F)vminq_f32(vmaxq_f32((float32x4_t)x, vdupq_n_f32(low)), vdupq_n_f32(high));
}
#else
static inline F larger(F a, F b) { return (a > b) ? a : b; }
static inline F clamp(F x, float low, float high) {
  x = (x < broadcast(low)) ? broadcast(low) : x;
  return (x > broadcast(high)) ? broadcast(high) : x;
}
#endif

// exp(x) with relative error about 1e-7; 0 below -87.7, infinity above 88.3. NaN stays NaN.
static inline F exponential(F x) {
  x = clamp(x, -88.0f, 89.0f);  // limits with exponent bits all 0 and all 1
  const F shifted = x * 1.44269504f + 12582912.0f;  // the low bits are the nearest integer
  const F whole = shifted - 12582912.0f;
  const F rest = x - whole * 0.693359375f + whole * 2.12194440e-4f, square = rest * rest;
  // Independent pairs, to hide latency.
  F p = (rest * 1.9875691500e-4f + 1.3981999507e-3f) * square + (rest * 8.3334519073e-3f + 4.1665795894e-2f);
  p = p * square + (rest * 1.6666665459e-1f + 5.0000001201e-1f);
  p = p * square + (rest + 1.0f);
  return p * (F)(((U)shifted + 127) << 23);
}

static inline F sigmoid(F x) { return 1.0f / (1.0f + exponential(-x)); }
static inline F silu(F x) { return x / (1.0f + exponential(-x)); }
// 0.5 * x * (1 + tanh(y)) == x / (1 + exp(-2 * y)).
static inline F gelu_tanh(F x) { return x / (1.0f + exponential(-1.5957691216f * (x + 0.044715f * x * x * x))); }

// GELU without approximation, with absolute error about 1e-7 * max(1, |x|). The normal CDF of -|x| is `exp(-x * x / 2)` times
// a polynomial in `1 / (1 + 0.3 * |x|)`, fitted to a relative error of 1.2e-7.
static inline F gelu(F x) {
  const F size = (x < 0.0f) ? -x : x, t = 1.0f / (1.0f + 0.3f * size);
  F p = t * 3.609257198e-2f - 1.589491780e-1f;
  p = p * t + 2.093726994e-1f;
  p = p * t - 5.647389198e-2f;
  p = p * t + 1.300449033e-1f;
  p = p * t + 9.946146039e-2f;
  p = p * t + 1.208268689e-1f;
  p = p * t + 1.196245064e-1f;
  const F below = p * t * exponential(-0.5f * x * x);
  return x * ((x < 0.0f) ? below : 1.0f - below);
}

// A growing per-thread buffer. `make` returns at least `count` uninitialized items.
struct Scratch {
  std::vector<char> bytes;
  template <class T>
  T* make(int64_t count) {
    if ((int64_t)bytes.size() < count * (int64_t)sizeof(T) + 64) bytes.resize(count * sizeof(T) + 64);
    return (T*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
  }
};

// Split `count` items into `threads` even ranges, and return range `thread`.
struct Range {
  int64_t begin, end;
};
static inline Range split_evenly(int64_t count, int64_t thread, int64_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}
