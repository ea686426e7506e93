// Four floats at a time: NEON, which every aarch64 CPU has. Same names as simd_generic.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

using allspan::Nibbles;

typedef float32x4_t V;

constexpr int kLanes = 4;
constexpr bool kManyRegisters = true;  // 32, else 16
constexpr int kDotRows = 4;  // 16 sums, 4 rows and a column: 21 of 32 registers; 16 chains keep four units busy
constexpr int kMixRows = 4;
constexpr int kMixVectors = 4;  // 16 sums, 4 values and a weight

inline V set1(float x) { return vdupq_n_f32(x); }
inline V load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, V v) { vst1q_f32(p, v); }
inline V load(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
// Elements 0, 2, … and 1, 3, … of 8 bfloat16.
inline uint32x4_t load_pairs(const uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
inline V load_even(const uint8_t* p) { return vreinterpretq_f32_u32(vshlq_n_u32(load_pairs(p), 16)); }
inline V load_odd(const uint8_t* p) { return vreinterpretq_f32_u32(vandq_u32(load_pairs(p), vdupq_n_u32(0xffff0000))); }
inline V load_part(const float* p, int count) {
  float padded[4] = {0, 0, 0, 0};
  std::memcpy(padded, p, count * sizeof(float));
  return load(padded);
}
inline V load_part(const uint16_t* p, int count) {
  uint16_t padded[4] = {0, 0, 0, 0};
  std::memcpy(padded, p, count * sizeof(uint16_t));
  return load(padded);
}
inline V load(const int8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const int16x8_t halves = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves)));
}
inline V load_part(const int8_t* p, int count) {
  int8_t padded[4] = {0, 0, 0, 0};
  std::memcpy(padded, p, count);
  return load(padded);
}
inline V load(const Nibbles* p) {
  uint16_t pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  const int32x4_t right = {0, -4, -8, -12};
  return vcvtq_f32_u32(vandq_u32(vshlq_u32(vdupq_n_u32(pairs), right), vdupq_n_u32(15)));
}
inline V load_part(const Nibbles* p, int count) {
  Nibbles padded[2] = {};
  std::memcpy(padded, p, (count + 1) / 2);
  return load(padded);
}
inline void store_part(float* p, V v, int count) {
  float all[4];
  store(all, v);
  std::memcpy(p, all, count * sizeof(float));
}

inline V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
// The second argument where the comparison fails, so that a NaN in `a` stays.
inline V max(V a, V b) { return vbslq_f32(vcltq_f32(a, b), b, a); }
inline V min(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), b, a); }
inline V zero_where_less(V x, V limit, V value) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, limit)));
}
inline V round_nearest(V x) { return vrndnq_f32(x); }
// 2^n for whole n in [-126, 127].
inline V exp2_whole(V n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}

// Lane l of the result is lane l ^ H.
template <int H>
inline V swap_lanes(V v) {
  return H == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2);
}

inline float sum(V v) { return vaddvq_f32(v); }
inline float highest(V v) { return vmaxvq_f32(v); }
// The sums of four vectors, each in the same order as sum().
inline void sum4(const V* v, float* out) { store(out, vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]))); }

inline V join(float32x4_t a, float32x4_t b, bool high) {
  const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
  return vreinterpretq_f32_f64(high ? vtrn2q_f64(x, y) : vtrn1q_f64(x, y));
}
// Lane i of rows[j] becomes lane j of rows[i].
inline void transpose(V* rows) {
  const V even = vtrn1q_f32(rows[0], rows[1]), odd = vtrn2q_f32(rows[0], rows[1]);
  const V next_even = vtrn1q_f32(rows[2], rows[3]), next_odd = vtrn2q_f32(rows[2], rows[3]);
  rows[0] = join(even, next_even, false);
  rows[1] = join(odd, next_odd, false);
  rows[2] = join(even, next_even, true);
  rows[3] = join(odd, next_odd, true);
}

}  // namespace
