// Choose the next token of every row. One block has one row, and reads it several times: it stays in the L2 cache.
//
// All sums are of integers: weights exp(score - highest), as fixed-point numbers. So no order of adding changes a bit.
// Nothing here needs Hopper.

constexpr int CHOOSE_THREADS = 1024, WARPS = CHOOSE_THREADS / 32;
constexpr int BINS = 2048, LISTED = 2048, SEGMENT = 256, MAX_SEGMENTS = 2048;
constexpr int STEP = CHOOSE_THREADS * 8;  // tokens that a block reads at once
constexpr int FRACTION = 44;              // bits of a weight; the sum of 2^19 of them fits
constexpr float FIRST_SCALE = 128;        // bins for each unit of score, in the first look at a row
constexpr float HIGHEST = 3.402823466e38f;
enum { SAMPLED = 1, RAW = 2, WATERMARK = 4 };

struct RowParams {  // `_ROW` of sampling.py, field by field
  u64 seed;
  float temperature, rest, min_p, typical_p;  // rest = 1 - top_p; below 0 where top-p, or typical-p, is not asked for
  int top_k, flags, changed, listed;          // row of the changed scores, row of the alternatives; -1: none
  int num_alternatives, min_new;
  float repetition, frequency, presence;
  int biases, biases_end, forbidden, forbidden_end, pad;  // stretches of the entries
};
static_assert(sizeof(RowParams) == 80, "as in sampling.py");

struct ChooseArgs {
  const void* logits;
  const RowParams* params;
  const i64 *lengths, *prompt_lengths;  // [rows]; null where all rows are greedy
  const i64* tokens;                    // [rows][tokens] the history; null where no row looks at it
  float* changed;                       // [changed rows][width] scores with penalties
  u32* counts;                          // [changed rows][width] of nothing, at first
  const int* changed_rows;              // [changed rows] their rows
  const int* entry_ids;                 // biases and forbidden tokens
  const float* entry_values;
  const i64* mask_rows;                 // [masks]
  const u32* mask_words;                // [masks][mask_width]
  i64* token_ids;                       // results
  float* logprobs;
  i64* listed_ids;                      // [asking rows][most]
  float* listed_logprobs;
  i64 stride, tokens_stride;
  int vocab, width, num_masks, mask_width, most;  // width: of changed rows, a multiple of 8
};

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

// ---------------------------------------------------------------------------------------------------- what is kept
// The scores of kept tokens are within two limits; those that equal the lower one have no lower id than `cut_id`.
struct Kept {
  float top, ceiling;  // the highest score of all, and of what is kept
  float cut = -HIGHEST;
  int cut_id = 0;

  DEVICE bool has(float s, int id) const { return (s <= ceiling) & ((s > cut) | ((s == cut) & (id >= cut_id))); }
  DEVICE bool has_any(const float (&s)[8]) const {  // or may have
    float best = s[0];
#pragma unroll
    for (int i = 1; i < 8; i++) best = fmaxf(best, s[i]);
    return best >= cut;
  }
  DEVICE float weight(float s) const { return exponential(__fsub_rn(s, top)); }
  DEVICE void raise(float limit) {  // leave out all scores below
    if (!(limit > cut)) return;
    cut = limit;
    cut_id = 0;
  }
};

// Return the lowest score up to `high` that passes a test, as do all above it.
template <class Test> DEVICE float bisect(float low, float high, Test passes) {
  u32 fails = order_bits(low) - 1, ok = order_bits(high);
  while (ok - fails > 1) {
    const u32 middle = fails + (ok - fails) / 2;
    if (passes(from_order(middle))) ok = middle;
    else fails = middle;
  }
  return from_order(ok);
}

// What a select orders tokens by, the highest first; what it adds up; and how far.
struct Order {
  Kept kept;
  double share;  // of the mass
  int count;     // of tokens, where it is not 0
  double log_sum, expected;  // of the weights; surprise
  DEVICE u64 mass(float s) const { return count ? 1 : to_fixed(kept.weight(s)); }
  DEVICE u64 target(u64 total) const { return count ? count : min(max((u64)ceil((double)total * share), 1ull), total); }
};
struct ByScore : Order {
  static constexpr bool NEEDS_ID = true;
  DEVICE float value(float s) const { return s; }
};
struct ByTypicality : Order {  // whose surprise is closest to the expected one; all equals are kept
  static constexpr bool NEEDS_ID = false;
  DEVICE float surplus(float s) const { return (float)(log_sum - ((double)s - (double)kept.top) - expected); }
  DEVICE float value(float s) const { return -fabsf(surplus(s)); }
};

