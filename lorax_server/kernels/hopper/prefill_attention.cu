// Prefill attention over the paged KV cache, for sequences with several new tokens.
//
// The rows of a block are `tokens` tokens x `pack` query heads that share a KV head; row = token * pack + head.
// Three warps issue TMA copies of Q, K and V. Compute warpgroups (64 rows each) overlap the softmax of a tile with the value
// product of the previous tile, also across items.
// Key tiles start at multiples of KEYS. A fully masked tile leaves a row bitwise unchanged, so results do not depend on
// prefill chunk boundaries or on the batch.
//
// Persistent blocks process items (a tile of rows and a KV head) in alternating order. Tile lists from the host start with
// the longest work. Lists from the device are padded; the first tile without tokens ends the list.
constexpr int COPY_THREADS = 128;  // threads of the copy warps, before the compute threads

struct PrefillArgs {
  const int4* tiles;  // sequence, first token, its position, tokens up to the sequence end
  const int* tables;  // [sequence][table_stride] blocks
  u16* out;           // [token][heads][HEAD]
  int items, heads, group, pack, tokens;
  int block_size, box, num_blocks, table_stride, window;
  float factor, cap;  // score factors before exp2 and before tanh
};

struct Item {
  int sequence, token, position, left;  // as in `tiles`
  int head, kv_head;                    // first head
  int first, last;                      // key tiles
};

// Load item `round` of this block. Returns false if there are no more items.
template <int KEYS> DEVICE bool get_item(const PrefillArgs& p, int round, Item& item) {
  const int index = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  if (index >= p.items) return false;
  const int packs = p.heads / p.pack;
  const int4 tile = p.tiles[index / packs];
  if (tile.w == 0) return false;
  item = {tile.x, tile.y, tile.z, tile.w, index % packs * p.pack, index % packs * p.pack / p.group};
  item.first = max(0, item.position - p.window + 1) / KEYS;
  item.last = (item.position + min(item.left, p.tokens) - 1) / KEYS;
  return true;
}

// Shared memory layout: chunks of 64 columns (swizzled 128-byte rows), in groups of eight rows. For keys and values, all
// chunks of a group are contiguous, so one copy transfers a cache block. If the last chunk is partial, all rows of a chunk
// are contiguous, and each chunk has a separate copy.
template <int HEAD, int KEYS, int STAGES, int GROUPS>
struct SharedLayout {
  static constexpr int ROWS = 64 * GROUPS, CHUNKS = (HEAD + 63) / 64, Q_BYTES = CHUNKS * ROWS * 128, TILE = CHUNKS * KEYS * 128;
  static constexpr bool WHOLE = HEAD % 64 == 0;
  static constexpr int GROUP = WHOLE ? CHUNKS * 1024 : 1024, CHUNK = WHOLE ? 1024 : KEYS * 128, COPIES = WHOLE ? 1 : CHUNKS;
  static constexpr int Q_STAGES = HEAD <= 128 ? 2 : 1;
  u32 q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
  DEVICE SharedLayout(u8* shared)
      : q(shared_address(shared)), k(q + Q_STAGES * Q_BYTES), v(k + STAGES * TILE), q_full(v + STAGES * TILE), q_empty(q_full + Q_STAGES * 8),
        k_full(q_empty + Q_STAGES * 8), k_empty(k_full + STAGES * 8), v_full(k_empty + STAGES * 8), v_empty(v_full + STAGES * 8) {}
  DEVICE void init() {
    for (int s = 0; s < Q_STAGES; s++) { init_barrier(q_full + s * 8, 1); init_barrier(q_empty + s * 8, 4 * GROUPS); }  // one arrival per warp
    for (int s = 0; s < STAGES; s++) {
      init_barrier(k_full + s * 8, 1); init_barrier(k_empty + s * 8, 4 * GROUPS);
      init_barrier(v_full + s * 8, 1); init_barrier(v_empty + s * 8, 4 * GROUPS);
    }
    fence_barriers();
  }
};

// ---------------------------------------------------------------------------------------------------- copy warps
DEVICE void copy_rows(u32 to, const TensorMap* map, u32 barrier, int column, int head, int token) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token) : "memory");
}
DEVICE void copy_block(u32 to, const TensorMap* map, u32 barrier, int column, int group, int block) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(group), "r"(block) : "memory");
}

