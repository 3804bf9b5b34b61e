// Rows of logits, and block-wide reductions. Not specific to Hopper.
//
// Weights exp(score - maximum) are summed as fixed-point integers, so sums do not depend on the order.

constexpr int WARPS = SAMPLE_THREADS / 32;
constexpr int NUM_BINS = 2048;
constexpr int BLOCK_TOKENS = SAMPLE_THREADS * 8;  // tokens per block and iteration
constexpr int FRACTION_BITS = 44;  // of a weight; the sum of 2^19 weights fits into 64 bits
constexpr float BINS_PER_SCORE_UNIT = 128;  // in the first pass over a row
constexpr float MAX_FLOAT = 3.402823466e38f;

DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float nan() { return __int_as_float(0x7fffffff); }
DEVICE float max_propagate_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

struct Float32 {};

// Passes over a row are not inlined: otherwise the code would be a megabyte.
#define NOINLINE_DEVICE static __device__ __noinline__

NOINLINE_DEVICE float divide_exactly(float x, float y) { return __fdiv_rn(x, y); }

// ---------------------------------------------------------------------------------------------------- rows
// Eight tokens in the logits dtype.
template <class Number> struct Chunk {
  uint4 words;
  static DEVICE Chunk load(const void* row, int first) { return {__ldg((const uint4*)((const u16*)row + first))}; }
  static DEVICE float load_one(const void* row, int token) { return Number::unpack(((const u16*)row)[token]).x; }
  static DEVICE Chunk load_some(const void* row, int first, int count) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u16* at = (const u16*)row + first + 2 * i;
      w[i] = (2 * i < count ? at[0] : 0) | (2 * i + 1 < count ? (u32)at[1] << 16 : 0);
    }
    return {make_uint4(w[0], w[1], w[2], w[3])};
  }
  DEVICE void unpack(float (&x)[8]) const {
    const float2 a = Number::unpack(words.x), b = Number::unpack(words.y), c = Number::unpack(words.z), d = Number::unpack(words.w);
    x[0] = a.x; x[1] = a.y; x[2] = b.x; x[3] = b.y; x[4] = c.x; x[5] = c.y; x[6] = d.x; x[7] = d.y;
  }
};
template <> struct Chunk<Float32> {
  float4 low, high;
  static DEVICE Chunk load(const void* row, int first) {
    const float4* at = (const float4*)((const float*)row + first);
    return {__ldg(at), __ldg(at + 1)};
  }
  static DEVICE float load_one(const void* row, int token) { return ((const float*)row)[token]; }
  static DEVICE Chunk load_some(const void* row, int first, int count) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i < count ? ((const float*)row)[first + i] : 0;
    return {make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7])};
  }
  DEVICE void unpack(float (&x)[8]) const {
    x[0] = low.x; x[1] = low.y; x[2] = low.z; x[3] = low.w; x[4] = high.x; x[5] = high.y; x[6] = high.z; x[7] = high.w;
  }
};