struct Range {  // of values, from the highest on
  float high, low, scale;
  DEVICE bool has(float v) const { return v <= high && v >= low; }
  DEVICE int bin(float v) const { return min((int)__fmul_rn(__fsub_rn(high, v), scale), BINS - 1); }
};

DEVICE void add_to_bin(Shared& sh, int bin, u64 mass) {
  const u32 low = (u32)mass, before = atomicAdd(&sh.low[bin], low);
  const u32 high = (u32)(mass >> 32) + (before + low < before);
  if (high) atomicAdd(&sh.high[bin], high);
}

// Sum masses by bins. Runs of a thread's tokens in one bin are added at once, and all of the last bin: there lies the
// tail, which is most of a vocabulary.
template <class Number, class By>
PASS void fill_bins(Shared& sh, const Row<Number> row, const By by, const Range range) {
  for (int i = threadIdx.x; i < BINS; i += CHOOSE_THREADS) sh.low[i] = sh.high[i] = 0;
  __syncthreads();
  u64 tail = 0, run = 0;
  int last = 0;
  row.template scan<1>([&](int first, const float(&s)[8]) {
    if (!by.kept.has_any(s)) return;
    float weights[8];
    int bins[8], in_front = 0;  // of the tail
    FixedSum at_end;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = by.value(s[i]);
      const bool is_in = by.kept.has(s[i], first + i) & range.has(v);
      weights[i] = is_in ? 1 : 0;
      bins[i] = is_in ? range.bin(v) : BINS - 1;
      in_front |= bins[i] < BINS - 1;
    }
    if (!by.count) {
#pragma unroll
      for (int i = 0; i < 8; i++) weights[i] = weights[i] > 0 ? by.kept.weight(s[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) at_end.add(bins[i] == BINS - 1 ? weights[i] : 0);
    tail += by.count ? at_end.total() >> FRACTION : at_end.total();
    if (!in_front) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (bins[i] == BINS - 1) continue;
      const u64 mass = by.count ? 1 : to_fixed(weights[i]);
      if (bins[i] == last) {
        run += mass;
      } else {
        if (run) add_to_bin(sh, last, run);
        last = bins[i];
        run = mass;
      }
    }
  });
  if (run) add_to_bin(sh, last, run);
  tail = reduce_warp<Sum>(tail);
  if (threadIdx.x % 32 == 0 && tail) add_to_bin(sh, BINS - 1, tail);
  __syncthreads();
}

// Find the bin in which the sum, from `above` on, reaches the target; what is above it becomes `above`. False if none.
// The target is set if it is 0, as the sum of all is known now.
template <class By> DEVICE bool cross_bins(Shared& sh, const By& by, u64& target, u64& above, int& bin) {
  u64 masses[BINS / CHOOSE_THREADS], mine = 0, total;
  const int first = threadIdx.x * (BINS / CHOOSE_THREADS);
  if (threadIdx.x == 0) sh.bin = -1;
#pragma unroll
  for (int i = 0; i < BINS / CHOOSE_THREADS; i++) mine += masses[i] = (u64)sh.high[first + i] << 32 | sh.low[first + i];
  u64 sum = above + sum_before(sh, mine, total);
  if (!target) target = by.target(total);
#pragma unroll
  for (int i = 0; i < BINS / CHOOSE_THREADS; i++) {
    if (sum < target && sum + masses[i] >= target) {
      sh.bin = first + i;
      sh.above = sum;
    }
    sum += masses[i];
  }
  __syncthreads();
  bin = sh.bin;
  above = sh.above;
  __syncthreads();
  return bin >= 0;
}

struct Listed {
  int count;
  Range range;  // of their values
};

