// Eight floats at a time: AVX2 with FMA. Same names as simd_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

using allspan::Nibbles;

typedef __m256 V;

constexpr int kLanes = 8;
constexpr bool kManyRegisters = false;  // 32, else 16
constexpr int kDotRows = 3;             // 12 sums, 3 rows and a column: 16 registers
constexpr int kMixRows = 4;
constexpr int kMixVectors = 2;

alignas(64) const int32_t kPartMask[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
inline __m256i part_mask(int count) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kPartMask + 8 - count));
}

inline V set1(float x) { return _mm256_set1_ps(x); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V widen(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
inline V load(const uint16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// Elements 0, 2, … and 1, 3, … of 16 bfloat16.
inline __m256i load_pairs(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline V load_even(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16)); }
inline V load_odd(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), _mm256_set1_epi32(-65536)));
}
inline V load_part(const float* p, int count) { return _mm256_maskload_ps(p, part_mask(count)); }
inline V load_part(const uint16_t* p, int count) {
  uint16_t padded[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  std::memcpy(padded, p, count * sizeof(uint16_t));
  return load(padded);
}
inline V load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline V load_part(const int8_t* p, int count) {
  int8_t padded[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  std::memcpy(padded, p, count);
  return load(padded);
}
inline V load(const Nibbles* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const __m128i pairs = _mm_cvtsi32_si128(bytes);
  const __m256i twice = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, pairs));
  const __m256i shifted = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
  return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)));
}
inline V load_part(const Nibbles* p, int count) {
  Nibbles padded[4] = {};
  std::memcpy(padded, p, (count + 1) / 2);
  return load(padded);
}
inline void store_part(float* p, V v, int count) { _mm256_maskstore_ps(p, part_mask(count), v); }

inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
// The instructions return their second operand when one is NaN: so a NaN in `a` stays.
inline V max(V a, V b) { return _mm256_max_ps(b, a); }
inline V min(V a, V b) { return _mm256_min_ps(b, a); }
inline V zero_where_less(V x, V limit, V value) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), value); }
inline V round_nearest(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V exp2_whole(V n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

// Lane l of the result is lane l ^ H.
template <int H>
inline V swap_lanes(V v) {
  if constexpr (H == 4) return _mm256_permute2f128_ps(v, v, 1);
  return _mm256_permute_ps(v, H == 1 ? 0xb1 : 0x4e);
}

inline __m128 fold(V v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
inline float sum(V v) {
  __m128 s = fold(v);
  s = _mm_hadd_ps(s, s);
  return _mm_cvtss_f32(_mm_hadd_ps(s, s));
}
inline float highest(V v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline void sum4(const V* v, float* out) {
  const __m128 ab = _mm_hadd_ps(fold(v[0]), fold(v[1]));
  const __m128 cd = _mm_hadd_ps(fold(v[2]), fold(v[3]));
  _mm_storeu_ps(out, _mm_hadd_ps(ab, cd));
}

// Lane i of rows[j] becomes lane j of rows[i].
__attribute__((always_inline)) inline void transpose(V* rows) {
  V quads[8];  // 4 · i + c: columns c and c + 4 of rows 4 · i …
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const V a = _mm256_unpacklo_ps(rows[i], rows[i + 1]), b = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    const V c = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]), d = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
    quads[i] = _mm256_shuffle_ps(a, c, 0x44);
    quads[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    quads[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    quads[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31);
  }
}

}  // namespace