template <int HEAD, int KEYS, int STAGES, int GROUPS>
DEVICE void fetch_queries(const SharedLayout<HEAD, KEYS, STAGES, GROUPS>& at, const TensorMap* map, const PrefillArgs& p) {
  using P = SharedLayout<HEAD, KEYS, STAGES, GROUPS>;
  Item item;
  for (int round = 0; get_item<KEYS>(p, round, item); round++) {
    const int stage = round % P::Q_STAGES;
    const u32 full = at.q_full + stage * 8, to = at.q + stage * P::Q_BYTES;
    wait_barrier(at.q_empty + stage * 8, round / P::Q_STAGES & 1 ^ 1);
    expect_bytes(full, P::CHUNKS * p.pack * p.tokens * 128);
    for (int c = 0; c < P::CHUNKS; c++) copy_rows(to + c * P::ROWS * 128, map, full, c * 64, item.head, item.token);
  }
}

// Copy key or value tiles. Each lane copies at most one box per tile. Boxes past the end of the sequence use an
// out-of-bounds block, which TMA fills with zeros.
template <class P, int KEYS, int STAGES>
DEVICE void fetch_tiles(u32 to, u32 full, u32 empty, const TensorMap* map, const PrefillArgs& p) {
  const int lane = threadIdx.x & 31, row = lane / P::COPIES * p.box, chunk = lane % P::COPIES;
  const int place = row / 8 * P::GROUP + chunk * P::CHUNK;
  Item item;
  for (int round = 0, count = 0; get_item<KEYS>(p, round, item); round++) {
    const int* table = p.tables + (i64)item.sequence * p.table_stride;
    const int length = row < KEYS ? item.position + item.left : 0;
    int position = item.first * KEYS + row, next = position < length ? table[position / p.block_size] : p.num_blocks;
    for (int tile = item.first; tile <= item.last; tile++, count++, position += KEYS) {
      const int block = next, stage = count % STAGES;
      next = position + KEYS < length ? table[(position + KEYS) / p.block_size] : p.num_blocks;  // load early, before the barrier wait
      wait_barrier(empty + stage * 8, count / STAGES & 1 ^ 1);
      if (lane == 0) expect_bytes(full + stage * 8, P::TILE);
      __syncwarp();
      if (row < KEYS)
        copy_block(to + stage * P::TILE + place, map, full + stage * 8, chunk * 64, position % p.block_size / 8,
                   block * (p.heads / p.group) + item.kv_head);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- compute warps
// WGMMA descriptor. `group` is the distance in bytes between groups of eight rows, `chunk` between chunks of 64 columns
// (for transposed operands).
struct Descriptor {
  u32 low, high;
  DEVICE Descriptor(u32 address, int group, int chunk = 16) : low(address >> 4 | chunk >> 4 << 16), high(group >> 4 | 1 << 30) {}
  DEVICE u64 at(int bytes) const { return (u64)high << 32 | (low + (bytes >> 4)); }
};
DEVICE void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Softmax state for two rows. A thread has a quarter of the columns: score i is row i / 2 % 2, key i / 4 * 8 + i % 2.
struct Softmax {
  float max_score[2], sum[2], rescale[2];  // maximum score, weight sum of this thread's columns, rescale factor of older sums

  DEVICE void init() {
#pragma unroll
    for (int h = 0; h < 2; h++) { max_score[h] = -__int_as_float(0x7f800000); sum[h] = 0; }
  }

  template <int COUNT> DEVICE void apply(float (&s)[COUNT], float factor) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float a = max_score[h], b = s[2 * h];
#pragma unroll
      for (int i = 2 * h; i < COUNT; i += 4) { a = fmaxf(a, s[i]); b = fmaxf(b, s[i + 1]); }
      a = fmaxf(a, b);
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
      const float base = a == -__int_as_float(0x7f800000) ? 0 : __fmul_rn(a, factor);  // all scores masked so far
      rescale[h] = exp2_of(__fmul_rn(max_score[h], factor) - base);  // 1 if the maximum did not change
      max_score[h] = a;
      float even = 0, odd = 0;
#pragma unroll
      for (int i = 2 * h; i < COUNT; i += 4) {
        s[i] = exp2_of(fmaf(s[i], factor, -base));
        s[i + 1] = exp2_of(fmaf(s[i + 1], factor, -base));
        even += s[i];
        odd += s[i + 1];
      }
      sum[h] = sum[h] * rescale[h] + (even + odd);
    }
  }

  // A branch that is never taken ends the basic block. Otherwise the assembler moves the wait for the values before the
  // softmax.
  DEVICE void finish() {
    asm volatile("{\n.reg .pred P;\nsetp.lt.f32 P, %0, 0f00000000;\nvote.sync.any.pred P, P, 0xffffffff;\n@!P bra.uni DONE;\nnanosleep.u32 1;\nDONE:\n}" ::"f"(
                     sum[0] + sum[1]) : "memory");
  }
};

// tanh(x / 2 / log2(e)), more precise than the tanh instruction.
template <int COUNT> DEVICE void cap_scores(float (&s)[COUNT], float cap) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) s[i] = 1 - __fdividef(2, 1 + exp2_of(s[i] * cap));
}

