// Select tokens of a row: top-k by count, top-p by probability mass, or the most typical tokens.

// ---------------------------------------------------------------------------------------------------- kept range
// Kept tokens have scores from `cut` to `ceiling`; tokens with score `cut` need an ID of at least `cut_id`.
struct KeptRange {
  float top, ceiling;  // maximum score of all tokens, and of kept tokens
  float cut = -MAX_FLOAT;
  int cut_id = 0;

  DEVICE bool contains(float s, int id) const { return (s <= ceiling) & ((s > cut) | ((s == cut) & (id >= cut_id))); }
  DEVICE bool has_any(const float (&s)[8]) const {  // conservative: can return true without a kept token
    float best = s[0];
#pragma unroll
    for (int i = 1; i < 8; i++) best = fmaxf(best, s[i]);
    return best >= cut;
  }
  DEVICE float weight(float s) const { return exponential(__fsub_rn(s, top)); }
  DEVICE void raise_cut(float limit) {  // drop all scores below `limit`
    if (!(limit > cut)) return;
    cut = limit;
    cut_id = 0;
  }
};

// Return the lowest score up to `high` that passes a monotonic test.
template <class Test> DEVICE float bisect(float low, float high, Test passes) {
  u32 fails = to_ordered_bits(low) - 1, ok = to_ordered_bits(high);
  while (ok - fails > 1) {
    const u32 middle = fails + (ok - fails) / 2;
    if (passes(from_ordered_bits(middle))) ok = middle;
    else fails = middle;
  }
  return from_ordered_bits(ok);
}

// Defines the order of a selection (highest first), the accumulated mass, and the target.
struct Order {
  KeptRange kept;
  double share;  // fraction of the total mass
  int count;     // number of tokens; 0: select by mass
  double log_sum, expected;  // log of the weight sum; expected surprise
  DEVICE u64 mass(float s) const { return count ? 1 : to_fixed(kept.weight(s)); }
  DEVICE u64 target(u64 total) const { return count ? count : min(max((u64)ceil((double)total * share), 1ull), total); }
};
struct ByScore : Order {
  static constexpr bool NEEDS_ID = true;
  DEVICE float value(float s) const { return s; }
};
struct ByTypicality : Order {  // surprise closest to the expected surprise first; ties are all kept
  static constexpr bool NEEDS_ID = false;
  DEVICE float surplus(float s) const { return (float)(log_sum - ((double)s - (double)kept.top) - expected); }
  DEVICE float value(float s) const { return -fabsf(surplus(s)); }
};

struct Range {  // of values, divided into bins
  float high, low, scale;
  DEVICE bool contains(float v) const { return v <= high && v >= low; }
  DEVICE int bin(float v) const { return min((int)__fmul_rn(__fsub_rn(high, v), scale), NUM_BINS - 1); }
};

DEVICE void add_to_bin(Shared& sh, int bin, u64 mass) {
  const u32 low = (u32)mass, before = atomicAdd(&sh.low[bin], low);
  const u32 high = (u32)(mass >> 32) + (before + low < before);
  if (high) atomicAdd(&sh.high[bin], high);
}