// List the tokens of a bin; there may be more than fit.
template <class Number, class By>
PASS Listed list_bin(Shared& sh, const Row<Number> row, const By by, const Range range, int bin) {
  if (threadIdx.x == 0) sh.count = 0;
  __syncthreads();
  u32 highest = 0, least = 0;
  row.template scan<1>([&](int first, const float(&s)[8]) {
    if (!by.kept.has_any(s)) return;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = by.value(s[i]);
      found |= (u32)(by.kept.has(s[i], first + i) & range.has(v) & (range.bin(v) == bin)) << i;
    }
    if (!found) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!(found >> i & 1)) continue;
      const float v = by.value(s[i]);
      const u32 order = order_bits(v);
      highest = max(highest, order);
      least = max(least, ~order);
      if (*(volatile int*)&sh.count <= LISTED) {
        const int place = atomicAdd(&sh.count, 1);
        if (place < LISTED) sh.list[place] = (u64)order << 32 | (u32)(first + i);
      }
    }
  });
  const float high = from_order((u32)reduce<Max>(sh, highest)), low = from_order(~(u32)reduce<Max>(sh, least));
  __syncthreads();
  return {sh.count, {high, low, fmaxf((BINS - 1) / (high - low), 1e-35f)}};
}

PASS void sort_list(Shared& sh, int count) {  // the highest first
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += CHOOSE_THREADS) sh.list[i] = 0;
  for (int width = 2; width <= size; width *= 2)
    for (int step = width / 2; step; step /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += CHOOSE_THREADS) {
        const int i = pair / step * 2 * step + pair % step, j = i + step;
        const u64 a = sh.list[i], b = sh.list[j];
        if ((a < b) == ((i & width) == 0)) {
          sh.list[i] = b;
          sh.list[j] = a;
        }
      }
    }
  __syncthreads();
}

// ---------------------------------------------------------------------------------------------------- in the order of the vocabulary
// Sum the weights of stretches of SEGMENT tokens, or the number of tokens that are kept. Return the sum of all.
template <class Number> PASS u64 sum_segments(Shared& sh, const Row<Number> row, const Kept kept, bool is_count) {
  __syncthreads();
  for (int i = threadIdx.x; i < MAX_SEGMENTS; i += CHOOSE_THREADS) sh.segments[i] = 0;
  __syncthreads();
  row.template scan<1>([&](int first, const float(&s)[8]) {
    if (!__any_sync(~0u, kept.has_any(s))) return;
    FixedSum eight;
    if (is_count) {
#pragma unroll
      for (int i = 0; i < 8; i++) eight.add(kept.has(s[i], first + i) ? 1 : 0);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) eight.add(kept.has(s[i], first + i) ? kept.weight(s[i]) : 0);
    }
    const u64 sum = reduce_warp<Sum>(is_count ? eight.total() >> FRACTION : eight.total());
    if (threadIdx.x % 32 == 0) sh.segments[first / SEGMENT] = sum;
  });
  __syncthreads();
  u64 mine = 0;
  for (int i = threadIdx.x; i < MAX_SEGMENTS; i += CHOOSE_THREADS) mine += sh.segments[i];
  return reduce<Sum>(sh, mine);
}

// Return the token at which the sum passes the target.
template <class Number> PASS int find_token(Shared& sh, const Row<Number> row, const Kept kept, bool is_count, u64 target) {
  constexpr int EACH = MAX_SEGMENTS / CHOOSE_THREADS;
  u64 mine = 0, total;
  const int own = threadIdx.x * EACH;
#pragma unroll
  for (int i = 0; i < EACH; i++) mine += sh.segments[own + i];
  u64 sum = sum_before(sh, mine, total);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u64 here = sh.segments[own + i];
    if (sum <= target && sum + here > target) {
      sh.bin = own + i;
      sh.above = sum;
    }
    sum += here;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int first = sh.bin * SEGMENT + threadIdx.x * 8;
    float s[8];
    row.unpack(row.load(first), first, s);
    u64 masses[8], all = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) all += masses[i] = !kept.has(s[i], first + i) ? 0 : is_count ? 1 : to_fixed(kept.weight(s[i]));
    u64 at = sh.above + sum_before_in_warp(all);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (at <= target && at + masses[i] > target) sh.count = first + i;
      at += masses[i];
    }
  }
  __syncthreads();
  return sh.count;
}

