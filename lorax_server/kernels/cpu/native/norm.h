// Norms. Each row is summed in a fixed order, independent of the batch and the threads.

constexpr int64_t MAX_SINGLE_THREAD_NORM = 64 * 1024;  // elements up to this count are faster on one thread

// Rows to normalize: `heads` rows per token, each with `size` contiguous elements.
template <class T>
struct Rows {
  const T* from;
  int64_t token_stride, head_stride, tokens, heads, size;

  int64_t count() const { return tokens * heads; }
  const T* at(int64_t row) const { return from + row / heads * token_stride + row % heads * head_stride; }
};

// An adapter's output scale and output bias; null if absent.
template <class T>
struct ScaleShift {
  const T *output_scale, *output_bias;
};

// Returns the output scale and output bias of rows in ascending order. Requires one head per token.
template <class T>
struct Adapters {
  const Lora* lora;
  int64_t target, segment;

  Adapters(const Lora* lora, int64_t target) : lora(lora), target(target), segment(0) {}

  ScaleShift<T> of(int64_t row) {
    if (lora == nullptr) return {nullptr, nullptr};
    while (lora->bounds[segment + 1] <= row) segment++;
    const int64_t* fields = lora->table + (lora->adapters[segment] * lora->targets + target) * FIELDS;
    const T* buffer = (const T*)lora->buffer;
    const auto at = [&](Field field) { return fields[field] < 0 ? nullptr : buffer + fields[field]; };
    return {at(OUTPUT_SCALE), at(OUTPUT_BIAS)};
  }
};

// Round to T and back. Adding the rounding bit cannot overflow a bfloat16 NaN.
template <class T>
static inline F rounded(F v) {
  if constexpr (std::is_same<T, float>::value) return v;
  if constexpr (std::is_same<T, Bf16>::value) return (F)(((U)v + 0x7fff + (((U)v >> 16) & 1)) & 0xffff0000u);
  T copy[VL];
  store(copy, v);
  return load(copy);
}

// Call `step(column, count)` for each vector of a row. `count` is `VL` except for the last vector.
template <class Step>
static inline __attribute__((always_inline)) void for_vectors(int64_t size, Step step) {
  int64_t i = 0;
  for (; i + VL <= size; i += VL) step(i, std::integral_constant<int64_t, VL>());
  if (i < size) step(i, size - i);
}

template <class T, class Count>
static inline F load_vector(const T* p, Count count, float rest = 0.0f) {
  if constexpr (std::is_same<Count, int64_t>::value) return load_partial(p, count, rest);
  return load(p);
}
template <class T, class Count>
static inline void store_vector(T* p, F v, Count count) {
  if constexpr (std::is_same<Count, int64_t>::value) return store_partial(p, v, count);
  else store(p, v);
}

// Sum `value(column, count)` over a row, in four independent sums to hide latency.
template <class Value>
static inline __attribute__((always_inline)) float sum_row(int64_t size, Value value) {
  F total[4] = {};
  int64_t i = 0;
  for (; i + 4 * VL <= size; i += 4 * VL)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) total[j] += value(i + j * VL, std::integral_constant<int64_t, VL>());
  for (; i + VL <= size; i += VL) total[0] += value(i, std::integral_constant<int64_t, VL>());
  if (i < size) total[1] += value(i, size - i);
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// Apply output scale and output bias with the rounding of separate torch ops. The caller's store rounds the last result.
template <class T, class Count>
static inline F adapt(F value, const ScaleShift<T>& vectors, int64_t column, Count count) {
  if (vectors.output_scale != nullptr) value = rounded<T>(value) * load_vector(vectors.output_scale + column, count);
  if (vectors.output_bias != nullptr) value = rounded<T>(value) + load_vector(vectors.output_bias + column, count);
  return value;
}

// A weight of type T multiplies the rounded value; a float weight multiplies before rounding.
template <class T, class W>
static void rms_norm_row(const T* x, const W* weight, float eps, T* out, int64_t size, const ScaleShift<T>& vectors) {
  const float squares = sum_row(size, [&](int64_t i, auto count) {
    const F v = load_vector(x + i, count);
    return v * v;
  });
  const F scale = broadcast(1.0f / std::sqrt(squares / (float)size + eps));
  for_vectors(size, [&](int64_t i, auto count) {
    const F normed = rounded<W>(load_vector(x + i, count) * scale);
    store_vector(out + i, adapt(normed * load_vector(weight + i, count), vectors, i, count), count);
  });
}

template <class T>
static void add_row(const T* x, const T* residual, T* total, int64_t size) {
  for_vectors(size, [&](int64_t i, auto count) {
    store_vector(total + i, load_vector(x + i, count) + load_vector(residual + i, count), count);
  });
}

