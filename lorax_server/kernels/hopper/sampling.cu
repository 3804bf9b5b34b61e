// Sample the next token of every row. One block per row; repeated passes over the row hit the L2 cache.


struct RowParams {
  u64 seed;
  float temperature, rest, min_p, typical_p;  // rest = 1 - top_p; negative: top-p or typical-p disabled
  int top_k, flags, changed, listed;          // row index in `changed` and in the alternatives; -1: none
  int num_alternatives, min_new;
  float repetition, frequency, presence;
  int biases, biases_end, forbidden, forbidden_end, pad;  // ranges in the entries
};

struct SampleArgs {
  const void* logits;
  const RowParams* params;
  const i64 *lengths, *prompt_lengths;  // [rows]; null if all rows are greedy
  const i64* tokens;                    // [rows][tokens] token history; null if no row needs it
  float* changed;                       // [changed rows][width] scores with penalties
  u32* counts;                          // [changed rows][width] scratch
  const int* changed_rows;              // [changed rows] row indices
  const int* entry_ids;                 // biases and forbidden tokens
  const float* entry_values;
  const i64* mask_rows;                 // [masks]
  const u32* token_masks;                // [masks][mask_width]
  i64* token_ids;                       // results
  float* logprobs;
  i64* listed_ids;                      // [listed rows][max_alternatives]
  float* listed_logprobs;
  i64 stride, tokens_stride;
  int vocab, width, num_masks, mask_width, max_alternatives;  // width: row stride of `changed`, a multiple of 8
};

// ---------------------------------------------------------------------------------------------------- greedy
struct BestToken {
  int token;
  float top;      // NaN if any score is NaN
  double log_sum; // log of the sum of exp(score - top)
};

// Find the first maximum and the weight sum in one pass. The assignment of tokens to threads is fixed, so sums are
// batch-invariant.
template <class Number> NOINLINE_DEVICE BestToken find_best_token(Shared& sh, const Row<Number> row) {
  float top = -infinity(), sum = 0;
  int found = -1;
  row.template scan<2>([&](int first, const float(&s)[8]) {
    float best = s[0];
#pragma unroll
    for (int i = 1; i < 8; i++) best = max_propagate_nan(best, s[i]);
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
  const u64 best = reduce<Max>(sh, (u64)to_ordered_bits(top) << 32 | (u32)~found);
  BestToken result{0, from_ordered_bits((u32)(best >> 32)), 0};
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
  const bool counts = top > -infinity() && fabsf(result.top) <= MAX_FLOAT;
  result.log_sum = log(sum_doubles(sh, counts ? (double)sum * exp((double)top - (double)result.top) : 0.0));
  return result;
}

DEVICE float log_probability(float s, float top, double log_sum) {
  if (!(fabsf(top) <= MAX_FLOAT)) return nan();
  return s == -infinity() ? s : (float)((double)s - (double)top - log_sum);
}

template <class Number> NOINLINE_DEVICE float find_max_score(Shared& sh, const Row<Number> row) {
  float top = -infinity();
  row.template scan<2>([&](int, const float(&s)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) top = max_propagate_nan(top, s[i]);
  });
  const u32 order = (u32)reduce<Max>(sh, to_ordered_bits(top));
  return order == ~0u ? nan() : from_ordered_bits(order);
}

// ---------------------------------------------------------------------------------------------------- sampling
// Return the weighted mean distance of kept tokens to the maximum score, and set `log_sum`.
template <class Number> NOINLINE_DEVICE double find_mean_surprise(Shared& sh, const Row<Number> row, const KeptRange kept, double& log_sum) {
  u64 total = 0, sum = 0;
  row.template scan<1>([&](int first, const float(&s)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!kept.contains(s[i], first + i)) continue;
      const float weight = kept.weight(s[i]);
      total += to_fixed(weight);
      sum += to_fixed(weight * __fsub_rn(kept.top, s[i]));
    }
  });
  total = reduce<Sum>(sh, total);
  log_sum = log(from_fixed(total));
  return (double)reduce<Sum>(sh, sum) / (double)total;
}

