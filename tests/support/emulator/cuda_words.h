// What CUDA C++ has beyond C++, for emulator.h.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__
#define __restrict__ __restrict
#define __shared__ static __attribute__((section("allspan_shared")))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define threadIdx (emulator::me->index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)
#define warpSize 32

typedef unsigned char uchar;

#define ALLSPAN_VECTORS(T, name, bytes)                                      \
  struct alignas(bytes * 2) name##2 { T x, y; };                             \
  struct alignas(bytes * 4 > 16 ? 16 : bytes * 4) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                 \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
ALLSPAN_VECTORS(float, float, 4)
ALLSPAN_VECTORS(int, int, 4)
ALLSPAN_VECTORS(unsigned, uint, 4)
ALLSPAN_VECTORS(unsigned short, ushort, 2)
ALLSPAN_VECTORS(short, short, 2)
ALLSPAN_VECTORS(signed char, char, 1)
ALLSPAN_VECTORS(unsigned char, uchar, 1)
ALLSPAN_VECTORS(long long, longlong, 8)
ALLSPAN_VECTORS(double, double, 8)
#undef ALLSPAN_VECTORS

template <class A, class B>
auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

template <class To, class From>
To as_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int x) { return as_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return as_bits<float>(x); }
inline int __float_as_int(float x) { return as_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return as_bits<unsigned>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) {
  return std::fabs(x) < 0x1p31f ? static_cast<int>(x) : x < 0 ? INT32_MIN : INT32_MAX;
}
inline long long __float2ll_rn(float x) { return static_cast<long long>(std::nearbyint(x)); }
inline long long __double2ll_rn(double x) { return static_cast<long long>(std::nearbyint(x)); }
inline long long __double_as_longlong(double x) { return as_bits<long long>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __saturatef(float x) { return std::min(std::max(x, 0.0f), 1.0f); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(both >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return c;
}

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T value) {
  *at = value;
}
template <class T>
void __stcg(T* at, T value) {
  *at = value;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <class T, class F>
T exchange_at(T* at, F&& next) {
  const T before = *at;
  *at = next(before);
  return before;
}
template <class T>
T atomicAdd(T* at, std::common_type_t<T> by) {
  return exchange_at(at, [&](T x) { return static_cast<T>(x + by); });
}
template <class T>
T atomicSub(T* at, std::common_type_t<T> by) {
  return exchange_at(at, [&](T x) { return static_cast<T>(x - by); });
}
template <class T>
T atomicMax(T* at, std::common_type_t<T> with) {
  return exchange_at(at, [&](T x) { return std::max(x, with); });
}
template <class T>
T atomicMin(T* at, std::common_type_t<T> with) {
  return exchange_at(at, [&](T x) { return std::min(x, with); });
}
template <class T>
T atomicOr(T* at, std::common_type_t<T> with) {
  return exchange_at(at, [&](T x) { return static_cast<T>(x | with); });
}
template <class T>
T atomicExch(T* at, std::common_type_t<T> next) {
  return exchange_at(at, [&](T) { return next; });
}
template <class T>
T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> next) {
  return exchange_at(at, [&](T x) { return x == expected ? next : x; });
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
  return exchange_at(at, [&](unsigned x) { return x >= most ? 0 : x + 1; });
}

inline void __syncthreads() { emulator::wait(emulator::block.barrier, emulator::block.alive); }
inline int block_vote(bool mine, int kind) {
  static int sums[2][2];  // by kind; counted before the first barrier, read before the second
  int& sum = sums[kind][0];
  if (mine) ++sum;
  __syncthreads();
  const int all = sum;
  __syncthreads();
  sum = 0;
  __syncthreads();
  return all;
}
inline int __syncthreads_count(int mine) { return block_vote(mine != 0, 0); }
inline int __syncthreads_or(int mine) { return block_vote(mine != 0, 0) != 0; }
inline int __syncthreads_and(int mine) { return block_vote(mine == 0, 1) == 0; }
inline void __syncwarp(unsigned = ~0u) { emulator::exchange(0, 1); }

template <class T>
T from_lane(T value, int lane, int kind) {
  const T* all = emulator::exchange(value, kind);
  return emulator::of_lane(all, lane);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const int mine = emulator::me->lane;
  return from_lane(value, mine / width * width + lane % width, 2);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int with, int = 32) {
  return from_lane(value, emulator::me->lane ^ with, 3);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
  const int mine = emulator::me->lane, from = mine - static_cast<int>(by);
  return from_lane(value, mine % width < static_cast<int>(by) ? mine : from, 4);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
  const int mine = emulator::me->lane, from = mine + static_cast<int>(by);
  return from_lane(value, mine % width + static_cast<int>(by) >= width ? mine : from, 5);
}
inline unsigned __ballot_sync(unsigned mask, int mine) {
  const int* all = emulator::exchange(mine, 6);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && emulator::of_lane(all, lane)) bits |= 1u << lane;
  return bits;
}
inline int __any_sync(unsigned mask, int mine) { return __ballot_sync(mask, mine) != 0; }
inline int __all_sync(unsigned mask, int mine) { return __ballot_sync(mask, mine) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T mine) {
  const T* all = emulator::exchange(mine, 7);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && emulator::of_lane(all, lane) == mine) bits |= 1u << lane;
  return bits;
}
template <class T, class F>
T of_all(T mine, int kind, F&& join) {
  const T* all = emulator::exchange(mine, kind);
  T result = emulator::of_lane(all, 0);
  for (int lane = 1; lane < 32; ++lane) result = join(result, emulator::of_lane(all, lane));
  return result;
}
template <class T>
T __reduce_add_sync(unsigned, T mine) {
  return of_all(mine, 8, [](T a, T b) { return static_cast<T>(a + b); });
}
template <class T>
T __reduce_max_sync(unsigned, T mine) {
  return of_all(mine, 9, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_min_sync(unsigned, T mine) {
  return of_all(mine, 10, [](T a, T b) { return std::min(a, b); });
}
