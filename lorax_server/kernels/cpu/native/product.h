// Matrix product with fused adapters, in one pass over the weights.
//
// The weights are zero-padded panels of `PANEL` outputs, `[panels, inputs, PANEL]`, read sequentially. Each output is one
// sum over the inputs in order, for any number of rows, so results are bitwise batch-invariant. LoRA, output scale and bias are
// applied while a tile of outputs is in registers or L1.

constexpr int PANEL = 2 * VL;

// `stored` is the dtype of the panels. `dtype` is the dtype of inputs, outputs, bias (can be null) and adapters. The other
// fields describe quantized panels: bits per weight, inputs per scale, whether there are offsets, whether scales and offsets
// are float32 instead of float16, and whether this CPU has the dot product instruction.
STRUCT(Matrix, const void* panels; const void* bias; int64_t outputs; int64_t inputs; int32_t stored; int32_t dtype;
       int32_t bits; int32_t block; int32_t has_offsets; int32_t has_wide_scales; int32_t uses_dot;);

// As in `LoraBatch`: segment i is rows bounds[i] to bounds[i + 1], with one adapter.
// `table` is [adapters, targets, FIELDS], `scales` [adapters, targets], `features` [targets, 2]. `expert` selects the factors
// of targets with one pair of factors per expert.
STRUCT(Lora, const void* buffer; const int64_t* table; const float* scales; const int64_t* features; int64_t targets;
       const int64_t* bounds; const int64_t* adapters; int64_t segments; int64_t expert;);

ENUM(Field, A = 0, B = 1, OUTPUT_SCALE = 2, OUTPUT_BIAS = 3, RANK = 7, FIELDS = 10);
ENUM(ActivationKind, NONE = 0, SILU = 1, GELU_TANH = 2, CLAMPED_SWIGLU = 3, GELU = 4, QUICK_GELU = 5, RELU = 6,
     SIGMOID = 7);  // CLAMPED_SWIGLU is only for experts

// Not inlined, because it is large and every product calls it.
static __attribute__((noinline)) F apply_activation(ActivationKind kind, F x) {
  switch (kind) {
    case SILU: return silu(x);
    case GELU_TANH: return gelu_tanh(x);
    case GELU: return gelu(x);
    case QUICK_GELU: return x * sigmoid(1.702f * x);
    case RELU: return (x < 0.0f) ? F{} : x;
    default: return sigmoid(x);
  }
}

// The weights of one adapter at one target, for one segment.
template <class T>
struct AdapterPart {
  const T *a, *b, *output_scale, *output_bias;
  int64_t rank, start, stop, low;  // columns `start` to `stop`; `low` is the index of the segment's first shrink result
  float scale;
};

constexpr int64_t PANELS_PER_GROUP = 4;  // panels per pass over the rows of a block
constexpr int64_t ROWS_PER_FINISH = 4;  // rows that share loads of B
constexpr int64_t MAX_SINGLE_THREAD_PRODUCTS = 128 * 1024;  // multiply-adds up to this count are faster on one thread

#if VL == 4
constexpr int MAX_TILE_ROWS = 8;
#elif VL == 8
constexpr int MAX_TILE_ROWS = 6;
#else
constexpr int MAX_TILE_ROWS = 12;
#endif
constexpr int MAX_UNBLOCKED_ROWS = VL == 4 ? 10 : MAX_TILE_ROWS;  // larger batches use the blocked product

// Small products are memory-bound, so weights are prefetched. x86 prefetches for any number of rows: large products read
// their weights from the L2 cache, which also has latency.
//
// On x86, small batches process several panels together: independent sums hide the latency of multiply-adds. On ARM, two
// sums reach memory bandwidth, and reading one panel at a time keeps prefetches sequential (20 % faster for one row).
#if VL == 4
constexpr int64_t PREFETCH_BYTES = 512;
constexpr int MAX_PREFETCH_ROWS = 4;  // larger products do not prefetch
constexpr int MAX_PANELS_PER_TILE = 1;
#else
constexpr int64_t PREFETCH_BYTES = 2048;
constexpr int MAX_PREFETCH_ROWS = MAX_TILE_ROWS;
constexpr int MAX_PANELS_PER_TILE = 4;
#endif
constexpr int64_t CACHE_LINE_BYTES = 64;

