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

// ---------------------------------------------------------------------------------------------------- a block
constexpr int WORKERS = 4, HALF_BLOCK = 128, AT_ONCE = 16, DECODE_THREADS = 2 * HALF_BLOCK;
// Barriers: an item's queries are ready (one for each of two buffers), its sums are complete, they are read; among workers,
// among clerks.
constexpr int READY = 1, FULL = 3, EMPTY = 4, AMONG_WORKERS = 5, AMONG_CLERKS = 6;
DEVICE void arrive_at(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(DECODE_THREADS) : "memory"); }
DEVICE void wait_at(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(DECODE_THREADS) : "memory"); }

// TILES: of eight query heads. FLOAT8: of the cache; it is widened to float16, and so are queries and weights.
template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
struct DecodeBlock {
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
  static DEVICE bool has_new(const Entry& e) { return e.split == e.num_splits - 1 && !e.is_empty; }
  DEVICE float highest_of(int row) const {  // finite, where nothing has been seen
    float highest = masses()[row].x;
#pragma unroll
    for (int w = 1; w < WORKERS; w++) highest = fmaxf(highest, masses()[w * QUERIES + row].x);
    return highest == NOTHING ? 0 : highest;
  }
};
