// Activations that are not fused with a linear layer. An element's result depends only on its value: the last vector of a
// row is padded, and computed with the same instructions.

constexpr int64_t ACTIVATION_CHUNK = 1024;  // elements per task
constexpr int64_t MAX_SINGLE_THREAD_ACTIVATION = 16 * 1024;  // elements up to this count are faster on one thread

// Write `activation(left) * right` for each row, or `activation(left)` if `right` is null.
template <class T>
static void activate_rows(ActivationKind kind, const T* left, const T* right, int64_t stride, T* out, int64_t rows,
                          int64_t width) {
  const int64_t parts = (width + ACTIVATION_CHUNK - 1) / ACTIVATION_CHUNK;
  parallel_for(rows * parts, 1, rows * width, MAX_SINGLE_THREAD_ACTIVATION, [&](Range mine) {
    for (int64_t task = mine.begin; task < mine.end; task++) {
      const int64_t row = task / parts, at = task % parts * ACTIVATION_CHUNK, from = row * stride + at;
      T* to = out + row * width + at;
      for_vectors(std::min(ACTIVATION_CHUNK, width - at), [&](int64_t i, auto count) {
        F value = apply_activation(kind, load_vector(left + from + i, count));
        if (right != nullptr) value *= load_vector(right + from + i, count);
        store_vector(to + i, value, count);
      });
    }
  });
}

template <class T>
static void run_gate(ActivationKind kind, const T* x, int64_t stride, T* out, int64_t rows, int64_t width) {
  activate_rows(kind, x, x + width, stride, out, rows, width);
}

// Write `activation(left) * right` for the two halves of each row, rounded once. Each half has `width` elements.
EXPORT(gate, int64_t dtype, int64_t kind, const void* x, int64_t stride, void* out, int64_t rows, int64_t width) {
  const ActivationKind activation = (ActivationKind)kind;
  if (dtype == FLOAT32) run_gate(activation, (const float*)x, stride, (float*)out, rows, width);
  else if (dtype == BFLOAT16) run_gate(activation, (const Bf16*)x, stride, (Bf16*)out, rows, width);
  else run_gate(activation, (const Half*)x, stride, (Half*)out, rows, width);
}

// Write `activation(x)` for `count` elements.
EXPORT(activate, int64_t dtype, int64_t kind, const void* x, void* out, int64_t count) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    activate_rows((ActivationKind)kind, (const T*)x, (const T*)nullptr, 0, (T*)out, 1, count);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
