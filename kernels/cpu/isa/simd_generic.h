// Four floats at a time in GCC/Clang vector extensions: SSE2 on x86-64, NEON on aarch64. The wrappers of the other
// instruction sets have the same names, so that kernels.inc is written once.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace {

using allspan::Nibbles;

typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint16_t H __attribute__((vector_size(8)));

constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr bool kManyRegisters = true;  // 32, else 16
constexpr int kDotRows = 4;            // 16 sums, 4 rows and a column: 21 of 32 registers
#else
constexpr bool kManyRegisters = false;
constexpr int kDotRows = 2;  // 8 sums, 2 rows and a column: 11 of 16 registers
#endif
constexpr int kMixRows = 4;
constexpr int kMixVectors = 2;

inline V set1(float x) { return V{x, x, x, x}; }
inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
inline V load(const uint16_t* p) {
  H half;
  std::memcpy(&half, p, sizeof half);
  typedef uint32_t U __attribute__((vector_size(16)));
  return (V)(__builtin_convertvector(half, U) << 16);
}
// Elements 0, 2, … and 1, 3, … of 8 bfloat16.
inline V load_even(const uint8_t* p) {
  I pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return (V)(pairs << 16);
}
inline V load_odd(const uint8_t* p) {
  I pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return (V)(pairs & -65536);
}
inline V load_part(const float* p, int count) {
  V v = set1(0);
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}
inline V load_part(const uint16_t* p, int count) {
  uint16_t padded[4] = {0, 0, 0, 0};
  std::memcpy(padded, p, count * sizeof(uint16_t));
  return load(padded);
}
inline V load(const int8_t* p) {
  typedef int8_t B __attribute__((vector_size(4)));
  B bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, V);
}
inline V load_part(const int8_t* p, int count) {
  int8_t padded[4] = {0, 0, 0, 0};
  std::memcpy(padded, p, count);
  return load(padded);
}
inline V load(const Nibbles* p) {
  const I twice = {p[0].pair, p[0].pair, p[1].pair, p[1].pair};
  return __builtin_convertvector((twice >> I{0, 4, 0, 4}) & 15, V);
}
inline V load_part(const Nibbles* p, int count) {
  Nibbles padded[2] = {};
  std::memcpy(padded, p, (count + 1) / 2);
  return load(padded);
}
inline void store_part(float* p, V v, int count) { std::memcpy(p, &v, count * sizeof(float)); }

#if defined(__aarch64__)
inline V fma(V a, V b, V c) { return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
inline V fma(V a, V b, V c) { return a * b + c; }
#endif
// The second argument where the comparison fails, so that a NaN in `a` stays.
inline V max(V a, V b) { return (V)(((I)a & ~(a < b)) | ((I)b & (a < b))); }
inline V min(V a, V b) { return (V)(((I)a & ~(a > b)) | ((I)b & (a > b))); }
inline V zero_where_less(V x, V limit, V value) { return (V)((I)value & ~(x < limit)); }
inline V round_nearest(V x) {
  const V magic = set1(12582912.0f);  // 1.5 · 2^23: adding it leaves no room for a fraction
  return (x + magic) - magic;
}
// 2^n for whole n in [-126, 127].
inline V exp2_whole(V n) { return (V)((__builtin_convertvector(n, I) + 127) << 23); }

// Lane l of the result is lane l ^ H.
template <int H>
inline V swap_lanes(V v) {
  return V{v[0 ^ H], v[1 ^ H], v[2 ^ H], v[3 ^ H]};
}

inline float sum(V v) { return (v[0] + v[1]) + (v[2] + v[3]); }
inline float highest(V v) {
  const float a = v[0] < v[1] ? v[1] : v[0];
  const float b = v[2] < v[3] ? v[3] : v[2];
  return a < b ? b : a;
}
// The sums of four vectors, each in the same order as sum().
inline void sum4(const V* v, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
}

// Lane i of rows[j] becomes lane j of rows[i].
inline void transpose(V* rows) {
  const V a = rows[0], b = rows[1], c = rows[2], d = rows[3];
  for (int i = 0; i < 4; ++i) rows[i] = V{a[i], b[i], c[i], d[i]};
}

}  // namespace
