// A gate that is opened outside of a linear.

constexpr int64_t GATED_AT_ONCE = 1024;  // numbers of a row that one thread opens
constexpr int64_t GATED_ALONE = 8 * 1024;  // numbers that one thread opens sooner than several

template <Gate KIND, class T>
static void gate_part(const T* left, const T* right, T* out, int64_t size) {
  for_vectors(size, [&](int64_t i, auto count) {
    const F in = take(left + i, count);
    put(out + i, (KIND == SILU ? silu(in) : gelu_tanh(in)) * take(right + i, count), count);
  });
}

template <Gate KIND, class T>
static void run_gate(const T* x, int64_t stride, T* out, int64_t rows, int64_t width) {
  const int64_t parts = (width + GATED_AT_ONCE - 1) / GATED_AT_ONCE;
  in_pieces(rows * parts, 1, rows * width, GATED_ALONE, [&](Range mine) {
    for (int64_t task = mine.begin; task < mine.end; task++) {
      const int64_t row = task / parts, at = task % parts * GATED_AT_ONCE;
      const T* left = x + row * stride + at;
      gate_part<KIND>(left, left + width, out + row * width + at, std::min(GATED_AT_ONCE, width - at));
    }
  });
}

// Write `activation(left) * right` of the two halves of each row, rounded once; each half is `width` wide.
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
