// The best scores of each row, in order.
//
// The largest score of each small chunk is found first. If `count` chunks have one of at least some bound, so have as
// many scores: so only those of at least the bound are collected, mostly a few more than `count`, and ordered.

constexpr int64_t CHUNK = 64;  // scores

struct Candidate {
  float score;
  int32_t id;
};

// A NaN comes first, as in torch, then the larger score; of equals the one of lower id.
static inline bool comes_before(const Candidate& a, const Candidate& b) {
  const bool a_is_nan = a.score != a.score, b_is_nan = b.score != b.score;
  if (a_is_nan != b_is_nan) return a_is_nan;
  if (!a_is_nan && a.score != b.score) return a.score > b.score;
  return a.id < b.id;
}

// Write the largest score of each chunk; return whether any score is NaN.
template <class T>
static bool find_largest(const T* scores, int64_t vocabulary, float* peaks) {
  I nan = {};
  for (int64_t at = 0; at < vocabulary; at += CHUNK) {
    F best = spread(-INFINITY);
    for_vectors(std::min(CHUNK, vocabulary - at), [&](int64_t i, auto width) {
      const F some = take(scores + at + i, width, -INFINITY);
      nan |= some != some;
      best = larger(some, best);
    });
    peaks[at / CHUNK] = largest(best);
  }
  for (int i = 0; i < VL; i++)
    if (nan[i]) return true;
  return false;
}

// Collect all scores that may be among the best `count`; return their number.
template <class T>
static int64_t collect(const T* scores, int64_t vocabulary, int64_t count, Candidate* into) {
  static thread_local Scratch scratch;
  const int64_t chunks = (vocabulary + CHUNK - 1) / CHUNK;
  float *peaks = scratch.make<float>(2 * chunks), *ordered = peaks + chunks;
  const bool has_nan = find_largest(scores, vocabulary, peaks), takes_all = has_nan || chunks <= count;
  float bound = -INFINITY;
  if (!takes_all) {
    std::copy(peaks, peaks + chunks, ordered);
    std::nth_element(ordered, ordered + count - 1, ordered + chunks, [](float a, float b) { return a > b; });
    bound = ordered[count - 1];
  }
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    if (!takes_all && peaks[chunk] < bound) continue;
    for (int64_t i = chunk * CHUNK; i < std::min(vocabulary, (chunk + 1) * CHUNK); i++) {
      const float score = read(scores + i);
      into[found] = {score, (int32_t)i};
      found += takes_all || score >= bound;
    }
  }
  return found;
}

template <class T>
static void find_best_of_row(const T* scores, int64_t vocabulary, int64_t count, float* best, int64_t* ids) {
  static thread_local Scratch scratch;
  Candidate* some = scratch.make<Candidate>(vocabulary + 1);
  const int64_t found = collect(scores, vocabulary, count, some);
  const auto before = [](const Candidate& a, const Candidate& b) { return comes_before(a, b); };
  if (found > count) std::nth_element(some, some + count - 1, some + found, before);
  std::sort(some, some + count, before);
  for (int64_t i = 0; i < count; i++) best[i] = some[i].score, ids[i] = some[i].id;
}

// Write the `count` best scores of each row, the best first, and their tokens. `count` is at most the vocabulary.
EXPORT(find_best)(int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary, int64_t count,
                  float* best, int64_t* ids) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    in_threads(rows > 1 && rows * vocabulary > SCORED_ALONE, [&](int64_t thread, int64_t threads) {
      const Range mine = part_of(rows, thread, threads);
      for (int64_t row = mine.begin; row < mine.end; row++)
        find_best_of_row((const T*)scores + row * stride, vocabulary, count, best + row * count, ids + row * count);
    });
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
