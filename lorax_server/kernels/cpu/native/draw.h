// Tokens that are drawn from a few of the likeliest.
//
// Top-k, top-p and min-p nearly always leave few tokens: those are found and ordered, and all else looks at them alone.
// Where the few do not decide, the caller draws otherwise. Sums over the few are double and go from one to the next.

// The parameters of each row. Where a row has no top-k, it is the vocabulary; no top-p, infinity; no min-p, 0.
struct Cuts {
  const float* temperatures;
  const int64_t* top_k;
  const double *top_p, *min_p, *uniforms;
};

struct Drawn {
  int64_t id;
  float logprob;
  bool is_decided;
};

// One row: its few best, the best first.
struct Few {
  const float* best;
  const int64_t* ids;
  int64_t count, vocabulary;
  double *scores, *weights;  // divided by the temperature; probabilities, divided by that of the best

  void weigh(float temperature) {
    for (int64_t i = 0; i < count; i++) {
      scores[i] = best[i] / temperature;
      weights[i] = std::exp(scores[i] - scores[0]);
    }
  }

  // The number of tokens that top-k keeps: with all that equal the last of them.
  int64_t keep_top_k(int64_t k) const {
    if (k >= vocabulary) return count;
    const double worst = scores[std::min(k, count) - 1];
    int64_t kept = 0;
    while (kept < count && scores[kept] >= worst) kept++;
    return kept;
  }

  // The number of the `kept` whose predecessors have less than the share `p` of `total`; at least one.
  int64_t keep_top_p(int64_t kept, double p, double total) const {
    double summed = 0;
    int64_t i = 0;
    for (; i < kept; i++) {
      const double before = (summed + weights[i]) - weights[i];
      if (!(before < p * total)) break;
      summed += weights[i];
    }
    return std::max<int64_t>(i, 1);
  }

  double sum(int64_t kept) const {
    double total = 0;
    for (int64_t i = 0; i < kept; i++) total += weights[i];
    return total;
  }
};

// Where the first and the last of those that equal the last one kept lie: of these the ones of higher id are kept.
static inline Range equals_of(const Few& few, int64_t kept, int64_t of) {
  int64_t first = kept - 1, last = kept;
  while (first > 0 && few.scores[first - 1] == few.scores[kept - 1]) first--;
  while (last < of && few.scores[last] == few.scores[kept - 1]) last++;
  return {first, last};
}

// Draw from the tokens at `places` the one at which weights, summed in the order of the vocabulary, pass a part of all.
static inline Drawn draw_place(const Few& few, int32_t* places, int64_t kept, double uniform) {
  std::sort(places, places + kept, [&](int32_t a, int32_t b) { return few.ids[a] < few.ids[b]; });
  double total = 0, summed = 0;
  for (int64_t i = 0; i < kept; i++) total += few.weights[places[i]];
  int64_t chosen = 0;
  for (; chosen + 1 < kept; chosen++) {
    summed += few.weights[places[chosen]];
    if (summed > uniform * total) break;
  }
  const int32_t place = places[chosen];
  return {few.ids[place], (float)std::log(few.weights[place] / total), true};
}

// `log_total` is the logarithm of the weights of all tokens.
static Drawn draw_row(Few few, const Cuts& cuts, int64_t row, double log_total) {
  static thread_local Scratch scratch;
  const int64_t k = cuts.top_k[row];
  few.weigh(cuts.temperatures[row]);
  if (!std::isfinite(few.scores[0]) || (k < few.vocabulary && k > few.count)) return {0, NAN, false};
  const int64_t of = few.keep_top_k(k);
  const double p = cuts.top_p[row], total = k < few.vocabulary ? few.sum(of) : std::exp(log_total);
  const int64_t kept = std::isinf(p) ? of : few.keep_top_p(of, p, total);
  const Range equal = equals_of(few, kept, of);
  int32_t* places = scratch.make<int32_t>(few.count);
  for (int64_t i = 0; i < equal.end; i++) places[i] = (int32_t)i;
  // Of equals lower ids come first: so the last of them are kept, as many as there are places.
  std::copy(places + equal.begin + (equal.end - kept), places + equal.end, places + equal.begin);
  int64_t likely = 0;
  while (likely < kept && few.weights[places[likely]] >= cuts.min_p[row]) likely++;
  if (likely == 0) return {0, NAN, false};
  const double worst = few.scores[places[likely - 1]];
  if (few.count < few.vocabulary && !(few.scores[few.count - 1] < worst)) return {0, NAN, false};
  return draw_place(few, places, likely, cuts.uniforms[row]);
}

template <class T>
static Drawn draw_from(const Scores<T>& scores, int64_t row, const Cuts& cuts, int64_t count) {
  static thread_local Scratch best_scratch, id_scratch, score_scratch, weight_scratch, peak_scratch;
  float* best = best_scratch.make<float>(count);
  int64_t* ids = id_scratch.make<int64_t>(count);
  find_best_of_row(scores.row(row), scores.vocabulary, count, best, ids);
  double log_total = 0;
  if (!std::isinf(cuts.top_p[row]) && cuts.top_k[row] >= scores.vocabulary) {
    Peak* peaks = peak_scratch.make<Peak>(scores.parts);
    for (int64_t part = 0; part < scores.parts; part++) peaks[part] = scores.peak_of(row, part);
    log_total = scores.join(peaks, scores.sharpness(row)).total;
  }
  double *scaled = score_scratch.make<double>(count), *weights = weight_scratch.make<double>(count);
  return draw_row({best, ids, count, scores.vocabulary, scaled, weights}, cuts, row, log_total);
}

// Draw a token of each row from its `count` best, and write its log probability among those that are left. `decided` is
// 0 where the others count too, or where scores are no numbers.
EXPORT(draw_few)(int64_t dtype, const void* scores, int64_t stride, int64_t rows, int64_t vocabulary, int64_t count,
                 const float* temperatures, const int64_t* top_k, const double* top_p, const double* min_p,
                 const double* uniforms, int64_t* ids, float* logprobs, uint8_t* decided) {
  const Cuts cuts{temperatures, top_k, top_p, min_p, uniforms};
  const auto run = [&](auto of) {
    using T = decltype(of);
    const Scores<T> all{(const T*)scores, stride, rows, vocabulary, temperatures};
    in_threads(rows > 1 && rows * vocabulary > SCORED_ALONE, [&](int64_t thread, int64_t threads) {
      const Range mine = part_of(rows, thread, threads);
      for (int64_t row = mine.begin; row < mine.end; row++) {
        const Drawn drawn = draw_from(all, row, cuts, count);
        ids[row] = drawn.id, logprobs[row] = drawn.logprob, decided[row] = drawn.is_decided;
      }
    });
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