// ---------------------------------------------------------------------------------------------------- select
struct Cut {
  float value;
  int id;
};

// Return where in the list the sum of masses, from `above` on, reaches the target.
template <class Number, class By>
PASS Cut cross_list(Shared& sh, const Row<Number> row, const By by, int count, u64 above, u64 target) {
  u64 masses[LISTED / CHOOSE_THREADS], mine = 0, total;
  const int first = threadIdx.x * (LISTED / CHOOSE_THREADS);
#pragma unroll
  for (int i = 0; i < LISTED / CHOOSE_THREADS; i++)
    mine += masses[i] = first + i < count ? by.mass(row.score((u32)sh.list[first + i])) : 0;
  u64 sum = above + sum_before(sh, mine, total);
#pragma unroll
  for (int i = 0; i < LISTED / CHOOSE_THREADS; i++) {
    if (sum < target && sum + masses[i] >= target) sh.crossed = sh.list[first + i];
    sum += masses[i];
  }
  __syncthreads();
  return {from_order((u32)(sh.crossed >> 32)), (int)(u32)sh.crossed};
}

// Find the token at which the sum of masses, from the highest value on and of equals from the highest id on, reaches
// the target. False if it never does.
template <class Number, class By>
DEVICE bool select(Shared& sh, const Row<Number>& row, const By& by, Range range, Cut& cut) {
  u64 above = 0, target = 0;
  int bin;
  for (;;) {
    __syncthreads();
    fill_bins(sh, row, by, range);
    if (!cross_bins(sh, by, target, above, bin)) return false;
    const Listed listed = list_bin(sh, row, by, range, bin);
    range = listed.range;
    if (listed.count <= LISTED) {
      sort_list(sh, listed.count);
      cut = cross_list(sh, row, by, listed.count, above, target);
      return true;
    }
    if (range.high == range.low) {  // too many equals to list
      cut = {range.high, 0};
      if (!By::NEEDS_ID) return true;
      Kept equals = by.kept;
      equals.raise(range.high);
      equals.ceiling = range.high;
      const u64 mass = by.mass(range.high), needed = (target - above + mass - 1) / mass;
      const u64 count = sum_segments(sh, row, equals, true);
      if (count > needed) cut.id = find_token(sh, row, equals, true, count - needed);
      return true;
    }
  }
}

// ---------------------------------------------------------------------------------------------------- greedy
struct Likeliest {
  int token;
  float top;      // NaN where any score is
  double log_sum; // of exp(score - top)
};

// The first of the highest scores, and the sum of all, in one pass. A thread's tokens are the same in every batch, so
// that its sum is.
template <class Number> PASS Likeliest find_likeliest(Shared& sh, const Row<Number> row) {
  float top = -infinity(), sum = 0;
  int found = -1;
  row.template scan<2>([&](int first, const float(&s)[8]) {
    float best = s[0];
#pragma unroll
    for (int i = 1; i < 8; i++) best = max_or_nan(best, s[i]);
    if (!(best <= top) && top == top) {
      sum *= top == -infinity() ? 0 : exponential(top - best);
      top = best;
      found = first;
    }
    if (top > -infinity()) {
#pragma unroll
      for (int i = 0; i < 8; i++) sum += exponential(s[i] - top);
    }
  });
  const u64 best = reduce<Max>(sh, (u64)order_bits(top) << 32 | (u32)~found);
  Likeliest result{0, from_order((u32)(best >> 32)), 0};
  const int first = (int)~(u32)best;
  const bool has_nan = (u32)(best >> 32) == ~0u;
  if (has_nan) result.top = nan();
  if (first >= 0) {
    float s[8];
    row.unpack(row.load(first), first, s);
#pragma unroll
    for (int i = 7; i >= 0; i--)
      if (has_nan ? s[i] != s[i] : s[i] == result.top) result.token = first + i;
  }
  const bool counts = top > -infinity() && fabsf(result.top) <= HIGHEST;
  result.log_sum = log(sum_doubles(sh, counts ? (double)sum * exp((double)top - (double)result.top) : 0.0));
  return result;
}

DEVICE float log_probability(float s, float top, double log_sum) {
  if (!(fabsf(top) <= HIGHEST)) return nan();
  return s == -infinity() ? s : (float)((double)s - (double)top - log_sum);
}

