// Find the tokens of a row that are kept: the best by count or by mass, or the most typical.

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
