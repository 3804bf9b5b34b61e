// A program: calls of the kernels above with arguments that were recorded, one after the other, without Python between.
// Each call is `words` long: the address of a kernel's `call_words`, then its arguments.
EXPORT(run_program, const int64_t* calls, int64_t count, int64_t words) {
  with_helpers([&] {
    for (int64_t i = 0; i < count; i++) {
      const int64_t* call = calls + i * words;
      ((void (*)(const int64_t*))call[0])(call + 1);
    }
  });
}
