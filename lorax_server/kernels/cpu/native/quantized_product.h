// Products with quantized weights: `BlockPanels` in Python.
//
// A weight panel is a sequence of blocks of 32 inputs. A block has the integers of `PANEL` outputs, then their scales, then
// their offsets. Integers are in groups of four inputs, `[groups, PANEL, 4]`. With 4 bits, the low halves of the bytes are
// inputs 0 to 15, and the high halves are inputs 16 to 31.
//
// Activations are quantized to 8 bits, with one scale per row and block. The integer sums of a block are exact. They are
// scaled and added in float32, block by block in order, for any number of rows, so results are bitwise batch-invariant.

constexpr int64_t BLOCK = 32;  // inputs per block

// The activations of one row and block. The arrays have values per half block; weights with one scale per block use only
// the first value, for the whole block.
struct alignas(64) QuantizedBlock {
  int8_t values[BLOCK];
  float scale;
  int32_t start[2];  // integer that is added to all sums, to cancel the bias of stored weights
  float sums[2];  // scale times the sum of the values, for offsets
};

// The parts of a format that kernels are compiled for.
template <int BITS_, int SCALES_, bool HAS_OFFSETS_>
struct BlockFormat {
  static constexpr int BITS = BITS_, SCALES = SCALES_;  // scales per block
  static constexpr bool HAS_OFFSETS = HAS_OFFSETS_;
  static constexpr int64_t VALUE_BYTES = PANEL * BLOCK * BITS / 8;
  static constexpr int64_t MIN_BYTES = VALUE_BYTES + PANEL * SCALES * sizeof(Half);

  // Return vector `j` of the weights in group `g` of half `half`.
  static inline __attribute__((always_inline)) I load_group(const char* block, int half, int g, int j) {
    using Unaligned = int32_t __attribute__((vector_size(VL * 4), aligned(4), may_alias));
    const int group = BITS == 8 ? half * 4 + g : g;
    const I packed = *(const Unaligned*)(block + group * PANEL * 4 + j * VL * 4);
    if (BITS == 8) return packed;
    return half == 0 ? low_nibbles(packed) : high_nibbles(packed);
  }
};

constexpr int QUANTIZED_TILE_ROWS = VL == 16 ? 8 : 4;
constexpr int64_t QUANTIZED_BLOCK_ROWS = 128;
constexpr int64_t INPUT_BLOCKS = 32;  // blocks of 32 inputs per pass over the rows

// Call `work` with 0 to 3 as constants.
template <class Work>
static inline __attribute__((always_inline)) void for_groups(Work work) {
  work(std::integral_constant<int, 0>());
  work(std::integral_constant<int, 1>());
  work(std::integral_constant<int, 2>());
  work(std::integral_constant<int, 3>());
}

// Consecutive blocks of a panel.
struct PanelBlocks {
  const char* at;
  int64_t count, block_bytes;
  bool has_wide_scales;  // scales and offsets are float32 instead of float16
  const char* next;  // other weights, which are prefetched
  int64_t step;  // bytes to prefetch per block

  F load_scales(const char* from, int64_t index) const {
    return has_wide_scales ? load((const float*)from + index) : load((const Half*)from + index);
  }
};

