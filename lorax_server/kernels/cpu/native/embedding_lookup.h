// Embedding lookup in panels, for embeddings that share the matrix of a tied LM head.

template <class T, class S>
static void copy_rows(const S* panels, int64_t inputs, int64_t first, const int64_t* rows, int64_t count, T* out) {
  for (int64_t i = 0; i < count; i++, out += inputs) {
    const S* from = panels + (first + rows[i]) / PANEL * inputs * PANEL + (first + rows[i]) % PANEL;
    for (int64_t k = 0; k < inputs; k++) write(out + k, read(from + k * PANEL));
  }
}

template <class T>
static void copy_paired_rows(const Pair* panels, int64_t inputs, int64_t first, const int64_t* rows, int64_t count, T* out) {
  const int64_t size = count_tiles(inputs) * (PANEL_TILE / 2);
  for (int64_t i = 0; i < count; i++, out += inputs) {
    const Pair* from = panels + (first + rows[i]) / PANEL * size + (first + rows[i]) % PANEL;
    for (int64_t k = 0; k < inputs; k++) {
      const Pair& pair = from[k / 2 * PANEL];
      write(out + k, read(k % 2 ? &pair.odd : &pair.even));
    }
  }
}

// Compute `scale * value + offset` for the weights of a row.
template <class Format, class S, class T>
static void dequantize_row(const char* panel, int64_t blocks, int64_t column, T* out) {
  const int64_t block_bytes = count_block_bytes<Format>(std::is_same<S, float>::value);
  for (int64_t block = 0; block < blocks; block++, panel += block_bytes) {
    const S* scales = (const S*)(panel + Format::VALUE_BYTES) + column;
    for (int64_t k = 0; k < BLOCK; k++, out++) {
      const int64_t part = k * Format::SCALES / BLOCK, at = Format::BITS == 8 ? k : k % (BLOCK / 2);
      const int byte = (uint8_t)panel[at / 4 * PANEL * 4 + column * 4 + at % 4];
      int value;
      if (Format::BITS == 8) value = (int8_t)(byte - WEIGHT_BIAS);
      else value = (k < BLOCK / 2 ? byte & 15 : byte >> 4) - (Format::HAS_OFFSETS ? 0 : 8);
      // Product and sum are rounded separately, as in `BlockMatrix.read`. `volatile` prevents fused multiply-adds.
      volatile float weight = read(scales + part * PANEL) * (float)value;
      write(out, Format::HAS_OFFSETS ? weight + read(scales + (Format::SCALES + part) * PANEL) : weight);
    }
  }
}

template <class T>
static void dequantize_rows(const Matrix& matrix, int64_t first, const int64_t* rows, int64_t count, T* out) {
  with_format(matrix, [&](auto format) {
    using Format = decltype(format);
    const int64_t blocks = matrix.inputs / BLOCK, panel_bytes = blocks * count_block_bytes<Format>(matrix.has_wide_scales);
    for (int64_t i = 0; i < count; i++, out += matrix.inputs) {
      const int64_t row = first + rows[i];
      const char* panel = (const char*)matrix.panels + row / PANEL * panel_bytes;
      if (matrix.has_wide_scales) dequantize_row<Format, float>(panel, blocks, row % PANEL, out);
      else dequantize_row<Format, Half>(panel, blocks, row % PANEL, out);
    }
  });
}

template <class T>
static void dispatch_row_copy(const Matrix& matrix, int64_t first, const int64_t* rows, int64_t count, T* out) {
  const void* panels = matrix.panels;
  switch (matrix.stored) {
    case FLOAT32: return copy_rows<T>((const float*)panels, matrix.inputs, first, rows, count, out);
    case BFLOAT16_PAIRS: return copy_paired_rows<T>((const Pair*)panels, matrix.inputs, first, rows, count, out);
    case QUANTIZED: return dequantize_rows<T>(matrix, first, rows, count, out);
    case BFLOAT16: return copy_rows<T>((const Bf16*)panels, matrix.inputs, first, rows, count, out);
    default: return copy_rows<T>((const Half*)panels, matrix.inputs, first, rows, count, out);
  }
}

// Copy rows of a matrix to `[count, inputs]` of its `dtype`. Row indices are relative to row `first`.
EXPORT(look_up_rows, const Matrix* matrix, int64_t first, const int64_t* rows, int64_t count, void* out) {
  switch (matrix->dtype) {
    case FLOAT32: return dispatch_row_copy(*matrix, first, rows, count, (float*)out);
    case BFLOAT16: return dispatch_row_copy(*matrix, first, rows, count, (Bf16*)out);
    default: return dispatch_row_copy(*matrix, first, rows, count, (Half*)out);
  }
}
