// Attention of sequences with several new tokens, over the paged cache.
//
// A block has rows: `pack` query heads, which share a KV head, of `tokens` tokens each; row = token * pack + head.
// Three warps have the copy engine bring Q, and tiles of KEYS keys and of values. Warpgroups of 64 rows each compute:
// a tile's softmax runs while the values of the tile before are multiplied, be it of the item before.
// Tiles begin at multiples of KEYS from the sequence's first token. A tile that a row may not see at all leaves that row
// as it is, bit for bit. So a row's result depends neither on how a prompt is cut nor on its neighbours.
//
// A block takes items (rows and KV head) until none is left, and turns go to and fro. A list of the host's has the
// heaviest first. One that is made on the device has room for more tiles than there are: one without tokens ends it.
constexpr int COPYING = 128;  // threads; those that compute come after them

struct PrefillArgs {
  const int4* tiles;  // sequence, first token, its position, tokens from it to the sequence's end
  const int* tables;  // [sequence][table_stride] blocks
  u16* out;           // [token][heads][HEAD]
  int items, heads, group, pack, tokens;
  int block_size, box, num_blocks, table_stride, window;
  float factor, cap;  // of a score, before exp2; of a score, before tanh
};

struct Item {
  int sequence, token, position, left;  // as in a tile
  int head, kv_head;                    // the first head
  int first, last;                      // tiles of keys
};

// Return whether there is one more.
template <int KEYS> DEVICE bool take_item(const PrefillArgs& p, int round, Item& item) {
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

// Shared memory. Columns lie in chunks of 64, 128 bytes a row, swizzled, and rows in groups of eight. Of keys and values
// all chunks of a group lie together, so that one copy brings a block of the cache as it is. Where the last chunk is not
// full, all rows of a chunk lie together, and each chunk has its copy, which stops at the last column.
template <int HEAD, int KEYS, int STAGES, int GROUPS>
struct Places {
  static constexpr int ROWS = 64 * GROUPS, CHUNKS = (HEAD + 63) / 64, Q_BYTES = CHUNKS * ROWS * 128, TILE = CHUNKS * KEYS * 128;
  static constexpr bool WHOLE = HEAD % 64 == 0;
  static constexpr int GROUP = WHOLE ? CHUNKS * 1024 : 1024, CHUNK = WHOLE ? 1024 : KEYS * 128, COPIES = WHOLE ? 1 : CHUNKS;
  static constexpr int Q_STAGES = HEAD <= 128 ? 2 : 1;
  u32 q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
  DEVICE Places(u8* shared)
      : q(shared_address(shared)), k(q + Q_STAGES * Q_BYTES), v(k + STAGES * TILE), q_full(v + STAGES * TILE), q_empty(q_full + Q_STAGES * 8),
        k_full(q_empty + Q_STAGES * 8), k_empty(k_full + STAGES * 8), v_full(k_empty + STAGES * 8), v_empty(v_full + STAGES * 8) {}
  DEVICE void init() {
    for (int s = 0; s < Q_STAGES; s++) { init_barrier(q_full + s * 8, 1); init_barrier(q_empty + s * 8, 4 * GROUPS); }  // one thread of each warp
    for (int s = 0; s < STAGES; s++) {
      init_barrier(k_full + s * 8, 1); init_barrier(k_empty + s * 8, 4 * GROUPS);
      init_barrier(v_full + s * 8, 1); init_barrier(v_empty + s * 8, 4 * GROUPS);
    }
    publish_barriers();
  }
};

// ---------------------------------------------------------------------------------------------------- the copying warps
DEVICE void copy_rows(u32 to, const TensorMap* map, u32 barrier, int column, int head, int token) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token) : "memory");
}
DEVICE void copy_block(u32 to, const TensorMap* map, u32 barrier, int column, int group, int block) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(group), "r"(block) : "memory");
}

template <int HEAD, int KEYS, int STAGES, int GROUPS>
DEVICE void fetch_queries(const Places<HEAD, KEYS, STAGES, GROUPS>& at, const TensorMap* map, const PrefillArgs& p) {
  using P = Places<HEAD, KEYS, STAGES, GROUPS>;
  Item item;
  for (int round = 0; take_item<KEYS>(p, round, item); round++) {
    const int stage = round % P::Q_STAGES;
    const u32 full = at.q_full + stage * 8, to = at.q + stage * P::Q_BYTES;
    wait_barrier(at.q_empty + stage * 8, round / P::Q_STAGES & 1 ^ 1);
    expect_bytes(full, P::CHUNKS * p.pack * p.tokens * 128);
    for (int c = 0; c < P::CHUNKS; c++) copy_rows(to + c * P::ROWS * 128, map, full, c * 64, item.head, item.token);
  }
}