// Add the product of a row tile and blocks of a panel to the sums. `x` is `[blocks, ROWS]`; only the first `rows` rows are
// stored.
template <class Format, bool HAS_DOT, int ROWS>
static __attribute__((noinline)) void multiply_blocks(const QuantizedBlock* x, int64_t rows, const PanelBlocks& panel,
                                                      float* sums, int64_t lds, bool is_first) {
  using Dot = DotProduct<Format::BITS, HAS_DOT>;
  const PanelBlocks blocks = panel;
  const char *at = blocks.at, *next = blocks.next;
  F total[ROWS][2];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) total[i][j] = is_first || i >= rows ? F{} : load(sums + i * lds + j * VL);
  for (int64_t block = 0; block < blocks.count; block++, x += ROWS, at += blocks.block_bytes, next += blocks.step) {
    if (blocks.step >= Format::MIN_BYTES)
#pragma GCC unroll 32
      for (int64_t line = 0; line < Format::MIN_BYTES; line += CACHE_LINE_BYTES) __builtin_prefetch(next + line);
    else
      for (int64_t line = 0; line < blocks.step; line += CACHE_LINE_BYTES) __builtin_prefetch(next + line, 0, 2);
    I sum[ROWS][2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      HalfBlock values[ROWS];
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) values[i] = load_half(x[i].values + half * (BLOCK / 2));
      if (half == 0 || Format::SCALES == 2)
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) sum[i][0] = sum[i][1] = Dot::begin(x[i].start[half]);
      for_groups([&](auto g) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
          const auto weights = Dot::prepare(Format::load_group(at, half, g, j));
#pragma GCC unroll 16
          for (int i = 0; i < ROWS; i++) sum[i][j] = Dot::template add<decltype(g)::value>(sum[i][j], weights, values[i]);
        }
      });
      if (half == 1 || Format::SCALES == 2) {
        const int part = Format::SCALES == 2 ? half : 0;
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
          const F scale = blocks.load_scales(at + Format::VALUE_BYTES, part * PANEL + j * VL);
#pragma GCC unroll 16
          for (int i = 0; i < ROWS; i++) {
            const F value = __builtin_convertvector(Dot::end(sum[i][j], x[i].start[part]), F);
            total[i][j] = fused_multiply_add(value, scale * x[i].scale, total[i][j]);
          }
          if (Format::HAS_OFFSETS) {
            const F offset = blocks.load_scales(at + Format::VALUE_BYTES, (Format::SCALES + part) * PANEL + j * VL);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) total[i][j] = fused_multiply_add(offset, broadcast(x[i].sums[part]), total[i][j]);
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++)
      if (i < rows) store(sums + i * lds + j * VL, total[i][j]);
}

using MultiplyBlocks = void (*)(const QuantizedBlock*, int64_t, const PanelBlocks&, float*, int64_t, bool);

template <class Format>
static int64_t count_block_bytes(bool has_wide_scales) {
  const int64_t scale_bytes = PANEL * Format::SCALES * (has_wide_scales ? sizeof(float) : sizeof(Half));
  return Format::VALUE_BYTES + scale_bytes * (Format::HAS_OFFSETS ? 2 : 1);
}

// The kernels and the sizes for the format of a matrix.
struct QuantizedKernels {
  MultiplyBlocks by_rows[QUANTIZED_TILE_ROWS + 1];  // only heights from `tile_height`
  int64_t block_bytes;
  bool has_wide_scales;
  int32_t bias;  // value that is subtracted from every integer in the sums
  int64_t scales;  // per block

  template <class Format, bool HAS_DOT>
  static QuantizedKernels make(bool has_wide_scales) {
    using Dot = DotProduct<Format::BITS, HAS_DOT>;
    QuantizedKernels made{};
    made.fill<Format, HAS_DOT, QUANTIZED_TILE_ROWS>();
    made.block_bytes = count_block_bytes<Format>(has_wide_scales);
    made.has_wide_scales = has_wide_scales;
    made.bias = Format::BITS == 8 ? (Dot::IS_BIASED ? WEIGHT_BIAS : 0) : Format::HAS_OFFSETS ? 0 : 8;
    made.scales = Format::SCALES;
    return made;
  }

 private:
  template <class Format, bool HAS_DOT, int ROWS>
  void fill() {
    by_rows[ROWS] = multiply_blocks<Format, HAS_DOT, ROWS>;
    if constexpr (ROWS > 1) fill<Format, HAS_DOT, ROWS / 2>();
  }
};

// Call `run` with the `BlockFormat` of a matrix.
template <class Run>
static auto with_format(const Matrix& matrix, Run run) {
  const auto with_offsets = [&](auto bits, auto scales) {
    if (matrix.has_offsets) return run(BlockFormat<bits, scales, true>());
    return run(BlockFormat<bits, scales, false>());
  };
  const auto with_block = [&](auto bits) {
    if (matrix.block == BLOCK) return with_offsets(bits, std::integral_constant<int, 1>());
    return with_offsets(bits, std::integral_constant<int, 2>());
  };
  return matrix.bits == 8 ? with_block(std::integral_constant<int, 8>()) : with_block(std::integral_constant<int, 4>());
}

