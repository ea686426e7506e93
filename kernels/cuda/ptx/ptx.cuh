// All that the kernels say to the hardware by name: copies to shared memory, matrix fragments, products on tensor
// cores. sm_80 and later, and in half precision sm_75, where copies are over when they return and products are of
// smaller matrices. Kernels have no assembly of their own, so that tests can put other functions in place of these.
#ifndef ALLSPAN_PTX
#define ALLSPAN_PTX
#include "ptx/e4m3.cuh"

typedef unsigned int uint32_t;

// Copies to shared memory beside the thread, products of 16 deep, pairs that are rounded or compared at once.
#define ALLSPAN_SM80 (__CUDA_ARCH__ >= 800)

// Elements of 16 bits are bfloat16, or, with FP16 = 1, IEEE's half precision: all here that has "16-bit" in its
// comment.
#ifndef FP16
#define FP16 0
#endif
typedef unsigned short bf16;
#if FP16
#define ALLSPAN_ELEMENT "f16"
#else
#define ALLSPAN_ELEMENT "bf16"
#endif

#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]

#define kInf __int_as_float(0x7f800000)

__device__ __forceinline__ uint32_t smem(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
#if ALLSPAN_SM80
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0));
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#else
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool is_there) {
  const uint4 x = is_there ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from, bool is_there) {
  const uint32_t x = is_there ? *static_cast<const uint32_t*>(from) : 0;
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void commit() {}
template <int N>
__device__ __forceinline__ void wait_for() {}
#endif
// Of a kernel whose blocks may begin before the one ahead has ended (`is_early` of a launch; otherwise these do
// nothing; sm_90 and later): waits until that one has, and what it wrote is there; and lets the next one's blocks
// begin, once all blocks of this one have come here: best before the wait, as the next one but one may be a product
// that asks for its weight meanwhile. Who waits for the one ahead has waited for all before it, as that one has, too.
__device__ __forceinline__ void wait_for_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Blocks of a cluster (sm_90 and later): what they stored before they came is there for all that have waited, and who
// ends counts as come. Shared memory of another block, where it has begun and not ended.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
template <class T>
__device__ __forceinline__ T* of_block(T* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  T* its;
  asm("mapa.u64 %0, %1, %2;" : "=l"(its) : "l"(mine), "r"(rank));
  return its;
#else
  return mine;
#endif
}
__device__ __forceinline__ void load4(uint32_t* r, uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
__device__ __forceinline__ void load4_transposed(uint32_t* r, uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
// Of half precision, whatever the 16-bit elements are; subnormal numbers count.
__device__ __forceinline__ void multiply_halves(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
#if ALLSPAN_SM80
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[half * 2]), "r"(a[half * 2 + 1]), "r"(half ? b1 : b0));
#endif
}
// Of 16-bit elements.
__device__ __forceinline__ void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
#if FP16
  multiply_halves(c, a, b0, b1);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
// … to what was nothing.
__device__ __forceinline__ void multiply_anew(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
#if ALLSPAN_SM80
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ALLSPAN_ELEMENT "." ALLSPAN_ELEMENT
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#else
  c[0] = c[1] = c[2] = c[3] = 0;
  multiply(c, a, b0, b1);
#endif
}
// Of integers of 8 bits, four a register.
__device__ __forceinline__ void multiply_whole(int* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
#if ALLSPAN_SM80
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
                 : "r"(a[i]), "r"(i < 2 ? b0 : b1));
#endif
}
__device__ __forceinline__ void multiply_whole_anew(int* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
#if ALLSPAN_SM80
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
#else
  c[0] = c[1] = c[2] = c[3] = 0;
  multiply_whole(c, a, b0, b1);
#endif
}
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  uint32_t pair;
#if ALLSPAN_SM80
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 x, y; cvt.rn.f16.f32 x, %1; cvt.rn.f16.f32 y, %2; mov.b32 %0, {x, y};}"
      : "=r"(pair)
      : "f"(low), "f"(high));