// Bring the keys or the values. Each lane has a box of a tile at most. A box past the end of the sequence lies past the
// end of the cache, so that zeros come: the block table says nothing about it.
template <class P, int KEYS, int STAGES>
DEVICE void fetch_tiles(u32 to, u32 full, u32 empty, const TensorMap* map, const PrefillArgs& p) {
  const int lane = threadIdx.x & 31, row = lane / P::COPIES * p.box, chunk = lane % P::COPIES;
  const int place = row / 8 * P::GROUP + chunk * P::CHUNK;
  Item item;
  for (int round = 0, count = 0; take_item<KEYS>(p, round, item); round++) {
    const int* table = p.tables + (i64)item.sequence * p.table_stride;
    const int length = row < KEYS ? item.position + item.left : 0;
    int position = item.first * KEYS + row, next = position < length ? table[position / p.block_size] : p.num_blocks;
    for (int tile = item.first; tile <= item.last; tile++, count++, position += KEYS) {
      const int block = next, stage = count % STAGES;
      next = position + KEYS < length ? table[(position + KEYS) / p.block_size] : p.num_blocks;  // while this one waits
      wait_barrier(empty + stage * 8, count / STAGES & 1 ^ 1);
      if (lane == 0) expect_bytes(full + stage * 8, P::TILE);
      __syncwarp();
      if (row < KEYS)
        copy_block(to + stage * P::TILE + place, map, full + stage * 8, chunk * 64, position % p.block_size / 8,
                   block * (p.heads / p.group) + item.kv_head);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- the computing warps
// What the matrix instruction reads: so many bytes lie between one group of eight rows and the next, and, where columns
// are not what is summed over, between one chunk of 64 columns and the next.
struct Descriptor {
  u32 low, high;
  DEVICE Descriptor(u32 address, int group, int chunk = 16) : low(address >> 4 | chunk >> 4 << 16), high(group >> 4 | 1 << 30) {}
  DEVICE u64 at(int bytes) const { return (u64)high << 32 | (low + (bytes >> 4)); }
};
DEVICE void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The softmax of two rows, a quarter of whose columns a thread has: score i is of row i / 2 % 2, key i / 4 * 8 + i % 2.
struct Softmax {
  float top[2], sum[2], keep[2];  // the highest score, the sum of this thread's columns, what is left of older sums

  DEVICE void init() {
#pragma unroll
    for (int h = 0; h < 2; h++) { top[h] = -__int_as_float(0x7f800000); sum[h] = 0; }
  }

  template <int COUNT> DEVICE void apply(float (&s)[COUNT], float factor) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float a = top[h], b = s[2 * h];
#pragma unroll
      for (int i = 2 * h; i < COUNT; i += 4) { a = fmaxf(a, s[i]); b = fmaxf(b, s[i + 1]); }
      a = fmaxf(a, b);
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
      a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
      const float base = a == -__int_as_float(0x7f800000) ? 0 : __fmul_rn(a, factor);  // a row that has seen nothing yet
      keep[h] = exp2_of(__fmul_rn(top[h], factor) - base);  // 1, if the highest score is the same
      top[h] = a;
      float even = 0, odd = 0;
#pragma unroll
      for (int i = 2 * h; i < COUNT; i += 4) {
        s[i] = exp2_of(fmaf(s[i], factor, -base));
        s[i + 1] = exp2_of(fmaf(s[i + 1], factor, -base));
        even += s[i];
        odd += s[i + 1];
      }
      sum[h] = sum[h] * keep[h] + (even + odd);
    }
  }

  // A branch that is never taken ends a block of instructions here: within one, the assembler puts the wait for the
  // values in front of all of the above.
  DEVICE void finish() {
    asm volatile("{\n.reg .pred P;\nsetp.lt.f32 P, %0, 0f00000000;\nvote.sync.any.pred P, P, 0xffffffff;\n@!P bra.uni DONE;\nnanosleep.u32 1;\nDONE:\n}" ::"f"(
                     sum[0] + sum[1]) : "memory");
  }
};

// tanh(x / 2 / log2(e)): its error is small against 1, where that of the instruction would show in scores.
template <int COUNT> DEVICE void cap_scores(float (&s)[COUNT], float cap) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) s[i] = 1 - __fdividef(2, 1 + exp2_of(s[i] * cap));
}

// Hide the keys after a row's own position, and those before its window. `last`: counted from this thread's first key.
template <int COUNT> DEVICE void mask_scores(float (&s)[COUNT], const int (&last)[2], int window) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const int key = i / 4 * 8 + i % 2, limit = last[i / 2 % 2];
    if (key > limit || key <= limit - window) s[i] = -__int_as_float(0x7f800000);
  }
}

// The values after the end of a sequence may be NaN, which no weight of zero would hide: make them zeros.
template <class P, int KEYS> DEVICE void clear_values(u32 v, int first, int group) {
  for (int i = threadIdx.x & 127; i < (KEYS - first) * P::CHUNKS * 8; i += 128) {
    const int unit = i % 8, chunk = i / 8 % P::CHUNKS, row = first + i / 8 / P::CHUNKS;
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v + row / 8 * P::GROUP + chunk * P::CHUNK + row % 8 * 128 + unit * 16), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
}