template <class T>
static void layer_norm_row(const T* x, const T* weight, const T* bias, float eps, T* out, int64_t size,
                           const ScaleShift<T>& vectors) {
  const float mean = sum_row(size, [&](int64_t i, auto count) { return load_vector(x + i, count); }) / (float)size;
  const float squares = sum_row(size, [&](int64_t i, auto count) {
    const F away = load_vector(x + i, count, mean) - mean;
    return away * away;
  });
  const F scale = broadcast(1.0f / std::sqrt(squares / (float)size + eps));
  for_vectors(size, [&](int64_t i, auto count) {
    F value = (load_vector(x + i, count) - mean) * scale;
    if (weight != nullptr) value *= load_vector(weight + i, count);
    if (bias != nullptr) value += load_vector(bias + i, count);
    store_vector(out + i, adapt(value, vectors, i, count), count);
  });
}

// Call `step(row, vectors)` for all rows, in parallel for large batches.
template <class T, class Step>
static void for_rows(const Rows<T>& rows, const Lora* lora, int64_t target, Step step) {
  parallel_for(rows.count(), 1, rows.count() * rows.size, MAX_SINGLE_THREAD_NORM, [&](Range mine) {
    Adapters<T> adapters(lora, target);
    for (int64_t row = mine.begin; row < mine.end; row++) step(row, adapters.of(row));
  });
}

template <class T, class W>
static void run_rms_norm(const Rows<T>& rows, const void* residual, const void* weight, float eps, void* normed,
                         void* total, const Lora* lora, int64_t target) {
  for_rows(rows, lora, target, [&](int64_t row, const ScaleShift<T>& vectors) {
    const T* x = rows.at(row);
    const int64_t at = row * rows.size;
    if (residual != nullptr) {
      T* sums = (T*)total + at;
      add_row(x, (const T*)residual + at, sums, rows.size);
      x = sums;
    }
    rms_norm_row(x, (const W*)weight, eps, (T*)normed + at, rows.size, vectors);
  });
}

template <class T>
static void run_layer_norm(const Rows<T>& rows, const void* weight, const void* bias, float eps, void* normed,
                           const Lora* lora, int64_t target) {
  for_rows(rows, lora, target, [&](int64_t row, const ScaleShift<T>& vectors) {
    T* out = (T*)normed + row * rows.size;
    layer_norm_row(rows.at(row), (const T*)weight, (const T*)bias, eps, out, rows.size, vectors);
  });
}

// RMSNorm of `x + residual`. `residual`, `total` (which receives the sum) and `lora` can be null; all outputs are
// contiguous. `is_wide`: the weight is float32. `lora` requires one head per token.
EXPORT(rms_norm, int64_t dtype, const void* x, int64_t token_stride, int64_t head_stride, const void* residual,
                 const void* weight, int64_t is_wide, const float* eps, void* normed, void* total, int64_t tokens,
                 int64_t heads, int64_t size, const Lora* lora, int64_t target) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    const Rows<T> rows{(const T*)x, token_stride, head_stride, tokens, heads, size};
    if (is_wide) run_rms_norm<T, float>(rows, residual, weight, *eps, normed, total, lora, target);
    else run_rms_norm<T, T>(rows, residual, weight, *eps, normed, total, lora, target);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}

// LayerNorm. `weight`, `bias` and `lora` can be null.
EXPORT(layer_norm, int64_t dtype, const void* x, int64_t token_stride, int64_t head_stride, const void* weight,
                   const void* bias, float eps, void* normed, int64_t tokens, int64_t heads, int64_t size,
                   const Lora* lora, int64_t target) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    const Rows<T> rows{(const T*)x, token_stride, head_stride, tokens, heads, size};
    run_layer_norm<T>(rows, weight, bias, eps, normed, lora, target);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}

template <class T>
static void run_scale_and_shift(T* x, int64_t stride, int64_t tokens, const Lora& lora, int64_t first, int64_t last) {
  int64_t width = 0;
  for (int64_t target = first; target <= last; target++) width += lora.features[2 * target + 1];
  parallel_for(tokens, 1, tokens * width, MAX_SINGLE_THREAD_NORM, [&](Range mine) {
    T* column = x;
    for (int64_t target = first; target <= last; target++) {
      Adapters<T> adapters(&lora, target);
      const int64_t size = lora.features[2 * target + 1];
      for (int64_t row = mine.begin; row < mine.end; row++) {
        const ScaleShift<T> vectors = adapters.of(row);
        if (vectors.output_scale == nullptr && vectors.output_bias == nullptr) continue;
        T* at = column + row * stride;
        for_vectors(size, [&](int64_t i, auto count) {
          store_vector(at + i, adapt(load_vector(at + i, count), vectors, i, count), count);
        });
      }
      column += size;
    }
  });
}

// Apply the output scale and output bias of each row's adapter. The targets are adjacent columns of `x`.
EXPORT(scale_and_shift, int64_t dtype, void* x, int64_t stride, int64_t tokens, const Lora* lora, int64_t first,
                        int64_t last) {
  const auto run = [&](auto of) { run_scale_and_shift((decltype(of)*)x, stride, tokens, *lora, first, last); };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
