// A product with 16-bit weights. W is the tall WGMMA operand, up to ROWS rows of x are the narrow operand.

template <class Number, int ROWS_, int STAGES>
struct DenseProduct {
  using Weights = const TensorMap*;
  static constexpr int ROWS = ROWS_, COLUMNS = 128, STEP = 64, WARPS = 4, WAITING_THREAD = 128;
  static constexpr int X_BYTES = ROWS * 128, W_BYTES = 128 * 128, RING = STAGES * (W_BYTES + X_BYTES);
  u32 weights, inputs, full, empty;
  DEVICE DenseProduct(u8* shared) : weights(shared_address(shared)), inputs(weights + STAGES * W_BYTES), full(inputs + STAGES * X_BYTES), empty(full + STAGES * 8) {}
  DEVICE void init() {
    for (int s = 0; s < STAGES; s++) { init_barrier(full + s * 8, 1); init_barrier(empty + s * 8, 4); }
    fence_barriers();
  }
  DEVICE void prepare(Weights) {}
  DEVICE void fetch_w(const TensorMap* map, int stage, int k, int column) {
    expect_bytes(full + stage * 8, W_BYTES + X_BYTES);
    copy_box(weights + stage * W_BYTES, map, full + stage * 8, k * 64, column, EVICT_FIRST);
  }
  DEVICE void fetch_x(const TensorMap* map, int stage, int k) { copy_box(inputs + stage * X_BYTES, map, full + stage * 8, k * 64, 0, EVICT_LAST); }
  DEVICE void fetch(Weights w, const TensorMap* x, const LinearArgs& p, int column, int first, int steps) {
    if (threadIdx.x != COMPUTE_THREADS) return;
    const int ahead = steps < STAGES ? steps : STAGES;
    for (int s = 0; s < ahead; s++) fetch_w(w, s, first + s, column);
    if (p.early) wait_for_previous_kernel();
    for (int s = 0; s < ahead; s++) fetch_x(x, s, first + s);
    for (int i = ahead, s = 0, phase = 0; i < steps; i++) {
      wait_barrier(empty + s * 8, phase);
      fetch_w(w, s, first + i, column);
      fetch_x(x, s, first + i);
      if (++s == STAGES) { s = 0; phase ^= 1; }
    }
    if (p.early == 3) launch_dependents();
  }

  DEVICE void multiply(float* part, int steps) {
    constexpr int STRIDE = COLUMNS + 4;  // row stride of the sums, padded against bank conflicts
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float sums[2][ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) sums[i / (ROWS / 2)][i % (ROWS / 2)] = 0;
    for (int i = 0, s = 0, phase = 0, last = 0; i < steps; i++) {
      wait_barrier(full + s * 8, phase);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const u64 x = descriptor(inputs + s * X_BYTES + k * 32);
        wgmma<Number>(sums[0], descriptor(weights + s * W_BYTES + k * 32), x);
        wgmma<Number>(sums[1], descriptor(weights + s * W_BYTES + 8192 + k * 32), x);
      }
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (i && lane == 0) arrive(empty + last * 8);
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
};
