// Attention math in float32: scores, softmax weights and weighted value sums. Each sum has a fixed order.

namespace attention {

constexpr float LOWEST_SCORE = -3.4e38f;
#if VL == 8
constexpr int MAX_HEADS_PER_PASS = 2;  // AVX2 has 16 registers
#else
constexpr int MAX_HEADS_PER_PASS = 4;
#endif

static inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif
#if VL == 4
#define EVENS 0, 2, 4, 6
#define ODDS 1, 3, 5, 7
#define LOWS 0, 4, 1, 5
#define HIGHS 2, 6, 3, 7
#elif VL == 8
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#define LOWS 0, 8, 1, 9, 2, 10, 3, 11
#define HIGHS 4, 12, 5, 13, 6, 14, 7, 15
#else
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOWS 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGHS 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif

// Return the sums of `VL` vectors as one vector, by pairwise additions.
static inline F sum_vectors(F* v) {
#pragma GCC unroll 4
  for (int count = VL / 2; count; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const F a = v[2 * i], b = v[2 * i + 1];
      v[i] = SHUFFLE(a, b, EVENS) + SHUFFLE(a, b, ODDS);
    }
  return v[0];
}

// Transpose a VL x VL matrix with log2(VL) perfect shuffles.
static inline void transpose(F* v) {
#pragma GCC unroll 4
  for (int round = 1; round < VL; round *= 2) {
    F dealt[VL];
#pragma GCC unroll 8
    for (int i = 0; i < VL / 2; i++) {
      const F a = v[i], b = v[i + VL / 2];
      dealt[2 * i] = SHUFFLE(a, b, LOWS);
      dealt[2 * i + 1] = SHUFFLE(a, b, HIGHS);
    }
    memcpy(v, dealt, sizeof dealt);
  }
}

// exp2(x) for x <= 0, with relative error about 1e-7. NaN stays NaN.
static inline F power_of_two(F x) {
  x = (x < broadcast(-126.0f)) ? broadcast(-126.0f) : x;
  const F shifted = x + 12582912.0f, rest = x - (shifted - 12582912.0f);  // rounds to the nearest integer
  F p = broadcast(1.535336188e-4f);
  p = p * rest + 1.339887440e-3f;
  p = p * rest + 9.618437358e-3f;
  p = p * rest + 5.550332471e-2f;
  p = p * rest + 2.402264791e-1f;
  p = p * rest + 6.931472029e-1f;
  p = p * rest + 1.0f;
  return p * (F)(((I)shifted << 23) + (127 << 23));
}

// Return the maximum of scores `from` to `to`, and mask the other scores. `count` is a multiple of `PANEL`.
static inline float find_max_score(float* scores, int64_t from, int64_t to, int64_t count) {
  for (int64_t i = 0; i < from; i++) scores[i] = LOWEST_SCORE;
  for (int64_t i = to; i < count; i++) scores[i] = LOWEST_SCORE;
  F best[2] = {broadcast(LOWEST_SCORE), broadcast(LOWEST_SCORE)};
  for (int64_t i = 0; i < count; i += PANEL) {
    best[0] = larger(load(scores + i), best[0]);
    best[1] = larger(load(scores + i + VL), best[1]);
  }
  return largest(larger(best[0], best[1]));
}

// Replace scores by exp2(score - best), and masked scores by 0. Return the vector of weight sums.
static inline F softmax_weights(float* scores, int64_t from, int64_t to, int64_t count, float best) {
  F total = {};
  const bool all = from == 0 && to == count;
  for (int64_t i = 0; i < count; i += PANEL) {
    const F a = power_of_two(load(scores + i) - best), b = power_of_two(load(scores + i + VL) - best);
    store(scores + i, a);
    store(scores + i + VL, b);
    total += a;
    total += b;
  }
  if (all) return total;
  for (int64_t i = 0; i < from; i++) scores[i] = 0;
  for (int64_t i = to; i < count; i++) scores[i] = 0;
  total = F{};
  for (int64_t i = 0; i < count; i += VL) total += load(scores + i);
  return total;
}

// Scores of `HEADS` queries with `VL` keys.
template <int HEADS, class T>
static __attribute__((noinline)) void score(
    const float* q, int64_t ldq, const T* const* rows, int64_t dim, float* scores, int64_t lds) {
  F all[HEADS][VL];
  for (int j = 0; j < VL; j += 4) {
    F total[HEADS][4] = {};
    const auto add = [&](int64_t d, auto take) __attribute__((always_inline)) {
      F key[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) key[i] = take(rows[j + i] + d);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++) {
        const F in = load(q + h * ldq + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) total[h][i] += key[i] * in;
      }
    };
    int64_t d = 0;
    for (; d + VL <= dim; d += VL) add(d, [](const T* p) { return load(p); });
    if (d < dim) add(d, [&](const T* p) { return load_partial(p, dim - d); });
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) all[h][j + i] = total[h][i];
  }
