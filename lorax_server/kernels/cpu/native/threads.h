// Work for several threads. Who calls a kernel leads; helpers take pieces of its work while it goes on.
//
// The leader waits for nobody to begin, and at the end only for pieces that somebody has begun. So a helper that other
// work keeps from its core comes late, or takes fewer pieces, and holds nobody up meanwhile.

static inline void rest() {
#if defined(__aarch64__)
  __asm__ volatile("yield");
#else
  _mm_pause();
#endif
}

#if defined(__aarch64__)
constexpr int64_t SPINS = 10000;
#else
constexpr int64_t SPINS = 200;  // of 140 cycles each on newer Intel CPUs, less on others
#endif
constexpr int64_t YIELDS = 100;  // after which a helper sleeps: waking it takes as long as a small kernel

// Wait a moment: at first for a memory line, after about ten microseconds for whoever else wants this core.
static inline void wait_a_moment(int64_t& waited) {
  if (waited++ < SPINS) rest();
  else sched_yield();
}

struct Helpers {
  // Items of work, a range of them for each thread to begin with. Who has done its own takes of those of others.
  struct Share {
    alignas(64) std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  static constexpr int64_t MOST = 256;  // threads
  static constexpr int64_t MEMBER = 1, OPEN = 1 << 16, NUMBER = 1 << 17;  // of a gate

  // The number of the work, whether helpers may come, and how many are there.
  alignas(64) std::atomic<int64_t> gate{0};
  // The work. It is another one only when all helpers have left.
  alignas(64) void (*run)(void* work, Range piece) = nullptr;
  void* work = nullptr;
  int64_t piece = 1;
  Share shares[MOST];
  alignas(64) std::atomic<int64_t> threads{1};  // that the leader wants, itself among them
  std::atomic<bool> is_awake{false};  // more work comes soon: nobody sleeps
  std::atomic<bool> has_failed{false};  // a piece of the work could not allocate memory
  std::mutex leading, resting;
  std::condition_variable has_work, is_wanted;
  std::atomic<int64_t> sleeping{0};
  int64_t started = 1;

  // Those of this process: one that was forked has none of its parent's threads, and makes new ones. They are never
  // deleted, and end with the process.
  static Helpers& all() {
    static std::atomic<Helpers*> made{nullptr};
    static const int forgets = pthread_atfork(nullptr, nullptr, [] { made.store(nullptr); });
    (void)forgets;
    Helpers* found = made.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    Helpers* other = new Helpers;
    if (made.compare_exchange_strong(found, other)) return *other;
    delete other;
    return *found;
  }

  // --- the leader ---

  void start(int64_t count) {
    count = std::min(count, MOST);
    if (threads.load(std::memory_order_relaxed) != count) {
      {
        const std::lock_guard<std::mutex> lock(resting);
        threads.store(count, std::memory_order_relaxed);
      }
      is_wanted.notify_all();
    }
    for (; started < count; started++) {
      try {
        std::thread([this, thread = started] { help(thread); }).detach();
      } catch (const std::system_error&) {
        break;  // the system has no more threads: those that are there do the work
      }
    }
  }

