// Attention over the paged KV cache and over new keys and values, read in place through row pointers.
//
// Decode uses splits of `SPLIT_TOKENS` positions, prefill uses tiles of `KEY_TILE` positions. Both are aligned to multiples
// of their size, so results are bitwise independent of the batch, the threads and prefill chunk boundaries.

namespace attention {

constexpr int64_t SPLIT_TOKENS = 128, KEY_TILE = 64;
constexpr int64_t BLOCK_ROWS = 96;  // query rows (tokens x heads) per task
constexpr int64_t PREFETCH_KEYS = 16;  // prefetch distance in keys

// A range of positions for one decode token and KV head. `result_index` is the index of the partial result.
struct Split {
  int64_t sequence, head, from, to, result_index;
  bool whole;  // the only split of the token
};
// The splits of one sequence and KV head, to be merged.
struct SplitMerge {
  int64_t sequence, head, result_index, count;
};
// A block of new tokens of one sequence and KV head.
struct Block {
  int64_t sequence, head, first, count, cost;
};

// Scale, window, soft cap, ALiBi slopes and attention sinks. Scores are in log2 units, because exp2 is cheaper than exp.
struct ScoreRule {
  float scale;
  int64_t window;
  float cap;            // 0: none
  const float* slopes;  // one per head; null: none
  const float* sinks;   // one per head; null: none

  // Return the weight of the head's attention sink, relative to the maximum score.
  float sink_weight(int64_t head, float top) const {
    return sinks == nullptr ? 0.0f : power_of_two(broadcast(std::min(sinks[head] * 1.44269504f - top, 120.0f)))[0];
  }

  // Apply the soft cap, then the ALiBi slope.
  void apply(float* scores, int64_t count, int64_t head, int64_t distance) const {
    constexpr float LOG2_E = 1.44269504f;
    if (cap != 0) {
      const float limit = cap * LOG2_E, twice = 2.0f / cap;
      for (int64_t j = 0; j < count; j += VL) {
        const F score = load(scores + j), size = (score < broadcast(0.0f)) ? -score : score;
        const F power = power_of_two(size * -twice), squeezed = (1.0f - power) / (1.0f + power) * limit;
        store(scores + j, (score < broadcast(0.0f)) ? -squeezed : squeezed);
      }
    }
    if (slopes == nullptr) return;
    const float slope = slopes[head] * LOG2_E;
    for (int64_t j = 0; j < count; j++) scores[j] += slope * (float)(distance + j);
  }
};

template <class T>
struct Attention {
  const Paged& batch;
  const T *q, *k, *v;  // k and v are null if the cache contains all keys and values
  Strides q_strides, k_strides, v_strides;
  const T *keys, *values;
  T* out;
  int64_t heads;
  ScoreRule rule;

  const int64_t window = rule.window;
  const int64_t group = heads / batch.kv_heads, dim = batch.head_dim, padded = round_up(dim, PANEL);
  const int64_t part_size = round_up(group * (padded + 2), 16);  // value sums, maximum score and weight sum of each head
  int64_t cost = 0, num_split_results = 0;
  std::vector<int64_t> starts = {};  // first token of each sequence
  std::vector<Split> splits = {};
  std::vector<SplitMerge> merges = {};
  std::vector<Block> blocks = {};

  // --- planning (one thread) ---

  void plan_decode() {
    starts.reserve(batch.sequences);
    splits.reserve(batch.sequences * batch.kv_heads);
    for (int64_t s = 0; s < batch.sequences; s++) {
      starts.push_back(s);
      if (batch.cached[s] + batch.inputs[s])
        plan_decode_sequence(s);
      else
        std::fill_n((char*)(out + s * heads * dim), heads * dim * sizeof(T), 0);  // padding row
    }
  }

