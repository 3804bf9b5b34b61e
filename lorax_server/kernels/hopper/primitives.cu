// Primitives of all kernels: types, 16-bit floats, and PTX wrappers for TMA, barriers and tensor cores.
// Compiled by NVRTC without headers.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(128) TensorMap { u64 words[16]; };

#define DEVICE __device__ __forceinline__

// ---------------------------------------------------------------------------------------------------- 16-bit floats
// Two values per word, the first in the lower half.
struct BFloat16 {
  static constexpr bool is_bfloat16 = true;
  static DEVICE u32 pack(float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
  static DEVICE float2 unpack(u32 word) { return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)}; }
};
struct Float16 {
  static constexpr bool is_bfloat16 = false;
  static DEVICE u32 pack(float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
  }
  static DEVICE float2 unpack(u32 word) {
    float2 pair;
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(pair.x), "=f"(pair.y) : "r"(word));
    return pair;
  }
};

DEVICE float exp2_of(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// d += a b: (16 x 16) x (16 x 8), float32 accumulation.
template <class Number>
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (Number::is_bfloat16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d = a b
template <class Number>
DEVICE void mma_from_zero(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (Number::is_bfloat16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// ---------------------------------------------------------------------------------------------------- programmatic dependent launch
// An early-launched kernel must wait before it reads results of the previous kernel, and before its first store, because
// the previous kernel can still be reading. It can launch its dependents at any time.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------- synchronization between blocks
DEVICE void increment(int* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE void wait_for_count(const int* counter, int count) {
  int seen;
  do { asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory"); } while (seen < count);
}
DEVICE int fetch_and_increment(int* counter) {  // returns the previous value
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE float4 load_from_block(u32 address, int block) {  // reads shared memory of another block in the cluster
  float4 r;
  asm volatile("{\n.reg .b32 t;\nmapa.shared::cluster.u32 t, %4, %5;\nld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [t];\n}"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(address), "r"(block));
  return r;
}

// ---------------------------------------------------------------------------------------------------- shared memory
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint4 load_shared(u32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address) : "memory");
  return r;
}
DEVICE u32 load_word(u32 address) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
template <int BARRIER, int THREADS> DEVICE void sync_threads() { asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory"); }

// Barriers of a pipeline stage: "full" after TMA has written all bytes, "empty" after all readers have released it.
DEVICE void init_barrier(u32 barrier, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)); }
DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void expect_bytes(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void wait_barrier(u32 barrier, int parity) {
  asm volatile("{\n.reg .pred P;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity)
               : "memory");
}

// WGMMA descriptor for swizzled 128-byte rows.
DEVICE u64 descriptor(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }

// ---------------------------------------------------------------------------------------------------- TMA
// L2 eviction policies: weights are read once, inputs by every block.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_LAST = 0x14F0000000000000ull;
DEVICE void copy_box(u32 to, const TensorMap* map, u32 barrier, int column, int row, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
               "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy) : "memory");
}
// For whole warps: one lane copies. Without branches around a copy, its operands stay in uniform registers.
DEVICE u32 elect_lane() {
  u32 is_elected;
  asm volatile("{\n.reg .pred P;\nelect.sync _|P, 0xffffffff;\nselp.u32 %0, 1, 0, P;\n}" : "=r"(is_elected));
  return is_elected;
}
DEVICE void expect_bytes_by(u32 is_elected, u32 barrier, int bytes) {
  asm volatile("{\n.reg .pred P;\nsetp.ne.u32 P, %0, 0;\n@P mbarrier.arrive.expect_tx.shared::cta.b64 _, [%1], %2;\n}" ::"r"(is_elected), "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void copy_bytes_by(u32 is_elected, u32 to, const u8* from, int bytes, u32 barrier, u64 policy) {
  asm volatile("{\n.reg .pred P;\nsetp.ne.u32 P, %0, 0;\n@P cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%1], [%2], %3, [%4], %5;\n}"
               ::"r"(is_elected), "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// A box of 64 columns x rows x slabs of 64 columns.
DEVICE void copy_slabs_by(u32 is_elected, u32 to, const TensorMap* map, u32 barrier, int slab, u64 policy) {
  asm volatile("{\n.reg .pred P;\nsetp.ne.u32 P, %0, 0;\n@P cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%1], [%2, {%4, %4, %5}], [%3], %6;\n}"
               ::"r"(is_elected), "r"(to), "l"(map), "r"(barrier), "r"(0), "r"(slab), "l"(policy) : "memory");
}
DEVICE void copy_factor(u32 to, const TensorMap* map, u32 barrier, int line) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %3, %4}], [%2], %5;" ::"r"(to),
               "l"(map), "r"(barrier), "r"(0), "r"(line), "l"(EVICT_FIRST) : "memory");
}
