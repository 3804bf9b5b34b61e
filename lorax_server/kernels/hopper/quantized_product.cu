// A product with quantized weights. Warps read packed weights from shared memory, convert them to integers or small floats in
// 16 bits, which is exact, and multiply them with mma.sync. Sums of a group of inputs are multiplied by the group's scale in
// float32, so weights are never rounded.
//
// Weights are packed in records of 128 columns x STEP inputs, in the order in which threads hold the operands. A record has,
// for each tile of 16 columns and each part of 32 inputs, 8 or 16 bytes per lane; then scales [tile][lane / 4][group][2], for
// columns lane / 4 and lane / 4 + 8; then offsets in the same order.

constexpr int STEP_INPUTS = 128, PARTS = 4;  // inputs per record, in parts of 32

struct QuantizedWeights {
  const u8* records;  // [outputs / 128][inputs / 128]
  u32 levels[8];      // of 4-bit values, two per word
};

// Like `load_matrices`, but other loads can be moved across it.
DEVICE void load_inputs(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
}
// a * b + c for two values
template <class Number> DEVICE u32 multiply_add(u32 a, u32 b, u32 c) {
  u32 r;
  if constexpr (Number::is_bfloat16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
template <class Number> DEVICE u32 multiply_pair(u32 a, u32 b) {
  u32 r;
  if constexpr (Number::is_bfloat16) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE constexpr u32 twice(u32 number) { return number | number << 16; }

// Formats. `convert` returns 16 columns x 32 inputs as MMA operands: registers 0 to 3 for the first 16 inputs. Converted values
// times RESCALE are the integers or levels.
//
// An offset is added to the scaled integers, a zero point is subtracted from the integers. Zero points are stored as
// 16-bit floats, `-zero / RESCALE`.
enum class Shift { NONE, ZEROS, OFFSETS };

// An integer in the low bits of a 16-bit word is a subnormal number, or has the smallest exponent. Multiplied by a power of
// two, it becomes normal without rounding.
template <class Number, Shift SHIFT>
struct Int4 {
  static constexpr int LANE_BYTES = 8, TABLE_BYTES = 0;
  static constexpr float RESCALE = Number::is_bfloat16 ? 64 : 512;
  static constexpr u32 LOW = twice(Number::is_bfloat16 ? 0x7F00 : 0x7800), HIGH = twice(Number::is_bfloat16 ? 0x7D00 : 0x6800);  // 2^127 and 2^123, or 2^15 and 2^11
  static constexpr u32 EIGHT = SHIFT == Shift::OFFSETS ? 0 : twice(Number::is_bfloat16 ? 0xBE00 : 0xA400);  // -8 / RESCALE
  static DEVICE void convert(u32* a, const u8* from, const u8*, uint2 zeros) {
    const uint2 words = *(const uint2*)from;
    const u32 w[2] = {words.x, words.y};
    const u32 shift0 = SHIFT == Shift::ZEROS ? zeros.x : EIGHT, shift1 = SHIFT == Shift::ZEROS ? zeros.y : EIGHT;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 upper = w[i] >> 8;
      a[i * 4] = multiply_add<Number>(w[i] & 0x000F000F, LOW, shift0);
      a[i * 4 + 1] = multiply_add<Number>(w[i] & 0x00F000F0, HIGH, shift1);
      a[i * 4 + 2] = multiply_add<Number>(upper & 0x000F000F, LOW, shift0);
      a[i * 4 + 3] = multiply_add<Number>(upper & 0x00F000F0, HIGH, shift1);
    }
  }
};

template <class Number, Shift SHIFT>
struct Int8 {  // bytes are the integers plus 128
  static constexpr int LANE_BYTES = 16, TABLE_BYTES = 0;
  static constexpr float RESCALE = Number::is_bfloat16 ? 64 : 512;
  static constexpr u32 FACTOR = twice(Number::is_bfloat16 ? 0x7F00 : 0x7800), HALF = twice(Number::is_bfloat16 ? 0xC000 : 0xB400);  // -128 / RESCALE
  static DEVICE void convert(u32* a, const u8* from, const u8*, uint2 zeros) {
    const uint4 words = *(const uint4*)from;
    const u32 w[4] = {words.x, words.y, words.z, words.w};
    const u32 shift0 = SHIFT == Shift::ZEROS ? zeros.x : HALF, shift1 = SHIFT == Shift::ZEROS ? zeros.y : HALF;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i * 2] = multiply_add<Number>(w[i] & 0x00FF00FF, FACTOR, shift0);
      a[i * 2 + 1] = multiply_add<Number>(w[i] >> 8 & 0x00FF00FF, FACTOR, shift1);
    }
  }
};

