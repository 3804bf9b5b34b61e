// Work for several threads, those of OpenMP.
//
// OpenMP lets its threads sleep between two kernels, as soon as a process has more of them than there are cores, and
// waking one takes as long as a small kernel. So the threads of a program are a crew, which stays awake until its end.

static inline void rest() {
#if defined(__aarch64__)
  __asm__ volatile("yield");
#else
  _mm_pause();
#endif
}

struct Crew {
  // Until a thread lets others have its core, for one that it waits for may be among them: about ten microseconds.
#if defined(__aarch64__)
  static constexpr int SPINS = 10000;
#else
  static constexpr int SPINS = 200;  // of 140 cycles each on newer Intel CPUs, less on others
#endif
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<int64_t> round{0};
  int64_t threads;
  void (*run)(void* work, int64_t thread, int64_t threads) = nullptr;
  void* work = nullptr;

  explicit Crew(int64_t threads) : threads(threads) {}

  // Wait until all threads are here.
  void meet() {
    const int64_t now = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
      if (spins < SPINS) rest();
      else sched_yield();
    }
  }

  // The first thread hands out work; without any, the others go.
  void share(void (*next)(void*, int64_t, int64_t), void* its_work) {
    run = next;
    work = its_work;
    meet();
    if (next == nullptr) return;
    next(its_work, 0, threads);
    meet();
  }

  void follow(int64_t thread) {
    for (meet(); run != nullptr; meet()) {
      run(work, thread, threads);
      meet();
    }
  }
};

static thread_local Crew* crew = nullptr;  // of the program that this thread runs

// Call `work(thread, threads)` in several threads, or in this one alone: OpenMP takes microseconds even for one thread.
template <class Work>
static inline void in_threads(bool several, Work work) {
  if (!several || (crew == nullptr ? omp_get_max_threads() : crew->threads) == 1) return work((int64_t)0, (int64_t)1);
  if (crew != nullptr)
    return crew->share([](void* it, int64_t thread, int64_t threads) { (*(Work*)it)(thread, threads); }, &work);
#pragma omp parallel
  work((int64_t)omp_get_thread_num(), (int64_t)omp_get_num_threads());
}

// Within such work: wait until all of its threads are here.
static inline void meet(int64_t threads) {
  if (threads == 1) return;
  if (crew != nullptr) return crew->meet();
#pragma omp barrier
}

// Do something that calls `in_threads` again and again, with threads that stay awake meanwhile.
template <class Work>
static inline void with_crew(Work work) {
  if (omp_get_max_threads() == 1) return work();
  Crew shared(omp_get_max_threads());
#pragma omp parallel num_threads(shared.threads)
  {
#pragma omp single
    shared.threads = omp_get_num_threads();  // OpenMP may have granted fewer
    crew = &shared;
    if (omp_get_thread_num() == 0) {
      work();
      shared.share(nullptr, nullptr);
    } else {
      shared.follow(omp_get_thread_num());
    }
    crew = nullptr;
  }
}
