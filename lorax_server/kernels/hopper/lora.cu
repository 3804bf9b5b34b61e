// LoRA for small batches with many adapters, computed by some blocks of a launch.
//
// Each block has eight compute warps and one thread that fetches LoRA factors with TMA: up to 16 ranks x WIDTH elements per
// instruction, through a ring of stages in shared memory. A stage is [WIDTH / 64][ranks][128 bytes, swizzled]. A lane reads
// 16 contiguous bytes directly into an MMA operand: the order along the inner dimension is arbitrary if both operands agree.
//
// Shrink: V = scale * x A^T. A block processes whole items (16 ranks of one tile and slice), each warp an eighth of every
// stage. The ranks of an item are stored in V in the order r % 4 * 4 + r / 4.
// Expand: after all blocks have finished the shrink, D = V B or y += V B, for WIDTH columns of a tile. Large ranks are split
// into parts with separate D buffers, to balance the work.
// Data outside L2 is loaded two stages ahead: records, 32 per load (one per lane), and x and V in registers.

constexpr int TILE_ROWS = 8;  // rows per tile, with the same adapter
constexpr int DELTA_ROWS = 128;  // rows of each D buffer
constexpr int RING_HEADER_BYTES = 9216;  // shared memory before the ring: warp sums and barriers
constexpr uint4 ZEROS = {0, 0, 0, 0};
constexpr int HAS_LORA = 1, HAS_OUTPUT_SCALE = 2, HAS_OUTPUT_BIAS = 4, EXTRA_PART = 8;  // row flags; EXTRA_PART times the number of additional parts

struct Record {  // one tile and slice
  i64 a, b;      // offsets of A and B
  int rows;      // first row | number of rows << 24
  int rank;
  float scale;
  int unused;
};

struct LinearArgs {
  TensorMap a[2], b[3][2];  // adapter buffer as rows of A, and as rows of B for each slice; boxes of 16 and of 8 rows
  const u16 *x, *buffer;    // inputs [M][x_stride]; adapter buffer
  u16 *y, *v, *d;           // outputs [M][y_stride]; V [M][slices * MAX_RANK]; LoRA outputs D [part][DELTA_ROWS][y_stride]
  const u16* bias;
  const i64* table;         // [adapter][target][FIELDS]
  const int* adapters;      // [M]
  const u32* items;         // [slice][max_items] shrink items: tile | item index within the tile << 16
  const Record* records;    // [slice][T]
  const u32* parts;         // [slice][max_parts] expand parts: tile | part index within the tile << 16
  const int *num_items, *num_parts, *num_tiles;  // [slice], [slice], [1]
  const u8* flags;          // [slice][T] flags of each row's adapter
  int* counters;            // blocks that finished the shrink, finished the expand, and no longer need the counters
  const float* row_scales;  // [M] scales of rounded inputs; null if the product's inputs are not rounded
  int K, N[3], slices;
  int x_stride, y_stride, M, T, max_items, max_parts;
  int target, num_targets;  // table index of the first slice; targets per adapter
  int lora_blocks, steps;   // blocks for LoRA; steps of `Product::STEP` inputs per product block
  int early;                // 0: plain launch. 1: wait for the previous kernel. 2: and launch dependents immediately. 3: or after the last load
  int zero;                 // always 0, but unknown to the compiler (see `Ring::release`)
};

// Pipeline stages, filled by the fetching thread and read by the warps in the same order.
template <int WIDTH, int BYTES>
struct Ring {
  static constexpr int STAGE_BYTES = ITEM_RANKS * WIDTH * 2, STAGES = (BYTES - RING_HEADER_BYTES) / STAGE_BYTES;
  static_assert(STAGES >= 3, "too little shared memory");
  u32 full, empty, first;
  int stage = 0, phase = 0;

