// MMA warps of decode attention: fetch cached tokens and compute attention.
template <class Model, bool FLOAT8, int D, int TILES, int STAGES>
struct MmaWarps : DecodeBlock<Model, FLOAT8, D, TILES, STAGES> {
  using Block = DecodeBlock<Model, FLOAT8, D, TILES, STAGES>;
  using Number = typename Block::Number;
  using Block::GROUP, Block::PARTS, Block::QUERIES, Block::ROW, Block::CHUNKS, Block::STRIDE, Block::HALF_STAGE,
      Block::STAGE, Block::Q_STRIDE, Block::SUM_STRIDE, Block::p, Block::shared, Block::thread, Block::lane,
      Block::warp, Block::num_items, Block::address_of, Block::queries, Block::new_token_key, Block::entry, Block::sums,
      Block::softmax_stats, Block::has_new_token, Block::max_score_of;

  // ------------------------------------------------------------------------------------------------ prefetching
  // The next group to fetch, and the group after it, whose block table lookup is already in progress.
  struct Group {
    int at, stop;  // empty if equal
    u32 row;       // cache row of this lane's token
  };
  struct Cursor {
    Group next, after;
    int item, seq, head;  // of `after`
    Entry next_entry;     // entry of the following item
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
    c.after.at += MMA_WARPS * GROUP;
    while (c.after.at >= c.after.stop && c.item < num_items) {  // next item with a group for this warp
      c.item += gridDim.x;
      c.seq = c.next_entry.seq, c.head = c.item % p.kv_heads, c.after.at = c.next_entry.start + warp * GROUP, c.after.stop = c.next_entry.stop;
      c.next_entry = read_entry(c.item + gridDim.x);
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
          const bool is_valid = c.next.at + row < c.next.stop;
          copy_16(address_of(keys, row, chunk), p.k_cache + from, is_valid);
          copy_16(address_of(values, row, chunk), p.v_cache + from, is_valid);
        }
      }
    }
    commit_copies();
    advance(c);
  }

  // ------------------------------------------------------------------------------------------------ attention
  DEVICE float finish_score(float sum) const {
    return p.soft_cap > 0 ? soft_cap_score(sum * p.scale, p.soft_cap) * LOG2_E : sum * (p.scale * LOG2_E);
  }

  // Accumulators of one warp, transposed: `sums[t][m]` has two of 16 dimensions for two queries. `weights` cover this
  // thread's tokens.
  struct State {
    float sums[TILES][D / 16][4], highest[TILES][2], weights[TILES][2];
  };

  static DEVICE int dim_of(int m, int lane, int lower) {  // lower: 0 for `sums[t][m][0, 1]`, 1 for `[2, 3]`
    return m * 16 + (FLOAT8 ? (lane >> 2) * 2 + lower : (lane >> 2) + lower * 8);
  }

  DEVICE void init_state(State& s, int buffer, bool has_new_token) const {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      s.highest[t][0] = s.highest[t][1] = NEG_INFINITY;
      s.weights[t][0] = s.weights[t][1] = 0;
#pragma unroll
      for (int m = 0; m < D / 16; m++) s.sums[t][m][0] = s.sums[t][m][1] = s.sums[t][m][2] = s.sums[t][m][3] = 0;
    }
    if (!has_new_token) return;
    const float *key = new_token_key(buffer), *value = key + D;
    for (int query = 0; query < p.heads_per_kv; query++) {
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
      if (lane < 4) s.weights[t][0] = s.weights[t][1] = 1;  // count the new token once per query
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
    float halves[2][TILES][4] = {};  // even and odd steps, for a shorter dependency chain
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4];
      if constexpr (FLOAT8) {
        const int g = lane >> 2, c = lane & 3;
        const u32 upper = load_word(address_of(keys, g, k) + c * 4), lower = load_word(address_of(keys, g + 8, k) + c * 4);
        a[0] = widen(upper), a[1] = widen(lower), a[2] = widen(upper >> 16), a[3] = widen(lower >> 16);
      } else load_matrices(a, address_of(keys, lane & 15, 2 * k + (lane >> 4)));
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
      for (int m = 0; m < D / 16; m += 2) {  // 16 tokens x 32 dimensions
        u32 r[4];
        const int chunk = m + (lane >> 4);
        load_transposed(r, address_of(values, lane & 15, chunk < CHUNKS ? chunk : m));
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
        load_transposed(a, address_of(values, (lane & 7) + (lane >> 4) * 8, 2 * m + ((lane >> 3) & 1)));
#pragma unroll
        for (int t = 0; t < TILES; t++) mma<Number>(s.sums[t][m], a[0], a[1], a[2], a[3], weights[t][0], weights[t][1]);
      }
    }
  }

  DEVICE void attend(State& s, const u32 (&q)[TILES][D / 16][2], int stage, int left) const {  // left: remaining tokens
    const u32 keys = shared_address(shared) + (warp * STAGES + stage) * STAGE, values = keys + HALF_STAGE;
    float scores[PARTS][TILES][4];
    u32 weights[PARTS][TILES][2];
#pragma unroll
    for (int h = 0; h < PARTS; h++) score_part(scores[h], q, keys + h * 16 * STRIDE);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float rescale[2], highest[2] = {s.highest[t][0], s.highest[t][1]};
#pragma unroll
      for (int h = 0; h < PARTS; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float score = finish_score(scores[h][t][i]);
          scores[h][t][i] = h * 16 + (lane >> 2) + (i >> 1) * 8 < left ? score : NEG_INFINITY;
          highest[i & 1] = fmaxf(highest[i & 1], scores[h][t][i]);
        }
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest[j] = fmaxf(highest[j], __shfl_xor_sync(~0u, highest[j], step));
        rescale[j] = exp2_of(s.highest[t][j] - highest[j]);
        s.highest[t][j] = highest[j];
        s.weights[t][j] *= rescale[j];
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
      if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
        for (int m = 0; m < D / 16; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) s.sums[t][m][i] *= rescale[i & 1];
      }
    }