template <class Number> PASS float find_top(Shared& sh, const Row<Number> row) {
  float top = -infinity();
  row.template scan<2>([&](int, const float(&s)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) top = max_or_nan(top, s[i]);
  });
  const u32 order = (u32)reduce<Max>(sh, order_bits(top));
  return order == ~0u ? nan() : from_order(order);
}

// ---------------------------------------------------------------------------------------------------- sampled
// The mean distance of kept tokens to the top, by their weights; `log_sum` of the weights.
template <class Number> PASS double find_mean(Shared& sh, const Row<Number> row, const Kept kept, double& log_sum) {
  u64 total = 0, sum = 0;
  row.template scan<1>([&](int first, const float(&s)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!kept.has(s[i], first + i)) continue;
      const float weight = kept.weight(s[i]);
      total += to_fixed(weight);
      sum += to_fixed(weight * __fsub_rn(kept.top, s[i]));
    }
  });
  total = reduce<Sum>(sh, total);
  log_sum = log(from_fixed(total));
  return (double)reduce<Sum>(sh, sum) / (double)total;
}

// Apply top-k, top-p, min-p and typical-p, one after the other.
template <class Number>
DEVICE void cut_row(Shared& sh, const Row<Number>& row, const RowParams& p, Kept& kept) {
  Cut cut;
  if (p.top_k > 0 && p.top_k < row.vocab) {
    const bool is_cut = select(sh, row, ByScore{kept, 0, p.top_k}, Range{kept.top, -HIGHEST, FIRST_SCALE}, cut);
    if (is_cut) kept.raise(cut.value);  // all equals are kept
  }
  if (p.rest >= 0) {
    const float scale = fmaxf(fminf((BINS - 1) / (kept.top - kept.cut), 1e6f), FIRST_SCALE);
    select(sh, row, ByScore{kept, 1.0 - (double)p.rest}, Range{kept.top, kept.cut, scale}, cut);
    kept.cut = cut.value;
    kept.cut_id = cut.id;
  }
  if (p.min_p > 0) kept.raise(bisect(-HIGHEST, kept.top, [&](float s) { return kept.weight(s) >= p.min_p; }));
  if (p.typical_p >= 0) {
    double log_sum;
    const double mean = find_mean(sh, row, kept, log_sum);
    const ByTypicality by{kept, (double)p.typical_p, 0, log_sum, log_sum + mean};
    select(sh, row, by, Range{0, -HIGHEST, FIRST_SCALE}, cut);
    const float limit = -cut.value;
    const float above = bisect(-HIGHEST, HIGHEST, [&](float s) { return -by.surplus(s) > limit; });
    kept.raise(bisect(-HIGHEST, kept.top, [&](float s) { return by.surplus(s) <= limit; }));
    kept.ceiling = fminf(kept.ceiling, from_order(order_bits(above) - 1));
  }
}

// ---------------------------------------------------------------------------------------------------- alternatives
// List the likeliest of the kept tokens in the order of their scores, the first of equals above the others; then
// tokens that are not kept.
template <class Number>
PASS void list_likeliest(Shared& sh, const Row<Number> row, const Kept kept, double log_sum, int asked, i64* ids, float* logprobs) {
  asked = min(asked, row.vocab);
  const bool is_number = fabsf(kept.top) <= HIGHEST;
  Cut cut{-HIGHEST, row.vocab};  // listed: those above it, and its equals up to this id
  if (is_number && select(sh, row, ByScore{kept, 0, asked}, Range{kept.top, kept.cut, FIRST_SCALE}, cut)) {
    Kept better = kept, equals = kept;
    better.raise(cut.value);
    equals.raise(cut.value);
    better.cut_id = row.vocab;
    equals.ceiling = cut.value;
    const u64 num_better = sum_segments(sh, row, better, true);
    sum_segments(sh, row, equals, true);
    cut.id = find_token(sh, row, equals, true, asked - 1 - num_better);
  }
  __syncthreads();
  if (threadIdx.x == 0) sh.count = 0;
  __syncthreads();
  if (is_number)
    row.template scan<1>([&](int first, const float(&s)[8]) {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (kept.has(s[i], first + i) && (s[i] > cut.value || (s[i] == cut.value && first + i <= cut.id)))
          sh.list[atomicAdd(&sh.count, 1)] = (u64)order_bits(s[i]) << 32 | (u32)~(first + i);
    });
  __syncthreads();
  const int count = sh.count;
  sort_list(sh, count);
  for (int i = threadIdx.x; i < count; i += CHOOSE_THREADS) {
    ids[i] = (int)~(u32)sh.list[i];
    logprobs[i] = log_probability(from_order((u32)(sh.list[i] >> 32)), kept.top, log_sum);
  }
  if (threadIdx.x >= 32) return;
  int place = count;  // of the first tokens that are not kept, as many are among the first `asked` as are needed
  for (int base = 0; base < asked; base += 32) {
    const int token = base + threadIdx.x;
    const bool is_left = token < asked && !(is_number && kept.has(row.score(token), token));
    const u32 left = __ballot_sync(~0u, is_left);
    const int at = place + __popc(left & ((1u << threadIdx.x) - 1));
    if (is_left && at < asked) {
      ids[at] = token;
      logprobs[at] = is_number ? -infinity() : nan();
    }
    place += __popc(left);
  }
}