  DEVICE Ring(u8* shared) : full(shared_address(shared) + 8192), empty(full + STAGES * 8), first(shared_address(shared) + RING_HEADER_BYTES) {}
  DEVICE void init() {
    for (int s = 0; s < STAGES; s++) { init_barrier(full + s * 8, 1); init_barrier(empty + s * 8, 8); }
    fence_barriers();
  }
  DEVICE void advance() { if (++stage == STAGES) { stage = 0; phase ^= 1; } }
  DEVICE void fetch(const TensorMap* maps, i64 at, int ranks) {
    wait_barrier(empty + stage * 8, phase ^ 1);
    expect_bytes(full + stage * 8, ranks > 8 ? STAGE_BYTES : STAGE_BYTES / 2);
    copy_factor(first + stage * STAGE_BYTES, maps + (ranks <= 8), full + stage * 8, (int)(at / 64));
    advance();
  }
  DEVICE void wait() { wait_barrier(full + stage * 8, phase); }
  // Return the address of eight elements, starting at `element`, of one rank in a stage with `ranks` ranks.
  DEVICE u32 address_of(int element, int rank, int ranks) const {
    return first + stage * STAGE_BYTES + (element / 64 * (ranks > 8 ? 16 : 8) + rank) * 128 + ((element % 64 / 8 ^ (rank & 7)) << 4);
  }
  // Release a stage for refilling. The barrier address depends on the loaded data: otherwise ptxas moves the arrival before
  // the loads, and TMA overwrites unread data (observed with refills from L2).
  DEVICE void release(u32 loaded, int zero) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(empty + stage * 8 + (loaded & zero));
    advance();
  }
};

// A shrink item: up to 16 ranks of one tile and slice.
struct Items {
  const LinearArgs& p;
  int first[3], total;  // first item index of each slice; total number of items
  DEVICE Items(const LinearArgs& args) : p(args), total(0) {
#pragma unroll
    for (int s = 0; s < 3; s++) { first[s] = total; if (s < p.slices) total += __ldg(p.num_items + s); }
  }
  struct Item { int slice, tile, done; };  // done: ranks in the previous items of the tile
  DEVICE Item find(int number) const {
    const int slice = (p.slices > 1 && number >= first[1]) + (p.slices > 2 && number >= first[2]);
    const u32 item = __ldg(p.items + slice * p.max_items + number - (slice == 0 ? 0 : slice == 1 ? first[1] : first[2]));
    return {slice, (int)(item & 0xffff), (int)(item >> 16) * ITEM_RANKS};
  }
  DEVICE const Record& record(const Item& i) const { return p.records[i.slice * p.T + i.tile]; }
};

// An expand unit: WIDTH columns of one part of a tile's ranks in one slice.
template <int WIDTH>
struct Units {
  const LinearArgs& p;
  int blocks[3], first[3], total;  // per slice: column blocks, and first unit index
  DEVICE Units(const LinearArgs& args) : p(args), total(0) {
#pragma unroll
    for (int s = 0; s < 3; s++) {
      blocks[s] = (p.N[s] + WIDTH - 1) / WIDTH;
      first[s] = total;
      if (s < p.slices) total += __ldg(p.num_parts + s) * blocks[s];
    }
  }
  struct Unit { int slice, tile, part, column; };  // column: first column within the slice
  DEVICE Unit find(int number) const {
    const int slice = (p.slices > 1 && number >= first[1]) + (p.slices > 2 && number >= first[2]);
    const int rest = number - (slice == 0 ? 0 : slice == 1 ? first[1] : first[2]);
    const int count = slice == 0 ? blocks[0] : slice == 1 ? blocks[1] : blocks[2], at = rest / count;
    const u32 part = __ldg(p.parts + slice * p.max_parts + at);
    return {slice, (int)(part & 0xffff), (int)(part >> 16), (rest - at * count) * WIDTH};
  }
  DEVICE const Record& record(const Unit& u) const { return p.records[u.slice * p.T + u.tile]; }
};

// The ranks `begin` to `end` of a unit. If results are added to y, one unit has all ranks.
struct Ranks {
  int begin, end;
  DEVICE Ranks(int part, int rank, bool whole) : begin(whole ? 0 : part * PART_RANKS), end(whole ? (part ? 0 : rank) : min(rank, begin + PART_RANKS)) {}
};

// Loads each record while the previous factor is being fetched.
template <int WIDTH, bool ADD, class RingType>
DEVICE void fetch_factors(const LinearArgs& p, RingType& ring, int block) {
  struct Factor { i64 at; int ranks, slice; };
  const Items items(p);
  auto find_item = [&](int i) {
    if (i >= items.total) return Factor{0, 0, 0};
    const auto item = items.find(i);
    const Record& r = items.record(item);
    return Factor{__ldg(&r.a) + (i64)item.done * p.K, __ldg(&r.rank) - item.done, 0};
  };
  Factor next = find_item(block);
  for (int i = block; i < items.total; i += p.lora_blocks) {
    const Factor now = next;
    next = find_item(i + p.lora_blocks);
    for (int k = 0; k < p.K; k += WIDTH) ring.fetch(p.a, now.at + k, now.ranks);
  }
  const Units<WIDTH> units(p);
  auto find_unit = [&](int i) {
    if (i >= units.total) return Factor{0, 0, 0};
    const auto u = units.find(i);
    const Record& r = units.record(u);
    const Ranks ranks(u.part, __ldg(&r.rank), ADD);
    return Factor{__ldg(&r.b) + (i64)ranks.begin * p.N[u.slice] + u.column, ranks.end - ranks.begin, u.slice};
  };
  next = find_unit(block);
  for (int i = block; i < units.total; i += p.lora_blocks) {
    const Factor now = next;
    next = find_unit(i + p.lora_blocks);
    for (int done = 0; done < now.ranks; done += ITEM_RANKS)
      ring.fetch(p.b[now.slice], now.at + (i64)done * p.N[now.slice], now.ranks - done);
  }
}

