// Integer dot products of quantized weights and activations.
//
// A weight vector has four inputs, one byte each, for each of `VL` outputs. `DotProduct::add` adds to each output the
// products with the four activations of group `G` in a half block. The sums are exact. Activations are -127 to 127.
//
// With `HAS_DOT`, one instruction multiplies and adds (VNNI on x86, SDOT on ARM). All CPUs support the other variants.

// Added to stored 8-bit weights: VNNI multiplies unsigned weights by signed activations.
constexpr int WEIGHT_BIAS = VL == 16 ? 128 : 0;

#if VL == 4
using HalfBlock = int8x16_t;  // 16 activations; instructions select four of them
static inline HalfBlock load_half(const int8_t* p) { return vld1q_s8(p); }
#else
using HalfBlock = const int8_t*;
static inline HalfBlock load_half(const int8_t* p) { return p; }
template <int G>
static inline I broadcast_group(HalfBlock x) {
  int32_t four;
  memcpy(&four, x + 4 * G, sizeof four);
  return four - I{};
}
#endif

#if VL == 4
static inline I low_nibbles(I packed) { return (I)vandq_u8((uint8x16_t)packed, vdupq_n_u8(15)); }
static inline I high_nibbles(I packed) { return (I)vshrq_n_u8((uint8x16_t)packed, 4); }
#else
static inline I low_nibbles(I packed) { return packed & 0x0f0f0f0f; }
static inline I high_nibbles(I packed) { return (I)((U)packed >> 4) & 0x0f0f0f0f; }
#endif

// `Weights` are prepared once for several rows. `begin` returns the sums before the first group, and `end` after the last
// group. `start` is added to all sums.
template <int BITS, bool HAS_DOT>
struct DotProduct;

#if defined(EMULATED_TILES)  // plain C++
template <int BITS, bool HAS_DOT>
struct DotProduct {
  using Weights = I;
  static constexpr bool IS_BIASED = true;
  static Weights prepare(I weights) { return weights; }
  static I begin(int32_t start) { return start - I{}; }
  template <int G>
  static I add(I sum, Weights weights, HalfBlock x) {
    for (int lane = 0; lane < VL; lane++)
      for (int k = 0; k < 4; k++) sum[lane] += (int32_t)((uint32_t)weights[lane] >> 8 * k & 255) * x[4 * G + k];
    return sum;
  }
  static I end(I sum, int32_t) { return sum; }
};

#elif VL == 4
#if defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__)  // Clang's assembler cannot enable SDOT for single instructions
#define HAS_SDOT
template <int BITS>
struct DotProduct<BITS, true> {
  using Weights = int8x16_t;
  static constexpr bool IS_BIASED = false;
  static Weights prepare(I weights) { return (int8x16_t)weights; }
  static I begin(int32_t start) { return start - I{}; }
  template <int G>
  static I add(I sum, Weights weights, HalfBlock x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (I)vdotq_laneq_s32((int32x4_t)sum, weights, x, G);
#else  // inline assembly, because the intrinsic would require SDOT for the whole translation unit
    __asm__(".arch armv8.2-a+dotprod\n\tsdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(weights), "w"(x), "i"(G));
    return sum;
#endif
  }
  static I end(I sum, int32_t) { return sum; }
};
#endif

template <int BITS>
struct DotProduct<BITS, false> {
  using Weights = int8x16_t;
  static constexpr bool IS_BIASED = false;
  static Weights prepare(I weights) { return (int8x16_t)weights; }
  static I begin(int32_t start) { return start - I{}; }
  template <int G>
  static I add(I sum, Weights weights, HalfBlock x) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), G));
    const int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(four)), high = vmull_high_s8(weights, four);
    return (I)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));  // the sum of two products fits into 16 bits
  }
  static I end(I sum, int32_t) { return sum; }
};

#else
#if VL == 16
template <int BITS>
struct DotProduct<BITS, true> {
  using Weights = I;
  static constexpr bool IS_BIASED = true;
  static Weights prepare(I weights) { return weights; }
  static I begin(int32_t start) { return start - I{}; }
  template <int G>
  static I add(I sum, Weights weights, HalfBlock x) {  // inline assembly, because not every CPU with AVX-512 has VNNI
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(broadcast_group<G>(x)));
    return sum;
  }
  static I end(I sum, int32_t) { return sum; }
};

static inline I multiply_pairs(I left, I right) { return (I)_mm512_maddubs_epi16((__m512i)left, (__m512i)right); }
static inline I add_pairs(I left, I right) { return (I)_mm512_add_epi16((__m512i)left, (__m512i)right); }
static inline I join_pairs(I sums) { return (I)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
struct SignedWeights {
  I magnitude;
  __mmask64 negative;

  static SignedWeights make(I biased) {
    const __m512i weights = _mm512_xor_si512((__m512i)biased, _mm512_set1_epi8(-128));
    return {(I)_mm512_abs_epi8(weights), _mm512_movepi8_mask(weights)};
  }
  I apply_signs(I x) const { return (I)_mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x); }
};
#else
static inline I multiply_pairs(I left, I right) { return (I)_mm256_maddubs_epi16((__m256i)left, (__m256i)right); }
static inline I add_pairs(I left, I right) { return (I)_mm256_add_epi16((__m256i)left, (__m256i)right); }
static inline I join_pairs(I sums) { return (I)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
struct SignedWeights {
  I magnitude, weights;

  static SignedWeights make(I weights) { return {(I)_mm256_abs_epi8((__m256i)weights), weights}; }
  I apply_signs(I x) const { return (I)_mm256_sign_epi8((__m256i)x, (__m256i)weights); }
};
#endif

// Pairs of products are added in 16 bits: 8-bit magnitudes are at most 128, so a pair is at most 32,512.
template <>
struct DotProduct<8, false> {
  using Weights = SignedWeights;
  static constexpr bool IS_BIASED = false;
  static Weights prepare(I weights) { return SignedWeights::make(weights); }
  static I begin(int32_t start) { return start - I{}; }
  template <int G>
  static I add(I sum, const Weights& weights, HalfBlock x) {
    return sum + join_pairs(multiply_pairs(weights.magnitude, weights.apply_signs(broadcast_group<G>(x))));
  }
  static I end(I sum, int32_t) { return sum; }
};

// 4-bit weights are at most 15, so the sum of eight pairs fits into 16 bits, too.
template <>
struct DotProduct<4, false> {
  using Weights = I;
  static constexpr bool IS_BIASED = false;
  static Weights prepare(I weights) { return weights; }
  static I begin(int32_t) { return I{}; }
  template <int G>
  static I add(I sum, Weights weights, HalfBlock x) {
    return add_pairs(sum, multiply_pairs(weights, broadcast_group<G>(x)));
  }
  static I end(I sum, int32_t start) { return join_pairs(sum) + start; }
};
#endif

#if defined(EMULATED_TILES) || defined(HAS_SDOT) || VL == 16
#define HAS_DOT_VARIANT
#endif

// Return true if this CPU has the instruction for `HAS_DOT`.
static bool has_dot_product() {
#if defined(EMULATED_TILES) || defined(__ARM_FEATURE_DOTPROD)
  return true;
#elif VL == 16 && defined(__x86_64__)
  constexpr uint32_t AVX512_VNNI = 1u << 11;
  uint32_t a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & AVX512_VNNI);
#elif defined(HAS_SDOT) && defined(__linux__)
  constexpr unsigned long ASIMD_DOT = 1ul << 20;
  return getauxval(AT_HWCAP) & ASIMD_DOT;
#else
  return false;
#endif
}
