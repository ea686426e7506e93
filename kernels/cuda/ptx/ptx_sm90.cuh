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

// As one of the `count`, and the phase is not done before so many more bytes came with tiles.
__device__ __forceinline__ void barrier_arrive_for(uint32_t at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// A matrix in global memory, or several, of which tiles are copied: what Driver.tensor_map makes. A kernel has it as a
// parameter that is __grid_constant__.
struct alignas(64) TensorMap {
  char words[128];
};
// Copies a tile, the first of which is this element of this row, into shared memory, 128 bytes a row, 16-byte chunks
// swizzled by the row; zeros where the matrix has nothing. The barrier counts its bytes.
__device__ __forceinline__ void copy_tile(uint32_t to, const TensorMap& map, int element, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(element), "r"(row), "r"(barrier)
      : "memory");
}
// … of one of several matrices.
__device__ __forceinline__ void copy_tile(uint32_t to, const TensorMap& map, int element, int row, int place,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(element), "r"(row), "r"(place), "r"(barrier)
      : "memory");
}
// Asks for the map itself, which the first copy would wait for.
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Asks for a tile to be in the L2 cache.
__device__ __forceinline__ void fetch_tile(const TensorMap& map, int element, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(element), "r"(row)
               : "memory");
}
// The other way, as far as the matrix goes: the tile is stored, or added to what is there (float32). wait_tiles waits
// until what this thread has sent, but for the last N batches, was read from shared memory, which may then change.
__device__ __forceinline__ void store_tile(const TensorMap& map, int element, int row, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(element),
               "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void add_tile(const TensorMap& map, int element, int row, uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(element), "r"(row), "r"(from)
      : "memory");
}
__device__ __forceinline__ void end_tiles() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_tiles() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Between what threads wrote into shared memory, copies too (of other threads that this one waited for), and products
// and tiles that read it.
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
#define ALLSPAN_SUMS128                                                                                         \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
  "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,"    \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,"    \
  "%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,"  \
  "%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,"   \
  "%127}"

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
__device__ __forceinline__ void multiply_keys(float (&d)[32], uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT " " ALLSPAN_SUMS32
      ", %32, %33, adds, 1, 1, 0, 0;\n"
      "}"
      : ALLSPAN_32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
}
// d[64][2 N] += a[64][16] · b[16][2 N]: a as four registers like those of mma.sync, or in shared memory like that of
// multiply_keys; b in shared memory, its rows along k.
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
#define ALLSPAN_ALL128(d) ALLSPAN_32(d, 0), ALLSPAN_32(d, 32), ALLSPAN_32(d, 64), ALLSPAN_32(d, 96)
__device__ __forceinline__ void multiply_values(float (&d)[128], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT " " ALLSPAN_SUMS128
      ", {%128,%129,%130,%131}, %132, adds, 1, 1, 1;\n"
      "}"
      : ALLSPAN_ALL128(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_values(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT " " ALLSPAN_SUMS128
      ", %128, %129, adds, 1, 1, 0, 1;\n"
      "}"
      : ALLSPAN_ALL128(d)
      : "l"(a), "l"(b));
}
// … of e4m3, 32 deep.
__device__ __forceinline__ void multiply_tiles_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " ALLSPAN_SUMS64
      ", %64, %65, adds, 1, 1;\n"
      "}"
      : ALLSPAN_32(d, 0), ALLSPAN_32(d, 32)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
}
// d[64][256] (+)= a[64][32 bytes] · b[32 bytes][256], like multiply_keys: of 16-bit elements, or of e4m3.
#define ALLSPAN_MULTIPLY_TILES(shape, more)                                                     \
  asm volatile(                                                                                 \
      "{\n"                                                                                     \
      ".reg .pred adds;\n"                                                                      \
      "setp.ne.b32 adds, %130, 0;\n"                                                            \
      "wgmma.mma_async.sync.aligned." shape " " ALLSPAN_SUMS128 ", %128, %129, adds, 1, 1" more \
      ";\n"                                                                                     \
      "}"                                                                                       \
      : ALLSPAN_ALL128(d)                                                                       \
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
__device__ __forceinline__ void multiply_tiles(float (&d)[128], uint64_t a, uint64_t b, bool adds) {
  ALLSPAN_MULTIPLY_TILES("m64n256k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT, ", 0, 0");
}
__device__ __forceinline__ void multiply_tiles_e4m3(float (&d)[128], uint64_t a, uint64_t b, bool adds) {
  ALLSPAN_MULTIPLY_TILES("m64n256k32.f32.e4m3.e4m3", "");
}
#undef ALLSPAN_MULTIPLY_TILES
#undef ALLSPAN_SUMS128
#undef ALLSPAN_ALL128
// d[64][2 N] += a[64][16] · b[16][2 N]: a as four registers, b in shared memory, its columns along k.
#define ALLSPAN_ROWS(sums, columns, registers, a0, a1, a2, a3, matrix, ...)                                     \
  asm volatile(                                                                                                 \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, 1, 0;\n"                                                          \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT " " registers \
      ", {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #matrix ", adds, 1, 1, 0;\n}"                                \
      : __VA_ARGS__                                                                                             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
__device__ __forceinline__ void multiply_rows(float (&d)[32], const uint32_t* a, uint64_t b) {
  ALLSPAN_ROWS(32, 64, ALLSPAN_SUMS32, 32, 33, 34, 35, 36, ALLSPAN_32(d, 0));
}
__device__ __forceinline__ void multiply_rows(float (&d)[16], const uint32_t* a, uint64_t b) {
  ALLSPAN_ROWS(16, 32, "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}", 16, 17, 18, 19, 20, ALLSPAN_8(d, 0),
               ALLSPAN_8(d, 8));
}
__device__ __forceinline__ void multiply_rows(float (&d)[8], const uint32_t* a, uint64_t b) {
  ALLSPAN_ROWS(8, 16, "{%0,%1,%2,%3,%4,%5,%6,%7}", 8, 9, 10, 11, 12, ALLSPAN_8(d, 0));
}
#undef ALLSPAN_ROWS
// d[64][2 N] (+)= a[64][16] · b[16][2 N], both in shared memory, columns of b along k; rows of a along k, or, for
// multiply_columns, k along rows, as b of multiply_values.
#define ALLSPAN_FEW(across, sums, columns, registers, first, second, adding, ...)                          \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #adding                                          \
               ", 0;\n"                                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT \
               " " registers ", %" #first ", %" #second ", adds, 1, 1, " across ", 0;\n}"                  \
               : __VA_ARGS__                                                                               \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
#define ALLSPAN_FEWS(name, across)                                                                                     \
  __device__ __forceinline__ void name(float (&d)[8], uint64_t a, uint64_t b, bool adds) {                             \
    ALLSPAN_FEW(across, 8, 16, "{%0,%1,%2,%3,%4,%5,%6,%7}", 8, 9, 10, ALLSPAN_8(d, 0));                                \
  }                                                                                                                    \
  __device__ __forceinline__ void name(float (&d)[16], uint64_t a, uint64_t b, bool adds) {                            \
    ALLSPAN_FEW(across, 16, 32, "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}", 16, 17, 18,                 \
                ALLSPAN_8(d, 0), ALLSPAN_8(d, 8));                                                                     \
  }                                                                                                                    \
  __device__ __forceinline__ void name(float (&d)[24], uint64_t a, uint64_t b, bool adds) {                            \
    ALLSPAN_FEW(across, 24, 48,                                                                                        \
                "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}", 24, 25, 26, \
                ALLSPAN_8(d, 0), ALLSPAN_8(d, 8), ALLSPAN_8(d, 16));                                                   \
  }
ALLSPAN_FEWS(multiply_keys, "0")
ALLSPAN_FEWS(multiply_columns, "1")
#undef ALLSPAN_FEWS
#undef ALLSPAN_FEW
#undef ALLSPAN_8
#undef ALLSPAN_32
#undef ALLSPAN_SUMS32
#undef ALLSPAN_SUMS64
#endif