template <class Number, Shift SHIFT>
struct Float8 {  // e4m3, without NaN
  static constexpr int LANE_BYTES = 16, TABLE_BYTES = 0;
  static constexpr float RESCALE = 1;
  static constexpr u32 FACTOR = twice(Number::is_bfloat16 ? 0x7B80 : 0x5C00);  // 2^120 or 2^8
  static DEVICE void convert(u32* a, const u8* from, const u8*, uint2) {
    const uint4 words = *(const uint4*)from;
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      constexpr u32 MAGNITUDE = Number::is_bfloat16 ? 0x07F007F0u : 0x3F803F80u;
      const u32 low = Number::is_bfloat16 ? w[i] << 4 : w[i] << 7, high = Number::is_bfloat16 ? w[i] >> 4 : w[i] >> 1;
      a[i * 2] = multiply_pair<Number>((low & MAGNITUDE) | (w[i] << 8 & 0x80008000u), FACTOR);
      a[i * 2 + 1] = multiply_pair<Number>((high & MAGNITUDE) | (w[i] & 0x80008000u), FACTOR);
    }
  }
};

template <class Number, Shift SHIFT>
struct Levels4 {  // a table of all pairs of levels, one copy per lane, so that lanes never access the same bank
  static constexpr int LANE_BYTES = 8, TABLE_BYTES = 256 * 128;
  static constexpr float RESCALE = 1;
  static DEVICE void convert(u32* a, const u8* from, const u8* table, uint2) {
    const uint2 words = *(const uint2*)from;
    const u32 w[2] = {words.x, words.y}, lane = (threadIdx.x & 31) * 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i * 4] = *(const u32*)(table + ((w[i] << 7 & 0x7F80) | lane));
      a[i * 4 + 1] = *(const u32*)(table + ((w[i] >> 1 & 0x7F80) | lane));
      a[i * 4 + 2] = *(const u32*)(table + ((w[i] >> 9 & 0x7F80) | lane));
      a[i * 4 + 3] = *(const u32*)(table + ((w[i] >> 17 & 0x7F80) | lane));
    }
  }
};

// Write the table of `Levels4`.
DEVICE void write_table(u32* table, const QuantizedWeights& w) {
  const int lane = threadIdx.x & 31;
  for (int i = threadIdx.x >> 5; i < 256; i += blockDim.x >> 5) {
    const u32 low = w.levels[(i & 15) >> 1] >> 16 * (i & 1) & 0xFFFF, high = w.levels[i >> 5] >> 16 * (i >> 4 & 1);
    table[i * 32 + lane] = low | high << 16;
  }
}

// The layout of a record.
template <class Format, int GROUPS_, bool FLOAT_SCALES, Shift SHIFT_>
struct Record128 {
  static constexpr int GROUPS = GROUPS_;  // of inputs that share a scale
  static constexpr Shift SHIFT = SHIFT_;
  static constexpr bool OFFSETS = SHIFT == Shift::OFFSETS;
  static constexpr int TILE_BYTES = PARTS * 32 * Format::LANE_BYTES, WEIGHT_BYTES = 8 * TILE_BYTES;
  static constexpr int PAIR_BYTES = FLOAT_SCALES ? 8 : 4, SCALE_BYTES = 64 * GROUPS * PAIR_BYTES;
  static constexpr int ZERO_BYTES = SHIFT == Shift::ZEROS ? 64 * GROUPS * 4 : 0;
  static constexpr int BYTES = WEIGHT_BYTES + SCALE_BYTES * (OFFSETS ? 2 : 1) + ZERO_BYTES;
  // Return operands of `Format::convert` for a part of 32 inputs.
  static DEVICE void convert(u32* a, const u8* record, int tile, int part, int lane, const u8* table) {
    uint2 zeros = {0, 0};
    if constexpr (SHIFT == Shift::ZEROS) {
      const u32 word = *(const u32*)(record + WEIGHT_BYTES + SCALE_BYTES + ((tile * 8 + lane / 4) * GROUPS + part * GROUPS / PARTS) * 4);
      zeros = {__byte_perm(word, word, 0x1010), __byte_perm(word, word, 0x3232)};
    }
    Format::convert(a, record + tile * TILE_BYTES + (part * 32 + lane) * Format::LANE_BYTES, table, zeros);
  }
  // Return the scales of this lane's columns. `kind` is 0 for scales and 1 for offsets.
  static DEVICE float2 scales(const u8* record, int tile, int group, int lane, int kind) {
    const u8* from = record + WEIGHT_BYTES + kind * SCALE_BYTES + ((tile * 8 + lane / 4) * GROUPS + group) * PAIR_BYTES;
    if constexpr (FLOAT_SCALES) return *(const float2*)from;
    else return Float16::unpack(*(const u32*)from);
  }
};

