// Cache-blocked matrix product for many rows.
//
// Inputs are first packed by row tiles, `[inputs, tile rows]`. Each block of a panel is multiplied by all tiles, and sums
// stay in memory between input blocks. Each output is one sum over the inputs in order, with the same bits as in the
// unblocked product.

constexpr int64_t BLOCK_ROWS = 192;  // a multiple of `MAX_TILE_ROWS`
constexpr int64_t BLOCK_INPUTS = VL == 4 ? 512 : 256;  // ARM panels are narrower

// Row tiles. The tiles in a block have nearly equal heights.
struct RowTiles {
  int64_t rows;

  static constexpr int64_t IN_BLOCK = BLOCK_ROWS / MAX_TILE_ROWS;
  static int64_t count(int64_t rows) { return (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS; }

  Range find(int64_t tile) const {
    const int64_t first = tile / IN_BLOCK * BLOCK_ROWS, block = std::min(BLOCK_ROWS, rows - first);
    const Range part = split_evenly(block, tile % IN_BLOCK, count(block));
    return {first + part.begin, first + part.end};
  }

  // Elements of the packed copy, with padding because whole vectors are read.
  static int64_t size(int64_t rows, int64_t inputs) { return rows * inputs + VL; }

  template <class T>
  void copy(Range tiles, const T* x, int64_t ldx, int64_t inputs, float* to) const {
    constexpr int64_t IN_LINE = CACHE_LINE_BYTES / sizeof(T);
    for (int64_t tile = tiles.begin; tile < tiles.end; tile++) {
      const Range range = find(tile);
      const int64_t height = range.end - range.begin;
      const T* from = x + range.begin * ldx;
      float* at = to + range.begin * inputs;
      int64_t k = 0;
      for (; k + IN_LINE <= inputs; k += IN_LINE)  // whole cache lines, because rows can evict each other
        for (int64_t i = 0; i < height; i++) {
          float* column = at + k * height + i;
#pragma GCC unroll 32
          for (int64_t j = 0; j < IN_LINE; j++, column += height) *column = read(from + i * ldx + k + j);
        }
      for (; k < inputs; k++)
        for (int64_t i = 0; i < height; i++) at[k * height + i] = read(from + i * ldx + k);
    }
  }
};

// Add the product of a row tile and a panel block to the sums. Prefetches `step` bytes of `next_block` per input.
template <int ROWS>
static __attribute__((noinline)) void multiply_block(const float* x, const float* panel, int64_t inputs, float* sums,
                                                     int64_t lds, bool is_first, const char* next_block, int64_t step) {
  F total[ROWS][2], weight[2];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) total[i][j] = is_first ? F{} : load(sums + i * lds + j * VL);
  for (int64_t k = 0; k < inputs; k++, x += ROWS) {
    __builtin_prefetch(next_block + k * step, 0, 2);
#if VL == 4  // ARM multiplies by a vector lane; one load for both weight vectors is faster
    const float32x4x2_t both = vld1q_f32_x2(panel + k * PANEL);
    weight[0] = (F)both.val[0], weight[1] = (F)both.val[1];
    F in[(ROWS + 3) / 4];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i += 4) in[i / 4] = load(x + i);
#else
    load_weights<1>(&panel, k, weight);
#endif
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
      for (int j = 0; j < 2; j++)
#if VL == 4
        total[i][j] += weight[j] * in[i / 4][i % 4];
#else
        total[i][j] += weight[j] * broadcast(x[i]);
#endif
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) store(sums + i * lds + j * VL, total[i][j]);
}

using MultiplyBlock = void (*)(const float*, const float*, int64_t, float*, int64_t, bool, const char*, int64_t);

template <int ROWS>
static MultiplyBlock select_multiply_block(int64_t rows) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return select_multiply_block<ROWS - 1>(rows);
  return multiply_block<ROWS>;
}

template <class T, class S>
struct BlockProduct : Product<T, S> {
  using Base = Product<T, S>;
  const float* copy;  // packed inputs

  void run(Range panels) const {
    Base::run_blocks(panels, BLOCK_ROWS, [&](auto... of) { multiply_group(of...); });
  }

  // Multiply by a group of panels, one input block after the other.
  void multiply_group(int64_t first, int64_t count, Range group, float* sums, int64_t width) const {
    const int64_t inputs = Base::matrix.inputs, sides = Base::sides(), panels = (group.end - group.begin) * sides;
    const int64_t blocks = (inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS * panels;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t k = block / panels * BLOCK_INPUTS, panel = group.begin + block % panels / sides, side = block % sides;
      const int64_t length = std::min(BLOCK_INPUTS, inputs - k);
      const S* next_block = find(group, std::min(block + 1, blocks - 1), panels);
      float* to = sums + (side * PANELS_PER_GROUP + panel - group.begin) * PANEL;
      multiply_tiles(first, count, k, length, widen_block(find(group, block, panels), length), to, width, (const char*)next_block);
    }
  }

  void multiply_tiles(int64_t first, int64_t count, int64_t k, int64_t length, const float* weights, float* sums,
                      int64_t width, const char* next_block) const {
    const RowTiles all{Base::rows};
    const int64_t begin = first / MAX_TILE_ROWS, tiles = RowTiles::count(count);
    const int64_t step = (PANEL * (int64_t)sizeof(S) + tiles - 1) / tiles;
    for (int64_t tile = begin; tile < begin + tiles; tile++, next_block += length * step) {
      const Range range = all.find(tile);
      const int64_t height = range.end - range.begin;
      select_multiply_block<MAX_TILE_ROWS>(height)(copy + range.begin * Base::matrix.inputs + k * height, weights, length,
                                             sums + (range.begin - first) * width, width, k == 0, next_block, step);
    }
  }

  // Return the weights of a block.
  const S* find(Range group, int64_t block, int64_t panels) const {
    const int64_t side = block % Base::sides(), panel = group.begin + block % panels / Base::sides();
    const int64_t index = panel + side * (Base::matrix.outputs / 2 / PANEL);
    return (const S*)Base::matrix.panels + (index * Base::matrix.inputs + block / panels * BLOCK_INPUTS) * PANEL;
  }

  // Widen a block to float32 once, instead of once per tile.
  static const float* widen_block(const S* weights, int64_t length) {
    if constexpr (std::is_same<S, float>::value) return weights;
    static thread_local Scratch scratch;
    float* wide = scratch.make<float>(BLOCK_INPUTS * PANEL);
    widen(weights, wide, length * PANEL);
    return wide;
  }
};
