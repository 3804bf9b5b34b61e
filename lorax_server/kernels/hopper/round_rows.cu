// Rounds rows of activations to 8-bit floats (e4m3) with a scale per row, like `round_rows` in quantized.py.

struct RoundArgs {
  const u16* x;   // [rows][n]
  void* values;   // [rows][n], as 8-bit floats or, with WIDE, exactly as 16-bit floats
  float* scales;  // [rows]
  int n;
};

constexpr float MAX_FLOAT8 = 448, MIN_LARGEST = 448e-30f;

// Four numbers, the first in the lowest byte.
DEVICE u32 narrow_four(const float* from) {
  u32 word;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(word) : "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
  return word;
}
DEVICE float4 widen_four(u32 word) {
  u32 low, high;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}" : "=r"(low), "=r"(high) : "r"(word));
  const float2 first = Float16::unpack(low), last = Float16::unpack(high);
  return {first.x, first.y, last.x, last.y};
}

// One row per block.
template <class Number, bool WIDE>
DEVICE void round_rows(const RoundArgs& p) {
  __shared__ float maxima[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 row = (i64)blockIdx.x * p.n;
  launch_dependents();
  wait_for_previous_kernel();
  float largest = MIN_LARGEST;
  for (int at = threadIdx.x * 8; at < p.n; at += blockDim.x * 8) {
    const Vector8<Number> x = Vector8<Number>::load(p.x + row + at);
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x.f[i]));
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (lane == 0) maxima[warp] = largest;
  __syncthreads();
  for (int w = 0; w < (int)blockDim.x / 32; w++) largest = fmaxf(largest, maxima[w]);
  if (threadIdx.x == 0) p.scales[blockIdx.x] = largest / MAX_FLOAT8;
  const float inverse = __fmul_rn(__frcp_rn(largest), MAX_FLOAT8);
  for (int at = threadIdx.x * 8; at < p.n; at += blockDim.x * 8) {
    Vector8<Number> x = Vector8<Number>::load(p.x + row + at);
#pragma unroll
    for (int i = 0; i < 8; i++) x.f[i] *= inverse;
    const u32 low = narrow_four(x.f), high = narrow_four(x.f + 4);
    if constexpr (WIDE) {
      const float4 a = widen_four(low), b = widen_four(high);
      *(uint4*)((u16*)p.values + row + at) = make_uint4(Number::pack(a.x, a.y), Number::pack(a.z, a.w), Number::pack(b.x, b.y), Number::pack(b.z, b.w));
    } else *(uint2*)((u8*)p.values + row + at) = uint2{low, high};
  }
}
