// Fused linear layer: y = x W^T + bias, with the adapter of each row, in one kernel.
//
// The first blocks compute LoRA into D. Each other block multiplies COLUMNS columns with a product class, which is dense or
// quantized. A cluster of CLUSTER blocks shares these columns, split along K; each block then finishes COLUMNS / CLUSTER
// columns: it adds the partial sums in order, bias and D, and applies the adapter's output scale and output bias.
// Weights are prefetched before the previous kernel finishes.
//
// A product class has `fetch`, for the last warp, and `multiply`, for the first WARPS warps, which writes sums [row][COLUMNS + 4]
// to the start of shared memory. WAITING_THREAD waits for LoRA.

struct Four {
  float f[4];
  DEVICE void add(const Four& other) {
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] += other.f[i];
  }
  DEVICE void multiply(const Four& other) {
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] *= other.f[i];
  }
};
template <class Number> DEVICE Four load_four(const u16* from) {
  const uint2 words = __ldcg((const uint2*)from);
  const float2 a = Number::unpack(words.x), b = Number::unpack(words.y);
  return {{a.x, a.y, b.x, b.y}};
}

// Finish four outputs of one row: apply the scale of the row, add bias and D, then apply output scale and output bias.
template <class Number, bool LORA>
DEVICE void finish_outputs(const LinearArgs& p, float4 product, int row, int column, int slice) {
  Four y = {{product.x, product.y, product.z, product.w}};
  if (p.row_scales) {
    const float scale = __ldcg(p.row_scales + row);
    y.multiply({{scale, scale, scale, scale}});
  }
  const i64 at = (i64)row * p.y_stride + column;
  if (p.bias) y.add(load_four<Number>(p.bias + column));
  if (LORA) {
    const int has = p.flags[slice * p.T + row];
    const Four delta = load_four<Number>(p.d + at);  // without waiting for the flags
#pragma unroll
    for (int i = 0; i < 4; i++) y.f[i] += has & HAS_LORA ? delta.f[i] : 0;
    for (int part = 1; part <= has / EXTRA_PART; part++) y.add(load_four<Number>(p.d + (i64)part * DELTA_ROWS * p.y_stride + at));
    if (has & (HAS_OUTPUT_SCALE | HAS_OUTPUT_BIAS)) {
      const i64* fields = p.table + ((i64)p.adapters[row] * p.num_targets + p.target + slice) * FIELDS;
      const int within = column - (slice > 0 ? p.N[0] : 0) - (slice > 1 ? p.N[1] : 0);
      if (has & HAS_OUTPUT_SCALE) y.multiply(load_four<Number>(p.buffer + fields[FIELD_OUTPUT_SCALE] + within));
      if (has & HAS_OUTPUT_BIAS) y.add(load_four<Number>(p.buffer + fields[FIELD_OUTPUT_BIAS] + within));
    }
  }
  *(uint2*)(p.y + at) = uint2{Number::pack(y.f[0], y.f[1]), Number::pack(y.f[2], y.f[3])};
}

template <class Number, class Product, int CLUSTER, bool LORA>
DEVICE void linear(typename Product::Weights w, const TensorMap* x, const LinearArgs& p) {
  extern __shared__ __align__(1024) u8 shared[];
  constexpr int COLUMNS = Product::COLUMNS / CLUSTER, STRIDE = Product::COLUMNS + 4;
  static_assert(STRIDE * Product::ROWS * 4 <= Product::RING, "the sums fit in the ring");
  if (LORA && (int)blockIdx.x < p.lora_blocks) {
    if (p.early == 2) launch_dependents();
    lora<Number, (Product::RING > 150000 ? 1024 : 512), Product::RING, false>(p, shared, blockIdx.x);
    if (threadIdx.x == 0 && *p.num_tiles) increment(p.counters + 1);
    return;
  }
  Product product(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), block = blockIdx.x - (LORA ? p.lora_blocks : 0);
  const int part_number = CLUSTER == 1 ? 0 : block % CLUSTER, tile = block / CLUSTER * Product::COLUMNS;
  const int first = part_number * p.steps, all = (p.K + Product::STEP - 1) / Product::STEP, steps = min(p.steps, all - first);
  if (threadIdx.x == COMPUTE_THREADS) product.init();
  product.prepare(w);
  __syncthreads();
  if (p.early == 2) launch_dependents();
  float* part = (float*)shared;  // [row][STRIDE]
  if (warp == COMPUTE_THREADS / 32) product.fetch(w, x, p, tile, first, steps);
  else if (warp < Product::WARPS) product.multiply(part, steps);
  if (LORA && threadIdx.x == Product::WAITING_THREAD && *p.num_tiles) {
    if (p.early) wait_for_previous_kernel();  // it uses the same counters, and may not have reset them yet
    wait_for_count(p.counters + 1, p.lora_blocks);
  }
  __syncthreads();  // sums and D are complete
  if (CLUSTER > 1) cluster_sync();
  if (p.early) wait_for_previous_kernel();  // required in every thread before its first store
  if (LORA && threadIdx.x == THREADS - 1 && *p.num_tiles) reset_counters(p, gridDim.x - p.lora_blocks);  // for few rows, this thread has no outputs
  const int width = p.N[0] + p.N[1] + p.N[2];
  for (int i = threadIdx.x; i < p.M * (COLUMNS / 4); i += THREADS) {
    const int row = i / (COLUMNS / 4), within = part_number * COLUMNS + i % (COLUMNS / 4) * 4, column = tile + within;
    if (column >= width) continue;
    float4 sum = {0, 0, 0, 0};
    if (CLUSTER == 1) sum = *(const float4*)(part + row * STRIDE + within);
    else {
      float4 parts[CLUSTER];
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) parts[r] = load_from_block(shared_address(part + row * STRIDE + within), r);
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) { sum.x += parts[r].x; sum.y += parts[r].y; sum.z += parts[r].z; sum.w += parts[r].w; }
    }
    finish_outputs<Number, LORA>(p, sum, row, column, (column >= p.N[0]) + (column >= p.N[0] + p.N[1] && p.N[2] > 0));
  }
  if (CLUSTER > 1) cluster_sync();  // keep shared memory alive until all blocks have read it
}