template <class Number, int WIDTH, class RingType>
DEVICE void shrink(const LinearArgs& p, RingType& ring, float* sums, int block) {
  constexpr int PART = WIDTH / 8, LOADS = PART / 32;  // elements per stage and warp; 16-byte loads of x per lane
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const Items items(p);
  const int count = block < items.total ? (items.total - block + p.lora_blocks - 1) / p.lora_blocks : 0;
  const int k_tiles = (p.K + WIDTH - 1) / WIDTH, first = warp * PART + c * 8, v_stride = p.slices * MAX_RANK;
  struct Stage { int rows, ranks, column, k_tile; float scale; };  // column: column of V
  int my_rows = 0, my_ranks = 0, my_column = 0;
  float my_scale = 0;
  auto load_records = [&](int number) {  // 32 items starting at `number`, one per lane
    const int i = block + (number + lane) * p.lora_blocks;
    if (i >= items.total) return;
    const auto item = items.find(i);
    const Record& r = items.record(item);
    my_rows = __ldg(&r.rows); my_ranks = __ldg(&r.rank) - item.done; my_scale = __ldg(&r.scale);
    my_column = item.slice * MAX_RANK + item.done;
  };
  if (count) load_records(0);
  if (p.early) wait_for_previous_kernel();
  int number = -1;
  Stage ahead = {0, 0, 0, k_tiles - 1, 0};
  auto load_next = [&](Stage& stage, uint4 (&x)[LOADS]) {  // returns false at the end
    if (++ahead.k_tile >= k_tiles) {
      if (number + 1 >= count) { ahead.k_tile = k_tiles; return false; }
      number++;
      if (number && (number & 31) == 0) load_records(number);
      ahead = {__shfl_sync(~0u, my_rows, number & 31), __shfl_sync(~0u, my_ranks, number & 31),
               __shfl_sync(~0u, my_column, number & 31), 0, __shfl_sync(~0u, my_scale, number & 31)};
    }
    stage = ahead;
    const int k = ahead.k_tile * WIDTH + first;
    const u16* from = p.x + (i64)((ahead.rows & 0xffffff) + g) * p.x_stride + k;
#pragma unroll
    for (int q = 0; q < LOADS; q++)
      x[q] = g < ahead.rows >> 24 && k + q * 32 < p.K ? __ldcg((const uint4*)(from + q * 32)) : ZEROS;
    return true;
  };
  int half = 0;
  float d[2][4];
  auto multiply = [&](const Stage& stage, const uint4 (&x)[LOADS]) {
    if (stage.k_tile == 0)
#pragma unroll
      for (int i = 0; i < 8; i++) d[i >> 2][i & 3] = 0;
    ring.wait();
    u32 loaded = 0;
#pragma unroll
    for (int q = 0; q < LOADS; q++) {
      const u32 at = ring.address_of(first + q * 32, g, stage.ranks);
      const bool inside = stage.k_tile * WIDTH + first + q * 32 < p.K;  // the next elements belong to another rank and can be NaN
      const uint4 a0 = inside && g < stage.ranks ? load_shared(at) : ZEROS, a1 = inside && g + 8 < stage.ranks ? load_shared(at + 1024) : ZEROS;
      mma<Number>(d[0], a0.x, a1.x, a0.y, a1.y, x[q].x, x[q].y);
      mma<Number>(d[1], a0.z, a1.z, a0.w, a1.w, x[q].z, x[q].w);
      loaded |= a0.x | a1.x;
    }
    ring.release(loaded, p.zero);
    if (stage.k_tile + 1 < k_tiles) return;
    float* mine = sums + (half * 8 + warp) * 128;  // [8 rows][16 ranks]
    mine[(2 * c) * 16 + g] = d[0][0] + d[1][0];
    mine[(2 * c + 1) * 16 + g] = d[0][1] + d[1][1];
    mine[(2 * c) * 16 + g + 8] = d[0][2] + d[1][2];
    mine[(2 * c + 1) * 16 + g + 8] = d[0][3] + d[1][3];
    sync_threads<2, COMPUTE_THREADS>();
    const int row = threadIdx.x >> 4, r = threadIdx.x & 15;
    if (row < stage.rows >> 24) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < 8; w++) sum += sums[(half * 8 + w) * 128 + threadIdx.x];
      p.v[(i64)((stage.rows & 0xffffff) + row) * v_stride + stage.column + r % 4 * 4 + r / 4] = (u16)Number::pack(sum * stage.scale, 0);
    }
    half ^= 1;
  };
  Stage stage0, stage1;
  uint4 x0[LOADS], x1[LOADS];
  bool more0 = load_next(stage0, x0), more1 = load_next(stage1, x1);
  while (more0) {
    multiply(stage0, x0);
    more0 = load_next(stage0, x0);
    if (!more1) break;
    multiply(stage1, x1);
    more1 = load_next(stage1, x1);
  }
  sync_threads<2, COMPUTE_THREADS>();
  if (threadIdx.x == 0) increment(p.counters);
}

