// The likeliest token of each row of scores, and log probabilities.
//
// A row is cut into parts that stay in a core's cache, always the same ones. The threads share parts, and what they
// find is put together in order. So a row's result depends neither on threads nor on other rows.

constexpr int64_t SCORES_AT_ONCE = 4096;
constexpr int64_t SCORED_ALONE = 16 * 1024;  // scores that one thread looks at sooner than several

// Of a part: its largest score, a NaN not counted, and the sum of e to the power of each score minus that, times the
// sharpness. The sum is NaN where a score is, or where the largest is infinity; it is 0 where all are minus infinity.
struct Peak {
  float best, total;
};

template <class T>
static Peak find_peak(const T* scores, int64_t count, float sharpness) {
  const F least = spread(-INFINITY);
  F best[4] = {least, least, least, least};
  int64_t i = 0;
  for (; i + 4 * VL <= count; i += 4 * VL)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) best[j] = larger(load(scores + i + j * VL), best[j]);
  for (; i < count; i += VL) {
    const F some = i + VL <= count ? load(scores + i) : load_some(scores + i, count - i, -INFINITY);
    best[0] = larger(some, best[0]);
  }
  const float most = largest(larger(larger(best[0], best[1]), larger(best[2], best[3])));
  const float base = most == -INFINITY ? 0.0f : most;
  const float total = sum_row(count, [&](int64_t at, auto size) {
    return exponential((take(scores + at, size, -INFINITY) - base) * sharpness);
  });
  return {most, total};
}

// Copy the scores that a mask allows, without gaps, and return how many are there. A mask has a bit for each, the first the
// lowest. Where it allows most of 32, all are copied, the others as minus infinity.
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

struct MaskedRows {
  const uint32_t* words = nullptr;  // [masks, width]
  int64_t width = 0;
  const int64_t* numbers = nullptr;  // [rows] of each row's mask; negative: it has none

  const uint32_t* of(int64_t row) const {
    return words == nullptr || numbers[row] < 0 ? nullptr : words + numbers[row] * width;
  }
};

template <class T>
struct Scores {
  const T* from;
  int64_t stride, rows, vocabulary;
  const float* temperatures = nullptr;  // of each row; null for 1
  MaskedRows masks = {};
  int64_t parts = (vocabulary + SCORES_AT_ONCE - 1) / SCORES_AT_ONCE;

  const T* row(int64_t index) const { return from + index * stride; }
  float sharpness(int64_t index) const { return temperatures == nullptr ? 1.0f : 1.0f / temperatures[index]; }

  Peak peak_of(int64_t index, int64_t part) const {
    const int64_t at = part * SCORES_AT_ONCE, count = std::min(SCORES_AT_ONCE, vocabulary - at);
    const uint32_t* mask = masks.of(index);
    if (mask == nullptr) return find_peak(row(index) + at, count, sharpness(index));
    alignas(64) float allowed[SCORES_AT_ONCE];
    const int64_t copied = copy_allowed(row(index) + at, mask + at / 32, count, allowed);
    return copied == 0 ? Peak{-INFINITY, 0.0f} : find_peak(allowed, copied, sharpness(index));
  }

  // [rows, parts]
  const Peak* find_peaks() const {
    static thread_local Scratch scratch;
    Peak* peaks = scratch.make<Peak>(rows * parts);
    in_pieces(rows * parts, 1, rows * vocabulary, SCORED_ALONE, [&](Range mine) {
      for (int64_t task = mine.begin; task < mine.end; task++) peaks[task] = peak_of(task / parts, task % parts);
    });
    return peaks;
  }

  // The largest score of a row, and the logarithm of the sum over all its parts.
  Peak join(const Peak* peaks, float sharpness) const {
    float best = peaks[0].best;
    for (int64_t part = 1; part < parts; part++) best = std::max(best, peaks[part].best);
    double total = 0;
    for (int64_t part = 0; part < parts; part++)
      total += (double)peaks[part].total * std::exp(((double)peaks[part].best - best) * sharpness);
    return {best, (float)std::log(total)};
  }

  // The first NaN, which torch takes for the largest, or the first of the largest.
  int64_t find_first(int64_t index, const Peak* peaks, Peak whole) const {
    const T* scores = row(index);
    const uint32_t* mask = masks.of(index);
    if (whole.total != whole.total)
      for (int64_t i = 0; i < vocabulary; i++)
        if (read(scores + i) != read(scores + i) && is_allowed(mask, i)) return i;
    int64_t part = 0;
    while (part + 1 < parts && peaks[part].best != whole.best) part++;
    int64_t i = part * SCORES_AT_ONCE;
    while (i + 1 < vocabulary && (read(scores + i) != whole.best || !is_allowed(mask, i))) i++;
    return i;
  }

  void choose(int64_t* ids, float* logprobs) const {
    const Peak* peaks = find_peaks();
    for (int64_t index = 0; index < rows; index++, peaks += parts) {
      const Peak whole = join(peaks, 1.0f);
      ids[index] = find_first(index, peaks, whole);
      logprobs[index] = whole.best == -INFINITY && masks.of(index) != nullptr ? NAN : 0.0f - whole.total;
    }
  }

  void find_logprobs(const int64_t* ids, int64_t count, float* logprobs) const {
    const Peak* peaks = find_peaks();
    for (int64_t index = 0; index < rows; index++, peaks += parts) {
      const Peak whole = join(peaks, sharpness(index));
      for (int64_t i = index * count; i < (index + 1) * count; i++) {
        const bool is_there = 0 <= ids[i] && ids[i] < vocabulary;
        logprobs[i] = is_there ? (read(row(index) + ids[i]) - whole.best) * sharpness(index) - whole.total : NAN;
      }
    }
  }
};

// Choose the token with the largest score of each row, the first of equals, and write its log probability. Rows that have
// one of the `words` choose as if all tokens that it does not allow had minus infinity; `words` may be null.
EXPORT(choose_greedy, int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary,
                      const uint32_t* words, int64_t width, const int64_t* numbers, int64_t* ids, float* logprobs) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    Scores<T>{(const T*)scores, stride, rows, vocabulary, nullptr, {words, width, numbers}}.choose(ids, logprobs);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}

// Write the log probabilities of `count` tokens of each row, of scores divided by `temperatures`, which may be null. Of a
// row with a mask, as above, they are those among the tokens that it allows; it must allow these.
EXPORT(find_logprobs, int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary,
                      const float* temperatures, const uint32_t* words, int64_t width, const int64_t* numbers,
                      const int64_t* ids, int64_t count, float* logprobs) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    Scores<T>{(const T*)scores, stride, rows, vocabulary, temperatures, {words, width, numbers}}.find_logprobs(
        ids, count, logprobs);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
