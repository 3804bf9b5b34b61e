// A program: calls of the kernels above with arguments that were recorded, one after the other, without Python between.

// Arguments are words of 64 bits, as the caller has recorded them.
template <class A>
static inline A take_word(const int64_t* word) {
  static_assert(sizeof(A) <= sizeof(int64_t), "a word holds each argument");
  A argument;
  memcpy(&argument, word, sizeof(A));
  return argument;
}

template <class... A, size_t... I>
static inline void call_kernel(void (*kernel)(A...), const int64_t* words, std::index_sequence<I...>) {
  kernel(take_word<A>(words + I)...);
}

template <class... A>
static inline void call_kernel(void (*kernel)(A...), const int64_t* words) {
  call_kernel(kernel, words, std::index_sequence_for<A...>());
}

#define CALL(kernel) \
  EXPORT(call_##kernel)(const int64_t* words) { call_kernel(&JOIN(kernel, ISA), words); }

CALL(linear)
CALL(rms_norm)
CALL(layer_norm)
CALL(scale_and_shift)
CALL(gate)
namespace attention {
CALL(rotary)
CALL(write_kv)
CALL(decode_attention)
}  // namespace attention

// Each call is `words` long: the address of one of the functions above, then the arguments of its kernel.
EXPORT(run_program)(const int64_t* calls, int64_t count, int64_t words) {
  with_helpers([&] {
    for (int64_t i = 0; i < count; i++) {
      const int64_t* call = calls + i * words;
      ((void (*)(const int64_t*))call[0])(call + 1);
    }
  });
}
