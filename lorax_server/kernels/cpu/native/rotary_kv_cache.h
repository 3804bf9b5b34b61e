// RoPE, and writes to the KV cache `[blocks, kv_heads, block_size, head_dim]`.

namespace attention {

// The fields of `PagedBatch`, and the cache shape. `tables` is [sequences, width], `inputs` and `cached` are
// [sequences], `slots` and `stored` (can be null) are [count].
STRUCT(Paged, const int32_t* tables; const int64_t* inputs; const int64_t* cached; const int64_t* slots;
       const int64_t* stored; int64_t width; int64_t sequences; int64_t count; int64_t kv_heads; int64_t block_size;
       int64_t head_dim; int32_t dtype;);

// Strides of `[tokens, heads, head_dim]` in elements.
struct Strides {
  int64_t token, head;
};

constexpr int64_t MAX_SINGLE_THREAD_ELEMENTS = 64 * 1024;  // elements up to this count are faster on one thread

// --- RoPE ---

// Round to T and back.
template <class T>
static inline F round_to(F v) {
  if constexpr (std::is_same<T, float>::value) return v;
  T copy[VL];
  store(copy, v);
  return load(copy);
}

// Rounds the cosine product before adding, as the reference does.
template <class T>
static inline void rotate_pair(F& a, F& b, F cosine, F sine) {
  const F c = round_to<T>(cosine), s = round_to<T>(sine), first = a;
  a = round_to<T>(a * c) - b * s;
  b = round_to<T>(b * c) + first * s;
}

template <class T>
static void rotate_head(T* x, const float* cosine, const float* sine, int64_t half) {
  int64_t i = 0;
  for (; i + VL <= half; i += VL) {
    F a = load(x + i), b = load(x + half + i);
    rotate_pair<T>(a, b, load(cosine + i), load(sine + i));
    store(x + i, a);
    store(x + half + i, b);
  }
  if (i == half) return;
  const int64_t left = half - i;
  F a = load_partial(x + i, left), b = load_partial(x + half + i, left);
  rotate_pair<T>(a, b, load_partial(cosine + i, left), load_partial(sine + i, left));
  store_partial(x + i, a, left);
  store_partial(x + half + i, b, left);
}

template <class T>
static void run_rotary(T* x, Strides strides, int64_t tokens, int64_t heads, const float* cosine, const float* sine,
                       int64_t half) {
  parallel_for(tokens, 1, tokens * heads * half, MAX_SINGLE_THREAD_ELEMENTS, [&](Range mine) {
    for (int64_t i = mine.begin; i < mine.end; i++)
      for (int64_t h = 0; h < heads; h++)
        rotate_head(x + i * strides.token + h * strides.head, cosine + i * half, sine + i * half, half);
  });
}

// Rotate dimension i of each head with dimension i + half, by angles `[tokens, half]`.
EXPORT(rotary, void* x, int64_t token, int64_t head, int64_t tokens, int64_t heads, const float* cosine,
               const float* sine, int64_t half, int64_t dtype) {
  switch (dtype) {
    case FLOAT32: return run_rotary((float*)x, {token, head}, tokens, heads, cosine, sine, half);
    case BFLOAT16: return run_rotary((Bf16*)x, {token, head}, tokens, heads, cosine, sine, half);
    default: return run_rotary((Half*)x, {token, head}, tokens, heads, cosine, sine, half);
  }
}

// --- KV cache ---

// Store new keys and values in their cache slots.
EXPORT(write_kv, const Paged* batch, const char* k, int64_t k_token, int64_t k_head, const char* v, int64_t v_token,
                 int64_t v_head, char* keys, char* values) {
  const int64_t size = batch->dtype == FLOAT32 ? 4 : 2, row = batch->head_dim * size;
  parallel_for(batch->count, 1, batch->count * batch->kv_heads * batch->head_dim, MAX_SINGLE_THREAD_ELEMENTS, [&](Range mine) {
    for (int64_t i = mine.begin; i < mine.end; i++) {
      if (batch->slots[i] < 0) continue;
      const int64_t token = batch->stored == nullptr ? i : batch->stored[i];
      const int64_t block = batch->slots[i] / batch->block_size, offset = batch->slots[i] % batch->block_size;
      for (int64_t h = 0; h < batch->kv_heads; h++) {
        const int64_t to = ((block * batch->kv_heads + h) * batch->block_size + offset) * row;
        memcpy(keys + to, k + (token * k_token + h * k_head) * size, row);
        memcpy(values + to, v + (token * v_token + h * v_head) * size, row);
      }
    }
  });
}

}  // namespace attention
