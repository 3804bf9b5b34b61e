// LoRA for a few rows of each of many adapters, by some blocks of a launch.
//
// Every block has eight warps that compute, and one thread that fetches factors: up to 16 ranks of WIDTH elements at a
// time, one instruction each, through a ring of stages in shared memory. A stage is [WIDTH / 64][ranks][128 bytes,
// swizzled]. A lane reads 16 contiguous bytes straight into an operand of the MMA: which slot of the MMA's inner
// dimension holds which element is free, as long as both operands agree.
//
// Shrink: V = scale * x A^T. A block takes whole items (16 ranks of one tile's adapter at one slice), each warp an eighth
// of every stage. The ranks of an item lie in V in the order r % 4 * 4 + r / 4.
// Expand: when all blocks have shrunk, D = V B, or y += V B, for WIDTH columns of a tile at a time. A large rank is cut
// into parts, each with a D of its own, so that no block has much more to do than the others.
// Whatever lies behind L2 is asked for two stages ahead: records 32 at a time, one in each lane; x and V in registers.

constexpr int TILE_ROWS = 8;    // rows of one adapter that are multiplied together
constexpr int D_ROWS = 128;     // rows that a D has room for
constexpr int COMPUTING = 256;
constexpr int HEAD_BYTES = 9216;  // of shared memory in front of the ring: sums of the warps, and barriers
constexpr uint4 ZEROS = {0, 0, 0, 0};
constexpr int HAS_LORA = 1, HAS_FACTOR = 2, HAS_SHIFT = 4, MORE_PARTS = 8;  // flags: the last, times the parts but one

struct Record {  // one tile at one slice
  i64 a, b;      // where its factors lie
  int rows;      // first row | number of rows << 24
  int rank;
  float scale;
  int unused;
};

struct Args {
  TensorMap a[2], b[3][2];  // the adapters' memory as rows of the linear's inputs, and of each slice's outputs; boxes of 16 rows, and of 8
  const u16 *x, *buffer;    // inputs [M][x_stride]; the adapters' memory
  u16 *y, *v, *d;           // outputs [M][y_stride]; x A^T [M][slices * MAX_RANK]; LoRA's part of the outputs [part][D_ROWS][y_stride]
  const u16* bias;
  const i64* table;         // [adapter][target][FIELDS]
  const int* adapters;      // [M]
  const u32* items;         // [slice][max_items] of the shrink: tile | number among the tile's items << 16
  const Record* records;    // [slice][T]
  const u32* parts;         // [slice][max_parts] of the expand: tile | number among the tile's parts << 16
  const int *num_items, *num_parts, *num_tiles;  // [slice], [slice], [1]
  const u8* flags;          // [slice][T] what each row's adapter has here
  int* counters;            // blocks that have shrunk; that have expanded; that need the counters no more
  int K, N[3], slices;
  int x_stride, y_stride, M, T, max_items, max_parts;
  int target, num_targets;  // the first slice's row of the table, and how many rows an adapter has
  int lora_blocks, steps;   // blocks that do LoRA; pieces of 64 inputs that a block of the product does
  int early;                // 0: plain launch. 1: wait for the kernel before. 2: and let the next one start at once. 3: or after the last load
  int zero;                 // 0, which the compiler does not know (see `Ring::release`)
};

// The stages that a block's fetching thread fills and its warps read, in the same order.
template <int WIDTH, int BYTES>
struct Ring {
  static constexpr int STAGE_BYTES = ITEM_RANKS * WIDTH * 2, STAGES = (BYTES - HEAD_BYTES) / STAGE_BYTES;
  static_assert(STAGES >= 3, "too little shared memory");
  u32 full, empty, first;
  int stage = 0, phase = 0;