// Mask keys after each row's position and before its window. `last` is relative to this thread's first key.
template <int COUNT> DEVICE void mask_scores(float (&s)[COUNT], const int (&last)[2], int window) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const int key = i / 4 * 8 + i % 2, limit = last[i / 2 % 2];
    if (key > limit || key <= limit - window) s[i] = -__int_as_float(0x7f800000);
  }
}

// Zero the values past the end of the sequence: stale values can be NaN, and 0 * NaN is NaN.
template <class P, int KEYS> DEVICE void zero_values(u32 v, int first, int group) {
  for (int i = threadIdx.x & 127; i < (KEYS - first) * P::CHUNKS * 8; i += 128) {
    const int unit = i % 8, chunk = i / 8 % P::CHUNKS, row = first + i / 8 / P::CHUNKS;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v + row / 8 * P::GROUP + chunk * P::CHUNK + row % 8 * 128 + unit * 16), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
}

// Exchange words between four lanes, so each lane stores 16 contiguous bytes.
DEVICE void exchange_words(u32 (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    if (odd) w[i] = got; else w[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
    if (upper) w[i] = got; else w[i + 2] = got;
  }
}

template <class Number, int HEAD>
DEVICE void store_rows(const PrefillArgs& p, const Item& item, const float (&o)[HEAD / 2], const float (&sums)[2], int first_row) {
  const int c = threadIdx.x & 3;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float sum = sums[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float scale = 1 / sum;
    const int row = first_row + 8 * h, token = row / p.pack, head = item.head + row % p.pack;
    const bool is_valid = token < min(item.left, p.tokens);
    u16* to = p.out + ((i64)(item.token + token) * p.heads + head) * HEAD;
#pragma unroll
    for (int j = 0; j < HEAD / 8; j += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (j + i < HEAD / 8) words[i] = Number::pack(o[(j + i) * 4 + 2 * h] * scale, o[(j + i) * 4 + 2 * h + 1] * scale);
      if (j + 4 <= HEAD / 8) {
        exchange_words(words);
        if (is_valid) *(uint4*)(to + (j + c) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (j + i < HEAD / 8 && is_valid) *(u32*)(to + (j + i) * 8 + 2 * c) = words[i];
      }
    }
  }
}

// One compute warpgroup.
template <class Number, int HEAD, int KEYS, int STAGES, int GROUPS, bool CAP>
struct ComputeWarpgroup {
  using P = SharedLayout<HEAD, KEYS, STAGES, GROUPS>;
  static constexpr bool ALTERNATES = GROUPS == 2;  // two warpgroups alternate between products and softmax
  const P& at;
  const PrefillArgs& p;
  const int group = __shfl_sync(~0u, (threadIdx.x - COPY_THREADS) >> 7, 0), lane = threadIdx.x & 31;
  const int first_row = ((threadIdx.x - COPY_THREADS) >> 5) * 16 + (lane >> 2);
  int count = 0, round = 0;  // processed tiles and items
  int has_values = 0;        // whether the output already has values of this item
  Softmax softmax;

  DEVICE void multiply_keys(float (&s)[KEYS / 2]) {
    const Descriptor q(at.q + round % P::Q_STAGES * P::Q_BYTES + group * 64 * 128, 1024), k(at.k + count % STAGES * P::TILE, P::GROUP);
    fence_registers();
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
      const u64 a = q.at(i / 4 * P::ROWS * 128 + i % 4 * 32), b = k.at(i / 4 * P::CHUNK + i % 4 * 32);
      if (i == 0) start_scores<Number>(s, a, b);
      else add_scores<Number>(s, a, b);
    }
    commit();
  }

  DEVICE void multiply_values(float (&o)[HEAD / 2], const u32 (&weights)[KEYS / 4]) {
    const Descriptor v(at.v + (count - 1) % STAGES * P::TILE, P::GROUP, P::CHUNK);
    fence_registers();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) add_values<Number>(o, weights + i * 4, v.at(i * 2 * P::GROUP), i ? 1 : has_values);
    commit();
  }

  DEVICE void apply_softmax(float (&s)[KEYS / 2], const Item& item, int tile) {
    if (lane == 0) {
      arrive(at.k_empty + count % STAGES * 8);
      if (tile == item.last) arrive(at.q_empty + round % P::Q_STAGES * 8);
    }
    if (CAP) cap_scores(s, p.cap);
    const int begin = tile * KEYS;
    if (begin + KEYS - 1 > item.position || begin <= item.position + p.tokens - 1 - p.window) {
      const int from = item.position - begin - 2 * (lane & 3);
      const int last[2] = {from + first_row / p.pack, from + (first_row + 8) / p.pack};
      mask_scores(s, last, p.window);
    }
    softmax.apply(s, p.factor);
  }

  DEVICE void pack_weights(u32 (&weights)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) weights[i] = Number::pack(s[2 * i], s[2 * i + 1]);
  }

  DEVICE void wait_queries() { wait_barrier(at.q_full + round % P::Q_STAGES * 8, round / P::Q_STAGES & 1); }
  DEVICE void wait_keys() { wait_barrier(at.k_full + count % STAGES * 8, count / STAGES & 1); }

  // Wait for the values of the previous tile, and zero those from `end` on, past the end of the sequence.
  DEVICE void wait_values_before(int end) {
    const int stage = (count - 1) % STAGES;
    wait_barrier(at.v_full + stage * 8, (count - 1) / STAGES & 1);
    if (end < KEYS) zero_values<P, KEYS>(at.v + stage * P::TILE, end, group);
  }

  DEVICE void store(const float (&o)[HEAD / 2], const float (&sums)[2], int round) {
    Item item;  // loaded again to save registers
    if (get_item<KEYS>(p, round, item)) store_rows<Number, HEAD>(p, item, o, sums, first_row);
  }

  DEVICE void start(u32 (&weights)[KEYS / 4], const Item& item, int tile) {
    float s[KEYS / 2];
    wait_queries();
    wait_keys();
    multiply_keys(s);
    wait_scores<0>(s);
    softmax.init();
    apply_softmax(s, item, tile);
    pack_weights(weights, s);
  }

  // Compute the scores of a tile and the value product of the previous tile. FRESH: the previous tile belongs to another item.
  template <bool FRESH>
  DEVICE void attend(float (&o)[HEAD / 2], u32 (&weights)[KEYS / 4], const Item& item, int tile, int end) {
    float s[KEYS / 2];
    if (FRESH) wait_queries();
    wait_keys();
    if (ALTERNATES) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
    multiply_keys(s);
    wait_values_before(end);
    multiply_values(o, weights);
    if (ALTERNATES) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
    wait_scores<1>(s);
    const float sums[2] = {softmax.sum[0], softmax.sum[1]};
    if (FRESH) softmax.init();
    apply_softmax(s, item, tile);
    softmax.finish();
    wait_values(o, weights);
    if (lane == 0) arrive(at.v_empty + (count - 1) % STAGES * 8);
    if (FRESH) store(o, sums, round - 1);
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) o[i] *= softmax.rescale[i / 2 % 2];
    has_values = !FRESH;
    count++;
    pack_weights(weights, s);
  }

  DEVICE void run() {
    if (ALTERNATES && group == 0) asm volatile("bar.arrive 1, 256;" ::: "memory");
    float o[HEAD / 2];
    u32 weights[KEYS / 4];
    Item item;
    get_item<KEYS>(p, 0, item);  // always exists
    int tile = item.first, end;
    start(weights, item, tile);
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) o[i] = 0;
    count = 1;
    while (true) {
      while (++tile <= item.last) attend<false>(o, weights, item, tile, KEYS);
      end = item.position + item.left - item.last * KEYS;
      if (!get_item<KEYS>(p, ++round, item)) break;
      tile = item.first;
      attend<true>(o, weights, item, tile, end);
    }
    wait_values_before(end);
    multiply_values(o, weights);
    wait_values(o, weights);
    store(o, softmax.sum, round - 1);
  }
};

template <class Number, int HEAD, int KEYS, int STAGES, int GROUPS, bool CAP>
DEVICE void prefill(const TensorMap* q, const TensorMap* k, const TensorMap* v, const PrefillArgs& p) {
  extern __shared__ __align__(1024) u8 shared[];
  SharedLayout<HEAD, KEYS, STAGES, GROUPS> at(shared);
  if (threadIdx.x == 0) at.init();
  __syncthreads();
  launch_dependents();
  wait_for_previous_kernel();
  if (p.tiles[blockIdx.x / (p.heads / p.pack)].w == 0) return;  // more blocks than items
  if (threadIdx.x < COPY_THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));
    const int warp = threadIdx.x >> 5;
    using P = SharedLayout<HEAD, KEYS, STAGES, GROUPS>;
    if (warp == 0) fetch_tiles<P, KEYS, STAGES>(at.k, at.k_full, at.k_empty, k, p);
    else if (warp == 1) fetch_tiles<P, KEYS, STAGES>(at.v, at.v_full, at.v_empty, v, p);
    else if (threadIdx.x == 64) fetch_queries(at, q, p);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 160));
    ComputeWarpgroup<Number, HEAD, KEYS, STAGES, GROUPS, CAP>{at, p}.run();
  }
}
