// Top-k scores of each row, in descending order.
//
// The `count`-th largest chunk maximum is a lower bound for the top-k scores. Only scores at or above the bound are
// collected and sorted, usually a few more than `count`. Chunks without allowed tokens are not read.

constexpr int64_t CHUNK_SCORES = 64;

struct Candidate {
  float score;
  int32_t id;
};

// NaN sorts first (as in torch), then higher scores, then lower token IDs.
static inline bool ranks_higher(const Candidate& a, const Candidate& b) {
  const bool a_is_nan = a.score != a.score, b_is_nan = b.score != b.score;
  if (a_is_nan != b_is_nan) return a_is_nan;
  if (!a_is_nan && a.score != b.score) return a.score > b.score;
  return a.id < b.id;
}

// Return the maximum of a chunk, and mark lanes with NaN.
template <class T>
static float find_chunk_maximum(const T* scores, int64_t count, I& nan) {
  F best = broadcast(-INFINITY);
  for_vectors(count, [&](int64_t i, auto width) {
    const F values = load_vector(scores + i, width, -INFINITY);
    nan |= values != values;
    best = larger(values, best);
  });
  return largest(best);
}

// Write the maximum allowed score of each chunk. Return true if any allowed score is NaN. `mask` can be null.
template <class T>
static bool find_chunk_maxima(const T* scores, const uint32_t* mask, int64_t vocabulary, float* chunk_maxima) {
  I nan = {};
  for (int64_t at = 0; at < vocabulary; at += CHUNK_SCORES) {
    const int64_t count = std::min(CHUNK_SCORES, vocabulary - at);
    float& maximum = chunk_maxima[at / CHUNK_SCORES];
    if (mask == nullptr) {
      maximum = find_chunk_maximum(scores + at, count, nan);
    } else if (mask[at / 32] == 0 && (count <= 32 || mask[at / 32 + 1] == 0)) {
      maximum = -INFINITY;
    } else {
      alignas(64) float allowed[CHUNK_SCORES];
      maximum = find_chunk_maximum(allowed, copy_allowed(scores + at, mask + at / 32, count, allowed), nan);
    }
  }
  for (int i = 0; i < VL; i++)
    if (nan[i]) return true;
  return false;
}

// Collect the allowed scores that can be in the top `count`, and return their number.
template <class T>
static int64_t collect_candidates(const T* scores, const uint32_t* mask, int64_t vocabulary, int64_t count, Candidate* into) {
  static thread_local Scratch scratch;
  const int64_t chunks = (vocabulary + CHUNK_SCORES - 1) / CHUNK_SCORES;
  float *chunk_maxima = scratch.make<float>(2 * chunks), *ordered = chunk_maxima + chunks;
  const bool has_nan = find_chunk_maxima(scores, mask, vocabulary, chunk_maxima), needs_all = has_nan || chunks <= count;
  float bound = -INFINITY;
  if (!needs_all) {
    std::copy(chunk_maxima, chunk_maxima + chunks, ordered);
    std::nth_element(ordered, ordered + count - 1, ordered + chunks, [](float a, float b) { return a > b; });
    bound = ordered[count - 1];
  }
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    if (!needs_all && chunk_maxima[chunk] < bound) continue;
    if (mask != nullptr && !has_nan && chunk_maxima[chunk] == -INFINITY) continue;  // no allowed token
    for (int64_t i = chunk * CHUNK_SCORES; i < std::min(vocabulary, (chunk + 1) * CHUNK_SCORES); i++) {
      const float score = read(scores + i);
      into[found] = {score, (int32_t)i};
      found += (needs_all || score >= bound) && is_allowed(mask, i);
    }
  }
  return found;
}

template <class T>
static void top_k_of_row(const T* scores, const uint32_t* mask, int64_t vocabulary, int64_t count, float* best,
                             int64_t* ids) {
  static thread_local Scratch scratch;
  Candidate* candidates = scratch.make<Candidate>(vocabulary + 1);
  const int64_t found = collect_candidates(scores, mask, vocabulary, count, candidates), num_written = std::min(found, count);
  const auto before = [](const Candidate& a, const Candidate& b) { return ranks_higher(a, b); };
  if (found > count) std::nth_element(candidates, candidates + count - 1, candidates + found, before);
  std::sort(candidates, candidates + num_written, before);
  for (int64_t i = 0; i < num_written; i++) best[i] = candidates[i].score, ids[i] = candidates[i].id;
  for (int64_t i = num_written; i < count; i++) best[i] = -INFINITY, ids[i] = 0;
}

// Write the `count` highest scores of each row and their tokens. If a mask allows fewer tokens, the rest is -infinity with
// token 0. Masks are as in `choose_greedy`. `count` must not exceed the vocabulary.
EXPORT(top_k_scores, int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary, int64_t count,
                  const uint32_t* token_masks, int64_t width, const int64_t* mask_indices, float* best, int64_t* ids) {
  const TokenMasks masks = {token_masks, width, mask_indices};
  const auto run = [&](auto of) {
    using T = decltype(of);
    parallel_for(rows * vocabulary > MAX_SINGLE_THREAD_SCORES, rows, 1, [&](Range mine) {
      for (int64_t row = mine.begin; row < mine.end; row++)
        top_k_of_row((const T*)scores + row * stride, masks.of(row), vocabulary, count, best + row * count,
                         ids + row * count);
    });
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
