// Attention of sequences with one new token: rotate its query and key, store its key and value, and attend to its sequence.
//
// A sequence is cut into stretches by its own length alone. An entry of the plan is a stretch; a work item is an entry at
// one key-value head, with all query heads that share it, eight or sixteen of them as the narrow operand of the MMA.
//
// A block has four workers and four clerks, which are warps. A worker takes every fourth group of 16 or 32 cached tokens, and
// fetches its own groups ahead of itself, across items, before the kernel waits for the one before it. Clerks rotate the
// queries of the next item, store its new token, and add up what workers leave behind: so no worker waits for memory but
// for its cached tokens. The new token is not read from the cache: the block of the last stretch begins its sums with it.
// The last block of a sequence to arrive joins the stretches in their order. So a row has the same bits in any batch.

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
  int kv_heads, sharing, block_size, block_shift;  // shift: by which a block's size is a power of two, else -1
  float scale, k_scale, v_scale, soft_cap;         // scale: of scores, with that of a float8 cache
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
constexpr int WORKERS = 4, HALF_BLOCK = 128, AT_ONCE = 16, DECODE_THREADS = 2 * HALF_BLOCK;
// Barriers: an item's queries are ready (one for each of two buffers), its sums are complete, they are read; among workers,
// among clerks.
constexpr int READY = 1, FULL = 3, EMPTY = 4, AMONG_WORKERS = 5, AMONG_CLERKS = 6;
DEVICE void arrive_at(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(DECODE_THREADS) : "memory"); }
DEVICE void wait_at(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(DECODE_THREADS) : "memory"); }

// TILES: of eight query heads. FLOAT8: of the cache; it is widened to float16, and so are queries and weights.
template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
struct Decode {
  using Number = typename Select<FLOAT8, Float16, Model>::type;
  static constexpr int GROUP = FLOAT8 ? 32 : 16, PARTS = GROUP / 16;  // tokens that are fetched together, in parts of an MMA's 16
  static constexpr int QUERIES = TILES * 8, PAIRS = D / 2, ROW = FLOAT8 ? D : 2 * D, CHUNKS = ROW / 16;
  static constexpr bool SWIZZLED = CHUNKS % 8 == 0;  // else rows are an odd number of chunks apart: either way no bank conflicts
  static constexpr int STRIDE = SWIZZLED || CHUNKS % 2 ? ROW : ROW + 16, HALF_STAGE = GROUP * STRIDE, STAGE = 2 * HALF_STAGE;
  static constexpr int Q_STRIDE = 2 * D + 16, SUM_STRIDE = D + 4;
  // Shared memory: stages of each worker; twice the queries, new key and value, and entry; sums of two workers; masses; shares of
  // stretches.
  static constexpr int Q_BYTES = QUERIES * Q_STRIDE, NEW_BYTES = 2 * D * 4, BUFFER = Q_BYTES + NEW_BYTES + sizeof(Entry);
  static constexpr int BUFFERS_AT = WORKERS * STAGES * STAGE, SUMS_AT = BUFFERS_AT + 2 * BUFFER;
  static constexpr int MASSES_AT = SUMS_AT + WORKERS / 2 * QUERIES * SUM_STRIDE * 4, SHARES_AT = MASSES_AT + WORKERS * QUERIES * 8;
  static constexpr int BYTES = SHARES_AT + QUERIES * MAX_SPLITS * 4;
  static_assert(BYTES <= 227 * 1024);

  const DecodeArgs& p;
  u8* shared;
  int thread, lane, warp, num_items;  // thread and warp among the workers, or among the clerks

  static DEVICE u32 place(u32 base, int row, int chunk) { return base + row * STRIDE + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 16; }
  DEVICE u8* queries(int buffer) const { return shared + BUFFERS_AT + buffer * BUFFER; }
  DEVICE float* new_key(int buffer) const { return (float*)(queries(buffer) + Q_BYTES); }
  DEVICE Entry& entry(int buffer) const { return *(Entry*)(queries(buffer) + Q_BYTES + NEW_BYTES); }
  DEVICE float* sums() const { return (float*)(shared + SUMS_AT); }
  DEVICE float2* masses() const { return (float2*)(shared + MASSES_AT); }
  DEVICE float* shares() const { return (float*)(shared + SHARES_AT); }