// Words of four lanes are exchanged, so that each lane has 16 bytes of a row to store.
DEVICE void transpose_words(u32 (&w)[4]) {
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
    const bool real = token < min(item.left, p.tokens);
    u16* to = p.out + ((i64)(item.token + token) * p.heads + head) * HEAD;
#pragma unroll
    for (int j = 0; j < HEAD / 8; j += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (j + i < HEAD / 8) words[i] = Number::pack(o[(j + i) * 4 + 2 * h] * scale, o[(j + i) * 4 + 2 * h + 1] * scale);
      if (j + 4 <= HEAD / 8) {
        transpose_words(words);
        if (real) *(uint4*)(to + (j + c) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (j + i < HEAD / 8 && real) *(u32*)(to + (j + i) * 8 + 2 * c) = words[i];
      }
    }
  }
}

// One computing warpgroup.
template <class Number, int HEAD, int KEYS, int STAGES, int GROUPS, bool CAP>
struct Computing {
  using P = Places<HEAD, KEYS, STAGES, GROUPS>;
  static constexpr bool TURNS = GROUPS == 2;  // one starts its products when the other has, and then does softmax
  const P& at;
  const PrefillArgs& p;
  const int group = __shfl_sync(~0u, (threadIdx.x - COPYING) >> 7, 0), lane = threadIdx.x & 31;
  const int first_row = ((threadIdx.x - COPYING) >> 5) * 16 + (lane >> 2);
  int count = 0, round = 0;  // of the tiles and items before
  int begun = 0;             // whether the output has values of this item, and not those of another one
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
    for (int i = 0; i < KEYS / 16; i++) add_values<Number>(o, weights + i * 4, v.at(i * 2 * P::GROUP), i ? 1 : begun);
    commit();
  }

  DEVICE void weigh(float (&s)[KEYS / 2], const Item& item, int tile) {
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

  // Wait for the values of the tile before, of which those from `end` on lie after the end of the sequence.
  DEVICE void wait_values_before(int end) {
    const int stage = (count - 1) % STAGES;
    wait_barrier(at.v_full + stage * 8, (count - 1) / STAGES & 1);
    if (end < KEYS) clear_values<P, KEYS>(at.v + stage * P::TILE, end, group);
  }

  DEVICE void store(const float (&o)[HEAD / 2], const float (&sums)[2], int round) {
    Item item;  // it is taken again: registers are few
    if (take_item<KEYS>(p, round, item)) store_rows<Number, HEAD>(p, item, o, sums, first_row);
  }

  DEVICE void start(u32 (&weights)[KEYS / 4], const Item& item, int tile) {
    float s[KEYS / 2];
    wait_queries();
    wait_keys();
    multiply_keys(s);
    wait_scores<0>(s);
    softmax.init();
    weigh(s, item, tile);
    pack_weights(weights, s);
  }

  // The scores of a tile, and the values of the one before. FRESH: which is of the item before.
  template <bool FRESH>
  DEVICE void attend(float (&o)[HEAD / 2], u32 (&weights)[KEYS / 4], const Item& item, int tile, int end) {
    float s[KEYS / 2];
    if (FRESH) wait_queries();
    wait_keys();
    if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
    multiply_keys(s);
    wait_values_before(end);
    multiply_values(o, weights);
    if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
    wait_scores<1>(s);
    const float sums[2] = {softmax.sum[0], softmax.sum[1]};
    if (FRESH) softmax.init();
    weigh(s, item, tile);
    softmax.finish();
    wait_values(o, weights);
    if (lane == 0) arrive(at.v_empty + (count - 1) % STAGES * 8);
    if (FRESH) store(o, sums, round - 1);
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) o[i] *= softmax.keep[i / 2 % 2];
    begun = !FRESH;
    count++;
    pack_weights(weights, s);
  }

  DEVICE void attend_all() {
    if (TURNS && group == 0) asm volatile("bar.arrive 1, 256;" ::: "memory");
    float o[HEAD / 2];
    u32 weights[KEYS / 4];
    Item item;
    take_item<KEYS>(p, 0, item);  // there is one
    int tile = item.first, end;
    start(weights, item, tile);
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) o[i] = 0;
    count = 1;
    while (true) {
      while (++tile <= item.last) attend<false>(o, weights, item, tile, KEYS);
      end = item.position + item.left - item.last * KEYS;
      if (!take_item<KEYS>(p, ++round, item)) break;
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
  Places<HEAD, KEYS, STAGES, GROUPS> at(shared);
  if (threadIdx.x == 0) at.init();
  __syncthreads();
  let_next_kernel_start();
  wait_for_kernel_before();
  if (p.tiles[blockIdx.x / (p.heads / p.pack)].w == 0) return;  // there are more blocks than items
  if (threadIdx.x < COPYING) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));
    const int warp = threadIdx.x >> 5;
    using P = Places<HEAD, KEYS, STAGES, GROUPS>;
    if (warp == 0) fetch_tiles<P, KEYS, STAGES>(at.k, at.k_full, at.k_empty, k, p);
    else if (warp == 1) fetch_tiles<P, KEYS, STAGES>(at.v, at.v_full, at.v_empty, v, p);
    else if (threadIdx.x == 64) fetch_queries(at, q, p);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 160));
    Computing<Number, HEAD, KEYS, STAGES, GROUPS, CAP>{at, p}.attend_all();
  }
}