  void plan_prefill() {
    int64_t start = 0;
    for (int64_t s = 0; s < batch.sequences; s++) {
      starts.push_back(start);
      start += batch.inputs[s];
      if (batch.inputs[s] == 1)
        plan_decode_sequence(s);
      else
        plan_blocks(s);
    }
    // Longest first, for load balance.
    std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.cost > b.cost; });
  }

  void plan_decode_sequence(int64_t s) {
    const int64_t length = batch.cached[s] + batch.inputs[s], first = std::max<int64_t>(0, length - window);
    const int64_t begin = first / SPLIT_TOKENS * SPLIT_TOKENS, count = (length - begin + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
    for (int64_t h = 0; h < batch.kv_heads; h++) {
      if (count > 1) merges.push_back({s, h, num_split_results, count});
      for (int64_t at = begin; at < length; at += SPLIT_TOKENS, num_split_results++)
        splits.push_back({s, h, std::max(at, first), std::min(at + SPLIT_TOKENS, length), num_split_results, count == 1});
    }
    cost += 2 * heads * (length - first) * dim;
  }

  void plan_blocks(int64_t s) {
    const int64_t most = std::max<int64_t>(1, BLOCK_ROWS / group);
    for (int64_t first = 0; first < batch.inputs[s]; first += most) {
      const int64_t count = std::min(most, batch.inputs[s] - first), position = batch.cached[s] + first + count;
      const int64_t each = std::min(position, window + count) * count;
      for (int64_t h = 0; h < batch.kv_heads; h++) blocks.push_back({s, h, first, count, each});
      cost += 2 * heads * each * dim;
    }
  }

  void run() const {
    static thread_local Scratch scratch;
    float* parts = scratch.make<float>(num_split_results * part_size);
    const int64_t tasks = blocks.size() + splits.size(), ends = merges.size();
    parallel_for(cost > MAX_SINGLE_THREAD_PRODUCTS, tasks, 1, [&](Range mine) {
      for (int64_t i = mine.begin; i < mine.end; i++)
        if (i < (int64_t)blocks.size())
          attend_block(blocks[i]);
        else
          attend_split(splits[i - blocks.size()], parts);
    });
    parallel_for(cost > MAX_SINGLE_THREAD_PRODUCTS, ends, 1, [&](Range mine) {
      for (int64_t i = mine.begin; i < mine.end; i++) merge_splits(merges[i], parts);
    });
  }

  // --- shared ---

  // Write the addresses of the keys and values at positions `from` to `to`.
  void find_rows(int64_t s, int64_t head, int64_t from, int64_t to, const T** key, const T** value) const {
    const int64_t cached = k == nullptr ? to : std::min(to, batch.cached[s]), size = batch.block_size;
    const int32_t* table = batch.tables + s * batch.width;
    int64_t position = from;
    while (position < cached) {
      const int64_t offset = position % size, count = std::min(size - offset, cached - position);
      const int64_t at = ((table[position / size] * batch.kv_heads + head) * size + offset) * dim;
      for (int64_t i = 0; i < count; i++) {
        *key++ = keys + at + i * dim;
        *value++ = values + at + i * dim;
      }
      position += count;
    }
    for (; position < to; position++) {
      const int64_t token = starts[s] + position - batch.cached[s];
      *key++ = k + token * k_strides.token + head * k_strides.head;
      *value++ = v + token * v_strides.token + head * v_strides.head;
    }
  }

  // Copy one query head, scaled and zero-padded.
  void copy_query(int64_t token, int64_t head, float* to) const {
    const float scale = rule.scale * 1.44269504f;
    const T* from = q + token * q_strides.token + head * q_strides.head;
    int64_t d = 0;
    for (; d + VL <= dim; d += VL) store(to + d, load(from + d) * scale);
    for (; d < padded; d += VL) store(to + d, load_partial(from + d, std::max<int64_t>(0, dim - d)) * scale);
  }

  void store_output(const float* sums, float mass, int64_t token, int64_t head) const {
    T* to = out + (token * heads + head) * dim;
    int64_t d = 0;
    for (; d + VL <= dim; d += VL) store(to + d, load(sums + d) / mass);
    if (d < dim) store_partial(to + d, load(sums + d) / mass, dim - d);
  }

  // --- decode: one new token ---

  void attend_split(const Split& split, float* parts) const {
    static thread_local Scratch scratch;
    float *queries = scratch.make<float>(group * (padded + SPLIT_TOKENS)), *scores = queries + group * padded;
    float *sums = parts + split.result_index * part_size, *best = sums + group * padded, *mass = best + group;
    const int64_t count = split.to - split.from, columns = round_up(count, PANEL);
    const T *key[SPLIT_TOKENS], *value[SPLIT_TOKENS];
    find_rows(split.sequence, split.head, split.from, split.to, key, value);
    std::fill(key + count, key + columns, key[count - 1]);
    for (int64_t g = 0; g < group; g++)
      copy_query(starts[split.sequence], split.head * group + g, queries + g * padded);
    for_heads([&](auto number, int64_t g) {
      for (int64_t j = 0; j < columns; j += VL) {
        if (g == 0) fetch(key, value, j, count);
        score<number()>(queries + g * padded, padded, key + j, dim, scores + g * SPLIT_TOKENS + j, SPLIT_TOKENS);
      }
    });
    const int64_t last = batch.cached[split.sequence] + batch.inputs[split.sequence] - 1;
    for (int64_t g = 0; g < group; g++) {
      rule.apply(scores + g * SPLIT_TOKENS, columns, split.head * group + g, split.from - last);
      best[g] = find_max_score(scores + g * SPLIT_TOKENS, 0, count, columns);
      mass[g] = sum(softmax_weights(scores + g * SPLIT_TOKENS, 0, count, columns, best[g]));
    }
    for_heads([&](auto number, int64_t g) {
      weighted_sum_all<number()>(scores + g * SPLIT_TOKENS, SPLIT_TOKENS, value, count, dim, sums + g * padded, padded);
    });
    if (split.whole) merge_splits({split.sequence, split.head, split.result_index, 1}, parts);
  }

  // Prefetch the values at positions `at` to `at + VL`, and keys that are needed soon.
  void fetch(const T* const* key, const T* const* value, int64_t at, int64_t count) const {
    for (int64_t j = at; j < std::min(at + VL, count); j++) {
      const char *soon = (const char*)key[std::min(j + PREFETCH_KEYS, count - 1)], *later = (const char*)value[j];
      for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64) {
        __builtin_prefetch(soon + byte);
        __builtin_prefetch(later + byte);
      }
    }
  }

  // Call `act(number of heads, first head)` for groups of heads that fit into the vector registers.
  template <class Act>
  void for_heads(Act act) const {
    int64_t g = 0;
    for (; g + MAX_HEADS_PER_PASS <= group; g += MAX_HEADS_PER_PASS) act(std::integral_constant<int, MAX_HEADS_PER_PASS>(), g);
    switch (group - g) {
      case 3: return act(std::integral_constant<int, 3>(), g);
      case 2: return act(std::integral_constant<int, 2>(), g);
      case 1: return act(std::integral_constant<int, 1>(), g);
    }
  }

  // Merge partial results, weighted by exp2(split maximum - total maximum).
  void merge_splits(const SplitMerge& splits, float* parts) const {
    float* first = parts + splits.result_index * part_size;
    for (int64_t g = 0; g < group; g++) {
      float *sums = first + g * padded, *best = first + group * padded + g, mass = 0, top = LOWEST_SCORE;
      for (int64_t i = 0; i < splits.count; i++) top = std::max(best[i * part_size], top);
      for (int64_t i = 0; i < splits.count; i++) {
        const float weight = power_of_two(broadcast(best[i * part_size] - top))[0];
        mass += weight * best[i * part_size + group];
        const float* from = sums + i * part_size;
        for (int64_t d = 0; d < dim; d += VL)
          store(sums + d, i == 0 ? load(from + d) * weight : load(sums + d) + load(from + d) * weight);
      }
      mass += rule.sink_weight(splits.head * group + g, top);
      store_output(sums, mass, starts[splits.sequence], splits.head * group + g);
    }
  }

  // --- prefill: several new tokens ---

  // Accumulators of a block: value sums, maximum score and weight sums of each row.
  struct Rows {
    float *queries, *sums, *best, *mass;
    int64_t count, position, head;  // position and head of the first row
  };

  void attend_block(const Block& block) const {
    static thread_local Scratch scratch;
    const int64_t count = block.count * group, position = batch.cached[block.sequence] + block.first;
    float* buffer = scratch.make<float>(count * (2 * padded + 1 + VL) + 2 * KEY_TILE * padded);
    float *key_panels = buffer, *value_panels = buffer + KEY_TILE * padded, *queries = value_panels + KEY_TILE * padded;
    float *sums = queries + count * padded, *mass = sums + count * padded, *best = mass + count * VL;
    const int64_t token = starts[block.sequence] + block.first, head = block.head * group;
    const Rows rows{queries, sums, best, mass, count, position, head};
    for (int64_t i = 0; i < count; i++) copy_query(token + i / group, head + i % group, queries + i * padded);
    std::fill(sums, best, 0.0f);
    std::fill_n(best, count, LOWEST_SCORE);
    const int64_t first = std::max<int64_t>(0, position - window + 1), last = position + block.count;
    for (int64_t key = first / KEY_TILE * KEY_TILE; key < last; key += KEY_TILE) {
      pack(block, std::max(key, first), std::min(key + KEY_TILE, last), key, key_panels, value_panels);
      for (int64_t row = 0; row < count; row += MAX_TILE_ROWS) attend_tile(rows, row, key, key_panels, value_panels);
    }
    for (int64_t i = 0; i < count; i++) {
      const float total = sum(load(mass + i * VL)) + rule.sink_weight(head + i % group, best[i]);
      store_output(sums + i * padded, total, token + i / group, head + i % group);
    }
  }

  // Pack the keys of a tile as `[keys / PANEL, dim, PANEL]` and the values as `[dim / PANEL, keys, PANEL]`.
  // Positions outside `from` to `to` are zero-filled.
  void pack(const Block& block, int64_t from, int64_t to, int64_t tile, float* keys_to, float* values_to) const {
    const T *key[KEY_TILE] = {}, *value[KEY_TILE] = {};
    find_rows(block.sequence, block.head, from, to, key + (from - tile), value + (from - tile));
    const int64_t count = round_up(to - tile, PANEL);
    const auto take = [&](const T* p, int64_t d) {
      return p == nullptr || d >= dim ? F{} : d + VL <= dim ? load(p + d) : load_partial(p + d, dim - d);
    };
    for (int64_t j = 0; j < count; j += VL)
      for (int64_t d = 0; d < dim; d += VL) {
        F square[VL];
        for (int i = 0; i < VL; i++) square[i] = take(key[j + i], d);
        transpose(square);
        float* panel = keys_to + (j / PANEL * padded + d) * PANEL + j % PANEL;
        for (int i = 0; i < VL; i++) store(panel + i * PANEL, square[i]);
      }
    for (int64_t j = 0; j < count; j++)
      for (int64_t d = 0; d < padded; d += VL)
        store(values_to + (d / PANEL * KEY_TILE + j) * PANEL + d % PANEL, take(value[j], d));
  }

  void attend_tile(const Rows& rows, int64_t row, int64_t tile, const float* keys_in, const float* values_in) const {
    float scores[MAX_TILE_ROWS * KEY_TILE], factors[MAX_TILE_ROWS];
    const int64_t height = std::min<int64_t>(MAX_TILE_ROWS, rows.count - row);
    const int64_t last = rows.position + (row + height - 1) / group, seen = std::min(KEY_TILE, last + 1 - tile);
    if (seen <= 0 || tile + KEY_TILE <= rows.position + row / group - window + 1) return;
    const int64_t columns = round_up(seen, PANEL);
    const MultiplyRows multiply_rows = select_product<MAX_TILE_ROWS>(height);
    const float* queries = rows.queries + row * padded;
    for (int64_t j = 0; j < columns; j += PANEL)
      multiply_rows(queries, padded, keys_in + j * padded, dim, scores + j, KEY_TILE, nullptr);
    for (int64_t i = 0; i < height; i++) {
      const int64_t position = rows.position + (row + i) / group;
      const int64_t to = std::clamp<int64_t>(position + 1 - tile, 0, columns);
      const int64_t from = std::clamp<int64_t>(position - window + 1 - tile, 0, to);
      rule.apply(scores + i * KEY_TILE, columns, rows.head + (row + i) % group, tile - position);
      float *own = scores + i * KEY_TILE, *mass = rows.mass + (row + i) * VL, &best = rows.best[row + i];
      const float top = std::max(best, find_max_score(own, from, to, columns));
      factors[i] = best == top ? 1.0f : power_of_two(broadcast(best - top))[0];
      store(mass, load(mass) * factors[i] + softmax_weights(own, from, to, columns, top));
      best = top;
    }
    float* sums = rows.sums + row * padded;
    for (int64_t d = 0; d < padded; d += PANEL)
      multiply_rows(scores, KEY_TILE, values_in + d * KEY_TILE, seen, sums + d, padded, factors);
  }
};

