// The functions of kernels/cuda/ptx/ptx.cuh, for emulator.h.
#pragma once

#define ALLSPAN_PTX
#include "ptx/e4m3.cuh"

#ifndef FP16
#define FP16 0
#endif
typedef unsigned short bf16;

#define kInf __int_as_float(0x7f800000)
#define DYNAMIC_SHARED(name) char* const name = emulator::block.base

inline uint32_t smem(const void* at) {
  return static_cast<uint32_t>(static_cast<const char*>(at) - emulator::block.base);
}
inline void copy16(uint32_t to, const void* from, bool is_there) { emulator::copy(to, from, is_there ? 16 : 0, 16); }
inline void copy4(uint32_t to, const void* from, bool is_there) { emulator::copy(to, from, is_there ? 4 : 0, 4); }
inline void wait_for_ahead() {}
inline void let_next_begin() {}
inline void cluster_arrive() { emulator::arrive_at_cluster(); }
inline void cluster_wait() { emulator::wait_for_cluster(); }
template <class T>
T* of_block(T* mine, int rank) {
  return reinterpret_cast<T*>(emulator::at_block(reinterpret_cast<const char*>(mine), rank));
}
inline void commit() { emulator::commit_copies(); }
template <int N>
void wait_for() {
  emulator::wait_for_copies(N);
}

inline float half_wide(uint32_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : std::ldexp(static_cast<float>(exponent ? 1024 + fraction : fraction),
                                                 (exponent ? exponent : 1) - 25);
  return bits & 0x8000 ? -size : size;
}
inline unsigned short half_narrow(float x) {
  if (std::isnan(x)) return 0x7fff;
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (size == 0) return static_cast<bf16>(sign);
  if (size >= 65520.0f) return static_cast<bf16>(sign | 0x7c00);
  int exponent;
  std::frexp(size, &exponent);  // size = [0.5, 1) times 2^exponent
  const int lowest = std::max(exponent - 11, -24);
  const float units = std::nearbyint(std::ldexp(size, -lowest));  // up to 2048
  if (lowest == -24 && units < 1024) return static_cast<bf16>(sign | static_cast<unsigned>(units));
  return static_cast<bf16>(sign | (((lowest + 25) << 10) + static_cast<unsigned>(units) - 1024));
}
#if FP16
inline float wide(uint32_t bits) { return half_wide(bits); }
inline bf16 narrow(float x) { return half_narrow(x); }
#else
inline float wide(uint32_t bits) { return __uint_as_float(bits << 16); }
inline bf16 narrow(float x) {
  if (std::isnan(x)) return 0x7fff;
  const unsigned bits = __float_as_uint(x);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif
inline float wide_low(uint32_t pair) { return wide(pair & 0xffff); }
inline float wide_high(uint32_t pair) { return wide(pair >> 16); }
inline uint32_t pack(float low, float high) { return narrow(low) | static_cast<uint32_t>(narrow(high)) << 16; }
inline uint32_t pack_halves(float low, float high) {
  return half_narrow(low) | static_cast<uint32_t>(half_narrow(high)) << 16;
}
inline uint32_t pack_e4m3(float low, float high) { return narrow_e4m3(low) | narrow_e4m3(high) << 8; }
inline uint32_t add_pairs(uint32_t a, uint32_t b) {
  return pack(wide(a & 0xffff) + wide(b & 0xffff), wide(a >> 16) + wide(b >> 16));
}
inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  return pack(wide(a & 0xffff) * wide(b & 0xffff), wide(a >> 16) * wide(b >> 16));
}
inline uint32_t larger_pairs(uint32_t a, uint32_t b) {
  return pack(std::fmax(wide(a & 0xffff), wide(b & 0xffff)), std::fmax(wide(a >> 16), wide(b >> 16)));
}
inline float power(float x) { return std::exp2(x); }
inline float logarithm(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline void widen_e4m3(uint32_t* pairs, uint32_t word) {
  for (int i = 0; i < 2; ++i) {
    float x[2];
    for (int e = 0; e < 2; ++e) {
      const uint32_t byte = word >> 8 * (i + 2 * e) & 0xff, exponent = byte >> 3 & 15;
      x[e] = std::ldexp(static_cast<float>(exponent ? 8 + byte % 8 : byte % 8), (exponent ? exponent : 1) - 10);
      if ((byte & 0x7f) == 0x7f) x[e] = NAN;
      if (byte & 0x80) x[e] = -x[e];
    }
    pairs[i] = pack_halves(x[0], x[1]);
  }
}
inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }
inline uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) { return (a & b) ^ c; }
inline uint32_t add_shared(uint32_t at, uint32_t by) {
  auto& word = *reinterpret_cast<uint32_t*>(emulator::block.base + at);
  return (word += by) - by;
}
inline float load_shared4(uint32_t at) { return *reinterpret_cast<const float*>(emulator::block.base + at); }
inline float4 load_shared16(uint32_t at) {
  if (at % 16) emulator::fail("a load of 16 bytes is not aligned");
  return *reinterpret_cast<const float4*>(emulator::block.base + at);
}
inline void prefetch_l2(const void*) {}
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  return pack(std::fma(wide(a & 0xffff), wide(b & 0xffff), wide(c & 0xffff)),
              std::fma(wide(a >> 16), wide(b >> 16), wide(c >> 16)));
}
inline void keep(uint32_t&) {}
inline uint4 load16(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a load of 16 bytes is not aligned");
  return *static_cast<const uint4*>(from);
}
inline uint4 stream16(const uint4* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a load of 16 bytes is not aligned");
  return *from;
}

