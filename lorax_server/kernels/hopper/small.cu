// What stands between the linears: norm and gate. Like them, these let the next kernel start early, and wait themselves.

struct NormArgs {
  const u16 *x, *residual, *weight;  // [rows][n], [rows][n] or null, [n]
  u16 *out, *total;                  // [rows][n]; x + residual, or null
  const float* eps;
  const u16* buffer;                 // the adapters' memory
  const i64* table;                  // [adapter][target][FIELDS]
  const int* adapters;               // [rows]
  const u8* flags;                   // [rows] what each row's adapter has here; null without adapters
  int n, target, num_targets;
};

template <class Number> struct Eight {
  float f[8];
  static DEVICE Eight load(const u16* from) { return of(__ldcg((const uint4*)from)); }
  static DEVICE Eight of(uint4 words) {
    const float2 a = Number::unpack(words.x), b = Number::unpack(words.y), c = Number::unpack(words.z), d = Number::unpack(words.w);
    return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
  }
  DEVICE void store(u16* to) const {
    *(uint4*)to = make_uint4(Number::pack(f[0], f[1]), Number::pack(f[2], f[3]), Number::pack(f[4], f[5]), Number::pack(f[6], f[7]));
  }
  DEVICE void round() {  // as a tensor of the model's type between two operations does
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = Number::unpack(Number::pack(f[i], f[i + 1]));
      f[i] = pair.x; f[i + 1] = pair.y;
    }
  }
  DEVICE void add(const Eight& other) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] += other.f[i];
  }
  DEVICE void multiply(const Eight& other) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] *= other.f[i];
  }
};

// A block has one row; a thread has CHUNKS times eight elements of it.
template <class Number, int CHUNKS>
DEVICE void rms_norm(const NormArgs& p) {
  __shared__ float sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 row = (i64)blockIdx.x * p.n;
  let_next_kernel_start();
  wait_for_kernel_before();
  Eight<Number> kept[CHUNKS];
  float sum = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = (c * blockDim.x + threadIdx.x) * 8;
    if (at >= p.n) continue;
    kept[c] = Eight<Number>::load(p.x + row + at);
    if (p.residual) {
      kept[c].add(Eight<Number>::load(p.residual + row + at));
      kept[c].round();
      kept[c].store(p.total + row + at);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum += kept[c].f[i] * kept[c].f[i];
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < (int)(blockDim.x + 31) / 32; w++) sum += sums[w];
  const float scale = rsqrtf(sum / p.n + *p.eps);
  const int has = p.flags ? p.flags[blockIdx.x] : 0;
  const i64* fields = has ? p.table + ((i64)p.adapters[blockIdx.x] * p.num_targets + p.target) * FIELDS : nullptr;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = (c * blockDim.x + threadIdx.x) * 8;
    if (at >= p.n) continue;
#pragma unroll
    for (int i = 0; i < 8; i++) kept[c].f[i] *= scale;
    kept[c].round();
    kept[c].multiply(Eight<Number>::load(p.weight + at));
    if (has & HAS_FACTOR) kept[c].multiply(Eight<Number>::load(p.buffer + fields[FIELD_FACTOR] + at));
    if (has & HAS_SHIFT) kept[c].add(Eight<Number>::load(p.buffer + fields[FIELD_SHIFT] + at));
    kept[c].store(p.out + row + at);
  }
}

struct GateArgs {
  const u16* gate_up;  // [rows][2 n]
  u16* out;            // [rows][n]
  int n;
};

// A division by __fdividef: the exact one takes more instructions than all the rest of a gate.
struct Silu { static DEVICE float of(float x) { return __fdividef(x, 1 + __expf(-x)); } };
struct Relu { static DEVICE float of(float x) { return x < 0 ? 0 : x; } };  // a NaN stays one
struct Gelu { static DEVICE float of(float x) { return 0.5f * x * (1 + erff(x * 0.70710678118654752f)); } };
struct GeluTanh {  // (1 + tanh(z)) / 2 is the sigmoid of 2 z
  static DEVICE float of(float x) { return __fdividef(x, 1 + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }
};

template <class Number, class Activation>
DEVICE void gate(const GateArgs& p) {
  const int blocks = (p.n + blockDim.x * 8 - 1) / (blockDim.x * 8), row = blockIdx.x / blocks;
  const int at = (blockIdx.x % blocks * blockDim.x + threadIdx.x) * 8;
  let_next_kernel_start();
  wait_for_kernel_before();
  if (at >= p.n) return;
  const u16* from = p.gate_up + (i64)row * 2 * p.n + at;
  Eight<Number> gate = Eight<Number>::load(from);
  const Eight<Number> up = Eight<Number>::load(from + p.n);
#pragma unroll
  for (int i = 0; i < 8; i++) gate.f[i] = Activation::of(gate.f[i]);
  gate.round();
  gate.multiply(up);
  gate.store(p.out + (i64)row * p.n + at);
}