template <class Number> struct Row {
  const void* at;
  const u8* mask;  // one bit per token, or null
  int vocab;
  bool is_aligned;
  float temperature, reciprocal;

  DEVICE Row(const void* row, const u32* mask, int vocab, float temperature)
      : at(row), mask((const u8*)mask), vocab(vocab), is_aligned((u64)row % 16 == 0), temperature(temperature), reciprocal(__frcp_rn(temperature)) {}

  DEVICE Chunk<Number> load(int first) const {
    const int count = vocab - first;
    return is_aligned && count >= 8 ? Chunk<Number>::load(at, first) : Chunk<Number>::load_some(at, first, count);
  }
  // Scores divided by the temperature. Masked tokens and tokens beyond the vocabulary are -infinity.
  DEVICE void unpack(const Chunk<Number>& chunk, int first, float (&x)[8]) const {
    chunk.unpack(x);
    const int count = vocab - first;
    if (mask || count < 8) {
      const int allowed = (count >= 8 ? 255 : count > 0 ? (1 << count) - 1 : 0) & (mask && count > 0 ? mask[first / 8] : 255);
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = allowed >> i & 1 ? x[i] : -infinity();
      if (!allowed) return;
    }
    if (temperature != 1) divide(x);
  }
  // Correctly rounded division by two Newton corrections, three times as fast as the compiler's division.
  DEVICE void divide(float (&x)[8]) const {
    float largest = fabsf(x[0]), smallest = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) {
      largest = max_propagate_nan(largest, fabsf(x[i]));
      smallest = fminf(smallest, fabsf(x[i]));
    }
    if (largest < 1e30f && smallest > 1e-30f) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float q = __fmul_rn(x[i], reciprocal);
        q = __fmaf_rn(__fmaf_rn(-q, temperature, x[i]), reciprocal, q);
        x[i] = __fmaf_rn(__fmaf_rn(-q, temperature, x[i]), reciprocal, q);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = divide_exactly(x[i], temperature);
    }
  }
  DEVICE float score(int token) const {
    if (mask && !(mask[token / 8] >> token % 8 & 1)) return -infinity();
    const float x = Chunk<Number>::load_one(at, token);
    return temperature == 1 ? x : divide_exactly(x, temperature);
  }
  // Call body(first token, eight scores) for the whole row. Whole warps call it together, even past the end of the row.
  template <int AHEAD, class Body> DEVICE void scan(Body body) const {
    Chunk<Number> next[AHEAD];
    const int mine = threadIdx.x * 8;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) next[a] = load(mine + a * BLOCK_TOKENS);
    for (int base = 0; base < vocab; base += AHEAD * BLOCK_TOKENS) {
      Chunk<Number> now[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        now[a] = next[a];
        next[a] = load(mine + base + (AHEAD + a) * BLOCK_TOKENS);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        float x[8];
        const int first = mine + base + a * BLOCK_TOKENS;
        unpack(now[a], first, x);
        body(first, x);
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------- block-wide reductions
struct Shared {
  u64 list[MAX_LISTED_TOKENS];
  u64 segments[MAX_SEGMENTS];
  u32 low[NUM_BINS], high[NUM_BINS];  // low and high words of the bin sums
  u64 parts[WARPS];
  double sums[WARPS];
  u64 above, crossing_token;
  int bin, count;
};

struct Sum { static DEVICE u64 of(u64 a, u64 b) { return a + b; } };
struct Max { static DEVICE u64 of(u64 a, u64 b) { return a > b ? a : b; } };

template <class Op> DEVICE u64 reduce_warp(u64 x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = Op::of(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
template <class Op> DEVICE u64 reduce(Shared& sh, u64 x) {
  x = reduce_warp<Op>(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sh.parts[threadIdx.x / 32] = x;
  __syncthreads();
  return reduce_warp<Op>(sh.parts[threadIdx.x % 32]);
}
DEVICE double sum_doubles(Shared& sh, double x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sh.sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = sh.sums[threadIdx.x % 32];
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
DEVICE u64 exclusive_sum_in_warp(u64 x) {
  const int lane = threadIdx.x % 32;
  u64 sum = x;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u64 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - x;
}
// Exclusive prefix sum over the block; `total` is the sum of all values.
DEVICE u64 exclusive_sum(Shared& sh, u64 x, u64& total) {
  const u64 before = exclusive_sum_in_warp(x), warp = __shfl_sync(~0u, before + x, 31);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sh.parts[threadIdx.x / 32] = warp;
  __syncthreads();
  const u64 part = sh.parts[threadIdx.x % 32], earlier = exclusive_sum_in_warp(part);
  total = __shfl_sync(~0u, earlier + part, 31);
  return before + __shfl_sync(~0u, earlier, threadIdx.x / 32);
}

// ---------------------------------------------------------------------------------------------------- number formats
DEVICE u32 to_ordered_bits(float x) {  // preserves the order of floats; NaN is the largest
  if (x != x) return ~0u;
  const u32 bits = __float_as_uint(x + 0.0f);  // -0.0 becomes 0.0
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
DEVICE float from_ordered_bits(u32 order) { return __uint_as_float(order ^ (order >> 31 ? 0x80000000u : ~0u)); }

// exp(x) for x <= 0, with an error of at most 2 ulp.
DEVICE float exponential(float x) {
  x = fmaxf(x, -200.0f);  // smaller values underflow to 0
  const float log2_e = 1.44269502162933349609375f, more = 1.92596299e-8f, log_2 = 0.693147180559945f;
  const float t = __fmul_rn(x, log2_e), lost = __fmaf_rn(x, more, __fmaf_rn(x, log2_e, -t));
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  return __fmaf_rn(__fmul_rn(power, log_2), lost, power);
}

// A sum of values in [0, 1], truncated to FRACTION_BITS bits. Each half is added as the raw bits of a float mantissa; the
// known exponent bits are subtracted at the end.
struct FixedSum {
  u32 high = 0, low = 0;
  int count = 0;
  DEVICE void add(float x) {
    constexpr float HALF = 1 << FRACTION_BITS / 2, MAGIC = 1 << 23;
    const float high_bits = __fmaf_rz(x, HALF, MAGIC);
    const float rest = __fmaf_rn(x, HALF, -__fadd_rn(high_bits, -MAGIC));
    high += __float_as_uint(high_bits);
    low += __float_as_uint(__fmaf_rz(rest, HALF, MAGIC));
    count++;
  }
  DEVICE u64 total() const {
    const u32 magic = 0x4b000000u * count;
    return ((u64)(high - magic) << FRACTION_BITS / 2) + (low - magic);
  }
};
DEVICE u64 to_fixed(float x) {
  FixedSum sum;
  sum.add(x);
  return sum.total();
}
DEVICE double from_fixed(u64 x) { return (double)x * (1.0 / (1ull << FRACTION_BITS)); }

DEVICE u64 splitmix64(u64 x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}
DEVICE u32 draw_bits(u64 seed, i64 position) {
  const u64 step = 0x9E3779B97F4A7C15ull;
  return (u32)(splitmix64(splitmix64(seed + step) + (u64)(position + 1) * step) >> 32);
}