// Apply top-k, top-p, min-p and typical-p, in this order.
template <class Number>
DEVICE void apply_limits(Shared& sh, const Row<Number>& row, const RowParams& p, KeptRange& kept) {
  Cut cut;
  if (p.top_k > 0 && p.top_k < row.vocab) {
    const bool is_cut = select(sh, row, ByScore{kept, 0, p.top_k}, Range{kept.top, -MAX_FLOAT, BINS_PER_SCORE_UNIT}, cut);
    if (is_cut) kept.raise_cut(cut.value);  // keeps all ties
  }
  if (p.rest >= 0) {
    const float scale = fmaxf(fminf((NUM_BINS - 1) / (kept.top - kept.cut), 1e6f), BINS_PER_SCORE_UNIT);
    select(sh, row, ByScore{kept, 1.0 - (double)p.rest}, Range{kept.top, kept.cut, scale}, cut);
    kept.cut = cut.value;
    kept.cut_id = cut.id;
  }
  if (p.min_p > 0) kept.raise_cut(bisect(-MAX_FLOAT, kept.top, [&](float s) { return kept.weight(s) >= p.min_p; }));
  if (p.typical_p >= 0) {
    double log_sum;
    const double mean = find_mean_surprise(sh, row, kept, log_sum);
    const ByTypicality by{kept, (double)p.typical_p, 0, log_sum, log_sum + mean};
    select(sh, row, by, Range{0, -MAX_FLOAT, BINS_PER_SCORE_UNIT}, cut);
    const float limit = -cut.value;
    const float above = bisect(-MAX_FLOAT, MAX_FLOAT, [&](float s) { return -by.surplus(s) > limit; });
    kept.raise_cut(bisect(-MAX_FLOAT, kept.top, [&](float s) { return by.surplus(s) <= limit; }));
    kept.ceiling = fminf(kept.ceiling, from_ordered_bits(to_ordered_bits(above) - 1));
  }
}

// ---------------------------------------------------------------------------------------------------- alternatives
// List the most likely kept tokens in descending order (ties by ascending ID), then tokens that are not kept.
template <class Number>
NOINLINE_DEVICE void list_alternatives(Shared& sh, const Row<Number> row, const KeptRange kept, double log_sum, int count_limit, i64* ids, float* logprobs) {
  count_limit = min(count_limit, row.vocab);
  const bool is_number = fabsf(kept.top) <= MAX_FLOAT;
  Cut cut{-MAX_FLOAT, row.vocab};  // list scores above the cut, and ties up to this ID
  if (is_number && select(sh, row, ByScore{kept, 0, count_limit}, Range{kept.top, kept.cut, BINS_PER_SCORE_UNIT}, cut)) {
    KeptRange better = kept, equals = kept;
    better.raise_cut(cut.value);
    equals.raise_cut(cut.value);
    better.cut_id = row.vocab;
    equals.ceiling = cut.value;
    const u64 num_better = sum_segments(sh, row, better, true);
    sum_segments(sh, row, equals, true);
    cut.id = find_token(sh, row, equals, true, count_limit - 1 - num_better);
  }
  __syncthreads();
  if (threadIdx.x == 0) sh.count = 0;
  __syncthreads();
  if (is_number)
    row.template scan<1>([&](int first, const float(&s)[8]) {
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (kept.contains(s[i], first + i) && (s[i] > cut.value || (s[i] == cut.value && first + i <= cut.id)))
          sh.list[atomicAdd(&sh.count, 1)] = (u64)to_ordered_bits(s[i]) << 32 | (u32)~(first + i);
    });
  __syncthreads();
  const int count = sh.count;
  sort_list(sh, count);
  for (int i = threadIdx.x; i < count; i += SAMPLE_THREADS) {
    ids[i] = (int)~(u32)sh.list[i];
    logprobs[i] = log_probability(from_ordered_bits((u32)(sh.list[i] >> 32)), kept.top, log_sum);
  }
  if (threadIdx.x >= 32) return;
  int place = count;  // fill up with the first tokens that are not kept
  for (int base = 0; base < count_limit; base += 32) {
    const int token = base + threadIdx.x;
    const bool is_left = token < count_limit && !(is_number && kept.contains(row.score(token), token));
    const u32 left = __ballot_sync(~0u, is_left);
    const int at = place + __popc(left & ((1u << threadIdx.x) - 1));
    if (is_left && at < count_limit) {
      ids[at] = token;
      logprobs[at] = is_number ? -infinity() : nan();
    }
    place += __popc(left);
  }
}