// Prefetch the weights `PREFETCH_BYTES` ahead of input k in each panel.
template <int PANELS, int INPUTS, class S>
static inline __attribute__((always_inline)) void prefetch_panels(const S* const* panels, int64_t k) {
#pragma GCC unroll 4
  for (int j = 0; j < PANELS; j++)
#pragma GCC unroll 2
    for (int64_t line = 0; line < INPUTS * PANEL * (int64_t)sizeof(S); line += CACHE_LINE_BYTES)
      __builtin_prefetch((const char*)(panels[j] + k * PANEL) + PREFETCH_BYTES + line);
}

template <int PANELS, class S>
static inline __attribute__((always_inline)) void load_weights(const S* const* panels, int64_t k, F* weight) {
#pragma GCC unroll 4
  for (int j = 0; j < PANELS; j++) {
    const VectorPair two = load_two(panels[j] + k * PANEL);
    weight[2 * j] = two.first;
    weight[2 * j + 1] = two.second;
  }
}

template <int ROWS, int PANELS, class S>
static __attribute__((noinline)) void multiply(const float* x, int64_t ldx, const S* const* from, int64_t inputs,
                                               float* tile, int64_t ldt) {
  F total[ROWS][PANELS * 2] = {}, weight[PANELS * 2];
  const S* panels[PANELS];
  for (int j = 0; j < PANELS; j++) panels[j] = from[j];
  int64_t k = 0;
#if VL == 4  // ARM multiplies by a vector lane
  for (; k + 4 <= inputs; k += 4) {
    F in[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) in[i] = load(x + i * ldx + k);
    if (ROWS <= MAX_PREFETCH_ROWS) prefetch_panels<PANELS, 4>(panels, k);
#pragma GCC unroll 4
    for (int l = 0; l < 4; l++) {
      load_weights<PANELS>(panels, k + l, weight);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < PANELS * 2; j++) total[i][j] += weight[j] * in[i][l];
    }
  }
#endif
  for (; k < inputs; k++) {
    if (ROWS <= MAX_PREFETCH_ROWS) prefetch_panels<PANELS, 1>(panels, k);
    load_weights<PANELS>(panels, k, weight);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const F in = broadcast(x[i * ldx + k]);
#pragma GCC unroll 16
      for (int j = 0; j < PANELS * 2; j++) total[i][j] += weight[j] * in;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < PANELS * 2; j++) store(tile + i * ldt + j * VL, total[i][j]);
}

template <class S>
using Multiply = void (*)(const float*, int64_t, const S* const*, int64_t, float*, int64_t);

template <int ROWS, class S>
static Multiply<S> select_multiply(int64_t rows, int panels) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return select_multiply<ROWS - 1, S>(rows, panels);
  if constexpr (ROWS <= 2 && MAX_PANELS_PER_TILE >= 4)
    if (panels == 4) return multiply<ROWS, 4, S>;
  if constexpr (ROWS <= 4 && MAX_PANELS_PER_TILE >= 2)
    if (panels == 2) return multiply<ROWS, 2, S>;
  return multiply<ROWS, 1, S>;
}

template <class T>
static void widen(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + VL <= count; i += VL) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = read(from + i);
}

template <class T, class S>
struct Product {
  const Matrix& matrix;
  const float* x;
  int64_t ldx, rows;
  T* out;
  int64_t ldo;
  int64_t parts_each;     // parts per segment
  const AdapterPart<T>* parts;   // [segments, parts_each]
  const int32_t* segment; // segment of each row; null without adapters
  const int64_t* bounds;
  const float* low;
  bool has_vectors;  // true if any part has an output scale or output bias
  ActivationKind gate;

  // LoRA outputs for the rows of a tile: columns of the panel group, and of the up half with a gate.
  struct Added {
    float columns[MAX_UNBLOCKED_ROWS][2][PANELS_PER_GROUP * PANEL];
  };