  // ------------------------------------------------------------------------------------------------ workers: fetching
  // The next group of a worker to fetch, and the one after it, of which only the rows are looked up: both lookups take long.
  struct Group {
    int at, stop;  // none where they are equal
    u32 row;       // of the cache, of the token of this lane
  };
  struct Cursor {
    Group next, after;
    int item, seq, head;  // of `after`
    Entry coming;   // of the item after that
  };

  DEVICE Entry read_entry(int item) const { return item < num_items ? p.entries[item / p.kv_heads] : Entry{}; }
  DEVICE void find_row(Cursor& c) const {
    const int position = c.after.at + lane % GROUP;
    c.after.row = 0;
    if (position < c.after.stop) {
      const int number = p.block_shift >= 0 ? position >> p.block_shift : position / p.block_size;
      const int block = p.tables[c.seq * p.table_stride + number];
      c.after.row = ((u32)block * p.kv_heads + c.head) * p.block_size + (position - number * p.block_size);
    }
  }
  DEVICE void advance(Cursor& c) const {
    c.next = c.after;
    c.after.at += WORKERS * GROUP;
    while (c.after.at >= c.after.stop && c.item < num_items) {  // on to the next item in which this worker has a group
      c.item += gridDim.x;
      c.seq = c.coming.seq, c.head = c.item % p.kv_heads, c.after.at = c.coming.start + warp * GROUP, c.after.stop = c.coming.stop;
      c.coming = read_entry(c.item + gridDim.x);
    }
    if (c.item >= num_items) c.after.at = c.after.stop = 0;
    else find_row(c);
  }
  DEVICE void fetch(Cursor& c, int stage) const {
    const u32 keys = shared_address(shared) + (warp * STAGES + stage) * STAGE, values = keys + HALF_STAGE;
    if (c.next.at < c.next.stop) {
#pragma unroll
      for (int i = 0; i < (GROUP * CHUNKS + 31) / 32; i++) {
        const int index = i * 32 + lane, row = index / CHUNKS, chunk = index % CHUNKS;
        const u32 cached = __shfl_sync(~0u, c.next.row, row % GROUP);
        if (GROUP * CHUNKS % 32 == 0 || row < GROUP) {
          const i64 from = (i64)cached * ROW + chunk * 16;
          const bool is_there = c.next.at + row < c.next.stop;
          copy_16(place(keys, row, chunk), p.k_cache + from, is_there);
          copy_16(place(values, row, chunk), p.v_cache + from, is_there);
        }
      }
    }
    commit_copies();
    advance(c);
  }

  // ------------------------------------------------------------------------------------------------ workers: attention
  DEVICE float finish_score(float sum) const {
    return p.soft_cap > 0 ? squeeze(sum * p.scale, p.soft_cap) * LOG2_E : sum * (p.scale * LOG2_E);
  }

  // Sums of one worker, transposed: of 16 dimensions, `sums[t][m]` has two at two queries. `weights` are of this thread's tokens.
  struct State {
    float sums[TILES][D / 16][4], highest[TILES][2], weights[TILES][2];
  };

  static DEVICE int dim_of(int m, int lane, int lower) {  // of `sums[t][m][0, 1]`, and of `[2, 3]`
    return m * 16 + (FLOAT8 ? (lane >> 2) * 2 + lower : (lane >> 2) + lower * 8);
  }