#endif
  return pair;
}
// Two 16-bit elements.
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if FP16
  return pack_halves(low, high);
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
// Of an 8 x 8 matrix of 16 bits, of which lanes hold fragments: the fragment of the transposed one.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}
// Of pairs of 16-bit elements, each rounded.
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("fma.rn." ALLSPAN_ELEMENT "x2 %0, %1, %2, %3;"
      : "=r"(pair)
      : "r"(a), "r"(FP16 ? 0x3c003c00 : 0x3f803f80), "r"(b));
  return pair;
}
// … subnormal numbers stay.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("fma.rn." ALLSPAN_ELEMENT "x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000));
  return pair;
}
// The larger of pairs of 16-bit elements that are not negative.
__device__ __forceinline__ uint32_t larger_pairs(uint32_t a, uint32_t b) {
#if ALLSPAN_SM80
  uint32_t pair;
  asm("max." ALLSPAN_ELEMENT "x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#else  // their bits are ordered as they are
  return max(a & 0xffffu, b & 0xffffu) | max(a & 0xffff0000u, b & 0xffff0000u);
#endif
}
#if !ALLSPAN_SM80
__device__ __forceinline__ unsigned __reduce_max_sync(unsigned lanes, unsigned x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = max(x, __shfl_xor_sync(lanes, x, o));
  return x;
}
__device__ __forceinline__ unsigned __reduce_min_sync(unsigned lanes, unsigned x) {
  return ~__reduce_max_sync(lanes, ~x);
}
#endif
__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float logarithm(float x) {  // to base 2
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// A float16 in the lower bits.
__device__ __forceinline__ float half_wide(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(bits)));
  return x;
}
// A 16-bit element, and those of a pair; the other way, halves round to even.
#if FP16
__device__ __forceinline__ float wide(uint32_t bits) { return half_wide(bits); }
__device__ __forceinline__ float wide_low(uint32_t pair) { return wide(pair & 0xffff); }
__device__ __forceinline__ float wide_high(uint32_t pair) { return wide(pair >> 16); }
#else
__device__ __forceinline__ float wide(uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float wide_low(uint32_t pair) { return wide(pair); }
__device__ __forceinline__ float wide_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }
#endif
__device__ __forceinline__ bf16 narrow(float x) {
  bf16 bits;
  asm("cvt.rn." ALLSPAN_ELEMENT ".f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// Two bytes of e4m3, the first in the low one; what is too large becomes ±448.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return narrow_e4m3(low) | narrow_e4m3(high) << 8;
#endif
}

// Four bytes of e4m3 as halves: bytes 0 and 2, then bytes 1 and 3.
__device__ __forceinline__ void widen_e4m3(uint32_t* pairs, uint32_t word) {
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.rn.f16x2.e4m3x2 %0, x; cvt.rn.f16x2.e4m3x2 %1, y;}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(__byte_perm(word, 0, 0x3120)));
#else  // the exponent's bias is less by 8
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = i == 0 ? word << 8 : word;
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(pairs[i])
        : "r"((high & 0x80008000u) | (high >> 1 & 0x3f803f80u)), "r"(0x5c005c00), "r"(0x80008000));
  }
#endif
}

// Memory of another GPU, or that another GPU writes: past the first-level cache. Each 4 bytes arrive as one; what was
// stored before a release is there for whoever acquires the value that it stored.
__device__ __forceinline__ void store16_far(void* to, uint4 value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
__device__ __forceinline__ uint4 load16_far(const void* from) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
// Between two looks at what another GPU is to write.
__device__ __forceinline__ void pause() {}
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// (a & b) | c in one instruction, which two constants would make two.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(a), "r"(b), "r"(c));
  return bits;
}
// … and (a & b) ^ c.
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(a), "r"(b), "r"(c));
  return bits;
}
// Shared memory by its address there. What it held is returned.
__device__ __forceinline__ uint32_t add_shared(uint32_t at, uint32_t by) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(at), "r"(by) : "memory");
  return before;
}
__device__ __forceinline__ float load_shared4(uint32_t at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_shared16(uint32_t at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
// To L2 only, a line.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn." ALLSPAN_ELEMENT "x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
// Has the compiler keep x, which it could find anew each time.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }
// 16 bytes, asked for here and not later: what follows a barrier cannot go before, nor this after it.
__device__ __forceinline__ uint4 load16(const void* from) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
// 16 bytes that are read once: not kept in L1.
__device__ __forceinline__ uint4 stream16(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}
#endif