// Sum masses per bin. Consecutive tokens in the same bin are added together, as are all tokens of the last bin, which
// contains the tail: most of the vocabulary.
template <class Number, class By>
NOINLINE_DEVICE void fill_bins(Shared& sh, const Row<Number> row, const By by, const Range range) {
  for (int i = threadIdx.x; i < NUM_BINS; i += SAMPLE_THREADS) sh.low[i] = sh.high[i] = 0;
  __syncthreads();
  u64 tail = 0, run = 0;
  int last = 0;
  row.template scan<1>([&](int first, const float(&s)[8]) {
    if (!by.kept.has_any(s)) return;
    float weights[8];
    int bins[8], in_front = 0;  // whether any token is not in the tail bin
    FixedSum at_end;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = by.value(s[i]);
      const bool is_in = by.kept.contains(s[i], first + i) & range.contains(v);
      weights[i] = is_in ? 1 : 0;
      bins[i] = is_in ? range.bin(v) : NUM_BINS - 1;
      in_front |= bins[i] < NUM_BINS - 1;
    }
    if (!by.count) {
#pragma unroll
      for (int i = 0; i < 8; i++) weights[i] = weights[i] > 0 ? by.kept.weight(s[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) at_end.add(bins[i] == NUM_BINS - 1 ? weights[i] : 0);
    tail += by.count ? at_end.total() >> FRACTION_BITS : at_end.total();
    if (!in_front) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (bins[i] == NUM_BINS - 1) continue;
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
  if (threadIdx.x % 32 == 0 && tail) add_to_bin(sh, NUM_BINS - 1, tail);
  __syncthreads();
}

// Find the bin where the sum, starting from `above`, reaches the target, and set `above` to the sum before the bin.
// Return false if no bin does. A target of 0 is first computed from the total.
template <class By> DEVICE bool find_crossing_bin(Shared& sh, const By& by, u64& target, u64& above, int& bin) {
  u64 masses[NUM_BINS / SAMPLE_THREADS], mine = 0, total;
  const int first = threadIdx.x * (NUM_BINS / SAMPLE_THREADS);
  if (threadIdx.x == 0) sh.bin = -1;
#pragma unroll
  for (int i = 0; i < NUM_BINS / SAMPLE_THREADS; i++) mine += masses[i] = (u64)sh.high[first + i] << 32 | sh.low[first + i];
  u64 sum = above + exclusive_sum(sh, mine, total);
  if (!target) target = by.target(total);
#pragma unroll
  for (int i = 0; i < NUM_BINS / SAMPLE_THREADS; i++) {
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

struct ListedBin {
  int count;
  Range range;  // value range of the listed tokens
};

// List the tokens of a bin. `count` can exceed the capacity.
template <class Number, class By>
NOINLINE_DEVICE ListedBin list_bin(Shared& sh, const Row<Number> row, const By by, const Range range, int bin) {
  if (threadIdx.x == 0) sh.count = 0;
  __syncthreads();
  u32 highest = 0, least = 0;
  row.template scan<1>([&](int first, const float(&s)[8]) {
    if (!by.kept.has_any(s)) return;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = by.value(s[i]);
      found |= (u32)(by.kept.contains(s[i], first + i) & range.contains(v) & (range.bin(v) == bin)) << i;
    }
    if (!found) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!(found >> i & 1)) continue;
      const float v = by.value(s[i]);
      const u32 order = to_ordered_bits(v);
      highest = max(highest, order);
      least = max(least, ~order);
      if (*(volatile int*)&sh.count <= MAX_LISTED_TOKENS) {
        const int place = atomicAdd(&sh.count, 1);
        if (place < MAX_LISTED_TOKENS) sh.list[place] = (u64)order << 32 | (u32)(first + i);
      }
    }
  });
  const float high = from_ordered_bits((u32)reduce<Max>(sh, highest)), low = from_ordered_bits(~(u32)reduce<Max>(sh, least));
  __syncthreads();
  return {sh.count, {high, low, fmaxf((NUM_BINS - 1) / (high - low), 1e-35f)}};
}

NOINLINE_DEVICE void sort_list(Shared& sh, int count) {  // descending
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += SAMPLE_THREADS) sh.list[i] = 0;
  for (int width = 2; width <= size; width *= 2)
    for (int step = width / 2; step; step /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += SAMPLE_THREADS) {
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

// ---------------------------------------------------------------------------------------------------- in vocabulary order
// Sum the weights, or count the kept tokens, in segments of SEGMENT_TOKENS tokens. Return the total.
template <class Number> NOINLINE_DEVICE u64 sum_segments(Shared& sh, const Row<Number> row, const KeptRange kept, bool is_count) {
  __syncthreads();
  for (int i = threadIdx.x; i < MAX_SEGMENTS; i += SAMPLE_THREADS) sh.segments[i] = 0;
  __syncthreads();
  row.template scan<1>([&](int first, const float(&s)[8]) {
    if (!__any_sync(~0u, kept.has_any(s))) return;
    FixedSum eight;
    if (is_count) {
#pragma unroll
      for (int i = 0; i < 8; i++) eight.add(kept.contains(s[i], first + i) ? 1 : 0);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) eight.add(kept.contains(s[i], first + i) ? kept.weight(s[i]) : 0);
    }
    const u64 sum = reduce_warp<Sum>(is_count ? eight.total() >> FRACTION_BITS : eight.total());
    if (threadIdx.x % 32 == 0) sh.segments[first / SEGMENT_TOKENS] = sum;
  });
  __syncthreads();
  u64 mine = 0;
  for (int i = threadIdx.x; i < MAX_SEGMENTS; i += SAMPLE_THREADS) mine += sh.segments[i];
  return reduce<Sum>(sh, mine);
}

// Return the token where the running sum exceeds the target.
template <class Number> NOINLINE_DEVICE int find_token(Shared& sh, const Row<Number> row, const KeptRange kept, bool is_count, u64 target) {
  constexpr int EACH = MAX_SEGMENTS / SAMPLE_THREADS;
  u64 mine = 0, total;
  const int own = threadIdx.x * EACH;
#pragma unroll
  for (int i = 0; i < EACH; i++) mine += sh.segments[own + i];
  u64 sum = exclusive_sum(sh, mine, total);
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
    const int first = sh.bin * SEGMENT_TOKENS + threadIdx.x * 8;
    float s[8];
    row.unpack(row.load(first), first, s);
    u64 masses[8], all = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) all += masses[i] = !kept.contains(s[i], first + i) ? 0 : is_count ? 1 : to_fixed(kept.weight(s[i]));
    u64 at = sh.above + exclusive_sum_in_warp(all);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (at <= target && at + masses[i] > target) sh.count = first + i;
      at += masses[i];
    }
  }
  __syncthreads();
  return sh.count;
}