  // Add bias and LoRA output (`added`) to one row of a panel, then apply output scale and output bias.
  void finish(float* tile, int64_t row, int64_t column, const float* added) const {
    F value[2] = {load(tile), load(tile + VL)};
    const int64_t width = std::min<int64_t>(PANEL, matrix.outputs - column);
    const T* bias = (const T*)matrix.bias;
    if (bias != nullptr) add(value, bias + column, width);
    if (segment != nullptr) {
      value[0] += load(added);
      value[1] += load(added + VL);
      if (has_vectors) adapt(value, row, column);
    }
    store(tile, value[0]);
    store(tile + VL, value[1]);
  }

  static void add(F* value, const T* from, int64_t width) {
    F more[2];
    load_panel(more, from, width);
    value[0] += more[0];
    value[1] += more[1];
  }

  static void load_panel(F* into, const T* from, int64_t width) {
    if (width == PANEL) {
      into[0] = load(from);
      into[1] = load(from + VL);
      return;
    }
    float copy[PANEL] = {};
    for (int64_t i = 0; i < width; i++) copy[i] = read(from + i);
    into[0] = load(copy);
    into[1] = load(copy + VL);
  }

  void adapt(F* value, int64_t row, int64_t column) const {
    const AdapterPart<T>* part = parts + segment[row] * parts_each;
    for (int64_t i = 0; i < parts_each; i++, part++) {
      const int64_t from = std::max(part->start, column), to = std::min(part->stop, column + PANEL);
      if (from >= to) continue;
      if (from == column && to == column + PANEL)
        adapt_panel(value, *part, column - part->start);
      else
        adapt_partial_panel(value, *part, from, to, column);
    }
  }

  const float* low_rank_row(const AdapterPart<T>& part, int64_t row) const {
    return low + part.low + (row - bounds[segment[row]]) * part.rank;
  }

  static void adapt_panel(F* value, const AdapterPart<T>& part, int64_t at) {
    for (int j = 0; j < 2; j++, at += VL)
      value[j] = scale_and_add(
          value[j], part, [&] { return load(part.output_scale + at); }, [&] { return load(part.output_bias + at); });
  }

  // One expression, so the compiler always fuses multiply and add.
  template <class V, class Scale, class Bias>
  static V scale_and_add(V value, const AdapterPart<T>& part, Scale output_scale, Bias output_bias) {
    if (part.output_scale != nullptr && part.output_bias != nullptr) return value * output_scale() + output_bias();
    if (part.output_scale != nullptr) return value * output_scale();
    return part.output_bias != nullptr ? value + output_bias() : value;
  }

  // The same for a target that covers only part of a panel.
  static void adapt_partial_panel(F* value, const AdapterPart<T>& part, int64_t from, int64_t to, int64_t column) {
    float copy[PANEL];
    store(copy, value[0]);
    store(copy + VL, value[1]);
    for (int64_t c = from; c < to; c++) {
      const int64_t at = c - part.start;
      copy[c - column] = scale_and_add(
          copy[c - column], part, [&] { return read(part.output_scale + at); }, [&] { return read(part.output_bias + at); });
    }
    value[0] = load(copy);
    value[1] = load(copy + VL);
  }

  // Write the LoRA outputs for the columns of a panel group, starting at column `first`. Rows are `stride` apart.
  // Up to four consecutive rows with the same adapter share loads of B.
  void expand(float* added, int64_t stride, int64_t row, int64_t count, int64_t first) const {
    for (int64_t i = 0; i < count;) {
      int64_t same = 1;
      while (same < 4 && i + same < count && segment[row + i + same] == segment[row + i]) same++;
      float* to = added + i * stride;
      switch (same) {
        case 1: expand_rows<1>(to, stride, row + i, first); break;
        case 2: expand_rows<2>(to, stride, row + i, first); break;
        case 3: expand_rows<3>(to, stride, row + i, first); break;
        default: expand_rows<4>(to, stride, row + i, first);
      }
      i += same;
    }
  }

  template <int ROWS>
  void expand_rows(float* added, int64_t stride, int64_t row, int64_t first) const {
    for (int i = 0; i < ROWS; i++) std::fill_n(added + i * stride, PANELS_PER_GROUP * PANEL, 0.0f);
    const AdapterPart<T>* part = parts + segment[row] * parts_each;
    for (int64_t i = 0; i < parts_each; i++, part++) {
      const int64_t from = std::max(part->start, first), to = std::min(part->stop, first + PANELS_PER_GROUP * PANEL);
      if (from < to && part->rank > 0)
        expand_part<ROWS>(added + from - first, stride, *part, row, from - part->start, to - from);
    }
  }