template <class Number, int WIDTH, bool ADD, class RingType>
DEVICE void expand(const LinearArgs& p, RingType& ring, int block) {
  constexpr int PART = WIDTH / 8, GROUPS = PART / 64;  // columns per stage and warp, in groups of 64
  static_assert(GROUPS >= 1, "a lane has eight columns");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3, v_stride = p.slices * MAX_RANK;
  const Units<WIDTH> units(p);
  if (block >= units.total) return;
  struct Stage { int rows, done, end, begin, slice, column; };  // ranks `done` to `end`; column within the slice
  int my_rows = 0, my_end = -1, my_begin = 0, my_slice = 0, my_column = 0;
  auto load_records = [&](int number) {  // 32 units starting at `number`, one per lane; end is -1 past the last unit
    const int i = block + (number + lane) * p.lora_blocks;
    my_end = -1;
    if (i >= units.total) return;
    const auto u = units.find(i);
    const Record& r = units.record(u);
    const Ranks ranks(u.part, __ldg(&r.rank), ADD);
    my_rows = __ldg(&r.rows); my_end = ranks.end; my_begin = ranks.begin; my_slice = u.slice; my_column = u.column;
  };
  load_records(0);
  if (lane == 0) wait_for_count(p.counters, p.lora_blocks);
  __syncwarp();
  int number = -1;
  Stage ahead = {0, 0, 0, 0, 0, 0};
  auto load_next = [&](Stage& stage, uint2& v) {  // returns false at the end
    ahead.done += ITEM_RANKS;
    while (ahead.done >= ahead.end) {
      if (ahead.end < 0) return false;
      number++;
      if (number && (number & 31) == 0) load_records(number);
      const int from = number & 31, begin = __shfl_sync(~0u, my_begin, from);
      ahead = {__shfl_sync(~0u, my_rows, from), begin, __shfl_sync(~0u, my_end, from), begin,
               __shfl_sync(~0u, my_slice, from), __shfl_sync(~0u, my_column, from)};
    }
    stage = ahead;
    v = uint2{0, 0};
    if (g < ahead.rows >> 24)
      v = __ldcg((const uint2*)(p.v + (i64)((ahead.rows & 0xffffff) + g) * v_stride + ahead.slice * MAX_RANK + ahead.done + 4 * c));
    return true;
  };
  float d[GROUPS][4][4];
  uint4 old[GROUPS][2];
  auto multiply = [&](const Stage& stage, const uint2& v) {
    const int rows = stage.rows >> 24, ranks = stage.end - stage.done, left = ranks - c, first = warp * PART + g * 8;
    const int y_column = stage.column + (stage.slice > 0 ? p.N[0] : 0) + (stage.slice > 1 ? p.N[1] : 0) + first;
    u16* y = (ADD ? p.y : p.d + (i64)(stage.begin / PART_RANKS) * DELTA_ROWS * p.y_stride) + (i64)((stage.rows & 0xffffff) + 2 * c) * p.y_stride + y_column;  // rows 2c and 2c + 1
    auto inside = [&](int k) { return stage.column + first + k * 64 < p.N[stage.slice]; };
    if (stage.done == stage.begin) {
#pragma unroll
      for (int k = 0; k < GROUPS; k++) {
        if (ADD && 2 * c < rows && inside(k)) old[k][0] = __ldcg((const uint4*)(y + k * 64));
        if (ADD && 2 * c + 1 < rows && inside(k)) old[k][1] = __ldcg((const uint4*)(y + p.y_stride + k * 64));
#pragma unroll
        for (int i = 0; i < 16; i++) d[k][i >> 2][i & 3] = 0;
      }
    }
    ring.wait();
    u32 loaded = 0;
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {  // this lane has ranks c, c + 4, c + 8, c + 12 of eight columns
      const int at = first + k * 64;
      const uint4 b0 = left > 0 ? load_shared(ring.address_of(at, c, ranks)) : ZEROS, b1 = left > 4 ? load_shared(ring.address_of(at, c + 4, ranks)) : ZEROS,
                  b2 = left > 8 ? load_shared(ring.address_of(at, c + 8, ranks)) : ZEROS, b3 = left > 12 ? load_shared(ring.address_of(at, c + 12, ranks)) : ZEROS;
      const u32 w0[4] = {b0.x, b0.y, b0.z, b0.w}, w1[4] = {b1.x, b1.y, b1.z, b1.w}, w2[4] = {b2.x, b2.y, b2.z, b2.w}, w3[4] = {b3.x, b3.y, b3.z, b3.w};
#pragma unroll
      for (int i = 0; i < 4; i++)
        mma<Number>(d[k][i], __byte_perm(w0[i], w1[i], 0x5410), __byte_perm(w0[i], w1[i], 0x7632), __byte_perm(w2[i], w3[i], 0x5410),
                    __byte_perm(w2[i], w3[i], 0x7632), v.x, v.y);
      loaded |= b0.x | b1.x | b2.x | b3.x;
    }
    ring.release(loaded, p.zero);
    if (ranks > ITEM_RANKS) return;
#pragma unroll
    for (int k = 0; k < GROUPS; k++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (2 * c + e >= rows || !inside(k)) continue;
        const u32 was[4] = {old[k][e].x, old[k][e].y, old[k][e].z, old[k][e].w};
        u32 now[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float2 f = ADD ? Number::unpack(was[i]) : float2{0, 0};
          now[i] = Number::pack(f.x + d[k][i][e], f.y + d[k][i][e + 2]);
        }
        *(uint4*)(y + e * p.y_stride + k * 64) = make_uint4(now[0], now[1], now[2], now[3]);
      }
  };
  Stage stage0, stage1;
  uint2 v0, v1;
  bool more0 = load_next(stage0, v0), more1 = more0 && load_next(stage1, v1);
  while (more0) {
    multiply(stage0, v0);
    more0 = load_next(stage0, v0);
    if (!more1) break;
    multiply(stage1, v1);
    more1 = load_next(stage1, v1);
  }
}