// Fetches records and inputs, for `TILES` x 128 columns.
template <class Number_, class Format_, class Record, int ROWS_, int TILES, int STAGES>
struct QuantizedPipeline {
  using Weights = const QuantizedWeights*;
  using Number = Number_;
  using Format = Format_;
  static constexpr int ROWS = ROWS_, COLUMNS = TILES * 128, STEP = STEP_INPUTS, WARPS = 8, WAITING_THREAD = 0;
  static constexpr int X_BYTES = ROWS * STEP * 2, W_BYTES = TILES * Record::BYTES, RING = STAGES * (X_BYTES + W_BYTES);
  u8* shared;  // inputs, records, barriers, table
  u32 inputs, full, empty;
  DEVICE QuantizedPipeline(u8* memory) : shared(memory), inputs(shared_address(memory)), full(inputs + RING), empty(full + STAGES * 8) {}
  DEVICE u8* weights(int stage) const { return shared + STAGES * X_BYTES + stage * W_BYTES; }
  DEVICE u8* table() const { return shared + RING + STAGES * 16; }
  DEVICE void init() {
    for (int s = 0; s < STAGES; s++) { init_barrier(full + s * 8, 1); init_barrier(empty + s * 8, WARPS); }
    fence_barriers();
  }
  DEVICE void prepare(Weights w) {
    if constexpr (Format::TABLE_BYTES > 0) write_table((u32*)table(), *w);
  }
  DEVICE void fetch(Weights w, const TensorMap* x, const LinearArgs& p, int column, int first, int steps) {
    const i64 tile_bytes = (i64)((p.K + STEP - 1) / STEP) * Record::BYTES;
    const u8* from = w->records + column / 128 * tile_bytes + (i64)first * Record::BYTES;
    const u32 is_elected = elect_lane(), records = inputs + STAGES * X_BYTES;
    auto fetch_w = [&](int s, int i) {
      expect_bytes_by(is_elected, full + s * 8, X_BYTES + W_BYTES);
#pragma unroll
      for (int t = 0; t < TILES; t++)
        copy_bytes_by(is_elected, records + s * W_BYTES + t * Record::BYTES, from + t * tile_bytes + (i64)i * Record::BYTES, Record::BYTES, full + s * 8, EVICT_FIRST);
    };
    auto fetch_x = [&](int s, int i) { copy_slabs_by(is_elected, inputs + s * X_BYTES, x, full + s * 8, (first + i) * (STEP / 64), EVICT_LAST); };
    const int ahead = steps < STAGES ? steps : STAGES;
    for (int s = 0; s < ahead; s++) fetch_w(s, s);
    if (p.early) wait_for_previous_kernel();
    for (int s = 0; s < ahead; s++) fetch_x(s, s);
    for (int i = ahead, s = 0, phase = 0; i < steps; i++) {
      wait_barrier(empty + s * 8, phase);
      fetch_w(s, i);
      fetch_x(s, i);
      if (++s == STAGES) { s = 0; phase ^= 1; }
    }
    if (p.early == 3) launch_dependents();
  }
};

