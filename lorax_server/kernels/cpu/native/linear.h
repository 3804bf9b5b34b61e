// Linear layers: shrink (x A^T) for all adapters first, then the fused product in the layout of the weights.

// Maximum rows and ranks per shrink task.
constexpr int64_t SHRINK_ROWS = 64, SHRINK_RANKS = 4;
struct ShrinkTask {
  int64_t segment, part, row, rows, rank;
};

// Compute the scaled products of rows with A: `low[row][rank]`.
template <int ROWS, class X, class T>
static inline __attribute__((always_inline)) void shrink_rows(
    const X* x, int64_t ldx, const T* a, int64_t inputs, int64_t ranks, float scale, float* low, int64_t rank) {
  F total[ROWS][SHRINK_RANKS] = {};
  const T* from[SHRINK_RANKS];
  for (int r = 0; r < SHRINK_RANKS; r++) from[r] = a + std::min<int64_t>(r, ranks - 1) * inputs;
  int64_t k = 0;
  for (; k + VL <= inputs; k += VL) {
    if (k % (CACHE_LINE_BYTES / (int64_t)sizeof(T)) == 0)  // prefetch the next rows of A
#pragma GCC unroll 4
      for (int r = 0; r < SHRINK_RANKS; r++) __builtin_prefetch(from[r] + SHRINK_RANKS * inputs + k);
#pragma GCC unroll 4
    for (int r = 0; r < SHRINK_RANKS; r++) {
      const F weight = load(from[r] + k);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i++) total[i][r] = fused_multiply_add(weight, load(x + i * ldx + k), total[i][r]);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int64_t r = 0; r < ranks; r++) {
      float value = sum(total[i][r]);
      for (int64_t rest = k; rest < inputs; rest++) value = __builtin_fmaf(read(from[r] + rest), read(x + i * ldx + rest), value);
      low[i * rank + r] = value * scale;
    }
}

// The adapter work of one call. Each thread reuses its plan to avoid allocations.
template <class T>
struct Plan {
  std::vector<AdapterPart<T>> parts;
  std::vector<int32_t> segment;
  std::vector<ShrinkTask> tasks;
  int64_t low = 0;
  bool has_vectors = false;

  void clear() {
    parts.clear();
    segment.clear();
    tasks.clear();
    low = 0;
    has_vectors = false;
  }

  void fill(const Lora& lora, int64_t first, int64_t count, int64_t rows) {
    bool changes = false;
    segment.resize(rows);
    for (int64_t s = 0; s < lora.segments; s++) {
      std::fill(segment.begin() + lora.bounds[s], segment.begin() + lora.bounds[s + 1], (int32_t)s);
      int64_t column = 0;
      for (int64_t t = first; t < first + count; t++) {
        const int64_t width = lora.features[2 * t + 1];
        parts.push_back(make(lora, s, t, column, column + width));
        has_vectors |= parts.back().output_scale || parts.back().output_bias;
        changes |= has_vectors || parts.back().rank;
        add_tasks(lora, s, parts.size() - 1);
        column += width;
      }
    }
    if (!changes) segment.clear();
  }

  AdapterPart<T> make(const Lora& lora, int64_t s, int64_t target, int64_t start, int64_t stop) {
    const int64_t place = lora.adapters[s] * lora.targets + target, *fields = lora.table + place * FIELDS;
    const T* buffer = (const T*)lora.buffer;
    const auto at = [&](Field field) { return fields[field] < 0 ? nullptr : buffer + fields[field]; };
    const int64_t *features = lora.features + 2 * target, before = lora.expert * fields[RANK];
    const T *a = at(A) + before * features[0], *b = at(B) + before * features[1];  // of this expert
    return {a, b, at(OUTPUT_SCALE), at(OUTPUT_BIAS), fields[RANK], start, stop, 0, lora.scales[place]};
  }

  void add_tasks(const Lora& lora, int64_t s, int64_t index) {
    AdapterPart<T>& part = parts[index];
    part.low = low;
    low += part.rank * (lora.bounds[s + 1] - lora.bounds[s]);
    for (int64_t row = lora.bounds[s]; row < lora.bounds[s + 1]; row += SHRINK_ROWS)
      for (int64_t rank = 0; rank < part.rank; rank += SHRINK_RANKS)
        tasks.push_back({s, index, row, std::min(SHRINK_ROWS, lora.bounds[s + 1] - row), rank});
  }