#pragma unroll
    for (int h = 0; h < PARTS; h++) add_values(s, weights[h], values + h * 16 * STRIDE);
  }

  // Pass the sums of all MMA warps to the epilogue warps, added in a fixed order.
  DEVICE void write_partial_sums(State& s, bool is_first) const {
    const int query = (lane & 3) * 2;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) s.weights[t][j] += __shfl_xor_sync(~0u, s.weights[t][j], step);
    if (!is_first) wait_at(SUMS_READ);
    if (lane < 4) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) softmax_stats()[warp * QUERIES + t * 8 + query + j] = {s.highest[t][j], s.weights[t][j]};
    }
    sync_threads<MMA_BARRIER, ROLE_THREADS>();
    if (warp >= MMA_WARPS / 2) store_sums<false>(s);
    sync_threads<MMA_BARRIER, ROLE_THREADS>();
    if (warp < MMA_WARPS / 2) store_sums<true>(s);
    arrive_at(SUMS_READY);
  }
  // Two warps share one buffer; the second warp adds to the first warp's sums.
  template <bool ADDS>
  DEVICE void store_sums(const State& s) const {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = t * 8 + (lane & 3) * 2 + j;
        if (row >= p.heads_per_kv) continue;
        const float share = exp2_of(s.highest[t][j] - max_score_of(row));
        float* to = sums() + (warp % (MMA_WARPS / 2) * QUERIES + row) * SUM_STRIDE;
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
  DEVICE void run_mma() const {
    Cursor prefetch_cursor{};
    prefetch_cursor.item = (int)blockIdx.x - (int)gridDim.x;
    prefetch_cursor.next_entry = read_entry(blockIdx.x);
    advance(prefetch_cursor), advance(prefetch_cursor);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(prefetch_cursor, s);
    int stage = 0, buffer = 0;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x, buffer ^= 1) {
      wait_at(QUERIES_READY + buffer);
      const Entry e = entry(buffer);
      u32 q[TILES][D / 16][2];
      load_fragments(q, buffer);
      State s;
      init_state(s, buffer, warp == 0 && has_new_token(e));
      for (int at = e.start + warp * GROUP; at < e.stop; at += MMA_WARPS * GROUP) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        fetch(prefetch_cursor, stage == 0 ? STAGES - 1 : stage - 1);
        attend(s, q, stage, e.stop - at);
        if (++stage == STAGES) stage = 0;
      }
      write_partial_sums(s, item == blockIdx.x);
    }
    wait_copies<0>();
  }
};
