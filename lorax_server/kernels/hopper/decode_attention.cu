// Decode attention: RoPE, KV cache write and attention for sequences with one new token, in one kernel.
//
// KV splits depend only on the sequence length. A plan entry is one split; a work item is one split and one KV head, with
// all its query heads (8 or 16) as the narrow MMA operand.
//
// A block has four MMA warps and four epilogue warps. Each MMA warp processes every fourth group of 16 or 32 cached tokens,
// and prefetches its groups across items, even before the previous kernel finishes. Epilogue warps rotate the queries of
// the next item, store the new token, and combine the partial sums. So MMA warps wait only for their cached tokens. The new
// token is not read from the cache: the last split starts its sums with it. The last block of each sequence merges the
// splits in a fixed order, so results are bitwise batch-invariant.

struct Entry {
  int seq, token;   // row in the block table; row in q, k, v and out
  int start, stop;  // cached tokens of this split
  int split, num_splits;
  int first;        // entry of the sequence's first split
  int is_empty;     // padding row: the output is zero
};

struct DecodePlanArgs {
  const i64 *input_lengths, *cache_lengths;  // [seqs]
  const int* bounds;                         // [seqs + 1] sequence boundaries; null if each sequence has one token
  Entry* entries;
  int* num_entries;
  int num_seqs, window;
};

struct DecodeArgs {
  u8 *k_cache, *v_cache;      // [blocks][kv_heads][block_size][D]
  const u16 *q, *k, *v;       // [tokens][heads or kv_heads][D]
  u16* out;                   // [tokens][heads][D], contiguous
  const float *cos, *sin;     // [tokens][half]; null: no RoPE
  const i64* slots;           // [tokens]; null: the new token is already stored
  const int* tables;          // [seqs][table_stride]
  const Entry* entries;
  const int* num_entries;
  float* sums;                // [entry][kv_head][heads_per_kv][D] partial value sums
  float2* softmax_stats;      // [entry][kv_head][heads_per_kv] maximum score and sum of weights
  int* counters;              // [seqs][kv_heads] finished splits
  i64 q_token, k_token, v_token, angle_token, table_stride;
  int q_head, k_head, v_head, half;
  int kv_heads, heads_per_kv, block_size, block_shift;  // block_shift: log2(block_size), or -1
  float scale, k_scale, v_scale, soft_cap;         // scale includes k_scale
};

constexpr float LOG2_E = 1.4426950408889634f;
template <bool FIRST, class A, class B> struct Select { using type = A; };
template <class A, class B> struct Select<false, A, B> { using type = B; };
#define NEG_INFINITY __int_as_float(0xff800000)

// ---------------------------------------------------------------------------------------------------- instructions
DEVICE void copy_16(u32 to, const void* from, bool is_valid) {  // writes zeros if not valid
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_valid ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
DEVICE void load_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE u32 transpose(u32 pair) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
DEVICE u32 widen(u32 two_float8) {  // the lower two bytes to float16 (exact)
  u32 r;
  asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}" : "=r"(r) : "r"(two_float8));
  return r;
}
DEVICE u8 narrow(float x) {  // to float8, saturating; NaN stays NaN
  u16 two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(x));
  return (u8)two;
}
DEVICE float soft_cap_score(float x, float cap) { return cap * (1 - __fdividef(2, 1 + __expf(2 * x / cap))); }
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
    int cached = 0, first = 0, count = 0, split_size = SPLIT_TOKENS, is_new = 0;
    if (seq < p.num_seqs) {
      const int input = (int)p.input_lengths[seq];
      cached = (int)p.cache_lengths[seq];
      is_new = input == 1;
      first = p.window <= cached ? cached + 1 - p.window : 0;
      const int seen = cached - first;
      split_size = SPLIT_TOKENS * max(1, (seen + SPLIT_TOKENS * MAX_SPLITS - 1) / (SPLIT_TOKENS * MAX_SPLITS));
      if (is_new) count = max(1, (seen + split_size - 1) / split_size);
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
      const int start = first + s * split_size;
      p.entries[at + s] = {seq, token, is_new ? start : 0, is_new ? min(start + split_size, cached) : 0, s, count, at, !is_new};
    }
    __syncthreads();
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.num_entries = before;
}