  // Reads whole cache lines of B, with independent sums. Fused multiply-adds are explicit, because the compiler could
  // round differently for one row and for four rows.
  template <int ROWS>
  void expand_part(float* added, int64_t stride, const AdapterPart<T>& part, int64_t row, int64_t at, int64_t count) const {
    constexpr int VECTORS_PER_TILE = ROWS == 1 ? 8 : ROWS == 2 && VL != 8 ? 8 : VL != 8 ? 4 : 2;
    const float* weights = low_rank_row(part, row);
    const T* b = part.b + at;
    const int64_t width = part.stop - part.start, rank = part.rank;
    int64_t c = 0;
    for (; c + VECTORS_PER_TILE * VL <= count; c += VECTORS_PER_TILE * VL)
      expand_vectors<ROWS, VECTORS_PER_TILE>(added + c, stride, b + c, width, weights, rank);
    for (; c + VL <= count; c += VL) expand_vectors<ROWS, 1>(added + c, stride, b + c, width, weights, rank);
    if (c == count) return;
    for (int i = 0; i < ROWS; i++, weights += rank) {
      F total = {};
      for (int64_t r = 0; r < rank; r++) total = fused_multiply_add(load_partial(b + r * width + c, count - c), broadcast(weights[r]), total);
      store_partial(added + i * stride + c, total, count - c);
    }
  }