  DEVICE Ring(u8* shared) : full(shared_address(shared) + 8192), empty(full + STAGES * 8), first(shared_address(shared) + HEAD_BYTES) {}
  DEVICE void init() {
    for (int s = 0; s < STAGES; s++) { init_barrier(full + s * 8, 1); init_barrier(empty + s * 8, 8); }
    publish_barriers();
  }
  DEVICE void advance() { if (++stage == STAGES) { stage = 0; phase ^= 1; } }
  DEVICE void fetch(const TensorMap* maps, i64 at, int ranks) {
    wait_barrier(empty + stage * 8, phase ^ 1);
    expect_bytes(full + stage * 8, ranks > 8 ? STAGE_BYTES : STAGE_BYTES / 2);
    copy_factor(first + stage * STAGE_BYTES, maps + (ranks <= 8), full + stage * 8, (int)(at / 64));
    advance();
  }
  DEVICE void wait() { wait_barrier(full + stage * 8, phase); }
  // Where eight elements from `element` on of one rank lie in a stage of so many ranks.
  DEVICE u32 place(int element, int rank, int ranks) const {
    return first + stage * STAGE_BYTES + (element / 64 * (ranks > 8 ? 16 : 8) + rank) * 128 + ((element % 64 / 8 ^ (rank & 7)) << 4);
  }
  // A stage may be filled again. The address depends on what was loaded: otherwise ptxas lets the arrival overtake the
  // loads, and the copy engine overwrites what is still to be read (seen where refills come from L2).
  DEVICE void release(u32 loaded, int zero) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(empty + stage * 8 + (loaded & zero));
    advance();
  }
};

// An item of the shrink: up to 16 ranks of one tile at one slice.
struct Items {
  const Args& p;
  int first[3], total;  // the number of each slice's first item, and of all
  DEVICE Items(const Args& args) : p(args), total(0) {
#pragma unroll
    for (int s = 0; s < 3; s++) { first[s] = total; if (s < p.slices) total += __ldg(p.num_items + s); }
  }
  struct Item { int slice, tile, done; };  // ranks that the items before it have
  DEVICE Item find(int number) const {
    const int slice = (p.slices > 1 && number >= first[1]) + (p.slices > 2 && number >= first[2]);
    const u32 item = __ldg(p.items + slice * p.max_items + number - (slice == 0 ? 0 : slice == 1 ? first[1] : first[2]));
    return {slice, (int)(item & 0xffff), (int)(item >> 16) * ITEM_RANKS};
  }
  DEVICE const Record& record(const Item& i) const { return p.records[i.slice * p.T + i.tile]; }
};

// A unit of the expand: WIDTH columns of one part of a tile's ranks at one slice.
template <int WIDTH>
struct Units {
  const Args& p;
  int blocks[3], first[3], total;  // of each slice: columns in WIDTHs, and the number of its first unit
  DEVICE Units(const Args& args) : p(args), total(0) {
#pragma unroll
    for (int s = 0; s < 3; s++) {
      blocks[s] = (p.N[s] + WIDTH - 1) / WIDTH;
      first[s] = total;
      if (s < p.slices) total += __ldg(p.num_parts + s) * blocks[s];
    }
  }
  struct Unit { int slice, tile, part, column; };  // the first column within the slice
  DEVICE Unit find(int number) const {
    const int slice = (p.slices > 1 && number >= first[1]) + (p.slices > 2 && number >= first[2]);
    const int rest = number - (slice == 0 ? 0 : slice == 1 ? first[1] : first[2]);
    const int count = slice == 0 ? blocks[0] : slice == 1 ? blocks[1] : blocks[2], at = rest / count;
    const u32 part = __ldg(p.parts + slice * p.max_parts + at);
    return {slice, (int)(part & 0xffff), (int)(part >> 16), (rest - at * count) * WIDTH};
  }
  DEVICE const Record& record(const Unit& u) const { return p.records[u.slice * p.T + u.tile]; }
};

// The ranks of a unit, from `begin` to `end`. Where the result is added to y, one unit has all of them.
struct Ranks {
  int begin, end;
  DEVICE Ranks(int part, int rank, bool whole) : begin(whole ? 0 : part * PART_RANKS), end(whole ? (part ? 0 : rank) : min(rank, begin + PART_RANKS)) {}
};

