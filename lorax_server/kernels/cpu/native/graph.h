// Replay recorded kernel calls in order, without Python between them.
// Each call has `words` words: the address of a kernel's `call_words`, then its arguments.
EXPORT(run_graph, const int64_t* calls, int64_t count, int64_t words) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t* call = calls + i * words;
    ((void (*)(const int64_t*))call[0])(call + 1);
  }
}
