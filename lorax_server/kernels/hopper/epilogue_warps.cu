// Epilogue warps of decode attention: prepare queries, store new tokens, and combine partial sums.
template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
struct EpilogueWarps : DecodeBlock<Model, FLOAT8, D, TILES, STAGES> {
  using Block = DecodeBlock<Model, FLOAT8, D, TILES, STAGES>;
  using Number = typename Block::Number;
  using Block::QUERIES, Block::PAIRS, Block::Q_STRIDE, Block::SUM_STRIDE, Block::p, Block::thread, Block::lane,
      Block::warp, Block::num_items, Block::address_of, Block::queries, Block::new_token_key, Block::entry, Block::sums,
      Block::softmax_stats, Block::split_weights, Block::has_new_token, Block::max_score_of;

  // Pair i of a head: dimensions i and i + half if rotated, otherwise two adjacent dimensions after those.
  DEVICE int2 dims_of(int i) const { return i < p.half ? make_int2(i, i + p.half) : make_int2(2 * i, 2 * i + 1); }
  DEVICE float2 load_pair(const u16* head, int i) const {
    const int2 dims = dims_of(i);
    return {to_float<Model>(head[dims.x]), to_float<Model>(head[dims.y])};
  }
  DEVICE float2 load_angle(int token, int i) const {
    if (i >= p.half) return {0, 0};
    return {rounded<Model>(p.cos[token * p.angle_token + i]), rounded<Model>(p.sin[token * p.angle_token + i])};
  }
  DEVICE float2 rotate(float2 x, float2 angle, int i) const {  // rounds the cosine product, as the reference does
    if (i >= p.half) return x;
    return {rounded<Model>(rounded<Model>(x.x * angle.x) - x.y * angle.y), rounded<Model>(rounded<Model>(x.y * angle.x) + x.x * angle.y)};
  }
  static DEVICE float clamp_to_float16(float x) {  // NaN stays NaN
    return FLOAT8 && Model::is_bfloat16 ? (x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x) : x;
  }

  DEVICE Entry prepare(int item, int buffer) const {
    const Entry e = p.entries[item / p.kv_heads];
    const int head = item % p.kv_heads;
    if (!e.is_empty) {
      load_queries(e, head, buffer);
      if (has_new_token(e)) load_new_token(e, head, buffer);
    }
    if (thread == 0) entry(buffer) = e;  // for the MMA warps; epilogue warps keep a copy, because they can be one item ahead
    arrive_at(QUERIES_READY + buffer);
    return e;
  }

  DEVICE void load_queries(const Entry& e, int head, int buffer) const {
    constexpr int COUNT = (QUERIES * PAIRS + ROLE_THREADS - 1) / ROLE_THREADS, STEP = COUNT < 4 ? COUNT : 4;  // loads in flight
    const u16* from = p.q + e.token * p.q_token + (i64)head * p.heads_per_kv * p.q_head;
    for (int first = 0; first < COUNT; first += STEP) {
      float2 x[STEP], angle[STEP];
#pragma unroll
      for (int n = 0; n < STEP; n++) {
        const int i = (first + n) * ROLE_THREADS + thread, query = i / PAIRS;
        x[n] = {0, 0};
        if (query < p.heads_per_kv) x[n] = load_pair(from + query * p.q_head, i % PAIRS);
        angle[n] = load_angle(e.token, i % PAIRS);
      }
#pragma unroll
      for (int n = 0; n < STEP; n++) {
        const int i = (first + n) * ROLE_THREADS + thread;
        if (i >= QUERIES * PAIRS) break;
        const int2 dims = dims_of(i % PAIRS);
        const float2 rotated = rotate(x[n], angle[n], i % PAIRS);
        u16* row = (u16*)(queries(buffer) + i / PAIRS * Q_STRIDE);
        row[dims.x] = from_float<Number>(clamp_to_float16(rotated.x)), row[dims.y] = from_float<Number>(clamp_to_float16(rotated.y));
      }
    }
  }

