// Codes, integers and floats of 16 features at a time, for linear_int.inc: AVX2, FMA and F16C, two registers each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

struct V {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
typedef I Raw;  // 64 codes

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
inline V broadcast(const char* p) {
  const __m256 v = _mm256_set1_ps(*reinterpret_cast<const float*>(p));
  return {v, v};
}
inline V mul(V a, V b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
inline V fnma(V a, V b, V c) { return {_mm256_fnmadd_ps(a.a, b.a, c.a), _mm256_fnmadd_ps(a.b, b.b, c.b)}; }
inline __m128i load_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline V load_half(const uint8_t* p) { return {_mm256_cvtph_ps(load_bytes(p)), _mm256_cvtph_ps(load_bytes(p + 16))}; }
inline V load_unsigned(const uint8_t* p) {
  const __m128i v = load_bytes(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
inline V load_low(const uint8_t* p) {
  alignas(16) uint8_t low[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(low), _mm_and_si128(load_bytes(p), _mm_set1_epi8(15)));
  return load_unsigned(low);
}
inline V load_high(const uint8_t* p) {
  alignas(16) uint8_t high[16];
  const __m128i shifted = _mm_srli_epi16(load_bytes(p), 4);
  _mm_store_si128(reinterpret_cast<__m128i*>(high), _mm_and_si128(shifted, _mm_set1_epi8(15)));
  return load_unsigned(high);
}
// 2^(byte - 128): the smallest two are no normal floats.
inline __m256 powers(__m128i bytes) {
  const __m256i e = _mm256_cvtepu8_epi32(bytes), one = _mm256_set1_epi32(1);
  const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), _mm256_min_epi32(e, one));
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23), small));
}
inline V load_exponents(const uint8_t* p) {
  const __m128i v = load_bytes(p);
  return {powers(v), powers(_mm_srli_si128(v, 8))};
}
inline V load_signed(const uint8_t* p) {
  const __m128i v = load_bytes(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}

inline I zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I load_int(const void* p) {
  const __m256i* from = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
inline void store_int(void* p, I v) {
  __m256i* to = static_cast<__m256i*>(p);
  _mm256_storeu_si256(to, v.a), _mm256_storeu_si256(to + 1, v.b);
}
inline I broadcast_int(const char* p) {
  const __m256i v = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p));
  return {v, v};
}
inline I add(I a, I b) { return {_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)}; }
inline I shift8(I v) { return {_mm256_slli_epi32(v.a, 8), _mm256_slli_epi32(v.b, 8)}; }
inline V to_float(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }

inline Raw load_raw(const uint8_t* p) { return load_int(p); }
inline void store_raw(uint8_t* p, Raw v) { store_int(p, v); }
inline Raw mask_bytes(Raw v, char mask) {
  return {_mm256_and_si256(v.a, _mm256_set1_epi8(mask)), _mm256_and_si256(v.b, _mm256_set1_epi8(mask))};
}
inline Raw join(Raw a, Raw b) { return {_mm256_or_si256(a.a, b.a), _mm256_or_si256(a.b, b.b)}; }
template <int Count>
inline Raw shift_right(Raw v) {
  if constexpr (Count < 0) return {_mm256_slli_epi16(v.a, -Count), _mm256_slli_epi16(v.b, -Count)};
  return {_mm256_srli_epi16(v.a, Count < 0 ? 0 : Count), _mm256_srli_epi16(v.b, Count < 0 ? 0 : Count)};
}
inline Raw low_halves(Raw v) { return mask_bytes(v, 15); }
inline Raw high_halves(Raw v) { return low_halves(shift_right<4>(v)); }
// `Value` in byte i where bit i of the 32 is 1.
template <int Value>
inline __m256i spread_bits(const uint8_t* p) {
  const __m256i all = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p));
  const __m256i own =
      _mm256_shuffle_epi8(all, _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(own, bit), bit), _mm256_set1_epi8(Value));
}
template <int Value>
inline Raw add_bits(Raw low, const uint8_t* p) {
  return join(low, {spread_bits<Value>(p), spread_bits<Value>(p + 4)});
}
// Bits 2·at and 2·at + 1 of each byte.
inline Raw two_bits(Raw v, int at) {
  return mask_bytes(at == 0 ? v : at == 1 ? shift_right<2>(v) : at == 2 ? shift_right<4>(v) : shift_right<6>(v), 3);
}
inline Raw look_up(Raw codes, const uint8_t* values) {
  const __m256i both = _mm256_broadcastsi128_si256(load_bytes(values));
  return {_mm256_shuffle_epi8(both, codes.a), _mm256_shuffle_epi8(both, codes.b)};
}
inline Raw join6(Raw pairs, Raw high, int quad) {
  const Raw low = quad < 4 ? low_halves(pairs) : high_halves(pairs);
  const int at = quad % 4;
  const Raw above = at == 0   ? shift_right<-4>(high)
                    : at == 1 ? shift_right<-2>(high)
                    : at == 2 ? high
                              : shift_right<2>(high);
  return join(low, mask_bytes(above, 48));
}

constexpr bool kByteDot = false;
constexpr int kCodeBias = 0, kPassesTogether = 0;
constexpr int kTileRows = 2, kTilePanelsAtOnce = 1, kAlonePanels = 1, kProductRows = 24;

// Even and odd places of a quad, as 16 bits.
struct W {
  I even, odd;
};
struct X {
  __m256i even, odd;
};
template <int Bits>
inline W widen(Raw v) {
  const __m256i low = _mm256_set1_epi16(255);
  return {{_mm256_and_si256(v.a, low), _mm256_and_si256(v.b, low)}, shift_right<8>(v)};
}
inline X load_x(const char* numbers, int quad) {
  const int32_t* pairs = reinterpret_cast<const int32_t*>(numbers) + quad * 2;
  return {_mm256_set1_epi32(pairs[0]), _mm256_set1_epi32(pairs[1])};
}
inline __m256i dot_half(__m256i sum, __m256i even, __m256i odd, X x) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x.even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, x.odd));
}
inline I dot(I sum, W w, X x) { return {dot_half(sum.a, w.even.a, w.odd.a, x), dot_half(sum.b, w.even.b, w.odd.b, x)}; }

}  // namespace