template <class T>
static void run_decode(const Paged& batch, const void* q, Strides strides, const void* keys, const void* values,
                       void* out, int64_t heads, ScoreRule rule) {
  Attention<T> attention{batch, (const T*)q, nullptr, nullptr, strides, {}, {}, (const T*)keys, (const T*)values,
                         (T*)out, heads, rule};
  attention.plan_decode();
  attention.run();
}

// Decode attention: one new token per sequence. Its key and value are in the cache.
EXPORT(decode_attention, const Paged* batch, const void* q, int64_t token, int64_t head, const void* keys,
                         const void* values, void* out, int64_t heads, float scale, int64_t window, float cap,
                         const float* slopes, const float* sinks) {
  const ScoreRule rule{scale, window, cap, slopes, sinks};
  switch (batch->dtype) {
    case FLOAT32: return run_decode<float>(*batch, q, {token, head}, keys, values, out, heads, rule);
    case BFLOAT16: return run_decode<Bf16>(*batch, q, {token, head}, keys, values, out, heads, rule);
    default: return run_decode<Half>(*batch, q, {token, head}, keys, values, out, heads, rule);
  }
}

// New queries, keys and values, with strides.
struct NewTokens {
  const void *q, *k, *v;
  Strides q_strides, k_strides, v_strides;
};

