// LoRA for prompts, after the shrink: expand tiles of tokens with the same adapter.
//
// A warp keeps 16 ranks x 64 columns of B in registers and processes eight tokens per iteration. Columns are the tall MMA
// operand. Lane (g, c) has columns 8 g to 8 g + 7 and ranks 4 c to 4 c + 3: MMA i multiplies columns 2 i and 2 i + 1 of each
// lane, so a lane has eight adjacent outputs and stores them with one instruction per token.

constexpr int WARP_COLUMNS = 64, BLOCK_COLUMNS = PROMPT_THREADS / 32 * WARP_COLUMNS, CHUNK = 16;

struct PromptLoraArgs {
  const u16 *v, *buffer, *bias;  // [tokens][slices][padded_rank]; adapter buffer; [N] or null
  u16 *y, *out;                  // [tokens][y_stride], written by expand and read by gate; gate output [tokens][N[0]]
  const int4* tiles;             // first token, tokens, adapter
  const i64* table;              // [adapter][target][FIELDS]
  int target, num_targets, y_stride, slices, padded_rank, N[3];
};

struct Columns { u32 a[4][4]; };  // 16 ranks x 8 columns of a lane, as operands of four MMAs

DEVICE Columns load_columns(const u16* b, int stride, int first, int rank, int c, bool inside) {
  uint4 rows[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int r = first + 4 * c + j;
    rows[j] = inside && r < rank ? __ldg((const uint4*)(b + (i64)r * stride)) : ZEROS;
  }
  const u32 w[4][4] = {{rows[0].x, rows[1].x, rows[2].x, rows[3].x}, {rows[0].y, rows[1].y, rows[2].y, rows[3].y},
                       {rows[0].z, rows[1].z, rows[2].z, rows[3].z}, {rows[0].w, rows[1].w, rows[2].w, rows[3].w}};
  Columns q;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    q.a[i][0] = __byte_perm(w[i][0], w[i][1], 0x5410); q.a[i][1] = __byte_perm(w[i][0], w[i][1], 0x7632);
    q.a[i][2] = __byte_perm(w[i][2], w[i][3], 0x5410); q.a[i][3] = __byte_perm(w[i][2], w[i][3], 0x7632);
  }
  return q;
}

// B of one slice, at this lane's columns.
struct Slice {
  const u16* b;
  const i64* fields;
  int index, width, rank, column;  // `column` within the slice
  bool inside;
  DEVICE Slice(const PromptLoraArgs& p, int adapter, int slice, int column) : index(slice), column(column) {
    fields = p.table + ((i64)adapter * p.num_targets + p.target + slice) * FIELDS;
    width = slice == 0 ? p.N[0] : slice == 1 ? p.N[1] : p.N[2];
    rank = adapter ? (int)__ldg(fields + FIELD_RANK) : 0;
    b = p.buffer + __ldg(fields + FIELD_B) + column;
    inside = column < width;
  }
};

// Load four ranks of V, starting at `first`, for this lane's token.
DEVICE uint2 load_low_rank(const PromptLoraArgs& p, const Slice& s, int token, bool exists, int first) {
  const int c = threadIdx.x & 3;
  return exists && first < s.rank ? __ldg((const uint2*)(p.v + ((i64)token * p.slices + s.index) * p.padded_rank + first + 4 * c)) : uint2{0, 0};
}

template <class Number> DEVICE void multiply_columns(float (&d)[4][4], const Columns& q, uint2 v) {
#pragma unroll
  for (int i = 0; i < 4; i++) mma<Number>(d[i], q.a[i][0], q.a[i][1], q.a[i][2], q.a[i][3], v.x, v.y);
}

