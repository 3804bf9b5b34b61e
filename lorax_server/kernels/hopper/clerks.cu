// The clerks of decode.cu: they prepare items, store new tokens, and add up what workers leave.
template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
struct Clerks : DecodeBlock<Model, FLOAT8, D, TILES, STAGES> {
  using Block = DecodeBlock<Model, FLOAT8, D, TILES, STAGES>;
  using Number = typename Block::Number;
  using Block::QUERIES, Block::PAIRS, Block::Q_STRIDE, Block::SUM_STRIDE, Block::p, Block::thread, Block::lane,
      Block::warp, Block::num_items, Block::place, Block::queries, Block::new_key, Block::entry, Block::sums,
      Block::masses, Block::shares, Block::has_new, Block::highest_of;

  // Pair i of a head: dimensions i and i + half where they turn, else two neighbours after those.
  DEVICE int2 dims_of(int i) const { return i < p.half ? make_int2(i, i + p.half) : make_int2(2 * i, 2 * i + 1); }
  DEVICE float2 load_pair(const u16* head, int i) const {
    const int2 dims = dims_of(i);
    return {to_float<Model>(head[dims.x]), to_float<Model>(head[dims.y])};
  }
  DEVICE float2 load_angle(int token, int i) const {
    if (i >= p.half) return {0, 0};
    return {rounded<Model>(p.cos[token * p.angle_token + i]), rounded<Model>(p.sin[token * p.angle_token + i])};
  }
  DEVICE float2 rotate(float2 x, float2 angle, int i) const {  // as the reference does it: each product by a cosine is rounded
    if (i >= p.half) return x;
    return {rounded<Model>(rounded<Model>(x.x * angle.x) - x.y * angle.y), rounded<Model>(rounded<Model>(x.y * angle.x) + x.x * angle.y)};
  }
  static DEVICE float limited(float x) {  // to what float16 can hold; a NaN stays one
    return FLOAT8 && Model::is_bfloat16 ? (x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x) : x;
  }

  DEVICE Entry prepare(int item, int buffer) const {
    const Entry e = p.entries[item / p.kv_heads];
    const int head = item % p.kv_heads;
    if (!e.is_empty) {
      load_queries(e, head, buffer);
      if (has_new(e)) load_new(e, head, buffer);
    }
    if (thread == 0) entry(buffer) = e;  // for the workers; a clerk has its own, since others may be an item ahead of it
    arrive_at(READY + buffer);
    return e;
  }

  DEVICE void load_queries(const Entry& e, int head, int buffer) const {
    constexpr int COUNT = (QUERIES * PAIRS + HALF_BLOCK - 1) / HALF_BLOCK, STEP = COUNT < 4 ? COUNT : 4;  // loads under way at once
    const u16* from = p.q + e.token * p.q_token + (i64)head * p.sharing * p.q_head;
    for (int first = 0; first < COUNT; first += STEP) {
      float2 x[STEP], angle[STEP];
#pragma unroll
      for (int n = 0; n < STEP; n++) {
        const int i = (first + n) * HALF_BLOCK + thread, query = i / PAIRS;
        x[n] = {0, 0};
        if (query < p.sharing) x[n] = load_pair(from + query * p.q_head, i % PAIRS);
        angle[n] = load_angle(e.token, i % PAIRS);
      }
#pragma unroll
      for (int n = 0; n < STEP; n++) {
        const int i = (first + n) * HALF_BLOCK + thread;
        if (i >= QUERIES * PAIRS) break;
        const int2 dims = dims_of(i % PAIRS);
        const float2 turned = rotate(x[n], angle[n], i % PAIRS);
        u16* row = (u16*)(queries(buffer) + i / PAIRS * Q_STRIDE);
        row[dims.x] = from_float<Number>(limited(turned.x)), row[dims.y] = from_float<Number>(limited(turned.y));
      }
    }
  }

  // Rotates the new key, stores key and value in the cache, and keeps both as they are read from there later.
  DEVICE void load_new(const Entry& e, int head, int buffer) const {
    static_assert(PAIRS <= HALF_BLOCK);
    if (thread >= PAIRS) return;
    const i64 slot = p.slots ? p.slots[e.token] : -1;
    const float2 k = load_pair(p.k + e.token * p.k_token + (i64)head * p.k_head, thread), angle = load_angle(e.token, thread);
    const float2 v = load_pair(p.v + e.token * p.v_token + (i64)head * p.v_head, thread);
    const i64 to = ((slot / p.block_size * p.kv_heads + head) * p.block_size + slot % p.block_size) * D;
    const int2 dims = dims_of(thread);
    const float2 turned = rotate(k, angle, thread);
    float *key = new_key(buffer), *value = key + D;
    key[dims.x] = store(p.k_cache, to + dims.x, turned.x, slot >= 0, p.k_scale);
    key[dims.y] = store(p.k_cache, to + dims.y, turned.y, slot >= 0, p.k_scale);
    value[dims.x] = store(p.v_cache, to + dims.x, v.x, slot >= 0, p.v_scale);
    value[dims.y] = store(p.v_cache, to + dims.y, v.y, slot >= 0, p.v_scale);
  }
  static DEVICE float store(u8* cache, i64 at, float x, bool has_slot, float scale) {
    if constexpr (FLOAT8) {
      const u8 byte = narrow(__fdiv_rn(x, scale));
      if (has_slot) cache[at] = byte;
      return Float16::unpack(widen(byte)).x;
    }
    if (has_slot) ((u16*)cache)[at] = from_float<Model>(x);
    return x;
  }