  // Compute the shrink results of all rows.
  template <class X>
  void shrink_all(const Lora* lora, const X* x, int64_t ldx, int64_t inputs, float* products) const {
    parallel_for(tasks.size(), 1, low * inputs, MAX_SINGLE_THREAD_PRODUCTS, [&](Range mine) {
      for (int64_t i = mine.begin; i < mine.end; i++) shrink(tasks[i], *lora, x, ldx, inputs, products);
    });
  }

  template <class X>
  void shrink(const ShrinkTask& task, const Lora& lora, const X* x, int64_t ldx, int64_t inputs, float* products) const {
    const AdapterPart<T>& part = parts[task.part];
    const int64_t ranks = std::min(SHRINK_RANKS, part.rank - task.rank);
    const T* a = part.a + task.rank * inputs;
    float* to = products + part.low + (task.row - lora.bounds[task.segment]) * part.rank + task.rank;
    for (int64_t row = 0; row < task.rows; row += 4) {
      const X* from = x + (task.row + row) * ldx;
      float* low_row = to + row * part.rank;
      switch (std::min<int64_t>(4, task.rows - row)) {
        case 1: shrink_rows<1>(from, ldx, a, inputs, ranks, part.scale, low_row, part.rank); break;
        case 2: shrink_rows<2>(from, ldx, a, inputs, ranks, part.scale, low_row, part.rank); break;
        case 3: shrink_rows<3>(from, ldx, a, inputs, ranks, part.scale, low_row, part.rank); break;
        default: shrink_rows<4>(from, ldx, a, inputs, ranks, part.scale, low_row, part.rank);
      }
    }
  }
};

constexpr int64_t MAX_SINGLE_THREAD_COPY = 32 * 1024;  // elements up to this count are faster on one thread
constexpr int64_t MAX_SINGLE_THREAD_QUANTIZE = 8 * 1024;

template <class T, class S>
static void run_linear(const Matrix& matrix, const T* x, int64_t ldx, int64_t rows, T* out, const Lora* lora,
                       int64_t first, int64_t count, ActivationKind gate) {
  static thread_local Scratch wide_scratch, low_scratch, tiled_scratch, tile_scratch;
  static thread_local Plan<T> own_plan;
  constexpr bool IS_TILED = std::is_same<S, Pair>::value;
  const int64_t inputs = matrix.inputs;
  Plan<T>& plan = own_plan;  // the calling thread's plan, shared with all threads
  plan.clear();
  if (lora != nullptr) plan.fill(*lora, first, count, rows);
  const bool is_blocked = !IS_TILED && rows > MAX_UNBLOCKED_ROWS;
  const bool is_widened = !IS_TILED && !is_blocked && !std::is_same<T, float>::value;
  float* wide = is_widened ? wide_scratch.make<float>(rows * inputs) : nullptr;
  float* tiled_copy = is_blocked ? tiled_scratch.make<float>(RowTiles::size(rows, inputs)) : nullptr;
  float* low = low_scratch.make<float>(plan.low);
  const int64_t width = gate == NONE ? matrix.outputs : matrix.outputs / 2;
  const Product<T, S> product{matrix, is_widened ? wide : (const float*)x, is_widened ? inputs : ldx, rows, out, width,
                              count, plan.parts.data(), plan.segment.empty() ? nullptr : plan.segment.data(),
                              lora == nullptr ? nullptr : lora->bounds, low, plan.has_vectors, gate};
  const bool is_packed = IS_TILED && TilePacking::is_needed(rows, inputs);
  Bf16* copy = is_packed ? tile_scratch.make<Bf16>(TilePacking::size(rows, inputs)) : nullptr;
  const TilePacking packing{(const Bf16*)x, ldx, rows, inputs, copy};
  if (is_widened || is_packed)
    parallel_for(rows, 1, rows * inputs, MAX_SINGLE_THREAD_COPY, [&](Range mine) {
      for (int64_t row = mine.begin; row < mine.end; row++) {
        if (is_widened) widen(x + row * ldx, wide + row * inputs, inputs);
        if (is_packed) packing.copy_row(row);
      }
    });
  if (is_blocked)
    parallel_for(RowTiles::count(rows), 1, rows * inputs, MAX_SINGLE_THREAD_COPY,
              [&](Range mine) { RowTiles{rows}.copy(mine, x, ldx, inputs, tiled_copy); });
  if (is_widened) plan.shrink_all(lora, wide, inputs, inputs, low);
  else plan.shrink_all(lora, x, ldx, inputs, low);
  parallel_for((width + PANEL - 1) / PANEL, PANELS_PER_GROUP, rows * inputs * matrix.outputs, MAX_SINGLE_THREAD_PRODUCTS, [&](Range mine) {
    if constexpr (IS_TILED) TileProduct{product, packing.find()}.run(mine);
    else if (is_blocked) BlockProduct<T, S>{product, tiled_copy}.run(mine);
    else product.run(mine);
  });
}