  DEVICE void begin(State& s, int buffer, bool has_new) const {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      s.highest[t][0] = s.highest[t][1] = NOTHING;
      s.weights[t][0] = s.weights[t][1] = 0;
#pragma unroll
      for (int m = 0; m < D / 16; m++) s.sums[t][m][0] = s.sums[t][m][1] = s.sums[t][m][2] = s.sums[t][m][3] = 0;
    }
    if (!has_new) return;
    const float *key = new_key(buffer), *value = key + D;
    for (int query = 0; query < p.sharing; query++) {
      const u16* row = (const u16*)(queries(buffer) + query * Q_STRIDE);
      float sum = 0;
#pragma unroll
      for (int d = 0; d < D; d += 32) sum += d + lane < D ? to_float<Number>(row[d + lane]) * key[d + lane] : 0;
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

  DEVICE void load_fragments(u32 (&q)[TILES][D / 16][2], int buffer) const {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        const u32 at = shared_address(queries(buffer)) + (t * 8 + (lane >> 2)) * Q_STRIDE + k * 32 + (lane & 3) * (FLOAT8 ? 8 : 4);
        q[t][k][0] = load_word(at), q[t][k][1] = load_word(at + (FLOAT8 ? 4 : 16));
      }
  }

  DEVICE void score_part(float (&scores)[TILES][4], const u32 (&q)[TILES][D / 16][2], u32 keys) const {
    float halves[2][TILES][4] = {};  // of even and of odd steps: half as long a chain of products
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4];
      if constexpr (FLOAT8) {
        const int g = lane >> 2, c = lane & 3;
        const u32 upper = load_word(place(keys, g, k) + c * 4), lower = load_word(place(keys, g + 8, k) + c * 4);
        a[0] = widen(upper), a[1] = widen(lower), a[2] = widen(upper >> 16), a[3] = widen(lower >> 16);
      } else load_matrices(a, place(keys, lane & 15, 2 * k + (lane >> 4)));
#pragma unroll
      for (int t = 0; t < TILES; t++) mma<Number>(halves[k & 1][t], a[0], a[1], a[2], a[3], q[t][k][0], q[t][k][1]);
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[t][i] = halves[0][t][i] + halves[1][t][i];
  }

  DEVICE void add_values(State& s, const u32 (&weights)[TILES][2], u32 values) const {
    if constexpr (FLOAT8) {
#pragma unroll
      for (int m = 0; m < D / 16; m += 2) {  // two bytes of 16 tokens at 32 dimensions
        u32 r[4];
        const int chunk = m + (lane >> 4);
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
    float scores[PARTS][TILES][4];
    u32 weights[PARTS][TILES][2];
#pragma unroll
    for (int h = 0; h < PARTS; h++) score_part(scores[h], q, keys + h * 16 * STRIDE);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float fading[2], highest[2] = {s.highest[t][0], s.highest[t][1]};
#pragma unroll
      for (int h = 0; h < PARTS; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float score = finish_score(scores[h][t][i]);
          scores[h][t][i] = h * 16 + (lane >> 2) + (i >> 1) * 8 < left ? score : NOTHING;
          highest[i & 1] = fmaxf(highest[i & 1], scores[h][t][i]);
        }
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest[j] = fmaxf(highest[j], __shfl_xor_sync(~0u, highest[j], step));
        fading[j] = exp2_of(s.highest[t][j] - highest[j]);
        s.highest[t][j] = highest[j];
        s.weights[t][j] *= fading[j];
      }
#pragma unroll
      for (int h = 0; h < PARTS; h++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          scores[h][t][i] = exp2_of(scores[h][t][i] - highest[i & 1]);
          s.weights[t][i & 1] += scores[h][t][i];
        }
        weights[h][t][0] = transpose(Number::pack(scores[h][t][0], scores[h][t][1]));
        weights[h][t][1] = transpose(Number::pack(scores[h][t][2], scores[h][t][3]));
      }
      if (__any_sync(~0u, fading[0] != 1 || fading[1] != 1)) {
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) s.sums[t][m][i] *= fading[i & 1];
      }
    }