  // Rotate the new key, store key and value in the cache, and keep both with the cache's rounding.
  DEVICE void load_new_token(const Entry& e, int head, int buffer) const {
    static_assert(PAIRS <= ROLE_THREADS);
    if (thread >= PAIRS) return;
    const i64 slot = p.slots ? p.slots[e.token] : -1;
    const float2 k = load_pair(p.k + e.token * p.k_token + (i64)head * p.k_head, thread), angle = load_angle(e.token, thread);
    const float2 v = load_pair(p.v + e.token * p.v_token + (i64)head * p.v_head, thread);
    const i64 to = ((slot / p.block_size * p.kv_heads + head) * p.block_size + slot % p.block_size) * D;
    const int2 dims = dims_of(thread);
    const float2 rotated = rotate(k, angle, thread);
    float *key = new_token_key(buffer), *value = key + D;
    key[dims.x] = store(p.k_cache, to + dims.x, rotated.x, slot >= 0, p.k_scale);
    key[dims.y] = store(p.k_cache, to + dims.y, rotated.y, slot >= 0, p.k_scale);
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

  // Write the result of an item: the final row, or the partial result of a split.
  DEVICE void write_result(const Entry& e, int item, bool is_last) const {
    wait_at(SUMS_READY);
    const i64 place = (i64)item * p.heads_per_kv;
    for (int i = thread; i < p.heads_per_kv * (D / 4); i += ROLE_THREADS) {
      const int row = i / (D / 4), d = i % (D / 4) * 4;
      const float highest = max_score_of(row);
      float4 sum = {0, 0, 0, 0};
      float weight = 0;
#pragma unroll
      for (int w = 0; w < MMA_WARPS / 2; w++) {
        const float4 part = *(const float4*)(sums() + (w * QUERIES + row) * SUM_STRIDE + d);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
#pragma unroll
      for (int w = 0; w < MMA_WARPS; w++) weight += softmax_stats()[w * QUERIES + row].y * exp2_of(softmax_stats()[w * QUERIES + row].x - highest);
      if (e.num_splits == 1) write_row(e, item % p.kv_heads, row, d, sum, weight);
      else {
        __stcg((float4*)(p.sums + (place + row) * D + d), sum);
        if (d == 0) __stcg(p.softmax_stats + place + row, make_float2(highest, weight));
      }
    }
    if (!is_last) arrive_at(SUMS_READ);
    if (e.num_splits > 1) merge_splits(e, item % p.kv_heads);
  }
  DEVICE void write_row(const Entry& e, int head, int row, int d, float4 sum, float weight) const {
    const float share = e.is_empty ? 0 : (FLOAT8 ? p.v_scale : 1.0f) / weight;
    u16* to = p.out + (((i64)e.token * p.kv_heads + head) * p.heads_per_kv + row) * D + d;
    *(uint2*)to = make_uint2(Model::pack(sum.x * share, sum.y * share), Model::pack(sum.z * share, sum.w * share));
  }

  // The last block to finish merges the splits of a sequence in order.
  DEVICE void merge_splits(const Entry& e, int head) const {
    __shared__ int before;
    int* counter = p.counters + (i64)e.seq * p.kv_heads + head;
    sync_threads<EPILOGUE_BARRIER, ROLE_THREADS>();  // all partial results are written
    if (thread == 0) before = fetch_and_increment(counter);
    sync_threads<EPILOGUE_BARRIER, ROLE_THREADS>();
    if (before != e.num_splits - 1) return;
    const i64 first = ((i64)e.first * p.kv_heads + head) * p.heads_per_kv, step = (i64)p.kv_heads * p.heads_per_kv;
    for (int row = warp; row < p.heads_per_kv; row += ROLE_THREADS / 32) {  // one split per lane
      const float2 mass = lane < e.num_splits ? __ldcg(p.softmax_stats + first + lane * step + row) : make_float2(NEG_INFINITY, 0);
      float highest = mass.x;
#pragma unroll
      for (int step = 16; step; step >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
      const float share = exp2_of(mass.x - highest);
      float weight = mass.y * share;
#pragma unroll
      for (int step = 16; step; step >>= 1) weight += __shfl_xor_sync(~0u, weight, step);
      split_weights()[row * MAX_SPLITS + lane] = share / weight;
    }
    sync_threads<EPILOGUE_BARRIER, ROLE_THREADS>();
    for (int i = thread; i < p.heads_per_kv * (D / 4); i += ROLE_THREADS) {
      const int row = i / (D / 4), d = i % (D / 4) * 4;
      const float* from = p.sums + (first + row) * D + d;
      float4 sum = {0, 0, 0, 0};
      for (int s = 0; s < e.num_splits; s += LOADS_IN_FLIGHT) {
        float4 parts[LOADS_IN_FLIGHT];  // issue all loads before using the first
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; i++)
          parts[i] = s + i < e.num_splits ? __ldcg((const float4*)(from + (s + i) * step * D)) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < LOADS_IN_FLIGHT; i++) {
          const float share = split_weights()[row * MAX_SPLITS + s + i];
          sum.x += parts[i].x * share, sum.y += parts[i].y * share, sum.z += parts[i].z * share, sum.w += parts[i].w * share;
        }
      }
      write_row(e, head, row, d, sum, 1);
    }
    if (thread == 0) *counter = 0;
  }

  DEVICE void run_epilogue() const {
    wait_for_previous_kernel();
    int buffer = 0;
    Entry e, next_entry;
    if (blockIdx.x < num_items) e = prepare(blockIdx.x, 0);
    for (int item = blockIdx.x; item < num_items; item += gridDim.x, buffer ^= 1, e = next_entry) {
      const int next = item + gridDim.x;
      if (next < num_items) next_entry = prepare(next, buffer ^ 1);
      write_result(e, item, next >= num_items);
    }
  }
};

template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
DEVICE void decode(const DecodeArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  launch_dependents();
  const int thread = threadIdx.x % ROLE_THREADS;
  const DecodeBlock<Model, FLOAT8, D, TILES, STAGES> block{p, shared, thread, thread & 31, thread >> 5, *p.num_entries * p.kv_heads};
  if (threadIdx.x < ROLE_THREADS) MmaWarps<Model, FLOAT8, D, TILES, STAGES>{block}.run_mma();
  else EpilogueWarps<Model, FLOAT8, D, TILES, STAGES>{block}.run_epilogue();
}