// For few rows: mma.sync. A warp has `TILES` tiles of 16 columns.
template <class Number, class Format, class Record, int ROWS, int TILES, int STAGES>
struct QuantizedProduct : QuantizedPipeline<Number, Format, Record, ROWS, TILES, STAGES> {
  using Base = QuantizedPipeline<Number, Format, Record, ROWS, TILES, STAGES>;
  using Base::Base, Base::inputs, Base::weights, Base::table, Base::full, Base::empty, Base::X_BYTES;
  static constexpr int BLOCKS = ROWS / 8, GROUPS = Record::GROUPS, GROUP_PARTS = PARTS / GROUPS;
  static constexpr u32 ONES = twice(Number::is_bfloat16 ? 0x3F80 : 0x3C00);
  DEVICE void multiply(float* part, int steps) {
    constexpr int STRIDE = Base::COLUMNS + 4;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    const u32 row_address = (lane & 7) * 128 + (((lane >> 3) ^ (lane & 7)) << 4);  // of a swizzled row; XOR 64 for odd parts
    float totals[TILES][BLOCKS][4];
#pragma unroll
    for (int i = 0; i < TILES * BLOCKS * 4; i++) totals[i / (BLOCKS * 4)][i / 4 % BLOCKS][i % 4] = 0;
#pragma unroll 1
    for (int i = 0, s = 0, phase = 0, last = 0; i < steps; i++) {
      wait_barrier(full + s * 8, phase);
      __syncwarp();
      if (i && lane == 0) arrive(empty + last * 8);  // its data was used by products before
      const u8* record = weights(s);
      const u32 x = inputs + s * X_BYTES;
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        float sums[TILES][BLOCKS][4], x_sums[BLOCKS][4];
#pragma unroll
        for (int k = 0; k < GROUP_PARTS; k++) {
          const int part32 = group * GROUP_PARTS + k;
          u32 a[TILES][8];
#pragma unroll
          for (int t = 0; t < TILES; t++) Record::convert(a[t], record + t * Record::BYTES, warp, part32, lane, table());
#pragma unroll
          for (int n = 0; n < BLOCKS; n++) {
            u32 b[4];
            load_inputs(b, x + part32 / 2 * ROWS * 128 + n * 1024 + (row_address ^ part32 % 2 * 64));
#pragma unroll
            for (int t = 0; t < TILES; t++) {
              if (k == 0) mma_from_zero<Number>(sums[t][n], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
              else mma<Number>(sums[t][n], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
              mma<Number>(sums[t][n], a[t][4], a[t][5], a[t][6], a[t][7], b[2], b[3]);
            }
            if constexpr (Record::OFFSETS) {
              if (k == 0) mma_from_zero<Number>(x_sums[n], ONES, ONES, ONES, ONES, b[0], b[1]);
              else mma<Number>(x_sums[n], ONES, ONES, ONES, ONES, b[0], b[1]);
              mma<Number>(x_sums[n], ONES, ONES, ONES, ONES, b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const float2 scales = Record::scales(record + t * Record::BYTES, warp, group, lane, 0);
          float2 offsets = {0, 0};
          if constexpr (Record::OFFSETS) offsets = Record::scales(record + t * Record::BYTES, warp, group, lane, 1);
          const float o0 = offsets.x / Format::RESCALE, o1 = offsets.y / Format::RESCALE;
#pragma unroll
          for (int n = 0; n < BLOCKS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              totals[t][n][e] += (e < 2 ? scales.x : scales.y) * sums[t][n][e];
              if constexpr (Record::OFFSETS) totals[t][n][e] += (e < 2 ? o0 : o1) * x_sums[n][e];
            }
        }
      }
      last = s;
      if (++s == STAGES) { s = 0; phase ^= 1; }
    }
    sync_threads<4, Base::WARPS * 32>();  // the ring is no longer read; its memory now holds the sums
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) part[(n * 8 + 2 * c + (e & 1)) * STRIDE + t * 128 + warp * 16 + g + (e >> 1) * 8] = totals[t][n][e] * Format::RESCALE;
  }
};

#ifdef WGMMA_ROWS
template <int COUNT> DEVICE void pin(u32 (&words)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(words[i])::"memory");
}
template <int COUNT> DEVICE void pin(float (&numbers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(numbers[i])::"memory");
}

// For many rows: WGMMA with weights in registers. A warpgroup has 64 columns. It converts weights while it multiplies the
// weights before.
template <class Number, class Format, class Record, int ROWS, int STAGES>
struct WideQuantizedProduct : QuantizedPipeline<Number, Format, Record, ROWS, 1, STAGES> {
  using Base = QuantizedPipeline<Number, Format, Record, ROWS, 1, STAGES>;
  using Base::Base, Base::inputs, Base::weights, Base::table, Base::full, Base::empty, Base::X_BYTES;
  static_assert(!Record::OFFSETS, "offsets require mma.sync");
  // Small chunks need fewer registers.
  static constexpr int CHUNK_PARTS = Record::GROUPS == 4 || ROWS >= 64 ? 1 : 2, CHUNKS = PARTS / CHUNK_PARTS, GROUP_CHUNKS = CHUNKS / Record::GROUPS;
  int warp, lane;
  DEVICE void convert(u32 (&a)[CHUNK_PARTS * 8], const u8* record, int number) const {
#pragma unroll
    for (int k = 0; k < CHUNK_PARTS; k++) Record::convert(a + k * 8, record, warp, number * CHUNK_PARTS + k, lane, table());
    pin(a);  // before the fence; otherwise ptxas runs one WGMMA at a time
  }
  DEVICE void start(const u32 (&a)[CHUNK_PARTS * 8], float (&sums)[ROWS / 2], u32 x, int number, bool adds) const {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const u64 b = descriptor(x + number * CHUNK_PARTS / 2 * ROWS * 128) + number * CHUNK_PARTS % 2 * 4;
#pragma unroll
    for (int k = 0; k < CHUNK_PARTS * 2; k++) wgmma_from_registers<Number>(sums, a[k * 4], a[k * 4 + 1], a[k * 4 + 2], a[k * 4 + 3], b + k * 2, adds || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  DEVICE void multiply(float* part, int steps) {
    constexpr int STRIDE = Base::COLUMNS + 4;
    warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    float totals[ROWS / 2], sums[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) totals[i] = 0;
    u32 a[2][CHUNK_PARTS * 8];
    wait_barrier(full, 0);
    convert(a[0], weights(0), 0);
#pragma unroll 1
    for (int i = 0, s = 0, phase = 0; i < steps; i++) {
      const u8* record = weights(s);
      int next = s, next_phase = phase;  // the last step converts its first chunk again
      if (i + 1 < steps && ++next == STAGES) { next = 0; next_phase ^= 1; }
#pragma unroll
      for (int number = 0; number < CHUNKS; number++) {
        const bool adds = number % GROUP_CHUNKS > 0;
        start(a[number % 2], sums, inputs + s * X_BYTES, number, adds);
        if (adds) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // for the chunk before
        if (number + 1 < CHUNKS) convert(a[(number + 1) % 2], record, number + 1);
        else {
          wait_barrier(full + next * 8, next_phase);
          convert(a[0], weights(next), 0);
        }
        if ((number + 1) % GROUP_CHUNKS) continue;
        const float2 scales = Record::scales(record, warp, number / GROUP_CHUNKS, lane, 0);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin(sums);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) totals[i] += (i & 2 ? scales.y : scales.x) * sums[i];
      }
      __syncwarp();
      if (lane == 0) arrive(empty + s * 8);
      s = next, phase = next_phase;
    }
    sync_threads<4, Base::WARPS * 32>();  // the ring is no longer read; its memory now holds the sums
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) part[(i / 4 * 8 + 2 * c + (i & 1)) * STRIDE + warp * 16 + g + (i >> 1 & 1) * 8] = totals[i] * Format::RESCALE;
  }
};
#endif

struct DequantizeArgs {
  QuantizedWeights weights;
  u16* out;             // [rows][inputs]
  int first, rows, inputs;  // first row
};

// Write rows of the dequantized matrix, rounded like in torch. One block per record.
template <class Number, class Format, class Record128>
DEVICE void dequantize(const DequantizeArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  constexpr int STRIDE = STEP_INPUTS + 8;
  u8* record = shared + Format::TABLE_BYTES;
  u16* rows = (u16*)(record + Record128::BYTES);  // [128][STRIDE]
  if constexpr (Format::TABLE_BYTES > 0) write_table((u32*)shared, p.weights);
  const int steps = (p.inputs + STEP_INPUTS - 1) / STEP_INPUTS, first_tile = p.first / 128, tile = first_tile + blockIdx.x / steps, step = blockIdx.x % steps;
  const uint4* from = (const uint4*)(p.weights.records + ((i64)tile * steps + step) * Record128::BYTES);
  for (int i = threadIdx.x; i < Record128::BYTES / 16; i += 256) ((uint4*)record)[i] = __ldcs(from + i);
  __syncthreads();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    u32 a[8];
    Record128::convert(a, record, warp, part, lane, shared);
    const int group = part * Record128::GROUPS / PARTS;
    const float2 scales = Record128::scales(record, warp, group, lane, 0);
    float2 offsets = {0, 0};
    if constexpr (Record128::OFFSETS) offsets = Record128::scales(record, warp, group, lane, 1);
#pragma unroll
    for (int i = 0; i < 8; i++) {  // upper columns in odd registers, upper inputs in registers 2, 3, 6 and 7
      const float2 values = Number::unpack(a[i]);
      const float s = (i & 1 ? scales.y : scales.x) * Format::RESCALE, o = i & 1 ? offsets.y : offsets.x;
      *(u32*)(rows + (warp * 16 + g + (i & 1) * 8) * STRIDE + part * 32 + i / 4 * 16 + (i & 2) * 4 + 2 * c) = Number::pack(__fadd_rn(__fmul_rn(values.x, s), o), __fadd_rn(__fmul_rn(values.y, s), o));
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * (STEP_INPUTS / 8); i += 256) {
    const int row = i / (STEP_INPUTS / 8), k = i % (STEP_INPUTS / 8) * 8, column = tile * 128 + row - p.first;
    if (column >= 0 && column < p.rows && step * STEP_INPUTS + k < p.inputs)
      *(uint4*)(p.out + (i64)column * p.inputs + step * STEP_INPUTS + k) = *(const uint4*)(rows + row * STRIDE + k);
  }
}

struct UnpackArgs {
  const u8* records;
  u8* values;     // [rows][inputs]
  float* scales;  // [rows]
  int rows, inputs;
};

// Write the 8-bit floats of a matrix with one float32 scale per row. One block per record.
template <class Record128>
DEVICE void unpack_float8(const UnpackArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  static_assert(Record128::GROUPS == 1 && Record128::PAIR_BYTES == 8, "one float32 scale per row");
  constexpr int STRIDE = STEP_INPUTS + 16, LANE_BYTES = 16;
  const int steps = (p.inputs + STEP_INPUTS - 1) / STEP_INPUTS, tile = blockIdx.x / steps, step = blockIdx.x % steps;
  const u8* record = p.records + (i64)blockIdx.x * Record128::BYTES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  uint4 words[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; part++) words[part] = __ldcs((const uint4*)(record + warp * Record128::TILE_BYTES + (part * 32 + lane) * LANE_BYTES));
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const u32 w[4] = {words[part].x, words[part].y, words[part].z, words[part].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {  // upper columns in odd bytes
      u8* to = shared + (warp * 16 + g) * STRIDE + part * 32 + i * 8 + 2 * c;
      *(u16*)to = __byte_perm(w[i], 0, 0x4420);
      *(u16*)(to + 8 * STRIDE) = __byte_perm(w[i], 0, 0x4431);
    }
  }
  if (step == 0 && c == 0) {
    const float2 scales = Record128::scales(record, warp, 0, lane, 0);
    const int row = tile * 128 + warp * 16 + g;
    if (row < p.rows) p.scales[row] = scales.x;
    if (row + 8 < p.rows) p.scales[row + 8] = scales.y;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * (STEP_INPUTS / 16); i += COMPUTE_THREADS) {
    const int within = i / (STEP_INPUTS / 16), row = tile * 128 + within, k = i % (STEP_INPUTS / 16) * 16;
    if (row < p.rows && step * STEP_INPUTS + k < p.inputs)
      *(uint4*)(p.values + (i64)row * p.inputs + step * STEP_INPUTS + k) = *(const uint4*)(shared + within * STRIDE + k);
  }
}