template <class T>
static void run_prefill(const Paged& batch, const NewTokens& new_tokens, const void* keys, const void* values, void* out,
                        int64_t heads, ScoreRule rule) {
  Attention<T> attention{batch, (const T*)new_tokens.q, (const T*)new_tokens.k, (const T*)new_tokens.v, new_tokens.q_strides,
                         new_tokens.k_strides, new_tokens.v_strides, (const T*)keys, (const T*)values, (T*)out, heads, rule};
  attention.plan_prefill();
  attention.run();
}

// Prefill attention: any number of new tokens per sequence attend causally to cached and new tokens.
EXPORT(prefill_attention, const Paged* batch, const void* q, int64_t q_token, int64_t q_head, const void* k,
                          int64_t k_token, int64_t k_head, const void* v, int64_t v_token, int64_t v_head,
                          const void* keys, const void* values, void* out, int64_t heads, float scale,
                          int64_t window, float cap, const float* slopes, const float* sinks) {
  const ScoreRule rule{scale, window, cap, slopes, sinks};
  const NewTokens new_tokens{q, k, v, {q_token, q_head}, {k_token, k_head}, {v_token, v_head}};
  switch (batch->dtype) {
    case FLOAT32: return run_prefill<float>(*batch, new_tokens, keys, values, out, heads, rule);
    case BFLOAT16: return run_prefill<Bf16>(*batch, new_tokens, keys, values, out, heads, rule);
    default: return run_prefill<Half>(*batch, new_tokens, keys, values, out, heads, rule);
  }
}

}  // namespace attention
