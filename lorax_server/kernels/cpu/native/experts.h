// Mixtures of experts: rows are grouped by expert, so each call reads the weights of every chosen expert once.
//
// All sums are per row and in a fixed order (inputs in order, experts ascending), so results are bitwise batch-invariant.

// The rows of one expert and their LoRA segments. Each thread reuses its vectors to avoid allocations.
struct ExpertRows {
  std::vector<int64_t> starts, pairs, bounds, adapters;

  // Sort the (row, choice) pairs by expert. The pairs of expert e are `pairs[starts[e]]` to `pairs[starts[e + 1]]`.
  void sort(const int64_t* chosen, int64_t count, int64_t experts) {
    starts.assign(experts + 2, 0);
    pairs.resize(count);
    for (int64_t pair = 0; pair < count; pair++) starts[chosen[pair] + 2]++;
    for (int64_t expert = 2; expert < experts + 2; expert++) starts[expert] += starts[expert - 1];
    for (int64_t pair = 0; pair < count; pair++) pairs[starts[chosen[pair] + 1]++] = pair;
  }

  // Return the batch of one expert, whose rows are ascending.
  Lora select(const Lora& lora, int64_t expert, int64_t top_k) {
    bounds.assign(1, 0);
    adapters.clear();
    int64_t segment = 0;
    for (int64_t i = starts[expert]; i < starts[expert + 1]; i++) {
      const int64_t row = pairs[i] / top_k;
      while (lora.bounds[segment + 1] <= row) segment++;
      if (adapters.empty() || adapters.back() != lora.adapters[segment]) {
        adapters.push_back(lora.adapters[segment]);
        bounds.push_back(bounds.back());
      }
      bounds.back()++;
    }
    Lora selected = lora;
    selected.bounds = bounds.data(), selected.adapters = adapters.data();
    selected.segments = (int64_t)adapters.size(), selected.expert = expert;
    return selected;
  }
};

// Write `swish(min(gate, limit)) * (clamp(up, -limit, limit) + 1)`, where `swish(x)` is `x * sigmoid(alpha * x)`.
template <class T>
static void run_clamped_gate(const T* both, T* out, int64_t rows, int64_t width, float alpha, float limit) {
  const F high = broadcast(limit), low = broadcast(-limit);
  for (int64_t row = 0; row < rows; row++, both += 2 * width, out += width)
    for_vectors(width, [&](int64_t i, auto count) {
      const F left = load_vector(both + i, count), right = load_vector(both + width + i, count);
      const F gate = (left < high) ? left : high, below = (right < high) ? right : high, up = (below < low) ? low : below;
      store_vector(out + i, silu(gate * alpha) / alpha * (up + 1.0f), count);
    });
}

template <class T>
static void run_experts(const Matrix* gate_up, const Matrix* down, int64_t experts, const T* x, int64_t ldx, int64_t rows,
                        const int64_t* chosen, const float* weights, int64_t top_k, T* out, const Lora* lora,
                        int64_t first, ActivationKind gate, float alpha, float limit) {
  static thread_local ExpertRows own_rows;
  static thread_local Scratch total_scratch, input_scratch, both_scratch, inner_scratch, output_scratch;
  const int64_t hidden = gate_up->inputs, inner = down->inputs;
  ExpertRows& groups = own_rows;
  groups.sort(chosen, rows * top_k, experts);
  float* total = std::is_same<T, float>::value ? (float*)out : total_scratch.make<float>(rows * hidden);
  std::fill(total, total + rows * hidden, 0.0f);
  for (int64_t expert = 0; expert < experts; expert++) {
    const int64_t* pairs = groups.pairs.data() + groups.starts[expert];
    const int64_t count = groups.starts[expert + 1] - groups.starts[expert];
    if (count == 0) continue;
    T* inputs = input_scratch.make<T>(count * hidden);
    T* both = both_scratch.make<T>(count * 2 * inner);
    T* inside = inner_scratch.make<T>(count * inner);
    T* outputs = output_scratch.make<T>(count * hidden);
    for (int64_t i = 0; i < count; i++) memcpy(inputs + i * hidden, x + pairs[i] / top_k * ldx, hidden * sizeof(T));
    Lora selected;
    if (lora != nullptr) selected = groups.select(*lora, expert, top_k);
    const Lora* batch = lora == nullptr ? nullptr : &selected;
    if (inner % PANEL == 0 && gate != CLAMPED_SWIGLU) {
      dispatch_storage<T>(gate_up[expert], inputs, hidden, count, inside, batch, first, 2, gate);
    } else {
      dispatch_storage<T>(gate_up[expert], inputs, hidden, count, both, batch, first, 2, NONE);
      if (gate == CLAMPED_SWIGLU) run_clamped_gate(both, inside, count, inner, alpha, limit);
      else run_gate(gate, both, 2 * inner, inside, count, inner);
    }
    dispatch_storage<T>(down[expert], inside, inner, count, outputs, batch, first + 2, 1, NONE);
    parallel_for(count, 1, count * hidden, MAX_SINGLE_THREAD_COPY, [&](Range mine) {
      for (int64_t i = mine.begin; i < mine.end; i++) {
        float* sum = total + pairs[i] / top_k * hidden;
        const float weight = weights[pairs[i]];
        for (int64_t j = 0; j < hidden; j++) sum[j] += read(outputs + i * hidden + j) * weight;
      }
    });
  }
  if constexpr (!std::is_same<T, float>::value)
    parallel_for(rows, 1, rows * hidden, MAX_SINGLE_THREAD_COPY, [&](Range mine) {
      for (int64_t i = mine.begin * hidden; i < mine.end * hidden; i++) write(out + i, total[i]);
    });
}

// Write the weighted sum of each row's experts to `out`. `chosen` and `weights` are [rows, top_k]. An expert's matrices have
// the same dtype. `lora` can be null; `first` is the target of the gate matrices, followed by up and down. `alpha` and `limit`
// are the parameters of the clamped SwiGLU.
EXPORT(run_experts, const Matrix* gate_up, const Matrix* down, int64_t experts, const void* x, int64_t ldx, int64_t rows,
                    const int64_t* chosen, const float* weights, int64_t top_k, void* out, const Lora* lora,
                    int64_t first, int64_t gate, float alpha, float limit) {
  const auto run = [&](auto of) {
    using T = decltype(of);
    run_experts<T>(gate_up, down, experts, (const T*)x, ldx, rows, chosen, weights, top_k, (T*)out, lora, first, (ActivationKind)gate,
                   alpha, limit);
  };
  if (rows == 0) return;
  if (gate_up->dtype == FLOAT32) run(float());
  else if (gate_up->dtype == BFLOAT16) run(Bf16());
  else run(Half());
}
