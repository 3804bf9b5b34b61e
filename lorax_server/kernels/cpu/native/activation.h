// Gated activations that are not fused with a linear layer.

constexpr int64_t GATE_CHUNK = 1024;  // elements per task
constexpr int64_t MAX_SINGLE_THREAD_GATE = 16 * 1024;  // elements up to this count are faster on one thread

template <Gate KIND, class T>
static void gate_part(const T* left, const T* right, T* out, int64_t size) {
  for_vectors(size, [&](int64_t i, auto count) {
    const F in = load_vector(left + i, count);
    store_vector(out + i, (KIND == SILU ? silu(in) : gelu_tanh(in)) * load_vector(right + i, count), count);
  });
}

template <Gate KIND, class T>
static void run_gate(const T* x, int64_t stride, T* out, int64_t rows, int64_t width) {
  const int64_t parts = (width + GATE_CHUNK - 1) / GATE_CHUNK;
  parallel_for(rows * parts, 1, rows * width, MAX_SINGLE_THREAD_GATE, [&](Range mine) {
    for (int64_t task = mine.begin; task < mine.end; task++) {
      const int64_t row = task / parts, at = task % parts * GATE_CHUNK;
      const T* left = x + row * stride + at;
      gate_part<KIND>(left, left + width, out + row * width + at, std::min(GATE_CHUNK, width - at));
    }
  });
}

// Write `activation(left) * right` for the two halves of each row, rounded once. Each half has `width` elements.
EXPORT(gate, int64_t dtype, int64_t kind, const void* x, int64_t stride, void* out, int64_t rows, int64_t width) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    if (kind == SILU) run_gate<SILU>((const T*)x, stride, (T*)out, rows, width);
    else run_gate<GELU_TANH>((const T*)x, stride, (T*)out, rows, width);
  };
  if (dtype == FLOAT32) run(float());
  else if (dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
