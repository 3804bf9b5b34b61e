// Greedy tokens and log probabilities.
//
// Rows are split into fixed parts that fit into the cache. Threads process parts, and results are merged in order, so they
// do not depend on threads or on other rows.

constexpr int64_t SCORES_PER_PART = 4096;
constexpr int64_t MAX_SINGLE_THREAD_SCORES = 32 * 1024;  // scores up to this count are faster on one thread

// Maximum score of a part (ignoring NaN), and sum of exp((score - maximum) * inverse_temperature). The sum is NaN if a
// score is NaN or the maximum is infinity, and 0 if all scores are -infinity.
struct MaxAndSum {
  float best, total;
};

template <class T>
static MaxAndSum find_max_and_sum(const T* scores, int64_t count, float inverse_temperature) {
  const F least = broadcast(-INFINITY);
  F best[4] = {least, least, least, least};
  int64_t i = 0;
  for (; i + 4 * VL <= count; i += 4 * VL)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) best[j] = larger(load(scores + i + j * VL), best[j]);
  for (; i < count; i += VL) {
    const F some = i + VL <= count ? load(scores + i) : load_partial(scores + i, count - i, -INFINITY);
    best[0] = larger(some, best[0]);
  }
  const float most = largest(larger(larger(best[0], best[1]), larger(best[2], best[3])));
  const float base = most == -INFINITY ? 0.0f : most;
  const float total = sum_row(count, [&](int64_t at, auto size) {
    return exponential((load_vector(scores + at, size, -INFINITY) - base) * inverse_temperature);
  });
  return {most, total};
}

// Copy the allowed scores and return their number. Masks have one bit per token, lowest bit first. If at least half of
// 32 tokens are allowed, all 32 are copied, with -infinity for the others.
template <class T>
static int64_t copy_allowed(const T* scores, const uint32_t* mask, int64_t count, float* to) {
  int64_t copied = 0;
  for (int64_t at = 0; at < count; at += 32) {
    const uint32_t allowed = mask[at / 32];
    if (at + 32 > count || __builtin_popcount(allowed) < 16) {
      for (uint32_t left = allowed; left != 0; left &= left - 1) {
        const int64_t i = at + __builtin_ctz(left);
        if (i < count) to[copied++] = read(scores + i);
      }
      continue;
    }
    for (int64_t i = 0; i < 32; i += VL) store(to + copied + i, load(scores + at + i));
    for (uint32_t left = ~allowed; left != 0; left &= left - 1) to[copied + __builtin_ctz(left)] = -INFINITY;
    copied += 32;
  }
  return copied;
}

static inline bool is_allowed(const uint32_t* mask, int64_t i) {
  return mask == nullptr || (mask[i / 32] >> (i % 32) & 1) != 0;
}

struct TokenMasks {
  const uint32_t* masks = nullptr;  // [masks, width]
  int64_t width = 0;
  const int64_t* mask_indices = nullptr;  // [rows] mask index of each row; negative: no mask

  const uint32_t* of(int64_t row) const {
    return masks == nullptr || mask_indices[row] < 0 ? nullptr : masks + mask_indices[row] * width;
  }
};

template <class T>
struct Scores {
  const T* from;
  int64_t stride, rows, vocabulary;
  const float* temperatures = nullptr;  // one per row; null: 1
  TokenMasks masks = {};
  int64_t parts = (vocabulary + SCORES_PER_PART - 1) / SCORES_PER_PART;

  const T* row(int64_t index) const { return from + index * stride; }
  float inverse_temperature(int64_t index) const { return temperatures == nullptr ? 1.0f : 1.0f / temperatures[index]; }

  MaxAndSum part_max_and_sum(int64_t index, int64_t part) const {
    const int64_t at = part * SCORES_PER_PART, count = std::min(SCORES_PER_PART, vocabulary - at);
    const uint32_t* mask = masks.of(index);
    if (mask == nullptr) return find_max_and_sum(row(index) + at, count, inverse_temperature(index));
    alignas(64) float allowed[SCORES_PER_PART];
    const int64_t copied = copy_allowed(row(index) + at, mask + at / 32, count, allowed);
    return copied == 0 ? MaxAndSum{-INFINITY, 0.0f} : find_max_and_sum(allowed, copied, inverse_temperature(index));
  }