// LoRA for one linear layer, by block `block` of `p.lora_blocks`. Requires THREADS threads.
template <class Number, int WIDTH, int BYTES, bool ADD>
DEVICE void lora(const LinearArgs& p, u8* shared, int block) {
  Ring<WIDTH, BYTES> ring(shared);
  if (threadIdx.x == COMPUTE_THREADS) ring.init();
  sync_threads<3, THREADS>();
  if (*p.num_tiles == 0) {
    if (p.early) wait_for_previous_kernel();
    return;
  }
  if (threadIdx.x >= COMPUTE_THREADS) {
    if (threadIdx.x == COMPUTE_THREADS) fetch_factors<WIDTH, ADD>(p, ring, block);
    return;
  }
  shrink<Number, WIDTH>(p, ring, (float*)shared, block);
  expand<Number, WIDTH, ADD>(p, ring, block);
  sync_threads<2, COMPUTE_THREADS>();
}

// The last of `users` callers resets the counters for the next launch.
DEVICE void reset_counters(const LinearArgs& p, int users) {
  if (fetch_and_increment(p.counters + 2) == users - 1) p.counters[0] = p.counters[1] = p.counters[2] = 0;
}

// y += LoRA, after a cuBLAS product.
template <class Number>
DEVICE void add_lora(const LinearArgs& p) {
  extern __shared__ __align__(1024) u8 shared[];
  if (p.early == 2) launch_dependents();
  lora<Number, 1024, 150 * 1024, true>(p, shared, blockIdx.x);
  if (threadIdx.x == 0 && *p.num_tiles) reset_counters(p, p.lora_blocks);
}
