// The LoRA plan, computed when the batch changes: tiles of up to TILE_ROWS rows with the same adapter and, for each target,
// tile records, shrink items, expand parts and row flags. One block per target.
struct PlanArgs {
  const int* adapters;         // [M]
  const i64* table;            // [adapter][target][FIELDS]
  const float* scales;         // [adapter][target]
  Record* records;             // [target][T]
  u32 *items, *parts;          // [target][max_items], [target][max_parts]
  int *num_items, *num_parts, *num_tiles;  // [target], [target], [1]
  u8* flags;                   // [target][T]
  int M, T, num_targets, max_items, max_parts;
};

// Inclusive prefix sum over the block.
DEVICE int inclusive_sum(int value, int* warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; w++) value += warps[w];
  return value;
}

// Split the ranks of each thread's tile into pieces of `size`, and list the pieces of all tiles in order.
DEVICE void write_pieces(int rank, int size, u32* pieces, int* total, int* warps) {
  const int count = (rank + size - 1) / size, last = inclusive_sum(count, warps);
  for (int i = 0; i < count; i++) pieces[last - count + i] = (u32)threadIdx.x | (u32)i << 16;
  if (threadIdx.x == PLAN_THREADS - 1) *total = last;
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_kernel(const __grid_constant__ PlanArgs p) {
  __shared__ int adapter_of[PLAN_THREADS], start_of[PLAN_THREADS], tile_rows[PLAN_THREADS], tile_first[PLAN_THREADS], warps[8];
  const int row = threadIdx.x, target = blockIdx.x;
  const int adapter = row < p.M ? p.adapters[row] : 0;
  const i64 mine = (i64)adapter * p.num_targets + target;
  adapter_of[row] = adapter;
  tile_rows[row] = 0;
  __syncthreads();
  const bool starts_run = row == 0 || adapter_of[row - 1] != adapter;
  const int run = inclusive_sum(starts_run, warps) - 1;
  if (starts_run) start_of[run] = row;
  __syncthreads();
  const bool starts_tile = adapter != 0 && (row - start_of[run]) % TILE_ROWS == 0;
  const int tile = inclusive_sum(starts_tile, warps) - 1;
  if (starts_tile) tile_first[tile] = row;
  if (adapter != 0) atomicAdd(tile_rows + tile, 1);  // integer sums do not depend on the order
  const int tiles = __syncthreads_count(starts_tile);
  if (row == 0 && target == 0) *p.num_tiles = tiles;

  if (row < p.M) {
    const i64* fields = p.table + mine * FIELDS;
    const int rank = (int)fields[FIELD_RANK], more = rank > 0 ? (rank - 1) / PART_RANKS : 0;
    const int has = (rank > 0) * HAS_LORA | (fields[FIELD_OUTPUT_SCALE] >= 0) * HAS_OUTPUT_SCALE | (fields[FIELD_OUTPUT_BIAS] >= 0) * HAS_OUTPUT_BIAS;
    p.flags[(i64)target * p.T + row] = adapter == 0 ? 0 : has | more * EXTRA_PART;
  }
  int rank = 0;
  if (row < tiles) {
    const i64 at = (i64)adapter_of[tile_first[row]] * p.num_targets + target;
    const i64* fields = p.table + at * FIELDS;
    rank = (int)fields[FIELD_RANK];
    p.records[(i64)target * p.T + row] = {fields[FIELD_A], fields[FIELD_B], tile_first[row] | tile_rows[row] << 24, rank, p.scales[at], 0};
  }
  write_pieces(rank, ITEM_RANKS, p.items + (i64)target * p.max_items, p.num_items + target, warps);
  write_pieces(rank, PART_RANKS, p.parts + (i64)target * p.max_parts, p.num_parts + target, warps);
  __threadfence();  // an early-launched linear kernel can read the plan before it waits
}
