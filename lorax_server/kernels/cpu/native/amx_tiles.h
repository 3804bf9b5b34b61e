// AMX tiles: eight registers of up to 16 rows x 64 bytes, and an instruction that multiplies two of them.
//
// `DOT_TILES(c, a, b)` adds the bfloat16 products of the rows of a and the columns of b to the floats in c. A row of a has
// 32 inputs; a row of b has two inputs for each of 16 outputs. For each output, even and odd inputs are summed separately
// from zero and in order; the two sums are added, and the result is added to c. Each step rounds to nearest and flushes
// denormals to zero (Intel's specification). `EMULATED_TILES` implements the same in plain C++, for tests on any CPU.

constexpr int TILE_ROWS = 16, TILE_INPUTS = 32, TILE_BYTES = 64;

// Tile configuration in the format of `ldtilecfg`.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "the processor reads 64 bytes");

#if defined(EMULATED_TILES)
#define HAS_TILES
struct Tile {
  int64_t rows, bytes;
  char numbers[TILE_ROWS][TILE_BYTES];

  void clear() { memset(numbers, 0, sizeof numbers); }
  void load(const void* from, int64_t stride) {
    clear();
    for (int64_t i = 0; i < rows; i++) memcpy(numbers[i], (const char*)from + i * stride, bytes);
  }
  void store(void* to, int64_t stride) const {
    for (int64_t i = 0; i < rows; i++) memcpy((char*)to + i * stride, numbers[i], bytes);
  }
};
static thread_local Tile emulated[8];

static void configure_tiles(const TileShapes& shapes) {
  for (int i = 0; i < 8; i++) {
    emulated[i].rows = shapes.rows[i];
    emulated[i].bytes = shapes.bytes[i];
    emulated[i].clear();
  }
}
static void release_tiles() { configure_tiles(TileShapes()); }

static float flush(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.0f, v) : v; }
static void dot_tiles(Tile& c, const Tile& a, const Tile& b) {
  for (int64_t m = 0; m < c.rows; m++)
    for (int64_t n = 0; n < c.bytes / 4; n++) {
      float sums[2] = {0.0f, 0.0f}, before;
      for (int64_t k = 0; k < a.bytes / 4; k++)
        for (int odd = 0; odd < 2; odd++) {
          const float left = flush(read((const Bf16*)a.numbers[m] + 2 * k + odd));
          sums[odd] = flush(std::fma(left, flush(read((const Bf16*)b.numbers[k] + 2 * n + odd)), sums[odd]));
        }
      memcpy(&before, c.numbers[m] + 4 * n, 4);
      const float after = flush(flush(before) + flush(sums[0] + sums[1]));
      memcpy(c.numbers[m] + 4 * n, &after, 4);
    }
}
#define LOAD_TILE(tile, from, stride) emulated[tile].load(from, stride)
#define STORE_TILE(tile, to, stride) emulated[tile].store(to, stride)
#define CLEAR_TILE(tile) emulated[tile].clear()
#define DOT_TILES(c, a, b) dot_tiles(emulated[c], emulated[a], emulated[b])

#elif VL == 16 && defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_TILES
// Inline assembly, because the intrinsics would require AMX flags for the whole translation unit.
static inline void configure_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
static inline void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
#define LOAD_TILE(tile, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define CLEAR_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define DOT_TILES(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

#else  // no tiles, so no weights in the paired layout
static inline void configure_tiles(const TileShapes&) {}
static inline void release_tiles() {}
#define LOAD_TILE(tile, from, stride) ((void)(from), (void)(stride))
#define STORE_TILE(tile, to, stride) ((void)(to), (void)(stride))
#define CLEAR_TILE(tile)
#define DOT_TILES(c, a, b)
#endif

// Return true if this process may use AMX. Linux grants permission per process and then saves the tile state.
static bool request_amx_permission() {
#if defined(EMULATED_TILES)
  return true;
#elif defined(HAS_TILES)
  constexpr uint32_t AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, OSXSAVE = 1u << 27, SAVED = 3u << 17;
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  uint32_t a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (AMX_BF16 | AMX_TILE)) return false;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & SAVED) == SAVED && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}