#pragma GCC unroll 4
  for (int h = 0; h < HEADS; h++) store(scores + h * lds, sum_vectors(all[h]));
}

// Weighted value sums for `HEADS` queries and `VECTORS` vectors of the head dimension.
template <int HEADS, int VECTORS, class T, class Take>
static inline __attribute__((always_inline)) void weighted_sum(
    const float* weights, int64_t ldw, const T* const* rows, int64_t count, int64_t d, float* out, int64_t ldo,
    Take take) {
  F total[HEADS][VECTORS] = {};
  for (int64_t j = 0; j < count; j++) {
    F value[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) value[i] = take(rows[j] + d + i * VL);
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
      const F weight = broadcast(weights[h * ldw + j]);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++) total[h][i] += value[i] * weight;
    }
  }
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < VECTORS; i++) store(out + h * ldo + d + i * VL, total[h][i]);
}

template <int HEADS, class T>
static __attribute__((noinline)) void weighted_sum_all(
    const float* weights, int64_t ldw, const T* const* rows, int64_t count, int64_t dim, float* out, int64_t ldo) {
  const auto take = [](const T* p) { return load(p); };
  constexpr int VECTORS_PER_PASS = HEADS == 1 ? 8 : 4;  // independent sums hide latency
  int64_t d = 0;
  for (; d + VECTORS_PER_PASS * VL <= dim; d += VECTORS_PER_PASS * VL) weighted_sum<HEADS, VECTORS_PER_PASS>(weights, ldw, rows, count, d, out, ldo, take);
  for (; d + 2 * VL <= dim; d += 2 * VL) weighted_sum<HEADS, 2>(weights, ldw, rows, count, d, out, ldo, take);
  for (; d + VL <= dim; d += VL) weighted_sum<HEADS, 1>(weights, ldw, rows, count, d, out, ldo, take);
  if (d < dim)
    weighted_sum<HEADS, 1>(weights, ldw, rows, count, d, out, ldo, [&](const T* p) { return load_partial(p, dim - d); });
}

// Multiply rows by a panel `[inputs, PANEL]`. With factors, add to `out` scaled by the factor of each row.
template <int ROWS>
static __attribute__((noinline)) void product(
    const float* x, int64_t ldx, const float* panel, int64_t inputs, float* out, int64_t ldo, const float* factors) {
  F total[ROWS][2] = {};
  if (factors != nullptr)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < 2; j++) total[i][j] = load(out + i * ldo + j * VL) * factors[i];
  int64_t k = 0;
#if VL == 4  // ARM multiplies by a vector lane
  for (; k + 4 <= inputs; k += 4) {
    F in[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) in[i] = load(x + i * ldx + k);
#pragma GCC unroll 4
    for (int l = 0; l < 4; l++) {
      const F a = load(panel + (k + l) * PANEL), b = load(panel + (k + l) * PANEL + VL);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) {
        total[i][0] += a * in[i][l];
        total[i][1] += b * in[i][l];
      }
    }
  }
#endif
  for (; k < inputs; k++) {
    const F a = load(panel + k * PANEL), b = load(panel + k * PANEL + VL);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const F in = broadcast(x[i * ldx + k]);
      total[i][0] += a * in;
      total[i][1] += b * in;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) store(out + i * ldo + j * VL, total[i][j]);
}

using MultiplyRows = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t, const float*);
template <int ROWS>
static MultiplyRows select_product(int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return select_product<ROWS - 1>(rows);
  return product<ROWS>;
}

}  // namespace attention
