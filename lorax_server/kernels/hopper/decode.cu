// Attention of sequences with one new token: rotate its query and key, store its key and value, and attend to its sequence.
//
// A sequence is cut into stretches by its own length alone. An entry of the plan is a stretch; a work item is an entry at
// one key-value head, with all query heads that share it, eight or sixteen of them as the narrow operand of the MMA. A
// block has four warps. A warp takes every fourth group of 16 cached tokens, and fetches its own groups ahead of itself,
// across items: no warp waits for another but at an item's end. The new token is not read from the cache: the block of
// the last stretch begins its sums with it. The last block of a sequence to arrive joins the stretches in their order.
// So a row has the same bits in any batch. Cached tokens are fetched before the kernel waits for the one before it.

struct Entry {
  int seq, token;   // row of the block table; row of q, k, v and out
  int start, stop;  // cached tokens of this stretch
  int split, num_splits;
  int first;        // entry of the sequence's first stretch
  int is_empty;     // a row of padding, which gets zeros
};

struct DecodePlanArgs {
  const i64 *input_lengths, *cache_lengths;  // [seqs]
  const int* bounds;                         // [seqs + 1] tokens of each sequence; null if each has one
  Entry* entries;
  int* num_entries;
  int num_seqs, window;
};

constexpr int STRETCH = 256, MAX_SPLITS = 32, PLAN_THREADS = 256;

struct DecodeArgs {
  u8 *k_cache, *v_cache;      // [blocks][kv_heads][block_size][D]
  const u16 *q, *k, *v;       // [tokens][heads or kv_heads][D]
  u16* out;                   // [tokens][heads][D], without gaps
  const float *cos, *sin;     // [tokens][half]; null: nothing is rotated
  const i64* slots;           // [tokens]; null: the new token is stored already
  const int* tables;          // [seqs][table_stride]
  const Entry* entries;
  const int* num_entries;
  float* sums;                // [entry][kv_head][heads that share it][D] of each stretch
  float2* masses;             // [entry][kv_head][heads that share it] highest score and sum of weights
  int* counters;              // [seqs][kv_heads] stretches that have arrived
  i64 q_token, k_token, v_token, angle_token, table_stride;
  int q_head, k_head, v_head, half;
  int kv_heads, sharing, block_size;
  float scale, k_scale, v_scale, soft_cap;  // scale: of scores, with that of a float8 cache
};

constexpr float LOG2_E = 1.4426950408889634f;
template <bool FIRST, class A, class B> struct Select { using type = A; };
template <class A, class B> struct Select<false, A, B> { using type = B; };
#define NOTHING __int_as_float(0xff800000)

// ---------------------------------------------------------------------------------------------------- instructions
DEVICE void copy_16(u32 to, const void* from, bool is_there) {  // zeros where nothing is
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE u32 transpose(u32 pair) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
DEVICE u32 load_word(u32 address) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
DEVICE float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEVICE u32 widen(u32 two_float8) {  // the lower two bytes, to float16, exactly
  u32 r;
  asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}" : "=r"(r) : "r"(two_float8));
  return r;
}
DEVICE u8 narrow(float x) {  // to float8, within its range; a NaN stays one
  u16 two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
  return (u8)two;
}
DEVICE float squeeze(float x, float cap) { return cap * (1 - __fdividef(2, 1 + __expf(2 * x / cap))); }
template <class Number> DEVICE float to_float(u16 x) { return Number::unpack(x).x; }
template <class Number> DEVICE u16 from_float(float x) { return (u16)Number::pack(x, 0); }
template <class Number> DEVICE float rounded(float x) { return to_float<Number>(from_float<Number>(x)); }