  // Writes an item's result: the row's own, or that of its stretch.
  DEVICE void conclude(const Entry& e, int item, bool is_last) const {
    wait_at(FULL);
    const i64 place = (i64)item * p.sharing;
    for (int i = thread; i < p.sharing * (D / 4); i += HALF_BLOCK) {
      const int row = i / (D / 4), d = i % (D / 4) * 4;
      const float highest = highest_of(row);
      float4 sum = {0, 0, 0, 0};
      float weight = 0;
#pragma unroll
      for (int w = 0; w < WORKERS / 2; w++) {
        const float4 part = *(const float4*)(sums() + (w * QUERIES + row) * SUM_STRIDE + d);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
#pragma unroll
      for (int w = 0; w < WORKERS; w++) weight += masses()[w * QUERIES + row].y * exp2_of(masses()[w * QUERIES + row].x - highest);
      if (e.num_splits == 1) write_row(e, item % p.kv_heads, row, d, sum, weight);
      else {
        __stcg((float4*)(p.sums + (place + row) * D + d), sum);
        if (d == 0) __stcg(p.masses + place + row, make_float2(highest, weight));
      }
    }
    if (!is_last) arrive_at(EMPTY);
    if (e.num_splits > 1) join(e, item % p.kv_heads);
  }
  DEVICE void write_row(const Entry& e, int head, int row, int d, float4 sum, float weight) const {
    const float share = e.is_empty ? 0 : (FLOAT8 ? p.v_scale : 1.0f) / weight;
    u16* to = p.out + (((i64)e.token * p.kv_heads + head) * p.sharing + row) * D + d;
    *(uint2*)to = make_uint2(Model::pack(sum.x * share, sum.y * share), Model::pack(sum.z * share, sum.w * share));
  }

  // The last block to arrive adds the stretches of a sequence, in their order.
  DEVICE void join(const Entry& e, int head) const {
    __shared__ int before;
    int* counter = p.counters + (i64)e.seq * p.kv_heads + head;
    sync_threads<AMONG_CLERKS, HALF_BLOCK>();  // all have written
    if (thread == 0) before = arrive_in_turn(counter);
    sync_threads<AMONG_CLERKS, HALF_BLOCK>();
    if (before != e.num_splits - 1) return;
    const i64 first = ((i64)e.first * p.kv_heads + head) * p.sharing, step = (i64)p.kv_heads * p.sharing;
    for (int row = warp; row < p.sharing; row += HALF_BLOCK / 32) {  // a lane has a stretch
      const float2 mass = lane < e.num_splits ? __ldcg(p.masses + first + lane * step + row) : make_float2(NOTHING, 0);
      float highest = mass.x;
#pragma unroll
      for (int step = 16; step; step >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
      const float share = exp2_of(mass.x - highest);
      float weight = mass.y * share;
#pragma unroll
      for (int step = 16; step; step >>= 1) weight += __shfl_xor_sync(~0u, weight, step);
      shares()[row * MAX_SPLITS + lane] = share / weight;
    }
    sync_threads<AMONG_CLERKS, HALF_BLOCK>();
    for (int i = thread; i < p.sharing * (D / 4); i += HALF_BLOCK) {
      const int row = i / (D / 4), d = i % (D / 4) * 4;
      const float* from = p.sums + (first + row) * D + d;
      float4 sum = {0, 0, 0, 0};
      for (int s = 0; s < e.num_splits; s += AT_ONCE) {
        float4 parts[AT_ONCE];  // all loads are under way before the first is waited for
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          parts[i] = s + i < e.num_splits ? __ldcg((const float4*)(from + (s + i) * step * D)) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const float share = shares()[row * MAX_SPLITS + s + i];
          sum.x += parts[i].x * share, sum.y += parts[i].y * share, sum.z += parts[i].z * share, sum.w += parts[i].w * share;
        }
      }
      write_row(e, head, row, d, sum, 1);
    }
    if (thread == 0) *counter = 0;
  }

  DEVICE void keep_books() const {
    wait_for_kernel_before();
    int buffer = 0;
    Entry e, coming;
    if (blockIdx.x < num_items) e = prepare(blockIdx.x, 0);
    for (int item = blockIdx.x; item < num_items; item += gridDim.x, buffer ^= 1, e = coming) {
      const int next = item + gridDim.x;
      if (next < num_items) coming = prepare(next, buffer ^ 1);
      conclude(e, item, next >= num_items);
    }
  }
};

template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
DEVICE void decode(const DecodeArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  let_next_kernel_start();
  const int thread = threadIdx.x % HALF_BLOCK;
  const DecodeBlock<Model, FLOAT8, D, TILES, STAGES> block{p, shared, thread, thread & 31, thread >> 5, *p.num_entries * p.kv_heads};
  if (threadIdx.x < HALF_BLOCK) Workers<Model, FLOAT8, D, TILES, STAGES>{block}.work();
  else Clerks<Model, FLOAT8, D, TILES, STAGES>{block}.keep_books();
}