#pragma unroll
    for (int h = 0; h < PARTS; h++) add_values(s, weights[h], values + h * 16 * STRIDE);
  }

  // Leaves the sums of all workers to the clerks, added in a fixed order.
  DEVICE void leave(State& s, bool is_first) const {
    const int query = (lane & 3) * 2;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) s.weights[t][j] += __shfl_xor_sync(~0u, s.weights[t][j], step);
    if (!is_first) wait_at(EMPTY);
    if (lane < 4) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) masses()[warp * QUERIES + t * 8 + query + j] = {s.highest[t][j], s.weights[t][j]};
    }
    sync_threads<AMONG_WORKERS, HALF_BLOCK>();
    if (warp >= WORKERS / 2) put_sums<false>(s);
    sync_threads<AMONG_WORKERS, HALF_BLOCK>();
    if (warp < WORKERS / 2) put_sums<true>(s);
    arrive_at(FULL);
  }
  // Two workers share a place; the second to write it adds what is there.
  template <bool ADDS>
  DEVICE void put_sums(const State& s) const {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = t * 8 + (lane & 3) * 2 + j;
        if (row >= p.sharing) continue;
        const float share = exp2_of(s.highest[t][j] - highest_of(row));
        float* to = sums() + (warp % (WORKERS / 2) * QUERIES + row) * SUM_STRIDE;
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
  DEVICE float highest_of(int row) const {  // finite, where nothing has been seen
    float highest = masses()[row].x;
#pragma unroll
    for (int w = 1; w < WORKERS; w++) highest = fmaxf(highest, masses()[w * QUERIES + row].x);
    return highest == NOTHING ? 0 : highest;
  }

  DEVICE void work() const {
    Cursor ahead{};
    ahead.item = (int)blockIdx.x - (int)gridDim.x;
    ahead.coming = read_entry(blockIdx.x);
    advance(ahead), advance(ahead);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(ahead, s);
    int stage = 0, buffer = 0;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x, buffer ^= 1) {
      wait_at(READY + buffer);
      const Entry e = entry(buffer);
      u32 q[TILES][D / 16][2];
      load_fragments(q, buffer);
      State s;
      begin(s, buffer, warp == 0 && has_new(e));
      for (int at = e.start + warp * GROUP; at < e.stop; at += WORKERS * GROUP) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        fetch(ahead, stage == 0 ? STAGES - 1 : stage - 1);
        attend(s, q, stage, e.stop - at);
        if (++stage == STAGES) stage = 0;
      }
      leave(s, item == blockIdx.x);
    }
    wait_copies<0>();
  }

  // ------------------------------------------------------------------------------------------------ clerks
  static DEVICE bool has_new(const Entry& e) { return e.split == e.num_splits - 1 && !e.is_empty; }

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

  DEVICE void prepare(int item, int buffer) const {
    const Entry e = p.entries[item / p.kv_heads];
    const int head = item % p.kv_heads;
    if (!e.is_empty) {
      load_queries(e, head, buffer);
      if (has_new(e)) load_new(e, head, buffer);
    }
    if (thread == 0) entry(buffer) = e;
    arrive_at(READY + buffer);
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
  DEVICE void conclude(int item, int buffer, bool is_last) const {
    wait_at(FULL);
    const Entry e = entry(buffer);
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
    if (blockIdx.x < num_items) prepare(blockIdx.x, 0);
    for (int item = blockIdx.x; item < num_items; item += gridDim.x, buffer ^= 1) {
      const int next = item + gridDim.x;
      if (next < num_items) prepare(next, buffer ^ 1);
      conclude(item, buffer, next >= num_items);
    }
  }
};

template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
DEVICE void decode(const DecodeArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  let_next_kernel_start();
  const int thread = threadIdx.x % HALF_BLOCK;
  const Decode<Model, FLOAT8, D, TILES, STAGES> block{p, shared, thread, thread & 31, thread >> 5, *p.num_entries * p.kv_heads};
  if (threadIdx.x < HALF_BLOCK) block.work();
  else block.keep_books();
}
