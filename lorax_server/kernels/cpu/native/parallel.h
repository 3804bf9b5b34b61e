// Split work over OpenMP threads. Results never depend on the number of threads: chunks are independent.

// Call `work(range)` for chunks of `chunk` items out of `count`, or once for all items if not `is_parallel`.
template <class Work>
static inline void parallel_for(bool is_parallel, int64_t count, int64_t chunk, Work work) {
  if (!is_parallel || count <= chunk || omp_get_max_threads() == 1) return work(Range{0, count});
  const int64_t chunks = (count + chunk - 1) / chunk;
  std::atomic<bool> has_failed{false};  // an exception must not leave an OpenMP thread
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < chunks; i++) {
    try {
      work(Range{i * chunk, std::min(count, (i + 1) * chunk)});
    } catch (const std::bad_alloc&) {
      has_failed.store(true, std::memory_order_relaxed);
    }
  }
  if (has_failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// Choose the chunk size in multiples of `unit` items. `cost` is the cost of all items, in the unit of
// `single_thread_cost`: work up to that cost is faster on one thread.
template <class Work>
static inline void parallel_for(int64_t count, int64_t unit, int64_t cost, int64_t single_thread_cost, Work work) {
  if (cost <= single_thread_cost || count <= unit) return work(Range{0, count});
  constexpr int64_t CHUNK_COST = 16;  // in multiples of `single_thread_cost`
  constexpr int64_t MIN_CHUNKS_PER_THREAD = 8;
  const int64_t by_cost = CHUNK_COST * single_thread_cost * count / cost;
  const int64_t by_count = count / (MIN_CHUNKS_PER_THREAD * omp_get_max_threads());
  parallel_for(true, count, std::max<int64_t>(1, std::min(by_cost, by_count) / unit) * unit, work);
}
