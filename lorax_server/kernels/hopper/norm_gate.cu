// RMSNorm and gated activation. Both support programmatic dependent launch.

struct NormArgs {
  const u16 *x, *residual, *weight;  // [rows][n], [rows][n] or null, [n]
  u16 *out, *total;                  // [rows][n]; x + residual, or null
  const float* eps;
  const u16* buffer;                 // adapter buffer
  const i64* table;                  // [adapter][target][FIELDS]
  const int* adapters;               // [rows]
  const u8* flags;                   // [rows] flags of each row's adapter; null without adapters
  int n, target, num_targets;
};

template <class Number> struct Vector8 {
  float f[8];
  static DEVICE Vector8 load(const u16* from) { return of(__ldcg((const uint4*)from)); }
  static DEVICE Vector8 of(uint4 words) {
    const float2 a = Number::unpack(words.x), b = Number::unpack(words.y), c = Number::unpack(words.z), d = Number::unpack(words.w);
    return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
  }
  DEVICE void store(u16* to) const {
    *(uint4*)to = make_uint4(Number::pack(f[0], f[1]), Number::pack(f[2], f[3]), Number::pack(f[4], f[5]), Number::pack(f[6], f[7]));
  }
  DEVICE void round() {  // to the model dtype, as between separate torch ops
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = Number::unpack(Number::pack(f[i], f[i + 1]));
      f[i] = pair.x; f[i + 1] = pair.y;
    }
  }
  DEVICE void add(const Vector8& other) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] += other.f[i];
  }
  DEVICE void multiply(const Vector8& other) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] *= other.f[i];
  }
};

// One row per block, CHUNKS x 8 elements per thread.
template <class Number, int CHUNKS>
DEVICE void rms_norm(const NormArgs& p) {
  __shared__ float sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 row = (i64)blockIdx.x * p.n;
  launch_dependents();
  wait_for_previous_kernel();
  Vector8<Number> kept[CHUNKS];
  float sum = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = (c * blockDim.x + threadIdx.x) * 8;
    if (at >= p.n) continue;
    kept[c] = Vector8<Number>::load(p.x + row + at);
    if (p.residual) {
      kept[c].add(Vector8<Number>::load(p.residual + row + at));
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
    kept[c].multiply(Vector8<Number>::load(p.weight + at));
    if (has & HAS_OUTPUT_SCALE) kept[c].multiply(Vector8<Number>::load(p.buffer + fields[FIELD_OUTPUT_SCALE] + at));
    if (has & HAS_OUTPUT_BIAS) kept[c].add(Vector8<Number>::load(p.buffer + fields[FIELD_OUTPUT_BIAS] + at));
    kept[c].store(p.out + row + at);
  }
}

struct GateArgs {
  const u16* gate_up;  // [rows][2 n]
  u16* out;            // [rows][n]
  int n;
};

// __fdividef, because an exact division takes more instructions than the rest of the gate.
struct Silu { static DEVICE float of(float x) { return __fdividef(x, 1 + __expf(-x)); } };
struct Relu { static DEVICE float of(float x) { return x < 0 ? 0 : x; } };  // NaN stays NaN
struct Gelu { static DEVICE float of(float x) { return 0.5f * x * (1 + erff(x * 0.70710678118654752f)); } };
struct GeluTanh {  // (1 + tanh(z)) / 2 == sigmoid(2 z)
  static DEVICE float of(float x) { return __fdividef(x, 1 + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }
};

template <class Number, class Activation>
DEVICE void gate(const GateArgs& p) {
  const int blocks = (p.n + blockDim.x * 8 - 1) / (blockDim.x * 8), row = blockIdx.x / blocks;
  const int at = (blockIdx.x % blocks * blockDim.x + threadIdx.x) * 8;
  launch_dependents();
  wait_for_previous_kernel();
  if (at >= p.n) return;
  const u16* from = p.gate_up + (i64)row * 2 * p.n + at;
  Vector8<Number> gate = Vector8<Number>::load(from);
  const Vector8<Number> up = Vector8<Number>::load(from + p.n);
#pragma unroll
  for (int i = 0; i < 8; i++) gate.f[i] = Activation::of(gate.f[i]);
  gate.round();
  gate.multiply(up);
  gate.store(p.out + (i64)row * p.n + at);
}