static QuantizedKernels select_kernels(const Matrix& matrix) {
  return with_format(matrix, [&](auto format) {
    using Format = decltype(format);
#if defined(HAS_DOT_VARIANT)
    if (matrix.uses_dot) return QuantizedKernels::make<Format, true>(matrix.has_wide_scales);
#endif
    return QuantizedKernels::make<Format, false>(matrix.has_wide_scales);
  });
}

#if VL == 4
static inline int32_t largest_lane(I v) { return vmaxvq_s32((int32x4_t)v); }
static inline int32_t sum_half(const int8_t* p) { return vaddlvq_s8(vld1q_s8(p)); }
static inline void store_bytes(int8_t* p, const I* v) {
  for (int i = 0; i < 2; i++, v += 4)
    vst1q_s8(p + 16 * i, vcombine_s8(vmovn_s16(vcombine_s16(vmovn_s32((int32x4_t)v[0]), vmovn_s32((int32x4_t)v[1]))),
                                     vmovn_s16(vcombine_s16(vmovn_s32((int32x4_t)v[2]), vmovn_s32((int32x4_t)v[3])))));
}
#elif defined(EMULATED_TILES)
static int32_t largest_lane(I v) {
  int32_t most = v[0];
  for (int i = 1; i < VL; i++) most = std::max(most, v[i]);
  return most;
}
static int32_t sum_half(const int8_t* p) {
  int32_t total = 0;
  for (int64_t i = 0; i < BLOCK / 2; i++) total += p[i];
  return total;
}
static void store_bytes(int8_t* p, const I* v) {
  for (int64_t i = 0; i < BLOCK; i++) p[i] = (int8_t)v[i / VL][i % VL];
}
#else
static inline int32_t sum_half(const int8_t* p) {
  const __m128i biased = _mm_xor_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}
#if VL == 16
static inline int32_t largest_lane(I v) { return _mm512_reduce_max_epi32((__m512i)v); }
static inline void store_bytes(int8_t* p, const I* v) {
  for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)(p + 16 * i), _mm512_cvtepi32_epi8((__m512i)v[i]));
}
#else
static inline int32_t largest_lane(I v) {
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}
static inline void store_bytes(int8_t* p, const I* v) {  // packs within 128-bit halves
  const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]), high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}
#endif
#endif

// Quantize 32 activations: scale is the largest magnitude / 127. Blocks with NaN or infinity get the scale NaN.
template <class T>
static inline void quantize_block(const T* x, int32_t bias, bool has_one_scale, QuantizedBlock& to) {
  constexpr int VECTORS = BLOCK / VL;
  constexpr float ROUNDING = 12582912.0f;  // the low bits of a sum with it are the nearest integer, ties to even
  F in[VECTORS];
  I largest = {}, values[VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; i++) {
    in[i] = load(x + i * VL);
    const I magnitude = (I)in[i] & 0x7fffffff;  // ordered like the floats, and NaN is above infinity
    largest = largest > magnitude ? largest : magnitude;
  }
  const int32_t bits = largest_lane(largest);
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  scale /= 127.0f;
  const bool is_finite = bits < 0x7f800000;
  const bool is_zero = !(scale >= 1.17549435e-38f);  // or denormal: the inverse would overflow
  const F inverse = broadcast(is_zero || !is_finite ? 0.0f : 1.0f / scale);
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; i++) values[i] = (I)fused_multiply_add(in[i], inverse, broadcast(ROUNDING)) - 0x4b400000;
  store_bytes(to.values, values);
  to.scale = !is_finite ? std::nanf("") : is_zero ? 0.0f : scale;
  int32_t sums[2] = {sum_half(to.values), sum_half(to.values + BLOCK / 2)};
  if (has_one_scale) sums[0] += sums[1];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    to.start[half] = -bias * sums[half];
    to.sums[half] = to.scale * (float)sums[half];
  }
}