// ---------------------------------------------------------------------------------------------------- all together
template <class Number, class Given>
DEVICE void choose_row(Shared& sh, const ChooseArgs& a, const RowParams& p, const Row<Number>& row, const Row<Given>& raw, bool is_raw) {
  const int number = blockIdx.x;
  Kept kept;
  int token;
  double log_sum;
  float score;
  if (p.flags & SAMPLED) {
    Row<Number> undivided = row;  // dividing does not change which is the highest
    undivided.temperature = 1;
    const float top = find_top(sh, undivided);
    kept.top = kept.ceiling = row.temperature == 1 ? top : divide_slowly(top, row.temperature);
    token = row.vocab - 1;
    score = kept.top;
    log_sum = 0;
    if (fabsf(kept.top) <= HIGHEST) {
      cut_row(sh, row, p, kept);
      const u64 total = sum_segments(sh, row, kept, false);
      const u64 bits = draw_bits(p.seed, a.lengths[number] - a.prompt_lengths[number]);
      const u64 target = __umul64hi(bits << 32, total);
      token = find_token(sh, row, kept, false, target);
      score = row.score(token);
      log_sum = log(from_fixed(total));
    }
  } else {
    const Likeliest likeliest = find_likeliest(sh, row);
    token = likeliest.token;
    kept.top = kept.ceiling = score = likeliest.top;
    log_sum = likeliest.log_sum;
  }
  float logprob = log_probability(score, kept.top, log_sum);
  const bool asks = p.listed >= 0;
  i64* ids = asks ? a.listed_ids + (i64)p.listed * a.most : nullptr;
  float* logprobs = asks ? a.listed_logprobs + (i64)p.listed * a.most : nullptr;
  if ((p.flags & RAW) && !is_raw) {
    const Likeliest likeliest = find_likeliest(sh, raw);
    logprob = log_probability(raw.score(token), likeliest.top, likeliest.log_sum);
    Kept all;
    all.top = all.ceiling = likeliest.top;
    if (asks) list_likeliest(sh, raw, all, likeliest.log_sum, p.num_alternatives, ids, logprobs);
  } else if (asks) {
    list_likeliest(sh, row, kept, log_sum, p.num_alternatives, ids, logprobs);
  }
  if (threadIdx.x == 0) {
    a.token_ids[number] = token;
    a.logprobs[number] = logprob;
  }
}

DEVICE const u32* find_mask(Shared& sh, const ChooseArgs& a, int number) {
  if (!a.num_masks) return nullptr;
  if (threadIdx.x == 0) sh.count = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < a.num_masks; i += CHOOSE_THREADS)
    if (a.mask_rows[i] == number) sh.count = i;
  __syncthreads();
  const int found = sh.count;
  __syncthreads();
  return found < 0 ? nullptr : a.mask_words + (i64)found * a.mask_width;
}

template <class Number> struct Size { static constexpr int bytes = 2; };
template <> struct Size<Float32> { static constexpr int bytes = 4; };

