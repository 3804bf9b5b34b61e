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

template <class T>
static void dispatch_row_copy(const void* panels, int64_t stored, int64_t inputs, int64_t first, const int64_t* rows,
                        int64_t count, T* out) {
  switch (stored) {
    case FLOAT32: return copy_rows<T>((const float*)panels, inputs, first, rows, count, out);
    case BFLOAT16_PAIRS: return copy_paired_rows<T>((const Pair*)panels, inputs, first, rows, count, out);
    case BFLOAT16: return copy_rows<T>((const Bf16*)panels, inputs, first, rows, count, out);
    default: return copy_rows<T>((const Half*)panels, inputs, first, rows, count, out);
  }
}

// Copy rows from panels of dtype `stored` to `[count, inputs]` of `dtype`. Row indices are relative to row `first`.
EXPORT(look_up_rows, const void* panels, int64_t stored, int64_t inputs, int64_t first, const int64_t* rows, int64_t count,
                int64_t dtype, void* out) {
  switch (dtype) {
    case FLOAT32: return dispatch_row_copy(panels, stored, inputs, first, rows, count, (float*)out);
    case BFLOAT16: return dispatch_row_copy(panels, stored, inputs, first, rows, count, (Bf16*)out);
    default: return dispatch_row_copy(panels, stored, inputs, first, rows, count, (Half*)out);
  }
}
