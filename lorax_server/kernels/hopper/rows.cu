// Rows of scores, and what a block adds up of them. Nothing here needs Hopper.
//
// All sums are of integers: weights exp(score - highest), as fixed-point numbers. So no order of adding changes a bit.

constexpr int WARPS = CHOOSE_THREADS / 32;
constexpr int BINS = 2048;
constexpr int STEP = CHOOSE_THREADS * 8;  // tokens that a block reads at once
constexpr int FRACTION = 44;              // bits of a weight; the sum of 2^19 of them fits
constexpr float FIRST_SCALE = 128;        // bins for each unit of score, in the first look at a row
constexpr float HIGHEST = 3.402823466e38f;

DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float nan() { return __int_as_float(0x7fffffff); }
DEVICE float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

struct Float32 {};

// Passes over a row are functions of their own, shared by what uses them: inlined, they would be a megabyte of code.
#define PASS static __device__ __noinline__

PASS float divide_slowly(float x, float y) { return __fdiv_rn(x, y); }

// ---------------------------------------------------------------------------------------------------- a row
// Eight tokens as they lie in memory.
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
  const u8* mask;  // a bit for each token, or null
  int vocab;
  bool is_aligned;
  float temperature, reciprocal;

  DEVICE Row(const void* row, const u32* mask, int vocab, float temperature)
      : at(row), mask((const u8*)mask), vocab(vocab), is_aligned((u64)row % 16 == 0), temperature(temperature), reciprocal(__frcp_rn(temperature)) {}

  DEVICE Chunk<Number> load(int first) const {
    const int count = vocab - first;
    return is_aligned && count >= 8 ? Chunk<Number>::load(at, first) : Chunk<Number>::load_some(at, first, count);
  }
  // Scores, divided by the temperature. What is masked or beyond the vocabulary is -infinity.
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
  // As IEEE rounds it, by two corrections of a product: the compiler's own division takes three times as long.
  DEVICE void divide(float (&x)[8]) const {
    float largest = fabsf(x[0]), smallest = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) {
      largest = max_or_nan(largest, fabsf(x[i]));
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
      for (int i = 0; i < 8; i++) x[i] = divide_slowly(x[i], temperature);
    }
  }
  DEVICE float score(int token) const {
    if (mask && !(mask[token / 8] >> token % 8 & 1)) return -infinity();
    const float x = Chunk<Number>::load_one(at, token);
    return temperature == 1 ? x : divide_slowly(x, temperature);
  }
  // Call body(first token, eight scores) for all of the row; whole warps together, also beyond the row's end.
  template <int AHEAD, class Body> DEVICE void scan(Body body) const {
    Chunk<Number> next[AHEAD];
    const int mine = threadIdx.x * 8;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) next[a] = load(mine + a * STEP);
    for (int base = 0; base < vocab; base += AHEAD * STEP) {
      Chunk<Number> now[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        now[a] = next[a];
        next[a] = load(mine + base + (AHEAD + a) * STEP);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        float x[8];
        const int first = mine + base + a * STEP;
        unpack(now[a], first, x);
        body(first, x);
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------- a block
struct Shared {
  u64 list[LISTED];
  u64 segments[MAX_SEGMENTS];
  u32 low[BINS], high[BINS];  // of the bins' masses
  u64 parts[WARPS];
  double sums[WARPS];
  u64 above, crossed;
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
DEVICE u64 sum_before_in_warp(u64 x) {
  const int lane = threadIdx.x % 32;
  u64 sum = x;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u64 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - x;
}
// The sum of what threads before this one have; `total` of all.
DEVICE u64 sum_before(Shared& sh, u64 x, u64& total) {
  const u64 before = sum_before_in_warp(x), warp = __shfl_sync(~0u, before + x, 31);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sh.parts[threadIdx.x / 32] = warp;
  __syncthreads();
  const u64 part = sh.parts[threadIdx.x % 32], earlier = sum_before_in_warp(part);
  total = __shfl_sync(~0u, earlier + part, 31);
  return before + __shfl_sync(~0u, earlier, threadIdx.x / 32);
}

// ---------------------------------------------------------------------------------------------------- numbers
DEVICE u32 order_bits(float x) {  // larger for a larger number; a NaN is the largest
  if (x != x) return ~0u;
  const u32 bits = __float_as_uint(x + 0.0f);  // -0.0 becomes 0.0, which it equals
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
DEVICE float from_order(u32 order) { return __uint_as_float(order ^ (order >> 31 ? 0x80000000u : ~0u)); }

// exp(x), x <= 0, to two units in the last place.
DEVICE float exponential(float x) {
  x = fmaxf(x, -200.0f);  // below it is 0
  const float log2_e = 1.44269502162933349609375f, more = 1.92596299e-8f, log_2 = 0.693147180559945f;
  const float t = __fmul_rn(x, log2_e), lost = __fmaf_rn(x, more, __fmaf_rn(x, log2_e, -t));
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  return __fmaf_rn(__fmul_rn(power, log_2), lost, power);
}

// A sum of numbers in [0, 1], cut off after FRACTION bits: each half in the mantissas of floats, of which all bits are
// added up, and what is too much of them is known.
struct FixedSum {
  u32 high = 0, low = 0;
  int count = 0;
  DEVICE void add(float x) {
    constexpr float HALF = 1 << FRACTION / 2, MAGIC = 1 << 23;
    const float high_bits = __fmaf_rz(x, HALF, MAGIC);
    const float rest = __fmaf_rn(x, HALF, -__fadd_rn(high_bits, -MAGIC));
    high += __float_as_uint(high_bits);
    low += __float_as_uint(__fmaf_rz(rest, HALF, MAGIC));
    count++;
  }
  DEVICE u64 total() const {
    const u32 magic = 0x4b000000u * count;
    return ((u64)(high - magic) << FRACTION / 2) + (low - magic);
  }
};
DEVICE u64 to_fixed(float x) {
  FixedSum sum;
  sum.add(x);
  return sum.total();
}
DEVICE double from_fixed(u64 x) { return (double)x * (1.0 / (1ull << FRACTION)); }

DEVICE u64 mix(u64 x) {  // splitmix64
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}
DEVICE u32 draw_bits(u64 seed, i64 position) {
  const u64 step = 0x9E3779B97F4A7C15ull;
  return (u32)(mix(mix(seed + step) + (u64)(position + 1) * step) >> 32);
}
