// bfloat16 matrix products with AMX tiles.
//
// The weights are panels of input pairs, `[panels, inputs / 2, PANEL, 2]`, zero-padded to whole tiles. Two tiles of a
// panel are 2 KiB of contiguous memory. Every output is summed by the same instructions in the same order for any number
// of rows, so results are bitwise batch-invariant.

struct Pair {
  Bf16 even, odd;
};

constexpr int64_t BLOCK_ROWS_AMX = 256;  // inputs and sums of a block fit into the L2 cache
constexpr int64_t BLOCK_TILES = 32;  // input tiles per block
constexpr int64_t AMX_PREFETCH_BYTES = 8192;  // prefetch distance for memory-bound products
constexpr int64_t PANEL_TILE = TILE_INPUTS * PANEL;  // elements per panel and input tile

static inline int64_t count_tiles(int64_t inputs) { return (inputs + TILE_INPUTS - 1) / TILE_INPUTS; }

// Input tiles. Distances in elements: `tile` between row tiles, `step` between input tiles, `stride` between rows.
struct TiledRows {
  const Bf16* at;
  int64_t tile, step, stride;
};

// Tile registers: 0-3 sums, 4-5 rows, 6-7 a panel. `TWO_ROW_TILES`: more than 16 rows.
template <bool TWO_ROW_TILES>
static void multiply_tiles(const TiledRows& rows, const Pair* panel, int64_t count, float* sums, int64_t lds, bool is_first) {
  const Bf16 *upper = rows.at, *lower = rows.at + rows.tile;
  const int64_t row_bytes = rows.stride * sizeof(Bf16), sum_bytes = lds * sizeof(float), panel_bytes = PANEL * sizeof(Pair);
  float* below = sums + TILE_ROWS * lds;
  if (is_first) {
    CLEAR_TILE(0);
    CLEAR_TILE(1);
    if (TWO_ROW_TILES) {
      CLEAR_TILE(2);
      CLEAR_TILE(3);
    }
  } else {
    LOAD_TILE(0, sums, sum_bytes);
    LOAD_TILE(1, sums + 16, sum_bytes);
    if (TWO_ROW_TILES) {
      LOAD_TILE(2, below, sum_bytes);
      LOAD_TILE(3, below + 16, sum_bytes);
    }
  }
  for (int64_t k = 0; k < count; k++) {
    if (!TWO_ROW_TILES)
      for (int64_t line = 0; line < PANEL_TILE * 2; line += CACHE_LINE_BYTES) __builtin_prefetch((const char*)panel + AMX_PREFETCH_BYTES + line, 0, 2);
    LOAD_TILE(4, upper, row_bytes);
    LOAD_TILE(6, panel, panel_bytes);
    DOT_TILES(0, 4, 6);
    LOAD_TILE(7, panel + 16, panel_bytes);
    DOT_TILES(1, 4, 7);
    if (TWO_ROW_TILES) {
      LOAD_TILE(5, lower, row_bytes);
      DOT_TILES(2, 5, 6);
      DOT_TILES(3, 5, 7);
    }
    upper += rows.step;
    lower += rows.step;
    panel += PANEL_TILE / 2;
  }
  STORE_TILE(0, sums, sum_bytes);
  STORE_TILE(1, sums + 16, sum_bytes);
  if (TWO_ROW_TILES) {
    STORE_TILE(2, below, sum_bytes);
    STORE_TILE(3, below + 16, sum_bytes);
  }
}

// Tile configuration for up to 32 rows. The destructor releases the tiles, which otherwise cost power.
struct TileConfig {
  int64_t height = 0;

  void configure(int64_t rows) {
    if (rows == height) return;
    height = rows;
    const uint8_t upper = std::min<int64_t>(rows, TILE_ROWS), lower = std::max<int64_t>(rows - TILE_ROWS, 1);
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = TILE_BYTES;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = upper;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = lower;
    shapes.rows[6] = shapes.rows[7] = TILE_ROWS;
    configure_tiles(shapes);
  }
  ~TileConfig() {
    if (height) release_tiles();
  }
};

struct TileProduct : Product<Bf16, Pair> {
  TiledRows tiled;

  void run(Range panels) const {
    TileConfig tiles;
    run_blocks(panels, BLOCK_ROWS_AMX, [&](auto... of) { multiply_group(tiles, of...); });
  }

  void multiply_group(TileConfig& tiles, int64_t first, int64_t count, Range group, float* sums, int64_t width) const {
    const int64_t all = count_tiles(matrix.inputs);
    for (int64_t k = 0; k < all; k += BLOCK_TILES)
      for (int64_t row = 0; row < count; row += 2 * TILE_ROWS) {
        const int64_t height = std::min<int64_t>(2 * TILE_ROWS, count - row);
        TiledRows from = tiled;
        from.at += (first + row) / TILE_ROWS * tiled.tile + k * tiled.step;
        tiles.configure(height);
        for (int64_t panel = group.begin; panel < group.end; panel++)
          for (int64_t side = 0; side < sides(); side++) {
            float* to = sums + row * width + (side * PANELS_PER_GROUP + panel - group.begin) * PANEL;
            const auto multiply = height > TILE_ROWS ? multiply_tiles<true> : multiply_tiles<false>;
            multiply(from, find(panel, side, k), std::min(BLOCK_TILES, all - k), to, width, k == 0);
          }
      }
  }

  // Return a panel, or its up panel (`side` 1), starting at input tile `tile`.
  const Pair* find(int64_t panel, int64_t side, int64_t tile) const {
    const int64_t tiles = count_tiles(matrix.inputs), index = panel + side * (matrix.outputs / 2 / PANEL);
    return (const Pair*)matrix.panels + (index * tiles + tile) * (PANEL_TILE / 2);
  }
};

// Input rows as tiles. Small batches with whole tiles are used in place; other batches are copied.
struct TilePacking {
  const Bf16* x;
  int64_t ldx, rows, inputs;
  Bf16* copy;  // null: used in place

  static bool is_needed(int64_t rows, int64_t inputs) { return rows > 2 * TILE_ROWS || inputs % TILE_INPUTS; }
  static int64_t size(int64_t rows, int64_t inputs) {
    return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * count_tiles(inputs) * TILE_INPUTS;
  }

  TiledRows find() const {
    if (copy == nullptr) return {x, TILE_ROWS * ldx, TILE_INPUTS, ldx};
    return {copy, size(TILE_ROWS, inputs), TILE_ROWS * TILE_INPUTS, TILE_INPUTS};
  }

  void copy_row(int64_t row) const {
    const TiledRows to = find();
    Bf16* at = copy + row / TILE_ROWS * to.tile + row % TILE_ROWS * to.stride;
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS, at += to.step) {
      const int64_t count = std::min<int64_t>(TILE_INPUTS, inputs - k);
      if (count < TILE_INPUTS) memset(at, 0, TILE_INPUTS * sizeof(Bf16));
      memcpy(at, x + row * ldx + k, count * sizeof(Bf16));
    }
  }
};