// ---------------------------------------------------------------------------------------------------- plan
DEVICE void plan_decode(const DecodePlanArgs& p) {
  __shared__ int warps[PLAN_THREADS / 32], total;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int before = 0;
  for (int base = 0; base < p.num_seqs; base += PLAN_THREADS) {
    const int seq = base + threadIdx.x;
    int cached = 0, first = 0, count = 0, stretch = STRETCH, is_new = 0;
    if (seq < p.num_seqs) {
      const int input = (int)p.input_lengths[seq];
      cached = (int)p.cache_lengths[seq];
      is_new = input == 1;
      first = p.window <= cached ? cached + 1 - p.window : 0;
      const int seen = cached - first;
      stretch = STRETCH * max(1, (seen + STRETCH * MAX_SPLITS - 1) / (STRETCH * MAX_SPLITS));
      if (is_new) count = max(1, (seen + stretch - 1) / stretch);
      else if (input == 0 && !p.bounds) count = 1;
    }
    int last = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, last, step);
      if (lane >= step) last += other;
    }
    if (lane == 31) warps[warp] = last;
    __syncthreads();
    for (int w = 0; w < warp; w++) last += warps[w];
    if (threadIdx.x == PLAN_THREADS - 1) total = last;
    const int at = before + last - count;
    const int token = seq < p.num_seqs && p.bounds ? p.bounds[seq] : seq;
    for (int s = 0; s < count; s++) {
      const int start = first + s * stretch;
      p.entries[at + s] = {seq, token, is_new ? start : 0, is_new ? min(start + stretch, cached) : 0, s, count, at, !is_new};
    }
    __syncthreads();
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.num_entries = before;
}

// ---------------------------------------------------------------------------------------------------- attention
constexpr int WARPS = 4, GROUP = 16, DECODE_THREADS = WARPS * 32;

// TILES: of eight query heads. FLOAT8: of the cache; it is widened to float16, and so are queries and weights.
template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
struct Decode {
  using Number = typename Select<FLOAT8, Float16, Model>::type;
  static constexpr int QUERIES = TILES * 8, ROW = FLOAT8 ? D : 2 * D, CHUNKS = ROW / 16;
  static constexpr bool SWIZZLED = CHUNKS % 8 == 0;  // else rows are an odd number of chunks apart: either way no bank conflicts
  static constexpr int STRIDE = SWIZZLED || CHUNKS % 2 ? ROW : ROW + 16, HALF_STAGE = GROUP * STRIDE, STAGE = 2 * HALF_STAGE;
  static constexpr int Q_STRIDE = 2 * D + 16, SUM_STRIDE = D + 4;
  // shared memory: stages of each warp, queries, new key and value, sums of two warps, masses of each warp (twice)
  static constexpr int Q_AT = WARPS * STAGES * STAGE, NEW_AT = Q_AT + QUERIES * Q_STRIDE, SUMS_AT = NEW_AT + 2 * D * 4;
  static constexpr int MASSES_AT = SUMS_AT + WARPS / 2 * QUERIES * SUM_STRIDE * 4, BYTES = MASSES_AT + 2 * WARPS * QUERIES * 8;
  static_assert(BYTES <= 227 * 1024);

  static DEVICE u32 place(u32 base, int row, int chunk) { return base + row * STRIDE + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 16; }

  const DecodeArgs& p;
  u8* shared;
  int lane, warp, num_items;

  // Where a warp's next group to fetch lies: item, first token, and the row of the cache of the token of this lane.
  struct Cursor {
    int item, at, stop, seq, head;
    u32 row;
  };

  DEVICE void find_row(Cursor& c) const {
    const int position = c.at + (lane & 15);
    c.row = 0;
    if (c.item < num_items && position < c.stop) {
      const int block = p.tables[c.seq * p.table_stride + position / p.block_size];
      c.row = ((u32)block * p.kv_heads + c.head) * p.block_size + position % p.block_size;
    }
  }
  DEVICE void open(Cursor& c) const {  // the item, or the next one in which this warp has a group
    for (; c.item < num_items; c.item += gridDim.x) {
      const Entry& e = p.entries[c.item / p.kv_heads];
      c.at = e.start + warp * GROUP, c.stop = e.stop, c.seq = e.seq, c.head = c.item % p.kv_heads;
      if (c.at < c.stop) break;
    }
    find_row(c);
  }
  DEVICE void fetch(Cursor& c, int stage) const {
    const u32 keys = shared_address(shared) + (warp * STAGES + stage) * STAGE, values = keys + HALF_STAGE;
    if (c.item < num_items) {
#pragma unroll
      for (int i = 0; i < (GROUP * CHUNKS + 31) / 32; i++) {
        const int index = i * 32 + lane, row = index / CHUNKS, chunk = index % CHUNKS;
        const u32 cached = __shfl_sync(~0u, c.row, row & 15);
        if (GROUP * CHUNKS % 32 == 0 || row < GROUP) {
          const i64 from = (i64)cached * ROW + chunk * 16;
          const bool is_there = c.at + row < c.stop;
          copy_16(place(keys, row, chunk), p.k_cache + from, is_there);
          copy_16(place(values, row, chunk), p.v_cache + from, is_there);
        }
      }
      c.at += WARPS * GROUP;
      if (c.at < c.stop) find_row(c);
      else c.item += gridDim.x, open(c);
    }
    commit_copies();
  }