  // Return the maximum and sum of each part, [rows, parts].
  const MaxAndSum* reduce_parts() const {
    static thread_local Scratch scratch;
    MaxAndSum* part_results = scratch.make<MaxAndSum>(rows * parts);
    parallel_for(rows * parts, 1, rows * vocabulary, MAX_SINGLE_THREAD_SCORES, [&](Range mine) {
      for (int64_t task = mine.begin; task < mine.end; task++) part_results[task] = part_max_and_sum(task / parts, task % parts);
    });
    return part_results;
  }

  // Return the maximum score of a row, and the logarithm of the total sum.
  MaxAndSum merge_parts(const MaxAndSum* part_results, float inverse_temperature) const {
    float best = part_results[0].best;
    for (int64_t part = 1; part < parts; part++) best = std::max(best, part_results[part].best);
    double total = 0;
    for (int64_t part = 0; part < parts; part++)
      total += (double)part_results[part].total * std::exp(((double)part_results[part].best - best) * inverse_temperature);
    return {best, (float)std::log(total)};
  }

  // Return the first NaN (which torch treats as the maximum) or the first maximum.
  int64_t find_argmax(int64_t index, const MaxAndSum* part_results, MaxAndSum whole) const {
    const T* scores = row(index);
    const uint32_t* mask = masks.of(index);
    if (whole.total != whole.total)
      for (int64_t i = 0; i < vocabulary; i++)
        if (read(scores + i) != read(scores + i) && is_allowed(mask, i)) return i;
    int64_t part = 0;
    while (part + 1 < parts && part_results[part].best != whole.best) part++;
    int64_t i = part * SCORES_PER_PART;
    while (i + 1 < vocabulary && (read(scores + i) != whole.best || !is_allowed(mask, i))) i++;
    return i;
  }

  void choose(int64_t* ids, float* logprobs) const {
    const MaxAndSum* part_results = reduce_parts();
    for (int64_t index = 0; index < rows; index++, part_results += parts) {
      const MaxAndSum whole = merge_parts(part_results, 1.0f);
      ids[index] = find_argmax(index, part_results, whole);
      logprobs[index] = whole.best == -INFINITY && masks.of(index) != nullptr ? NAN : 0.0f - whole.total;
    }
  }

  void gather_logprobs(const int64_t* ids, int64_t count, float* logprobs) const {
    const MaxAndSum* part_results = reduce_parts();
    for (int64_t index = 0; index < rows; index++, part_results += parts) {
      const MaxAndSum whole = merge_parts(part_results, inverse_temperature(index));
      for (int64_t i = index * count; i < (index + 1) * count; i++) {
        const bool is_there = 0 <= ids[i] && ids[i] < vocabulary;
        logprobs[i] = is_there ? (read(row(index) + ids[i]) - whole.best) * inverse_temperature(index) - whole.total : NAN;
      }
    }
  }
};

// Write the first token with the maximum score of each row, and its log probability. `token_masks` can be null;
// tokens that a row's mask forbids count as -infinity.
EXPORT(choose_greedy, int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary,
                      const uint32_t* token_masks, int64_t width, const int64_t* mask_indices, int64_t* ids, float* logprobs) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    Scores<T>{(const T*)scores, stride, rows, vocabulary, nullptr, {token_masks, width, mask_indices}}.choose(ids, logprobs);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}

// Write the log probabilities of `count` tokens per row. Scores are divided by `temperatures` (can be null). With a mask,
// probabilities are over the allowed tokens, which must include the given tokens.
EXPORT(gather_logprobs, int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary,
                      const float* temperatures, const uint32_t* token_masks, int64_t width, const int64_t* mask_indices,
                      const int64_t* ids, int64_t count, float* logprobs) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    Scores<T>{(const T*)scores, stride, rows, vocabulary, temperatures, {token_masks, width, mask_indices}}.gather_logprobs(
        ids, count, logprobs);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