// ---------------------------------------------------------------------------------------------------- sampling kernel
template <class Number, class Given>
DEVICE void sample_row(Shared& sh, const SampleArgs& a, const RowParams& p, const Row<Number>& row, const Row<Given>& raw, bool is_raw) {
  const int number = blockIdx.x;
  KeptRange kept;
  int token;
  double log_sum;
  float score;
  if (p.flags & SAMPLED) {
    Row<Number> undivided = row;  // the temperature does not change the maximum
    undivided.temperature = 1;
    const float top = find_max_score(sh, undivided);
    kept.top = kept.ceiling = row.temperature == 1 ? top : divide_exactly(top, row.temperature);
    token = row.vocab - 1;
    score = kept.top;
    log_sum = 0;
    if (fabsf(kept.top) <= MAX_FLOAT) {
      apply_limits(sh, row, p, kept);
      const u64 total = sum_segments(sh, row, kept, false);
      const u64 bits = draw_bits(p.seed, a.lengths[number] - a.prompt_lengths[number]);
      const u64 target = __umul64hi(bits << 32, total);
      token = find_token(sh, row, kept, false, target);
      score = row.score(token);
      log_sum = log(from_fixed(total));
    }
  } else {
    const BestToken likeliest = find_best_token(sh, row);
    token = likeliest.token;
    kept.top = kept.ceiling = score = likeliest.top;
    log_sum = likeliest.log_sum;
  }
  float logprob = log_probability(score, kept.top, log_sum);
  const bool lists_alternatives = p.listed >= 0;
  i64* ids = lists_alternatives ? a.listed_ids + (i64)p.listed * a.max_alternatives : nullptr;
  float* logprobs = lists_alternatives ? a.listed_logprobs + (i64)p.listed * a.max_alternatives : nullptr;
  if ((p.flags & RAW) && !is_raw) {
    const BestToken likeliest = find_best_token(sh, raw);
    logprob = log_probability(raw.score(token), likeliest.top, likeliest.log_sum);
    KeptRange all;
    all.top = all.ceiling = likeliest.top;
    if (lists_alternatives) list_alternatives(sh, raw, all, likeliest.log_sum, p.num_alternatives, ids, logprobs);
  } else if (lists_alternatives) {
    list_alternatives(sh, row, kept, log_sum, p.num_alternatives, ids, logprobs);
  }
  if (threadIdx.x == 0) {
    a.token_ids[number] = token;
    a.logprobs[number] = logprob;
  }
}

DEVICE const u32* find_mask(Shared& sh, const SampleArgs& a, int number) {
  if (!a.num_masks) return nullptr;
  if (threadIdx.x == 0) sh.count = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < a.num_masks; i += SAMPLE_THREADS)
    if (a.mask_rows[i] == number) sh.count = i;
  __syncthreads();
  const int found = sh.count;
  __syncthreads();
  return found < 0 ? nullptr : a.token_masks + (i64)found * a.mask_width;
}

template <class Number> struct Size { static constexpr int bytes = 2; };
template <> struct Size<Float32> { static constexpr int bytes = 4; };

template <class Number> DEVICE void sample(const SampleArgs& a) {
  extern __shared__ __align__(16) u8 memory[];
  Shared& sh = *(Shared*)memory;
  const RowParams& p = a.params[blockIdx.x];
  const void* logits = (const u8*)a.logits + blockIdx.x * a.stride * Size<Number>::bytes;
  const Row<Number> raw(logits, nullptr, a.vocab, 1);
  if (p.changed >= 0) {
    const Row<Float32> row(a.changed + (i64)p.changed * a.width, nullptr, a.vocab, p.temperature);
    sample_row(sh, a, p, row, raw, false);
  } else {
    const u32* mask = find_mask(sh, a, blockIdx.x);
    const Row<Number> row(logits, mask, a.vocab, p.temperature);
    sample_row(sh, a, p, row, raw, !mask && !(p.flags & SAMPLED));
  }
}

// ---------------------------------------------------------------------------------------------------- penalties
DEVICE u32 hash_token(u32 x) {  // same hash as watermark.py
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return (x ^ x >> 16) | 1;
}

// Call body(token, count) for each distinct token in a range of the history.
template <class Body>
DEVICE void for_each_token(const i64* tokens, i64 begin, i64 end, u32* counts, int vocab, Body body) {
  for (i64 i = begin + threadIdx.x; i < end; i += SAMPLE_THREADS)
    if ((u64)tokens[i] < vocab) counts[tokens[i]] = 0;
  __syncthreads();
  for (i64 i = begin + threadIdx.x; i < end; i += SAMPLE_THREADS)
    if ((u64)tokens[i] < vocab) atomicAdd(&counts[tokens[i]], 1);
  __syncthreads();
  for (i64 i = begin + threadIdx.x; i < end; i += SAMPLE_THREADS)
    if ((u64)tokens[i] < vocab)
      if (const u32 count = atomicExch(&counts[tokens[i]], 0)) body((int)tokens[i], count);
  __syncthreads();
}

// Write modified scores for rows with penalties, biases or forbidden tokens.
template <class Number> DEVICE void apply_penalties(const SampleArgs& a) {
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
  for (int i = p.biases + threadIdx.x; i < p.biases_end; i += SAMPLE_THREADS) scores[a.entry_ids[i]] += a.entry_values[i];
  __syncthreads();
  if (length - prompt < p.min_new)
    for (int i = p.forbidden + threadIdx.x; i < p.forbidden_end; i += SAMPLE_THREADS) scores[a.entry_ids[i]] = -infinity();
}