// ---------------------------------------------------------------------------------------------------- selection
struct Cut {
  float value;
  int id;
};

// Return the listed token where the mass sum, starting from `above`, reaches the target.
template <class Number, class By>
NOINLINE_DEVICE Cut find_crossing_token(Shared& sh, const Row<Number> row, const By by, int count, u64 above, u64 target) {
  u64 masses[MAX_LISTED_TOKENS / SAMPLE_THREADS], mine = 0, total;
  const int first = threadIdx.x * (MAX_LISTED_TOKENS / SAMPLE_THREADS);
#pragma unroll
  for (int i = 0; i < MAX_LISTED_TOKENS / SAMPLE_THREADS; i++)
    mine += masses[i] = first + i < count ? by.mass(row.score((u32)sh.list[first + i])) : 0;
  u64 sum = above + exclusive_sum(sh, mine, total);
#pragma unroll
  for (int i = 0; i < MAX_LISTED_TOKENS / SAMPLE_THREADS; i++) {
    if (sum < target && sum + masses[i] >= target) sh.crossing_token = sh.list[first + i];
    sum += masses[i];
  }
  __syncthreads();
  return {from_ordered_bits((u32)(sh.crossing_token >> 32)), (int)(u32)sh.crossing_token};
}

// Find the token where the mass sum reaches the target, in descending order of value and then of token ID. Return false if
// the sum never reaches the target.
template <class Number, class By>
DEVICE bool select(Shared& sh, const Row<Number>& row, const By& by, Range range, Cut& cut) {
  u64 above = 0, target = 0;
  int bin;
  for (;;) {
    __syncthreads();
    fill_bins(sh, row, by, range);
    if (!find_crossing_bin(sh, by, target, above, bin)) return false;
    const ListedBin listed = list_bin(sh, row, by, range, bin);
    range = listed.range;
    if (listed.count <= MAX_LISTED_TOKENS) {
      sort_list(sh, listed.count);
      cut = find_crossing_token(sh, row, by, listed.count, above, target);
      return true;
    }
    if (range.high == range.low) {  // more ties than the list can hold
      cut = {range.high, 0};
      if (!By::NEEDS_ID) return true;
      KeptRange equals = by.kept;
      equals.raise_cut(range.high);
      equals.ceiling = range.high;
      const u64 mass = by.mass(range.high), needed = (target - above + mass - 1) / mass;
      const u64 count = sum_segments(sh, row, equals, true);
      if (count > needed) cut.id = find_token(sh, row, equals, true, count - needed);
      return true;
    }
  }
}