// Every factor's record is asked for while the one before is being fetched.
template <int WIDTH, bool ADD, class RingType>
DEVICE void fetch_factors(const Args& p, RingType& ring, int block) {
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
DEVICE void shrink(const Args& p, RingType& ring, float* sums, int block) {
  constexpr int PART = WIDTH / 8, LOADS = PART / 32;  // elements of a stage for a warp; 16-byte loads of x for a lane
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const Items items(p);
  const int count = block < items.total ? (items.total - block + p.lora_blocks - 1) / p.lora_blocks : 0;
  const int stretches = (p.K + WIDTH - 1) / WIDTH, first = warp * PART + c * 8, v_stride = p.slices * MAX_RANK;
  struct Stage { int rows, ranks, column, stretch; float scale; };  // `column` of V
  int my_rows = 0, my_ranks = 0, my_column = 0;
  float my_scale = 0;
  auto load_records = [&](int number) {  // of the 32 items from `number` on, one in each lane
    const int i = block + (number + lane) * p.lora_blocks;
    if (i >= items.total) return;
    const auto item = items.find(i);
    const Record& r = items.record(item);
    my_rows = __ldg(&r.rows); my_ranks = __ldg(&r.rank) - item.done; my_scale = __ldg(&r.scale);
    my_column = item.slice * MAX_RANK + item.done;
  };
  if (count) load_records(0);
  if (p.early) wait_for_kernel_before();
  int number = -1;
  Stage ahead = {0, 0, 0, stretches - 1, 0};
  auto load_next = [&](Stage& stage, uint4 (&x)[LOADS]) {  // false at the end
    if (++ahead.stretch >= stretches) {
      if (number + 1 >= count) { ahead.stretch = stretches; return false; }
      number++;
      if (number && (number & 31) == 0) load_records(number);
      ahead = {__shfl_sync(~0u, my_rows, number & 31), __shfl_sync(~0u, my_ranks, number & 31),
               __shfl_sync(~0u, my_column, number & 31), 0, __shfl_sync(~0u, my_scale, number & 31)};
    }
    stage = ahead;
    const int k = ahead.stretch * WIDTH + first;
    const u16* from = p.x + (i64)((ahead.rows & 0xffffff) + g) * p.x_stride + k;
#pragma unroll
    for (int q = 0; q < LOADS; q++)
      x[q] = g < ahead.rows >> 24 && k + q * 32 < p.K ? __ldcg((const uint4*)(from + q * 32)) : ZEROS;
    return true;
  };
  int half = 0;
  float d[2][4];
  auto multiply = [&](const Stage& stage, const uint4 (&x)[LOADS]) {
    if (stage.stretch == 0)
#pragma unroll
      for (int i = 0; i < 8; i++) d[i >> 2][i & 3] = 0;
    ring.wait();
    u32 loaded = 0;
#pragma unroll
    for (int q = 0; q < LOADS; q++) {
      const u32 at = ring.place(first + q * 32, g, stage.ranks);
      const bool inside = stage.stretch * WIDTH + first + q * 32 < p.K;  // past it lies another rank, maybe a NaN
      const uint4 a0 = inside && g < stage.ranks ? load_shared(at) : ZEROS, a1 = inside && g + 8 < stage.ranks ? load_shared(at + 1024) : ZEROS;
      mma<Number>(d[0], a0.x, a1.x, a0.y, a1.y, x[q].x, x[q].y);
      mma<Number>(d[1], a0.z, a1.z, a0.w, a1.w, x[q].z, x[q].w);
      loaded |= a0.x | a1.x;
    }
    ring.release(loaded, p.zero);
    if (stage.stretch + 1 < stretches) return;
    float* mine = sums + (half * 8 + warp) * 128;  // [8 rows][16 ranks]
    mine[(2 * c) * 16 + g] = d[0][0] + d[1][0];
    mine[(2 * c + 1) * 16 + g] = d[0][1] + d[1][1];
    mine[(2 * c) * 16 + g + 8] = d[0][2] + d[1][2];
    mine[(2 * c + 1) * 16 + g + 8] = d[0][3] + d[1][3];
    sync_threads<2, COMPUTING>();
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
  sync_threads<2, COMPUTING>();
  if (threadIdx.x == 0) signal(p.counters);
}

template <class Number, int WIDTH, bool ADD, class RingType>
DEVICE void expand(const Args& p, RingType& ring, int block) {
  constexpr int PART = WIDTH / 8, GROUPS = PART / 64;  // columns of a stage for a warp, in groups of 64
  static_assert(GROUPS >= 1, "a lane has eight columns");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3, v_stride = p.slices * MAX_RANK;
  const Units<WIDTH> units(p);
  if (block >= units.total) return;
  struct Stage { int rows, done, end, begin, slice, column; };  // ranks from `done` on, up to `end`; column of the slice
  int my_rows = 0, my_end = -1, my_begin = 0, my_slice = 0, my_column = 0;
  auto load_records = [&](int number) {  // of the 32 units from `number` on, one in each lane; an end of -1 past the last
    const int i = block + (number + lane) * p.lora_blocks;
    my_end = -1;
    if (i >= units.total) return;
    const auto u = units.find(i);
    const Record& r = units.record(u);
    const Ranks ranks(u.part, __ldg(&r.rank), ADD);
    my_rows = __ldg(&r.rows); my_end = ranks.end; my_begin = ranks.begin; my_slice = u.slice; my_column = u.column;
  };
  load_records(0);
  if (lane == 0) await(p.counters, p.lora_blocks);
  __syncwarp();
  int number = -1;
  Stage ahead = {0, 0, 0, 0, 0, 0};
  auto load_next = [&](Stage& stage, uint2& v) {  // false at the end
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
    u16* y = (ADD ? p.y : p.d + (i64)(stage.begin / PART_RANKS) * D_ROWS * p.y_stride) + (i64)((stage.rows & 0xffffff) + 2 * c) * p.y_stride + y_column;  // rows 2c and 2c + 1
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
    for (int k = 0; k < GROUPS; k++) {  // this lane: ranks c, c + 4, c + 8, c + 12 of eight columns
      const int at = first + k * 64;
      const uint4 b0 = left > 0 ? load_shared(ring.place(at, c, ranks)) : ZEROS, b1 = left > 4 ? load_shared(ring.place(at, c + 4, ranks)) : ZEROS,
                  b2 = left > 8 ? load_shared(ring.place(at, c + 8, ranks)) : ZEROS, b3 = left > 12 ? load_shared(ring.place(at, c + 12, ranks)) : ZEROS;
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

// LoRA of one linear by block `block` of `p.lora_blocks`. The caller's kernel has THREADS threads.
template <class Number, int WIDTH, int BYTES, bool ADD>
DEVICE void lora(const Args& p, u8* shared, int block) {
  Ring<WIDTH, BYTES> ring(shared);
  if (threadIdx.x == COMPUTING) ring.init();
  sync_threads<3, THREADS>();
  if (*p.num_tiles == 0) {
    if (p.early) wait_for_kernel_before();
    return;
  }
  if (threadIdx.x >= COMPUTING) {
    if (threadIdx.x == COMPUTING) fetch_factors<WIDTH, ADD>(p, ring, block);
    return;
  }
  shrink<Number, WIDTH>(p, ring, (float*)shared, block);
  expand<Number, WIDTH, ADD>(p, ring, block);
  sync_threads<2, COMPUTING>();
}

// The last of `users` to come leaves the counters at zero for the next launch.
DEVICE void leave_counters(const Args& p, int users) {
  if (arrive_in_turn(p.counters + 2) == users - 1) p.counters[0] = p.counters[1] = p.counters[2] = 0;
}

// y += LoRA, after a product by another library.
template <class Number>
DEVICE void add_lora(const Args& p) {
  extern __shared__ __align__(1024) u8 shared[];
  if (p.early == 2) let_next_kernel_start();
  lora<Number, 1024, 150 * 1024, true>(p, shared, blockIdx.x);
  if (threadIdx.x == 0 && *p.num_tiles) leave_counters(p, p.lora_blocks);
}
