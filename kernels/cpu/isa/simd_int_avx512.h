// Codes, integers and floats of 16 features at a time, for linear_int.inc: AVX-512 F, BW, VL and DQ.
// With VNNI, sums of products of bytes are one instruction.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

typedef __m512 V;
typedef __m512i I;
typedef __m512i Raw;  // 64 codes

inline V zero() { return _mm512_setzero_ps(); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V broadcast(const char* p) { return _mm512_set1_ps(*reinterpret_cast<const float*>(p)); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
inline V load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m128i load_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline V load_unsigned(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_bytes(p))); }
inline V load_low(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_cvtepu8_epi32(load_bytes(p)), _mm512_set1_epi32(15)));
}
inline V load_high(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(load_bytes(p)), 4));
}
// 2^(byte - 128): the smallest two are no normal floats.
inline V load_exponents(const uint8_t* p) {
  const __m512i e = _mm512_cvtepu8_epi32(load_bytes(p)), one = _mm512_set1_epi32(1);
  const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), _mm512_min_epi32(e, one));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23), small));
}
inline V load_signed(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p))); }

inline I zero_int() { return _mm512_setzero_si512(); }
inline I load_int(const void* p) { return _mm512_loadu_si512(p); }
inline void store_int(void* p, I v) { _mm512_storeu_si512(p, v); }
inline I broadcast_int(const char* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I shift8(I v) { return _mm512_slli_epi32(v, 8); }
inline V to_float(I v) { return _mm512_cvtepi32_ps(v); }

// What linear_int.inc else writes in plain C++, which takes twice the time.
#define ALLSPAN_NUMBERS 1
// The largest magnitude's bits of x[32].
inline uint32_t largest_bits_of_group(const float* x) {
  const I magnitude = _mm512_set1_epi32(0x7fffffff);
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_and_si512(load_int(x), magnitude), _mm512_and_si512(load_int(x + 16), magnitude)));
}
// 16 of x as integers, or zeros; see Quantiser.
inline I whole_numbers(const float* x, float factor) {
  const I shifted =
      _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(load(x), _mm512_set1_ps(factor)), _mm512_set1_ps(12582912.0f)));
  return _mm512_maskz_sub_epi32(factor == 0 ? 0 : 0xffff, shifted, _mm512_set1_epi32(0x4b400000));
}
inline int32_t sum_of(I v) { return _mm512_reduce_add_epi32(v); }
inline void put_bytes(char* to, I v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(v)); }
// As pairs of 16 bits: even, then odd places of each quad.
inline void put_words(char* to, I v) {
  const __m256i words = _mm512_cvtepi32_epi16(v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}
inline I high_bytes(I v) { return _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8); }

inline Raw load_raw(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_raw(uint8_t* p, Raw v) { _mm512_storeu_si512(p, v); }
inline Raw low_halves(Raw v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Raw high_halves(Raw v) { return low_halves(_mm512_srli_epi16(v, 4)); }
// Codes, and `Value` more where a bit of the 64 at p is 1.
template <int Value>
inline Raw add_bits(Raw low, const uint8_t* p) {
  return _mm512_mask_add_epi8(low, _cvtu64_mask64(*reinterpret_cast<const uint64_t*>(p)), low, _mm512_set1_epi8(Value));
}
// Bits 2·at and 2·at + 1 of each byte.
inline Raw two_bits(Raw v, int at) {
  return _mm512_and_si512(at == 0   ? v
                          : at == 1 ? _mm512_srli_epi16(v, 2)
                          : at == 2 ? _mm512_srli_epi16(v, 4)
                                    : _mm512_srli_epi16(v, 6),
                          _mm512_set1_epi8(3));
}
inline Raw look_up(Raw codes, const uint8_t* values) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes(values)), codes);
}
// Codes of 4 bits in either half of `pairs`, and two more bits of each in bits 2·(quad % 4) of `high`.
inline Raw join6(Raw pairs, Raw high, int quad) {
  const Raw low = quad < 4 ? pairs : _mm512_srli_epi16(pairs, 4);
  const int at = quad % 4;
  const Raw above = at == 0   ? _mm512_slli_epi16(high, 4)
                    : at == 1 ? _mm512_slli_epi16(high, 2)
                    : at == 2 ? high
                              : _mm512_srli_epi16(high, 2);
  const Raw mask = _mm512_set1_epi8(15);
  // mask ? low : above, bit by bit.
  return _mm512_and_si512(_mm512_ternarylogic_epi32(mask, low, above, 0xca), _mm512_set1_epi8(63));
}

#ifdef __AVX512VNNI__

constexpr bool kByteDot = true;
constexpr int kCodeBias = 0, kPassesTogether = 4;
constexpr int kTileRows = 6, kTilePanelsAtOnce = 2, kAlonePanels = 1, kProductRows = 48;

typedef __m512i W;
typedef __m512i X;
template <int Bits>
inline W widen(Raw v) {
  return v;
}
inline X load_x(const char* numbers, int quad) {
  return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(numbers + quad * 4));
}
inline I dot(I sum, W w, X x) { return _mm512_dpbusd_epi32(sum, w, x); }

#else

constexpr bool kByteDot = false;
constexpr int kCodeBias = 0, kPassesTogether = 0;
constexpr int kTileRows = 4, kTilePanelsAtOnce = 2, kAlonePanels = 1, kProductRows = 48;

// Even and odd places of a quad, as 16 bits.
struct W {
  __m512i even, odd;
};
struct X {
  __m512i even, odd;
};
template <int Bits>
inline W widen(Raw v) {
  return {_mm512_and_si512(v, _mm512_set1_epi16(255)), _mm512_srli_epi16(v, 8)};
}
inline X load_x(const char* numbers, int quad) {
  const int32_t* pairs = reinterpret_cast<const int32_t*>(numbers) + quad * 2;
  return {_mm512_set1_epi32(pairs[0]), _mm512_set1_epi32(pairs[1])};
}
inline I dot(I sum, W w, X x) {
  const I even = _mm512_add_epi32(sum, _mm512_madd_epi16(w.even, x.even));
  return _mm512_add_epi32(even, _mm512_madd_epi16(w.odd, x.odd));
}

#endif

}  // namespace
