// Sixteen floats at a time: AVX-512 F, BW, VL and DQ. Same names as simd_generic.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace {

using allspan::Nibbles;

typedef __m512 V;

constexpr int kLanes = 16;
constexpr bool kManyRegisters = true;  // 32, else 16
constexpr int kDotRows = 6;            // 24 sums, 6 rows and a column: 31 of 32 registers
constexpr int kMixRows = 6;
constexpr int kMixVectors = 4;

inline __mmask16 part_mask(int count) { return static_cast<__mmask16>((1u << count) - 1); }

inline V set1(float x) { return _mm512_set1_ps(x); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }
inline V load(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// Elements 0, 2, … and 1, 3, … of 32 bfloat16.
inline V load_even(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline V load_odd(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)));
}
inline V load_part(const float* p, int count) { return _mm512_maskz_loadu_ps(part_mask(count), p); }
inline V load_part(const uint16_t* p, int count) { return widen(_mm256_maskz_loadu_epi16(part_mask(count), p)); }
inline V widen_signed(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
inline V load(const int8_t* p) { return widen_signed(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline V load_part(const int8_t* p, int count) { return widen_signed(_mm_maskz_loadu_epi8(part_mask(count), p)); }
inline V widen_pairs(__m128i pairs) {
  const __m512i twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, pairs));
  const __m512i shifted = _mm512_srlv_epi32(twice, _mm512_set1_epi64(int64_t{4} << 32));
  return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(15)));
}
inline V load(const Nibbles* p) { return widen_pairs(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline V load_part(const Nibbles* p, int count) {
  return widen_pairs(_mm_maskz_loadu_epi8(part_mask((count + 1) / 2), p));
}
inline void store_part(float* p, V v, int count) { _mm512_mask_storeu_ps(p, part_mask(count), v); }

inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
// The instructions return their second operand when one is NaN: so a NaN in `a` stays.
inline V max(V a, V b) { return _mm512_max_ps(b, a); }
inline V min(V a, V b) { return _mm512_min_ps(b, a); }
inline V zero_where_less(V x, V limit, V value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
}
inline V round_nearest(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V exp2_whole(V n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

// Lane l of the result is lane l ^ H.
template <int H>
inline V swap_lanes(V v) {
  if constexpr (H >= 4) return _mm512_shuffle_f32x4(v, v, H == 4 ? 0xb1 : 0x4e);
  return _mm512_permute_ps(v, H == 1 ? 0xb1 : 0x4e);
}

inline __m128 fold(V v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float sum(V v) {
  __m128 s = fold(v);
  s = _mm_hadd_ps(s, s);
  return _mm_cvtss_f32(_mm_hadd_ps(s, s));
}
inline float highest(V v) { return _mm512_reduce_max_ps(v); }
inline void sum4(const V* v, float* out) {
  const __m128 ab = _mm_hadd_ps(fold(v[0]), fold(v[1]));
  const __m128 cd = _mm_hadd_ps(fold(v[2]), fold(v[3]));
  _mm_storeu_ps(out, _mm_hadd_ps(ab, cd));
}

// Lane i of rows[j] becomes lane j of rows[i].
__attribute__((always_inline)) inline void transpose(V* rows) {
  V pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  V quads[16];  // 4 · i + c: column c of each quarter, of rows 4 · i …
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512d a = _mm512_castps_pd(pairs[i + half]), b = _mm512_castps_pd(pairs[i + 2 + half]);
      quads[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      quads[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const V low = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);        // quarters 0, 2 of rows 0 … 7
    const V high = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);       // quarters 1, 3
    const V low2 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);  // of rows 8 … 15
    const V high2 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    rows[4 + c] = _mm512_shuffle_f32x4(high, high2, 0x88);
    rows[12 + c] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}

}  // namespace