  template <int ROWS, int VECTORS>
  static void expand_vectors(float* added, int64_t stride, const T* b, int64_t width, const float* weights, int64_t rank) {
    F total[ROWS][VECTORS] = {};
    for (int64_t r = 0; r < rank; r++, b += width) {
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) {
        const F some = load(b + j * VL);
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) total[i][j] = fused_multiply_add(some, broadcast(weights[i * rank + r]), total[i][j]);
      }
      for (int64_t ahead = 0; ahead < VECTORS * VL; ahead += CACHE_LINE_BYTES / sizeof(T))
        __builtin_prefetch(b + PANELS_PER_GROUP * PANEL + ahead);  // prefetch for the next group
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) store(added + i * stride + j * VL, total[i][j]);
  }

  void store_panel(const float* tile, int64_t row, int64_t column, int64_t outputs) const {
    T* to = out + row * ldo + column;
    if (column + PANEL <= outputs) {
      store(to, load(tile));
      store(to + VL, load(tile + VL));
    } else {
      for (int64_t i = 0; i < outputs - column; i++) write(to + i, tile[i]);
    }
  }

  static int panels_per_tile(int64_t height) { return std::min(MAX_PANELS_PER_TILE, height <= 2 ? 4 : height <= 4 ? 2 : 1); }

  void run_tile(const int64_t* columns, int panels, const Added& added, int64_t first) const {
    float values[MAX_UNBLOCKED_ROWS * 4 * PANEL];
    const S* from[4];
    for (int j = 0; j < panels; j++) from[j] = (const S*)matrix.panels + columns[j] * matrix.inputs;
    const int tile_panels = std::min(panels, panels_per_tile(rows));
    const Multiply<S> multiply = select_multiply<MAX_UNBLOCKED_ROWS, S>(rows, tile_panels);
    for (int j = 0; j < panels; j += tile_panels)
      multiply(x, ldx, from + j, matrix.inputs, values + j * PANEL, panels * PANEL);
    for (int64_t i = 0; i < rows; i++) {
      float* tile = values + i * panels * PANEL;
      for (int j = 0; j < panels; j++) {
        const bool is_up_half = gate != NONE && j >= panels / 2;
        const int64_t at = columns[j] - first - (is_up_half ? matrix.outputs / 2 : 0);
        finish(tile + j * PANEL, i, columns[j], added.columns[i][is_up_half] + at);
      }
      if (gate == NONE)
        for (int j = 0; j < panels; j++) store_panel(tile + j * PANEL, i, columns[j], matrix.outputs);
      else
        for (int j = 0; j < panels / 2; j++) {
          apply_gate(tile + j * PANEL, tile + (panels / 2 + j) * PANEL);
          store_panel(tile + j * PANEL, i, columns[j], matrix.outputs / 2);
        }
    }
  }

  void apply_gate(float* left, const float* right) const {
    for (int j = 0; j < PANEL; j += VL) {
      const F in = load(left + j);
      store(left + j, apply_activation(gate, in) * load(right + j));
    }
  }

  int64_t sides() const { return gate == NONE ? 1 : 2; }

  // Multiply all rows (a small batch) by a group of panels and, with a gate, by the up panels.
  void run_group(Range panels) const {
    const int most = panels_per_tile(rows), both = sides();
    const int64_t first = panels.begin * PANEL;
    Added added;
    if (segment != nullptr)
      for (int side = 0; side < both; side++)
        expand(added.columns[0][side], 2 * PANELS_PER_GROUP * PANEL, 0, rows, first + side * (matrix.outputs / 2));
    for (int64_t panel = panels.begin; panel < panels.end;) {
      int count = std::max(1, most / both);
      while (count > panels.end - panel) count /= 2;
      int64_t columns[4];
      for (int j = 0; j < count; j++) {
        columns[j] = (panel + j) * PANEL;
        if (gate != NONE) columns[count + j] = matrix.outputs / 2 + columns[j];
      }
      run_tile(columns, count * both, added, first);
      panel += count;
    }
  }

  void run(Range panels) const {
    for (int64_t panel = panels.begin; panel < panels.end; panel += PANELS_PER_GROUP)
      run_group({panel, std::min(panel + PANELS_PER_GROUP, panels.end)});
  }

  // For each block of rows and each panel group, call `multiply` to write the sums (`width` floats per row), then add
  // bias and adapters.
  template <class Multiply>
  void run_blocks(Range panels, int64_t block_rows, Multiply multiply) const {
    static thread_local Scratch scratch;
    const int64_t width = sides() * PANELS_PER_GROUP * PANEL;
    for (int64_t first = 0; first < rows; first += block_rows) {
      const int64_t count = std::min(block_rows, rows - first);
      float* sums = scratch.make<float>(count * width);
      for (int64_t panel = panels.begin; panel < panels.end; panel += PANELS_PER_GROUP) {
        const Range group{panel, std::min(panel + PANELS_PER_GROUP, panels.end)};
        multiply(first, count, group, sums, width);
        finish_group(first, count, group, sums, width);
      }
    }
  }

  // Add bias and adapters to the sums of a panel group and, with a gate, to its up half.
  void finish_group(int64_t first, int64_t count, Range group, float* sums, int64_t width) const {
    for (int64_t i = 0; i < count; i += ROWS_PER_FINISH)
      finish_rows(first + i, std::min(ROWS_PER_FINISH, count - i), group, sums + i * width, width);
  }

  void finish_rows(int64_t row, int64_t count, Range group, float* sums, int64_t width) const {
    float added[ROWS_PER_FINISH][2][PANELS_PER_GROUP * PANEL];
    if (segment != nullptr)
      for (int64_t side = 0; side < sides(); side++)
        expand(added[0][side], 2 * PANELS_PER_GROUP * PANEL, row, count, group.begin * PANEL + side * (matrix.outputs / 2));
    for (int64_t i = 0; i < count; i++) finish_row(row + i, group, sums + i * width, added[i]);
  }

  void finish_row(int64_t row, Range group, float* sums, const float (*added)[PANELS_PER_GROUP * PANEL]) const {
    const int64_t first = group.begin * PANEL, half = matrix.outputs / 2;
    for (int64_t side = 0; side < sides(); side++) {
      for (int64_t panel = group.begin; panel < group.end; panel++) {
        const int64_t at = panel * PANEL - first;
        finish(sums + side * PANELS_PER_GROUP * PANEL + at, row, first + at + side * half, added[side] + at);
      }
    }
    for (int64_t panel = group.begin; panel < group.end; panel++) {
      float* tile = sums + panel * PANEL - first;
      if (gate != NONE) apply_gate(tile, tile + PANELS_PER_GROUP * PANEL);
      store_panel(tile, row, panel * PANEL, gate == NONE ? matrix.outputs : half);
    }
  }
};