// d += V B for GROUPS x 8 tokens and ranks from 16 on. The caller multiplies the first 16 ranks, which are in registers.
template <class Number, int GROUPS>
DEVICE void multiply_remaining_ranks(const PromptLoraArgs& p, const Slice& s, int token, int left, float (&d)[GROUPS][4][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  for (int first = CHUNK; first < s.rank; first += CHUNK) {
    const Columns q = load_columns(s.b, s.width, first, s.rank, c, s.inside);
#pragma unroll
    for (int h = 0; h < GROUPS; h++) multiply_columns<Number>(d[h], q, load_low_rank(p, s, token + h * 8 + g, h * 8 + g < left, first));
  }
}

template <class Number> DEVICE Vector8<Number> token_outputs(const float (&d)[4][4], int e) {
  return {{d[0][e], d[0][e + 2], d[1][e], d[1][e + 2], d[2][e], d[2][e + 2], d[3][e], d[3][e + 2]}};
}

// y = V B + bias or, with ADD, y += V B + bias. blockIdx.x: columns of one slice; blockIdx.y: tile.
template <class Number, bool ADD>
DEVICE void expand_tile(const PromptLoraArgs& p) {
  constexpr int GROUPS = 4;
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  int block = blockIdx.x, slice = 0, start = 0;
  while (block >= (p.N[slice] + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS) { block -= (p.N[slice] + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS; start += p.N[slice++]; }
  const int4 tile = __ldg(p.tiles + blockIdx.y);
  const Slice s(p, tile.z, slice, block * BLOCK_COLUMNS + (threadIdx.x >> 5) * WARP_COLUMNS + g * 8);
  const Columns columns = load_columns(s.b, s.width, 0, s.rank, c, s.inside);
  Vector8<Number> bias = {};
  if (p.bias && s.inside) bias = Vector8<Number>::load(p.bias + start + s.column);
  wait_for_previous_kernel();
  for (int t = 0; t < tile.y; t += 8 * GROUPS) {
    float d[GROUPS][4][4] = {};
#pragma unroll
    for (int h = 0; h < GROUPS; h++) {
      const int token = t + h * 8 + g;
      multiply_columns<Number>(d[h], columns, load_low_rank(p, s, tile.x + token, token < tile.y, 0));
    }
    multiply_remaining_ranks<Number, GROUPS>(p, s, tile.x + t, tile.y - t, d);
#pragma unroll
    for (int h = 0; h < GROUPS; h++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int token = t + h * 8 + 2 * c + e;
        if (token >= tile.y || !s.inside) continue;
        Vector8<Number> y = token_outputs<Number>(d[h], e);
        u16* to = p.y + (i64)(tile.x + token) * p.y_stride + start + s.column;
        y.add(bias);
        if (ADD) y.add(Vector8<Number>::load(to));
        y.store(to);
      }
  }
}
// Before cuBLAS accumulates the base product.
template <class Number> DEVICE void expand_prompt(const PromptLoraArgs& p) { expand_tile<Number, false>(p); }
// After the base product.
template <class Number> DEVICE void add_prompt(const PromptLoraArgs& p) { expand_tile<Number, true>(p); }

template <class Number> DEVICE void scale_and_shift(Vector8<Number>& y, const PromptLoraArgs& p, const Slice& s, i64 output_scale, i64 output_bias) {
  if (output_scale >= 0) y.multiply(Vector8<Number>::load(p.buffer + output_scale + s.column));
  if (output_bias >= 0) y.add(Vector8<Number>::load(p.buffer + output_bias + s.column));
}

// out = activation(gate) * up, with adapters applied to gate and up.
template <class Number, class Activation>
DEVICE void gate_prompt(const PromptLoraArgs& p) {
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int4 tile = __ldg(p.tiles + blockIdx.y);
  const int column = blockIdx.x * BLOCK_COLUMNS + (threadIdx.x >> 5) * WARP_COLUMNS + g * 8;
  const Slice gate(p, tile.z, 0, column), up(p, tile.z, 1, column);
  const Columns gate_columns = load_columns(gate.b, gate.width, 0, gate.rank, c, gate.inside);
  const Columns up_columns = load_columns(up.b, up.width, 0, up.rank, c, up.inside);
  const i64 output_scale = tile.z ? gate.fields[FIELD_OUTPUT_SCALE] : -1, output_bias = tile.z ? gate.fields[FIELD_OUTPUT_BIAS] : -1;
  const i64 up_scale = tile.z ? up.fields[FIELD_OUTPUT_SCALE] : -1, up_bias = tile.z ? up.fields[FIELD_OUTPUT_BIAS] : -1;
  wait_for_previous_kernel();
  uint4 ahead[2][2];  // gate and up of the next eight tokens, two tokens per lane
  uint2 v_ahead[2];
  auto load = [&](int t) {
    v_ahead[0] = load_low_rank(p, gate, tile.x + t + g, t + g < tile.y, 0);
    v_ahead[1] = load_low_rank(p, up, tile.x + t + g, t + g < tile.y, 0);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (t + 2 * c + e >= tile.y || !gate.inside) continue;
      const u16* from = p.y + (i64)(tile.x + t + 2 * c + e) * p.y_stride + column;
      ahead[e][0] = __ldcs((const uint4*)from);
      ahead[e][1] = __ldcs((const uint4*)(from + p.N[0]));
    }
  };
  load(0);
  for (int t = 0; t < tile.y; t += 8) {
    const uint4 base[2][2] = {{ahead[0][0], ahead[0][1]}, {ahead[1][0], ahead[1][1]}};
    const uint2 v = v_ahead[0], v_up = v_ahead[1];
    load(t + 8);
    float d[1][4][4] = {}, d_up[1][4][4] = {};
    multiply_columns<Number>(d[0], gate_columns, v);
    multiply_columns<Number>(d_up[0], up_columns, v_up);
    multiply_remaining_ranks<Number, 1>(p, gate, tile.x + t, tile.y - t, d);
    multiply_remaining_ranks<Number, 1>(p, up, tile.x + t, tile.y - t, d_up);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = t + 2 * c + e;
      if (token >= tile.y || !gate.inside) continue;
      Vector8<Number> a = token_outputs<Number>(d[0], e), b = token_outputs<Number>(d_up[0], e);
      a.add(Vector8<Number>::of(base[e][0]));
      b.add(Vector8<Number>::of(base[e][1]));
      scale_and_shift(a, p, gate, output_scale, output_bias);
      scale_and_shift(b, p, up, up_scale, up_bias);
#pragma unroll
      for (int i = 0; i < 8; i++) a.f[i] = Activation::of(a.f[i]);
      a.multiply(b);
      a.store(p.out + (i64)(tile.x + token) * p.N[0] + column);
    }
  }
}

struct SumPartsArgs {
  const float* parts;   // [num_parts][tokens][slices][padded_rank]
  u16* v;               // [tokens][slices][padded_rank]
  const int* adapters;  // [tokens]
  const i64* table;     // [adapter][target][FIELDS]
  const float* scales;  // [adapter][target]
  int num_parts, tokens, slices, padded_rank, target, num_targets;
};

// V = scale * sum of its parts in order; zeros beyond the adapter's rank. Four ranks per thread.
template <class Number>
DEVICE void sum_parts(const SumPartsArgs& p) {
  const int four = blockIdx.x * blockDim.x + threadIdx.x, at = four * 4, width = p.slices * p.padded_rank, token = at / width;
  wait_for_previous_kernel();
  if (token >= p.tokens) return;
  const int adapter = p.adapters[token];
  if (adapter == 0) return;
  const int slice = at % width / p.padded_rank, rank = at % p.padded_rank;
  const i64 entry = (i64)adapter * p.num_targets + p.target + slice;
  const int left = (int)__ldg(p.table + entry * FIELDS + FIELD_RANK) - rank;
  if (left <= -CHUNK) return;
  float4 sum = {0, 0, 0, 0};
  if (left > 0)
    for (int part = 0; part < p.num_parts; part++) {
      const float4 more = __ldcg((const float4*)(p.parts + (i64)part * p.tokens * width + at));
      sum.x += more.x; sum.y += more.y; sum.z += more.z; sum.w += more.w;
    }
  const float scale = __ldg(p.scales + entry);
  *(uint2*)(p.v + at) = uint2{Number::pack(left > 0 ? sum.x * scale : 0, left > 1 ? sum.y * scale : 0),
                              Number::pack(left > 2 ? sum.z * scale : 0, left > 3 ? sum.w * scale : 0)};
}