  void share(int64_t count, int64_t its_piece, void (*its_run)(void*, Range), void* its_work) {
    run = its_run, work = its_work, piece = its_piece;
    has_failed.store(false, std::memory_order_relaxed);
    const int64_t parts = threads.load(std::memory_order_relaxed), pieces = (count + piece - 1) / piece;
    for (int64_t i = 0; i < parts; i++) {
      const Range part = part_of(pieces, i, parts);
      shares[i].next.store(part.begin * piece, std::memory_order_relaxed);
      shares[i].end = std::min(part.end * piece, count);
    }
    gate.store(gate.load(std::memory_order_relaxed) + NUMBER + OPEN);
    if (sleeping.load()) {
      { const std::lock_guard<std::mutex> lock(resting); }
      has_work.notify_all();
    }
    take_pieces(0);
    gate.fetch_and(~OPEN, std::memory_order_acq_rel);
    for (int64_t waited = 0; gate.load(std::memory_order_acquire) & (OPEN - 1);) wait_a_moment(waited);
    if (has_failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  // --- everybody ---

  // Take pieces until none is left: first one's own.
  void take_pieces(int64_t thread) {
    const int64_t parts = threads.load(std::memory_order_relaxed);
    for (int64_t i = 0; i < parts; i++) {
      Share& from = shares[(thread + i) % parts];
      for (int64_t at; (at = from.next.fetch_add(piece, std::memory_order_relaxed)) < from.end;) {
        try {
          run(work, {at, std::min(at + piece, from.end)});
        } catch (const std::bad_alloc&) {  // an exception that leaves a helper thread would end the process
          has_failed.store(true, std::memory_order_relaxed);
        }
      }
    }
  }

  // --- helpers ---

  bool may_help(int64_t thread) const { return thread < threads.load(std::memory_order_relaxed); }
  bool may_come(int64_t thread, int64_t at, int64_t done) const {
    return at & OPEN && at / NUMBER != done && may_help(thread);
  }

  // Go where OpenMP would place this thread, if it is to place threads: else all would be where the leader is.
  static void take_place(int64_t thread) {
#if defined(__linux__)
    const int places = omp_get_proc_bind() == omp_proc_bind_false ? 0 : omp_get_num_places();
    if (places == 0) return;
    std::vector<int> cores(omp_get_place_num_procs(thread % places));
    omp_get_place_proc_ids(thread % places, cores.data());
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
#endif
  }

  void help(int64_t thread) {
    try {
      take_place(thread);
    } catch (const std::bad_alloc&) {  // without a place it helps as well
    }
    int64_t done = 0;  // the number of the work that it took part in last
    for (int64_t waited = 0;;) {
      int64_t at = gate.load(std::memory_order_acquire);
      if (may_come(thread, at, done)) {
        waited = 0;
        if (!gate.compare_exchange_weak(at, at + MEMBER, std::memory_order_acq_rel)) continue;
        take_pieces(thread);
        done = at / NUMBER;
        gate.fetch_sub(MEMBER, std::memory_order_release);
      } else if (waited < SPINS + YIELDS || (is_awake.load(std::memory_order_relaxed) && may_help(thread))) {
        wait_a_moment(waited);
      } else {
        sleep(thread, done);
        waited = 0;
      }
    }
  }

  void sleep(int64_t thread, int64_t done) {
    std::unique_lock<std::mutex> lock(resting);
    is_wanted.wait(lock, [&] { return may_help(thread); });  // those who are not are not woken by each kernel
    sleeping++;
    has_work.wait(lock, [&] { return may_come(thread, gate.load(), done) || !may_help(thread); });
    sleeping--;
  }
};

static thread_local bool is_leading = false;  // this thread, during a program

template <class Work>
struct AtExit {
  Work work;
  ~AtExit() { work(); }
};
template <class Work>
AtExit(Work) -> AtExit<Work>;

// Call something while this thread leads; without helpers, if another one does already.
template <class Work>
static inline void lead(Work do_it) {
  Helpers& helpers = Helpers::all();
  const int64_t threads = omp_get_max_threads();
  if (is_leading || threads == 1 || !helpers.leading.try_lock()) return do_it();
  const std::lock_guard<std::mutex> lock(helpers.leading, std::adopt_lock);
  helpers.start(threads);
  is_leading = true;
  const AtExit end{[] { is_leading = false; }};
  do_it();
}

// Do `count` items of work in pieces, each by `work(range)`; all at once, if not several threads are to do it.
template <class Work>
static inline void in_pieces(bool several, int64_t count, int64_t piece, Work work) {
  if (!several || count <= piece) return work(Range{0, count});
  lead([&] {
    if (!is_leading) return work(Range{0, count});
    Helpers::all().share(count, piece, [](void* it, Range range) { (*(Work*)it)(range); }, &work);
  });
}

// Likewise, in pieces of whole `unit`s. All items together cost `cost`, of which one thread does `few` sooner than several.
template <class Work>
static inline void in_pieces(int64_t count, int64_t unit, int64_t cost, int64_t few, Work work) {
  if (cost <= few || count <= unit) return work(Range{0, count});
  constexpr int64_t LARGE = 16, LEAST = 8;  // a piece costs so many times `few`, and each thread has at least so many
  const int64_t by_cost = LARGE * few * count / cost, by_count = count / (LEAST * omp_get_max_threads());
  in_pieces(true, count, std::max<int64_t>(1, std::min(by_cost, by_count) / unit) * unit, work);
}

// Do something that calls `in_pieces` again and again, with helpers that stay awake meanwhile.
template <class Work>
static inline void with_helpers(Work work) {
  lead([&] {
    if (!is_leading) return work();
    Helpers::all().is_awake.store(true, std::memory_order_relaxed);
    const AtExit end{[] { Helpers::all().is_awake.store(false, std::memory_order_relaxed); }};
    work();
  });
}