template <class Number> DEVICE void choose(const ChooseArgs& a) {
  extern __shared__ __align__(16) u8 memory[];
  Shared& sh = *(Shared*)memory;
  const RowParams& p = a.params[blockIdx.x];
  const void* logits = (const u8*)a.logits + blockIdx.x * a.stride * Size<Number>::bytes;
  const Row<Number> raw(logits, nullptr, a.vocab, 1);
  if (p.changed >= 0) {
    const Row<Float32> row(a.changed + (i64)p.changed * a.width, nullptr, a.vocab, p.temperature);
    choose_row(sh, a, p, row, raw, false);
  } else {
    const u32* mask = find_mask(sh, a, blockIdx.x);
    const Row<Number> row(logits, mask, a.vocab, p.temperature);
    choose_row(sh, a, p, row, raw, !mask && !(p.flags & SAMPLED));
  }
}

// ---------------------------------------------------------------------------------------------------- penalties
DEVICE u32 hash_token(u32 x) {  // as watermark.py
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return (x ^ x >> 16) | 1;
}

// Call body(token, count) for each different token of a stretch of the history.
template <class Body>
DEVICE void for_each_token(const i64* tokens, i64 begin, i64 end, u32* counts, int vocab, Body body) {
  for (i64 i = begin + threadIdx.x; i < end; i += CHOOSE_THREADS)
    if ((u64)tokens[i] < vocab) counts[tokens[i]] = 0;
  __syncthreads();
  for (i64 i = begin + threadIdx.x; i < end; i += CHOOSE_THREADS)
    if ((u64)tokens[i] < vocab) atomicAdd(&counts[tokens[i]], 1);
  __syncthreads();
  for (i64 i = begin + threadIdx.x; i < end; i += CHOOSE_THREADS)
    if ((u64)tokens[i] < vocab)
      if (const u32 count = atomicExch(&counts[tokens[i]], 0)) body((int)tokens[i], count);
  __syncthreads();
}

// Write the scores of rows with penalties, biases or forbidden tokens.
template <class Number> DEVICE void change(const ChooseArgs& a) {
  extern __shared__ __align__(16) u8 memory[];
  Shared& sh = *(Shared*)memory;
  const int number = a.changed_rows[blockIdx.x];
  const RowParams& p = a.params[number];
  float* scores = a.changed + (i64)blockIdx.x * a.width;
  u32* counts = a.counts + (i64)blockIdx.x * a.width;
  const i64 length = a.lengths[number], prompt = a.prompt_lengths[number];
  const i64* tokens = a.tokens ? a.tokens + number * a.tokens_stride : nullptr;
  const Row<Number> row((const u8*)a.logits + number * a.stride * Size<Number>::bytes, find_mask(sh, a, number), a.vocab, 1);
  const bool is_marked = p.flags & WATERMARK;
  const u32 before = is_marked ? hash_token((u32)(tokens[length - 1] * 15485863)) : 0;
  row.template scan<1>([&](int first, const float(&s)[8]) {
    if (first >= a.vocab) return;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const bool is_green = is_marked && (int)(hash_token(first + i) * before) < 0;
      x[i] = is_green ? s[i] + 2.0f : s[i];
    }
    float4* to = (float4*)(scores + first);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  });
  __syncthreads();
  if (p.repetition != 1)
    for_each_token(tokens, 0, length, counts, a.vocab, [&](int token, u32) {
      const float s = scores[token];
      scores[token] = s < 0 ? __fmul_rn(s, p.repetition) : __fdiv_rn(s, p.repetition);
    });
  if (p.frequency != 0 || p.presence != 0)
    for_each_token(tokens, prompt, length, counts, a.vocab, [&](int token, u32 count) {
      scores[token] = __fsub_rn(scores[token], __fadd_rn(__fmul_rn((float)count, p.frequency), p.presence));
    });
  for (int i = p.biases + threadIdx.x; i < p.biases_end; i += CHOOSE_THREADS) scores[a.entry_ids[i]] += a.entry_values[i];
  __syncthreads();
  if (length - prompt < p.min_new)
    for (int i = p.forbidden + threadIdx.x; i < p.forbidden_end; i += CHOOSE_THREADS) scores[a.entry_ids[i]] = -infinity();
}