  // Pair i of a head: dimensions i and i + half where they turn, else two neighbours after those.
  static DEVICE int2 dims_of(int i, int half) { return i < half ? make_int2(i, i + half) : make_int2(2 * i, 2 * i + 1); }
  // A pair, rotated as the reference does it: each product by a cosine is rounded.
  DEVICE float2 rotated(const u16* head, int token, int i) const {
    const int half = p.cos ? p.half : 0;
    const int2 dims = dims_of(i, half);
    const float x = to_float<Model>(head[dims.x]), y = to_float<Model>(head[dims.y]);
    if (i >= half) return {x, y};
    const float c = rounded<Model>(p.cos[token * p.angle_token + i]), s = rounded<Model>(p.sin[token * p.angle_token + i]);
    return {rounded<Model>(rounded<Model>(x * c) - y * s), rounded<Model>(rounded<Model>(y * c) + x * s)};
  }

  DEVICE void load_queries(const Entry& e, int head) const {
    const int half = p.cos ? p.half : 0;
    for (int i = threadIdx.x; i < QUERIES * (D / 2); i += DECODE_THREADS) {
      const int query = i / (D / 2), pair = i % (D / 2);
      const int2 dims = dims_of(pair, half);
      float2 x = {0, 0};
      if (query < p.sharing) x = rotated(p.q + e.token * p.q_token + (i64)(head * p.sharing + query) * p.q_head, e.token, pair);
      u16* row = (u16*)(shared + Q_AT + query * Q_STRIDE);
      row[dims.x] = from_float<Number>(limited(x.x)), row[dims.y] = from_float<Number>(limited(x.y));
    }
  }
  static DEVICE float limited(float x) {  // to what float16 can hold; a NaN stays one
    return FLOAT8 && Model::is_bfloat16 ? (x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x) : x;
  }

  // Rotates the new key, stores key and value in the cache, and keeps both as they are read from there later.
  DEVICE void load_new(const Entry& e, int head) const {
    float *key = (float*)(shared + NEW_AT), *value = key + D;
    const int half = p.cos ? p.half : 0;
    const i64 slot = p.slots ? p.slots[e.token] : -1;
    const i64 to = ((slot / p.block_size * p.kv_heads + head) * p.block_size + slot % p.block_size) * D;
    for (int i = threadIdx.x; i < D / 2; i += DECODE_THREADS) {
      const int2 dims = dims_of(i, half);
      const float2 x = rotated(p.k + e.token * p.k_token + (i64)head * p.k_head, e.token, i);
      const u16* v = p.v + e.token * p.v_token + (i64)head * p.v_head;
      keep(key, p.k_cache, dims.x, x.x, to, slot, p.k_scale), keep(key, p.k_cache, dims.y, x.y, to, slot, p.k_scale);
      keep(value, p.v_cache, dims.x, to_float<Model>(v[dims.x]), to, slot, p.v_scale);
      keep(value, p.v_cache, dims.y, to_float<Model>(v[dims.y]), to, slot, p.v_scale);
    }
  }
  DEVICE void keep(float* kept, u8* cache, int dim, float x, i64 to, i64 slot, float scale) const {
    if constexpr (FLOAT8) {
      const u8 byte = narrow(__fdiv_rn(x, scale));
      if (slot >= 0) cache[to + dim] = byte;
      x = Float16::unpack(widen(byte)).x;
    } else if (slot >= 0) ((u16*)cache)[to + dim] = from_float<Model>(x);
    kept[dim] = x;
  }

