// Eight or sixteen floats at a time: SVE, its vector length fixed by -msve-vector-bits, so that vectors are types like
// those of the other instruction sets and sums have one order. Same names as simd_generic.h.
#pragma once

#include <arm_sve.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

using allspan::Nibbles;

typedef svfloat32_t V __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));

constexpr int kLanes = __ARM_FEATURE_SVE_BITS / 32;
constexpr bool kManyRegisters = true;  // 32, else 16
constexpr int kDotRows = 4;            // 16 sums, 4 rows and a column: 21 of 32 registers
constexpr int kMixRows = 4;
constexpr int kMixVectors = 4;  // 16 sums, 4 values and a weight

inline svbool_t all_lanes() { return svptrue_b32(); }
inline svbool_t first_lanes(int count) { return svwhilelt_b32(0, count); }

inline V set1(float x) { return svdup_f32(x); }
inline V load_lanes(const float* p, svbool_t lanes) { return svld1_f32(lanes, p); }
inline V load_lanes(const uint16_t* p, svbool_t lanes) {
  return svreinterpret_f32_u32(svlsl_n_u32_x(lanes, svld1uh_u32(lanes, p), 16));
}
inline V load_lanes(const int8_t* p, svbool_t lanes) { return svcvt_f32_s32_x(all_lanes(), svld1sb_s32(lanes, p)); }
// Each byte goes to two lanes, the second of which takes its high half.
inline V load_bytes(const Nibbles* p, int bytes) {
  const svuint32_t pairs = svld1ub_u32(first_lanes(bytes), &p->pair);
  const svuint32_t right = svlsl_n_u32_x(all_lanes(), svand_n_u32_x(all_lanes(), svindex_u32(0, 1), 1), 2);
  const svuint32_t shifted = svlsr_u32_x(all_lanes(), svzip1_u32(pairs, pairs), right);
  return svcvt_f32_u32_x(all_lanes(), svand_n_u32_x(all_lanes(), shifted, 15));
}
// Elements 0, 2, … and 1, 3, … of twice as many bfloat16.
inline svuint32_t load_pairs(const uint8_t* p) { return svld1_u32(all_lanes(), reinterpret_cast<const uint32_t*>(p)); }
inline V load_even(const uint8_t* p) { return svreinterpret_f32_u32(svlsl_n_u32_x(all_lanes(), load_pairs(p), 16)); }
inline V load_odd(const uint8_t* p) {
  return svreinterpret_f32_u32(svand_n_u32_x(all_lanes(), load_pairs(p), 0xffff0000));
}
template <class T>
inline V load(const T* p) {
  return load_lanes(p, all_lanes());
}
template <class T>
inline V load_part(const T* p, int count) {
  return load_lanes(p, first_lanes(count));
}
inline V load(const Nibbles* p) { return load_bytes(p, kLanes / 2); }
inline V load_part(const Nibbles* p, int count) { return load_bytes(p, (count + 1) / 2); }
inline void store(float* p, V v) { svst1_f32(all_lanes(), p, v); }
inline void store_part(float* p, V v, int count) { svst1_f32(first_lanes(count), p, v); }

inline V fma(V a, V b, V c) { return svmla_f32_x(all_lanes(), c, a, b); }
// The second argument where the comparison fails, so that a NaN in `a` stays.
inline V max(V a, V b) { return svsel_f32(svcmplt_f32(all_lanes(), a, b), b, a); }
inline V min(V a, V b) { return svsel_f32(svcmpgt_f32(all_lanes(), a, b), b, a); }
inline V zero_where_less(V x, V limit, V value) {
  return svsel_f32(svcmplt_f32(all_lanes(), x, limit), set1(0), value);
}
inline V round_nearest(V x) { return svrintn_f32_x(all_lanes(), x); }
// 2^n for whole n in [-126, 127].
inline V exp2_whole(V n) {
  const svint32_t biased = svadd_n_s32_x(all_lanes(), svcvt_s32_f32_x(all_lanes(), n), 127);
  return svreinterpret_f32_s32(svlsl_n_s32_x(all_lanes(), biased, 23));
}

// Lane l of the result is lane l ^ H.
template <int H>
inline V swap_lanes(V v) {
  return svtbl_f32(v, sveor_n_u32_x(all_lanes(), svindex_u32(0, 1), H));
}

inline float sum(V v) { return svaddv_f32(all_lanes(), v); }
inline float highest(V v) { return svmaxv_f32(all_lanes(), v); }
inline void sum4(const V* v, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
}

// Lane i of rows[j] becomes lane j of rows[i].
inline void transpose(V* rows) {
  float from[kLanes][kLanes], to[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(from[i], rows[i]);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) to[i][j] = from[j][i];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(to[i]);
}

}  // namespace
