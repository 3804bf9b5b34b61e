// Fused linear layer: y = x W^T + bias, with the adapter of each row, in one kernel.
//
// The first blocks compute LoRA into D. Each other block multiplies 128 columns: W is the tall WGMMA operand, up to ROWS rows
// of x are the narrow operand. A cluster of CLUSTER blocks shares 128 columns, split along K; each block then finishes
// 128 / CLUSTER columns: it adds the partial sums in order, bias and D, and applies the adapter's output scale and output bias.
// Weights are prefetched before the previous kernel finishes.

// WGMMA descriptor for swizzled 128-byte rows.
DEVICE u64 descriptor(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }

template <int ROWS, int STAGES>
struct Pipeline {
  static constexpr int X_BYTES = ROWS * 128, W_BYTES = 128 * 128, RING = STAGES * (W_BYTES + X_BYTES);
  u32 w, x, full, empty;
  DEVICE Pipeline(u8* shared) : w(shared_address(shared)), x(w + STAGES * W_BYTES), full(x + STAGES * X_BYTES), empty(full + STAGES * 8) {}
  DEVICE void init() {
    for (int s = 0; s < STAGES; s++) { init_barrier(full + s * 8, 1); init_barrier(empty + s * 8, 4); }
    fence_barriers();
  }
  DEVICE void fetch_w(const TensorMap* map, int stage, int k, int column) {
    expect_bytes(full + stage * 8, W_BYTES + X_BYTES);
    copy_box(w + stage * W_BYTES, map, full + stage * 8, k * 64, column, EVICT_FIRST);
  }
  DEVICE void fetch_x(const TensorMap* map, int stage, int k) { copy_box(x + stage * X_BYTES, map, full + stage * 8, k * 64, 0, EVICT_LAST); }
};

template <int ROWS, int STAGES>
DEVICE void fetch_product(Pipeline<ROWS, STAGES>& line, const TensorMap* w, const TensorMap* x, const LinearArgs& p, int column, int first, int steps) {
  const int ahead = steps < STAGES ? steps : STAGES;
  for (int s = 0; s < ahead; s++) line.fetch_w(w, s, first + s, column);
  if (p.early) wait_for_previous_kernel();
  for (int s = 0; s < ahead; s++) line.fetch_x(x, s, first + s);
  for (int i = ahead, s = 0, phase = 0; i < steps; i++) {
    wait_barrier(line.empty + s * 8, phase);
    line.fetch_w(w, s, first + i, column);
    line.fetch_x(x, s, first + i);
    if (++s == STAGES) { s = 0; phase ^= 1; }
  }
  if (p.early == 3) launch_dependents();
}

template <class Number, int ROWS, int STAGES>
DEVICE void multiply_product(Pipeline<ROWS, STAGES>& line, float* part, int steps) {
  constexpr int STRIDE = 132;  // row stride of the sums: 128 columns, padded against bank conflicts
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float sums[2][ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS; i++) sums[i / (ROWS / 2)][i % (ROWS / 2)] = 0;
  for (int i = 0, s = 0, phase = 0, last = 0; i < steps; i++) {
    wait_barrier(line.full + s * 8, phase);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u64 x = descriptor(line.x + s * line.X_BYTES + k * 32);
      wgmma<Number>(sums[0], descriptor(line.w + s * line.W_BYTES + k * 32), x);
      wgmma<Number>(sums[1], descriptor(line.w + s * line.W_BYTES + 8192 + k * 32), x);
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (i && lane == 0) arrive(line.empty + last * 8);
    last = s;
    if (++s == STAGES) { s = 0; phase ^= 1; }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  sync_threads<4, 128>();  // the ring is no longer read; its memory now holds the sums
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) part[(j * 8 + 2 * c + (e & 1)) * STRIDE + h * 64 + warp * 16 + g + (e >> 1) * 8] = sums[h][j * 4 + e];
}

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

// Finish four outputs of one row: add bias and D, then apply output scale and output bias.
template <class Number, bool LORA>
DEVICE void finish_outputs(const LinearArgs& p, float4 product, int row, int column, int slice) {
  Four y = {{product.x, product.y, product.z, product.w}};
  const i64 at = (i64)row * p.y_stride + column;
  if (p.bias) y.add(load_four<Number>(p.bias + column));
  if (LORA) {
    const int has = p.flags[slice * p.T + row];
    if (has & HAS_LORA)
      for (int part = 0; part <= has / EXTRA_PART; part++) y.add(load_four<Number>(p.d + (i64)part * DELTA_ROWS * p.y_stride + at));
    if (has & (HAS_OUTPUT_SCALE | HAS_OUTPUT_BIAS)) {
      const i64* fields = p.table + ((i64)p.adapters[row] * p.num_targets + p.target + slice) * FIELDS;
      const int within = column - (slice > 0 ? p.N[0] : 0) - (slice > 1 ? p.N[1] : 0);
      if (has & HAS_OUTPUT_SCALE) y.multiply(load_four<Number>(p.buffer + fields[FIELD_OUTPUT_SCALE] + within));
      if (has & HAS_OUTPUT_BIAS) y.add(load_four<Number>(p.buffer + fields[FIELD_OUTPUT_BIAS] + within));
    }
  }
  *(uint2*)(p.y + at) = uint2{Number::pack(y.f[0], y.f[1]), Number::pack(y.f[2], y.f[3])};
}

template <class Number, int ROWS, int STAGES, int CLUSTER, bool LORA>
DEVICE void linear(const TensorMap* w, const TensorMap* x, const LinearArgs& p) {
  extern __shared__ __align__(1024) u8 shared[];
  using Line = Pipeline<ROWS, STAGES>;
  constexpr int COLUMNS = 128 / CLUSTER, STRIDE = 132;
  static_assert(STRIDE * ROWS * 4 <= Line::RING, "the sums fit in the ring");
  if (LORA && (int)blockIdx.x < p.lora_blocks) {
    if (p.early == 2) launch_dependents();
    lora<Number, (Line::RING > 150000 ? 1024 : 512), Line::RING, false>(p, shared, blockIdx.x);
    if (threadIdx.x == 0 && *p.num_tiles) increment(p.counters + 1);
    return;
  }
  Line line(shared);
  const int warp = threadIdx.x >> 5, block = blockIdx.x - (LORA ? p.lora_blocks : 0);
  const int part_number = CLUSTER == 1 ? 0 : block % CLUSTER, tile = block / CLUSTER * 128;
  const int first = part_number * p.steps, all = (p.K + 63) / 64, steps = min(p.steps, all - first);
  if (threadIdx.x == COMPUTE_THREADS) line.init();
  __syncthreads();
  if (p.early == 2) launch_dependents();
  float* part = (float*)shared;  // [row][STRIDE]
  if (threadIdx.x == COMPUTE_THREADS) fetch_product(line, w, x, p, tile, first, steps);
  else if (warp < 4) multiply_product<Number>(line, part, steps);
  else if (LORA && threadIdx.x == 128 && *p.num_tiles) {
    if (p.early) wait_for_previous_kernel();  // it uses the same counters, and may not have reset them yet
    wait_for_count(p.counters + 1, p.lora_blocks);
    reset_counters(p, gridDim.x - p.lora_blocks);
  }
  __syncthreads();  // sums and D are complete
  if (CLUSTER > 1) cluster_sync();
  if (p.early) wait_for_previous_kernel();  // required in every thread before its first store
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