  DEVICE float finish_score(float sum) const {
    sum *= p.scale;
    return (p.soft_cap > 0 ? squeeze(sum, p.soft_cap) : sum) * LOG2_E;
  }

  // Sums of one warp, transposed: of 16 dimensions, `sums[t][m]` has two at two queries. `weights` are of this thread's tokens.
  struct State {
    float sums[TILES][D / 16][4], highest[TILES][2], weights[TILES][2];
  };

  static DEVICE int dim_of(int m, int lane, int lower) {  // of `sums[t][m][0, 1]`, and of `[2, 3]`
    return m * 16 + (FLOAT8 ? (lane >> 2) * 2 + lower : (lane >> 2) + lower * 8);
  }

  DEVICE void begin(State& s, const u32 (&q)[TILES][D / 16][2], bool has_new) const {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      s.highest[t][0] = s.highest[t][1] = NOTHING;
      s.weights[t][0] = s.weights[t][1] = 0;
#pragma unroll
      for (int m = 0; m < D / 16; m++) s.sums[t][m][0] = s.sums[t][m][1] = s.sums[t][m][2] = s.sums[t][m][3] = 0;
    }
    if (!has_new) return;
    const float *key = (const float*)(shared + NEW_AT), *value = key + D;
    for (int query = 0; query < QUERIES; query++) {
      if (query >= p.sharing) break;
      const u16* row = (const u16*)(shared + Q_AT + query * Q_STRIDE);
      float sum = 0;
      for (int d = lane; d < D; d += 32) sum += to_float<Number>(row[d]) * key[d];
#pragma unroll
      for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
      const float score = finish_score(sum);
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (query == t * 8 + (lane & 3) * 2 + j) s.highest[t][j] = score;
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if (lane < 4) s.weights[t][0] = s.weights[t][1] = 1;  // once for each query
#pragma unroll
      for (int m = 0; m < D / 16; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) s.sums[t][m][i] = value[dim_of(m, lane, i >> 1)];
    }
  }

  DEVICE void score_group(float (&scores)[TILES][4], const u32 (&q)[TILES][D / 16][2], u32 keys) const {
#pragma unroll
    for (int t = 0; t < TILES; t++) scores[t][0] = scores[t][1] = scores[t][2] = scores[t][3] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4];
      if constexpr (FLOAT8) {
        const int g = lane >> 2, c = lane & 3;
        const u32 upper = load_word(place(keys, g, k) + c * 4), lower = load_word(place(keys, g + 8, k) + c * 4);
        a[0] = widen(upper), a[1] = widen(lower), a[2] = widen(upper >> 16), a[3] = widen(lower >> 16);
      } else load_matrices(a, place(keys, lane & 15, 2 * k + (lane >> 4)));