template <class T>
static void run_quantized_linear(const Matrix& matrix, const T* x, int64_t ldx, int64_t rows, T* out, const Lora* lora,
                                 int64_t first, int64_t count, ActivationKind gate) {
  static thread_local Scratch low_scratch, quantized_scratch;
  static thread_local Plan<T> own_plan;
  const int64_t inputs = matrix.inputs, blocks = inputs / BLOCK, width = gate == NONE ? matrix.outputs : matrix.outputs / 2;
  const QuantizedKernels kernels = select_kernels(matrix);
  Plan<T>& plan = own_plan;  // the calling thread's plan, shared with all threads
  plan.clear();
  if (lora != nullptr) plan.fill(*lora, first, count, rows);
  float* low = low_scratch.make<float>(plan.low);
  const int64_t padded = QuantizedRows::padded(rows);
  const QuantizedRows quantized{rows, blocks, quantized_scratch.make<QuantizedBlock>(padded * blocks)};
  const Product<T, char> product{matrix, nullptr, 0, rows, out, width, count, plan.parts.data(),
                                 plan.segment.empty() ? nullptr : plan.segment.data(),
                                 lora == nullptr ? nullptr : lora->bounds, low, plan.has_vectors, gate};
  parallel_for(padded, 1, rows * inputs, MAX_SINGLE_THREAD_QUANTIZE, [&](Range mine) {
    for (int64_t row = mine.begin; row < mine.end; row++) quantized.fill(row, x, ldx, kernels);
  });
  plan.shrink_all(lora, x, ldx, inputs, low);
  const auto multiply = [&](Range mine) { QuantizedProduct<T>{product, kernels, quantized}.run(mine); };
  const int64_t panels = (width + PANEL - 1) / PANEL, products = rows * inputs * matrix.outputs;
  if (rows <= QUANTIZED_TILE_ROWS && products > MAX_SINGLE_THREAD_PRODUCTS) {  // memory-bound: read long ranges
    const int64_t threads = omp_get_max_threads();
    parallel_for(true, panels, (panels + threads - 1) / threads, multiply);
  } else {
    parallel_for(panels, 1, products, MAX_SINGLE_THREAD_PRODUCTS, multiply);
  }
}

template <class T>
static void dispatch_storage(const Matrix& matrix, const void* x, int64_t ldx, int64_t rows, void* out, const Lora* lora,
                           int64_t first, int64_t count, ActivationKind gate) {
#if defined(HAS_TILES)
  if constexpr (std::is_same<T, Bf16>::value)
    if (matrix.stored == BFLOAT16_PAIRS)
      return run_linear<T, Pair>(matrix, (const T*)x, ldx, rows, (T*)out, lora, first, count, gate);
#endif
  switch (matrix.stored) {
    case QUANTIZED: return run_quantized_linear(matrix, (const T*)x, ldx, rows, (T*)out, lora, first, count, gate);
    case FLOAT32: return run_linear<T, float>(matrix, (const T*)x, ldx, rows, (T*)out, lora, first, count, gate);
    case BFLOAT16: return run_linear<T, Bf16>(matrix, (const T*)x, ldx, rows, (T*)out, lora, first, count, gate);
    default: return run_linear<T, Half>(matrix, (const T*)x, ldx, rows, (T*)out, lora, first, count, gate);
  }
}

// Multiply `rows` rows of `x` by a matrix. With a gate, the matrix has equal numbers of gate and up outputs, each a
// multiple of `PANEL`. `lora` can be null; the matrix has the targets `first` to `first + count - 1`.
EXPORT(linear, const Matrix* matrix, const void* x, int64_t ldx, int64_t rows, void* out, const Lora* lora,
               int64_t first, int64_t count, int64_t gate) {
  const ActivationKind kind = (ActivationKind)gate;
  if (rows == 0) return;
  switch (matrix->dtype) {
    case FLOAT32: return dispatch_storage<float>(*matrix, x, ldx, rows, out, lora, first, count, kind);
    case BFLOAT16: return dispatch_storage<Bf16>(*matrix, x, ldx, rows, out, lora, first, count, kind);
    default: return dispatch_storage<Half>(*matrix, x, ldx, rows, out, lora, first, count, kind);
  }
}