inline void load_matrices(uint32_t* r, uint32_t at, bool transposed) {
  if (at % 16) emulator::fail("a row of a matrix is not aligned");
  const uint32_t* all = emulator::exchange(at, transposed ? 20 : 21);
  const int lane = emulator::me->lane;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? lane % 4 * 2 + e : lane / 4, col = transposed ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(&pair[e], emulator::block.base + emulator::of_lane(all, i * 8 + row) + col * 2, 2);
    }
    r[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}
inline void load4(uint32_t* r, uint32_t at) { load_matrices(r, at, false); }
inline void load4_transposed(uint32_t* r, uint32_t at) { load_matrices(r, at, true); }
inline uint32_t transpose(uint32_t pair) {
  const uint32_t* all = emulator::exchange(pair, 23);
  const int row = emulator::me->lane / 4, col = emulator::me->lane % 4 * 2;
  uint32_t other = 0;
  for (int e = 0; e < 2; ++e)
    other |= (emulator::of_lane(all, (col + e) * 4 + row / 2) >> 16 * (row % 2) & 0xffff) << 16 * e;
  return other;
}

struct Fragments {
  uint32_t a[4], b[2];
};

// d[16][8] += a[16][k] · b[k][8]; `at` reads element i of a register.
template <int kElements, class T, class Read>
void multiply_fragments(T* c, const uint32_t* a, uint32_t b0, uint32_t b1, int kind, Read&& at) {
  const Fragments* all = emulator::exchange(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}}, kind);
  const int lane = emulator::me->lane;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, col = lane % 4 * 2 + e % 2;
    T sum = 0;
    for (int half = 0; half < 2; ++half)
      for (int t = 0; t < 4; ++t) {
        const uint32_t x = emulator::of_lane(all, row % 8 * 4 + t).a[row / 8 + half * 2];
        const uint32_t y = emulator::of_lane(all, col * 4 + t).b[half];
        for (int i = 0; i < kElements; ++i) sum += at(x, i) * at(y, i);
      }
    c[e] += sum;
  }
}
inline void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);
inline void multiply_anew(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  c[0] = c[1] = c[2] = c[3] = 0;
  multiply(c, a, b0, b1);
}
inline void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  multiply_fragments<2>(c, a, b0, b1, 22, [](uint32_t x, int i) { return wide(x >> 16 * i & 0xffff); });
}
inline void multiply_halves(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  multiply_fragments<2>(c, a, b0, b1, 24, [](uint32_t x, int i) { return half_wide(x >> 16 * i & 0xffff); });
}
inline void multiply_whole(int* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  multiply_fragments<4>(c, a, b0, b1, 23, [](uint32_t x, int i) { return static_cast<int8_t>(x >> 8 * i); });
}
inline void multiply_whole_anew(int* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  c[0] = c[1] = c[2] = c[3] = 0;
  multiply_whole(c, a, b0, b1);
}

// Memory of another GPU, or that another GPU writes.
inline void store16_far(void* to, uint4 value) {
  if (reinterpret_cast<uintptr_t>(to) % 16) emulator::fail("a store of 16 bytes is not aligned");
  const uint32_t words[] = {value.x, value.y, value.z, value.w};
  for (int i = 0; i < 4; ++i) {
    const emulator::Late store{static_cast<char*>(to) + 4 * i, words[i]};
    if (emulator::beside_others)
      emulator::block.late.push_back(store);
    else
      emulator::arrive(store);
  }
}
inline uint4 load16_far(const void* from) { return *static_cast<const uint4*>(from); }
inline void release(uint32_t* flag, uint32_t value) {
  for (const auto& store : emulator::block.late) emulator::arrive(store);
  emulator::block.late.clear();
  *flag = value;
}
inline uint32_t acquire(const uint32_t* flag) { return *flag; }
inline void pause() {
  emulator::block.moved = true;
  emulator::yield();
}
inline unsigned long long nanoseconds() {
  static unsigned long long now = 0;
  return now += 1000;
}