#pragma unroll
      for (int t = 0; t < TILES; t++) mma<Number>(scores[t], a[0], a[1], a[2], a[3], q[t][k][0], q[t][k][1]);
    }
  }

  DEVICE void add_values(State& s, const u32 (&weights)[TILES][2], u32 values) const {
    if constexpr (FLOAT8) {
#pragma unroll
      for (int m = 0; m < D / 16; m += 2) {  // two bytes of 16 tokens at 32 dimensions
        u32 r[4];
        const int chunk = m + ((lane >> 4) & 1);
        load_transposed(r, place(values, lane & 15, chunk < CHUNKS ? chunk : m));
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if (m + j >= D / 16) continue;
          const u32 early = r[2 * j], late = r[2 * j + 1];
          const u32 a0 = widen(__byte_perm(early, 0, 0x20)), a1 = widen(__byte_perm(early, 0, 0x31));
          const u32 a2 = widen(__byte_perm(late, 0, 0x20)), a3 = widen(__byte_perm(late, 0, 0x31));
#pragma unroll
          for (int t = 0; t < TILES; t++) mma<Number>(s.sums[t][m + j], a0, a1, a2, a3, weights[t][0], weights[t][1]);
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < D / 16; m++) {
        u32 a[4];
        load_transposed(a, place(values, (lane & 7) + (lane >> 4) * 8, 2 * m + ((lane >> 3) & 1)));
#pragma unroll
        for (int t = 0; t < TILES; t++) mma<Number>(s.sums[t][m], a[0], a[1], a[2], a[3], weights[t][0], weights[t][1]);
      }
    }
  }

  DEVICE void attend(State& s, const u32 (&q)[TILES][D / 16][2], int stage, int left) const {  // left: tokens of the group
    const u32 keys = shared_address(shared) + (warp * STAGES + stage) * STAGE, values = keys + HALF_STAGE;
    float scores[TILES][4];
    score_group(scores, q, keys);
    u32 weights[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float score = finish_score(scores[t][i]);
        scores[t][i] = (lane >> 2) + (i >> 1) * 8 < left ? score : NOTHING;
      }
      float fading[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float highest = fmaxf(scores[t][j], scores[t][j + 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
        highest = fmaxf(highest, s.highest[t][j]);
        fading[j] = exp2_of(s.highest[t][j] - highest);
        s.highest[t][j] = highest;
        scores[t][j] = exp2_of(scores[t][j] - highest), scores[t][j + 2] = exp2_of(scores[t][j + 2] - highest);
        s.weights[t][j] = s.weights[t][j] * fading[j] + (scores[t][j] + scores[t][j + 2]);
      }
      if (__any_sync(~0u, fading[0] != 1 || fading[1] != 1)) {
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) s.sums[t][m][i] *= fading[i & 1];
      }
      weights[t][0] = transpose(Number::pack(scores[t][0], scores[t][1]));
      weights[t][1] = transpose(Number::pack(scores[t][2], scores[t][3]));
    }
    add_values(s, weights, values);
  }

  // Adds the warps' sums in a fixed order, and writes the item's result: the row's own, or that of its stretch.
  DEVICE void finish(State& s, const Entry& e, int item, int head, int parity) const {
    float2* masses = (float2*)(shared + MASSES_AT) + parity * WARPS * QUERIES;
    float* all = (float*)(shared + SUMS_AT);
    const int query = (lane & 3) * 2;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) s.weights[t][j] += __shfl_xor_sync(~0u, s.weights[t][j], step);
        if (lane < 4) masses[warp * QUERIES + t * 8 + query + j] = {s.highest[t][j], s.weights[t][j]};
      }
    __syncthreads();  // also: the sums of the item before are read
    if (warp >= WARPS / 2) put_sums<false>(s, masses, all);
    __syncthreads();
    if (warp < WARPS / 2) put_sums<true>(s, masses, all);
    __syncthreads();
    const i64 place = (i64)item * p.sharing;
    for (int i = threadIdx.x; i < p.sharing * (D / 4); i += DECODE_THREADS) {
      const int row = i / (D / 4), d = i % (D / 4) * 4;
      const float highest = highest_of(masses, row);
      float4 sum = {0, 0, 0, 0};
      float weight = 0;
#pragma unroll
      for (int w = 0; w < WARPS / 2; w++) {
        const float4 part = *(const float4*)(all + (w * QUERIES + row) * SUM_STRIDE + d);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        weight += masses[w * QUERIES + row].y * exp2_of(masses[w * QUERIES + row].x - highest);
      }
      if (e.num_splits == 1) write_row(e, head, row, d, sum, weight);
      else {
        __stcg((float4*)(p.sums + (place + row) * D + d), sum);
        if (d == 0) __stcg(p.masses + place + row, make_float2(highest, weight));
      }
    }
    if (e.num_splits > 1) join(e, head);
  }
  // Two warps share a place; the second to write it adds what is there.
  template <bool ADDS>
  DEVICE void put_sums(const State& s, const float2* masses, float* all) const {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = t * 8 + (lane & 3) * 2 + j;
        if (row >= p.sharing) continue;
        const float share = exp2_of(s.highest[t][j] - highest_of(masses, row));
        float* to = all + (warp % (WARPS / 2) * QUERIES + row) * SUM_STRIDE;
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
          for (int lower = 0; lower < 2; lower++) {
            const int d = dim_of(m, lane, lower);
            const float part = s.sums[t][m][j + 2 * lower] * share;
            to[d] = ADDS ? to[d] + part : part;
          }
      }
  }
  DEVICE float highest_of(const float2* masses, int row) const {  // finite, where nothing has been seen
    float highest = masses[row].x;
#pragma unroll
    for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, masses[w * QUERIES + row].x);
    return highest == NOTHING ? 0 : highest;
  }
  DEVICE void write_row(const Entry& e, int head, int row, int d, float4 sum, float weight) const {
    const float share = e.is_empty ? 0 : (FLOAT8 ? p.v_scale : 1.0f) / weight;
    u16* to = p.out + ((i64)e.token * p.kv_heads + head) * p.sharing * D + row * D + d;
    *(uint2*)to = make_uint2(Model::pack(sum.x * share, sum.y * share), Model::pack(sum.z * share, sum.w * share));
  }

  // The last block to arrive adds the stretches of a sequence, in their order.
  DEVICE void join(const Entry& e, int head) const {
    int* counter = p.counters + (i64)e.seq * p.kv_heads + head;
    __threadfence();
    __syncthreads();  // all have written
    __shared__ int before;
    if (threadIdx.x == 0) before = arrive_in_turn(counter);
    __syncthreads();
    if (before != e.num_splits - 1) return;
    __threadfence();
    const i64 first = ((i64)e.first * p.kv_heads + head) * p.sharing, step = (i64)p.kv_heads * p.sharing;
    for (int i = threadIdx.x; i < p.sharing * (D / 4); i += DECODE_THREADS) {
      const int row = i / (D / 4), d = i % (D / 4) * 4;
      float highest = NOTHING, weight = 0;
      for (int s = 0; s < e.num_splits; s++) highest = fmaxf(highest, __ldcg(p.masses + first + s * step + row).x);
      float4 sum = {0, 0, 0, 0};
#pragma unroll 4
      for (int s = 0; s < e.num_splits; s++) {
        const float2 mass = __ldcg(p.masses + first + s * step + row);
        const float4 part = __ldcg((const float4*)(p.sums + (first + s * step + row) * D + d));
        const float share = exp2_of(mass.x - highest);
        weight += mass.y * share;
        sum.x += part.x * share, sum.y += part.y * share, sum.z += part.z * share, sum.w += part.w * share;
      }
      write_row(e, head, row, d, sum, weight);
    }
    if (threadIdx.x == 0) *counter = 0;
  }

  DEVICE void run() {
    Cursor ahead;
    ahead.item = blockIdx.x;
    open(ahead);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(ahead, s);
    wait_for_kernel_before();
    int stage = 0, parity = 0;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x, parity ^= 1) {
      const Entry e = p.entries[item / p.kv_heads];
      const int head = item % p.kv_heads;
      const bool is_last = e.split == e.num_splits - 1 && !e.is_empty;
      if (!e.is_empty) load_queries(e, head);
      if (is_last) load_new(e, head);
      __syncthreads();
      u32 q[TILES][D / 16][2];
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
          const u32 row = shared_address(shared) + Q_AT + (t * 8 + (lane >> 2)) * Q_STRIDE + k * 32 + (lane & 3) * (FLOAT8 ? 8 : 4);
          q[t][k][0] = load_word(row), q[t][k][1] = load_word(row + (FLOAT8 ? 4 : 16));
        }
      State s;
      begin(s, q, is_last && warp == 0);
      for (int at = e.start + warp * GROUP; at < e.stop; at += WARPS * GROUP) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        fetch(ahead, stage == 0 ? STAGES - 1 : stage - 1);
        attend(s, q, stage, e.stop - at);
        if (++stage == STAGES) stage = 0;
      }
      finish(s, e, item, head, parity);
    }
    wait_copies<0>();
  }
};

template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
DEVICE void decode(const DecodeArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  let_next_kernel_start();
  Decode<Model, FLOAT8, D, TILES, STAGES> block{p, shared, (int)(threadIdx.x & 31), (int)(threadIdx.x >> 5), *p.num_entries * p.kv_heads};
  block.run();
}