// Quantized activations in row tiles, `[tiles, blocks, tile height]`. The last tile can have rows of zeros.
struct QuantizedRows {
  int64_t rows, blocks;
  QuantizedBlock* at;

  static int64_t tile_height(int64_t rows) {
    int64_t height = 1;
    while (height < std::min<int64_t>(rows, QUANTIZED_TILE_ROWS)) height *= 2;
    return height;
  }
  static int64_t padded(int64_t rows) {
    const int64_t rest = rows % QUANTIZED_TILE_ROWS;
    return rows - rest + (rest ? tile_height(rest) : 0);
  }
  QuantizedBlock* find(int64_t tile) const { return at + tile * QUANTIZED_TILE_ROWS * blocks; }

  // Quantize row `row`, or write zeros if the row is padding.
  template <class T>
  void fill(int64_t row, const T* x, int64_t ldx, const QuantizedKernels& kernels) const {
    const int64_t tile = row / QUANTIZED_TILE_ROWS, first = tile * QUANTIZED_TILE_ROWS;
    const int64_t height = tile_height(rows - first);
    QuantizedBlock* to = find(tile) + row - first;
    for (int64_t block = 0; block < blocks; block++, to += height) {
      if (row < rows) quantize_block(x + row * ldx + block * BLOCK, kernels.bias, kernels.scales == 1, *to);
      else memset(to, 0, sizeof *to);
    }
  }
};

template <class T>
struct QuantizedProduct : Product<T, char> {
  using Base = Product<T, char>;
  const QuantizedKernels& kernels;
  QuantizedRows quantized;

  void run(Range panels) const {
    Base::run_blocks(panels, QUANTIZED_BLOCK_ROWS, [&](auto... of) { multiply_group(of...); });
  }

  // Multiply by a group of panels, `INPUT_BLOCKS` blocks at a time.
  void multiply_group(int64_t first, int64_t count, Range group, float* sums, int64_t width) const {
    for (int64_t block = 0; block < quantized.blocks; block += INPUT_BLOCKS)
      for (int64_t panel = group.begin; panel < group.end; panel++)
        for (int64_t side = 0; side < Base::sides(); side++) {
          float* to = sums + (side * PANELS_PER_GROUP + panel - group.begin) * PANEL;
          const bool is_last = panel + 1 == group.end && block + INPUT_BLOCKS < quantized.blocks;
          const char* next = is_last ? find(group.begin, side, block + INPUT_BLOCKS) : find(panel + 1, side, block);
          multiply_tiles(first, count, block, find(panel, side, block), to, width, next);
        }
  }

  // Multiply all row tiles by blocks of a panel. Prefetches the following weights: a short distance ahead for a single
  // tile, or the next panel for several tiles, one part per tile.
  void multiply_tiles(int64_t first, int64_t count, int64_t block, const char* weights, float* sums, int64_t width,
                      const char* next) const {
    const int64_t length = std::min(INPUT_BLOCKS, quantized.blocks - block);
    const int64_t tiles = (count + QUANTIZED_TILE_ROWS - 1) / QUANTIZED_TILE_ROWS;
    PanelBlocks panel{weights, length, kernels.block_bytes, kernels.has_wide_scales, next, kernels.block_bytes};
    if (tiles == 1) panel.next = weights + PREFETCH_BYTES;
    else panel.step = (panel.step / tiles / CACHE_LINE_BYTES + 1) * CACHE_LINE_BYTES;
    for (int64_t row = 0; row < count; row += QUANTIZED_TILE_ROWS, panel.next += length * panel.step) {
      const int64_t rows = std::min<int64_t>(QUANTIZED_TILE_ROWS, count - row), height = QuantizedRows::tile_height(rows);
      const QuantizedBlock* x = quantized.find((first + row) / QUANTIZED_TILE_ROWS) + block * height;
      kernels.by_rows[height](x, rows, panel, sums + row * width, width, block == 0);
    }
  }

  const char* find(int64_t panel, int64_t side, int64_t block) const {
    const int64_t index = panel + side * (Base::matrix.outputs / 2 / PANEL);
    return (const char*)Base::matrix.panels + (index * quantized.blocks + block) * kernels.block_bytes;
  }
};