// ---------------------------------------------------------------------------------------------------- thread block
constexpr int MMA_WARPS = 4, ROLE_THREADS = 128, LOADS_IN_FLIGHT = 16, DECODE_THREADS = 2 * ROLE_THREADS;
// Named barriers: queries ready (two buffers), sums ready, sums read, and one among the warps of each role.
constexpr int QUERIES_READY = 1, SUMS_READY = 3, SUMS_READ = 4, MMA_BARRIER = 5, EPILOGUE_BARRIER = 6;
DEVICE void arrive_at(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(DECODE_THREADS) : "memory"); }
DEVICE void wait_at(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(DECODE_THREADS) : "memory"); }

// TILES: groups of eight query heads. FLOAT8: the cache is float8 and is converted to float16, as are queries and weights.
template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
struct DecodeBlock {
  using Number = typename Select<FLOAT8, Float16, Model>::type;
  static constexpr int GROUP = FLOAT8 ? 32 : 16, PARTS = GROUP / 16;  // tokens per fetch, in parts of 16 (one MMA)
  static constexpr int QUERIES = TILES * 8, PAIRS = D / 2, ROW = FLOAT8 ? D : 2 * D, CHUNKS = ROW / 16;
  static constexpr bool SWIZZLED = CHUNKS % 8 == 0;  // otherwise the stride is an odd number of chunks; both avoid bank conflicts
  static constexpr int STRIDE = SWIZZLED || CHUNKS % 2 ? ROW : ROW + 16, HALF_STAGE = GROUP * STRIDE, STAGE = 2 * HALF_STAGE;
  static constexpr int Q_STRIDE = 2 * D + 16, SUM_STRIDE = D + 4;
  // Shared memory: stages of each MMA warp; two buffers of queries, new key and value, and entry; sums of two warps;
  // softmax statistics; split weights.
  static constexpr int Q_BYTES = QUERIES * Q_STRIDE, NEW_BYTES = 2 * D * 4, BUFFER = Q_BYTES + NEW_BYTES + sizeof(Entry);
  static constexpr int BUFFERS_AT = MMA_WARPS * STAGES * STAGE, SUMS_AT = BUFFERS_AT + 2 * BUFFER;
  static constexpr int STATS_AT = SUMS_AT + MMA_WARPS / 2 * QUERIES * SUM_STRIDE * 4, SPLIT_WEIGHTS_AT = STATS_AT + MMA_WARPS * QUERIES * 8;
  static constexpr int BYTES = SPLIT_WEIGHTS_AT + QUERIES * MAX_SPLITS * 4;
  static_assert(BYTES <= 227 * 1024);

  const DecodeArgs& p;
  u8* shared;
  int thread, lane, warp, num_items;  // thread and warp index within the role

  static DEVICE u32 address_of(u32 base, int row, int chunk) { return base + row * STRIDE + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 16; }
  DEVICE u8* queries(int buffer) const { return shared + BUFFERS_AT + buffer * BUFFER; }
  DEVICE float* new_token_key(int buffer) const { return (float*)(queries(buffer) + Q_BYTES); }
  DEVICE Entry& entry(int buffer) const { return *(Entry*)(queries(buffer) + Q_BYTES + NEW_BYTES); }
  DEVICE float* sums() const { return (float*)(shared + SUMS_AT); }
  DEVICE float2* softmax_stats() const { return (float2*)(shared + STATS_AT); }
  DEVICE float* split_weights() const { return (float*)(shared + SPLIT_WEIGHTS_AT); }
  static DEVICE bool has_new_token(const Entry& e) { return e.split == e.num_splits - 1 && !e.is_empty; }
  DEVICE float max_score_of(int row) const {  // 0 if all scores are masked
    float highest = softmax_stats()[row].x;
#pragma unroll
    for (int w = 1; w < MMA_WARPS; w++) highest = fmaxf(highest, softmax_stats()[w * QUERIES + row].x);
    return highest == NEG_INFINITY ? 0 : highest;
  }
};
