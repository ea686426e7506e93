// What only Hopper has: products of a warpgroup (four warps, the first one's number a multiple of four) on matrices in
// shared memory, barriers in shared memory, registers that warpgroups pass on. sm_90a alone; see ptx.cuh.
#ifndef ALLSPAN_PTX_SM90
#define ALLSPAN_PTX_SM90

typedef unsigned long long uint64_t;

// A barrier of 8 bytes in shared memory, done with a phase once `count` threads arrived. Phases have parities 0, 1, 0
// ...
__device__ __forceinline__ void barrier_init(uint32_t at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
// Once all copies that this thread has asked for are there, as one of the `count`.
__device__ __forceinline__ void barrier_arrive_with_copies(uint32_t at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
// Until the phase of this parity is done; of a new barrier the one before the first is.
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(at),
      "r"(parity)
      : "memory");
}
// Hardware barrier `id` (1 to 15): over once `threads` have come, those that wait and those that only say so.
__device__ __forceinline__ void turn_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void turn_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Between what came into shared memory, of other threads too that this one waited for, and products that read it.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Products run on by themselves: registers that they read or write are theirs from begin_products to the
// wait_products after which at most N later batches may still run; settle then keeps the compiler from using sums
// early.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void settle(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Has the compiler compute x before what follows, which it could do later. x is not negative.
__device__ __forceinline__ void hold(float x) {
  if (__any_sync(~0u, x < 0)) asm volatile("trap;" ::: "memory");
}

#define ALLSPAN_8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ALLSPAN_32(d, i) ALLSPAN_8(d, i), ALLSPAN_8(d, i + 8), ALLSPAN_8(d, i + 16), ALLSPAN_8(d, i + 24)
#define ALLSPAN_SUMS32                                                                                          \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31}"
#define ALLSPAN_SUMS64                                                                                           \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"  \
  "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
  "%56,%57,%58,%59,%60,%61,%62,%63}"

// d[64][128] (+)= a[64][16] · b[16][128], bfloat16, both in shared memory, rows of a and columns of b along k. As for
// mma.sync, a warp has 16 rows; d[4 n ...] is its tile of columns 8 n to 8 n + 7.
__device__ __forceinline__ void multiply_keys(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT " " ALLSPAN_SUMS64
      ", %64, %65, adds, 1, 1, 0, 0;\n"
      "}"
      : ALLSPAN_32(d, 0), ALLSPAN_32(d, 32)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
}
// d[64][2 N] += a[64][16] · b[16][2 N]: a as four registers like those of mma.sync, b in shared memory, its rows along
// k.
__device__ __forceinline__ void multiply_values(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT " " ALLSPAN_SUMS64
      ", {%64,%65,%66,%67}, %68, adds, 1, 1, 1;\n"
      "}"
      : ALLSPAN_32(d, 0), ALLSPAN_32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_values(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT " " ALLSPAN_SUMS32
      ", {%32,%33,%34,%35}, %36, adds, 1, 1, 1;\n"
      "}"
      : ALLSPAN_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef ALLSPAN_8
#undef ALLSPAN_32
#undef ALLSPAN_SUMS32
#undef ALLSPAN_SUMS64
#endif
