// Words of two bfloat16 for attention, multiplied by the dot products of AVX-512-BF16. Part of attention.inc, inside
// its namespace; written over simd_avx512.h and vectors.inc.
#pragma once

// Words of two bfloat16, the first in the low half. q and the weights are rounded to bfloat16 (to nearest, ties to
// even); integers of quantised pages fit without.
struct Pairs {
  static constexpr Size kWide = 2;
  static constexpr float kUnit = 1.44269504f;  // power() is of 2
  static V multiply_add(V a, V b, V sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(b), (__m512bh)_mm512_castps_si512(a));
  }
  // 2^x to 3e-6, which the rounding of weights hides: a polynomial on [0, 1), fitted for the least relative error.
  static V power(V x) {
    const V r = _mm512_reduce_ps(x, 9);  // x - floor(x)
    V p = set1(1.353416755e-2f);
    p = fma(p, r, set1(5.201146387e-2f));
    p = fma(p, r, set1(2.414427529e-1f));
    p = fma(p, r, set1(6.930038359e-1f));
    p = fma(p, r, set1(1.000002593f));
    return _mm512_scalef_ps(p, x);  // · 2^floor(x)
  }
  static bool any_above(V x, V limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ) != 0; }
  static V round(V low, V high) { return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low)); }
  static int lanes_from(Size i, Size dim) { return static_cast<int>(greater(0, lesser(kLanes, dim - i))); }
  template <class T>
  static V take_words(const T* row, Size first, Size dim) {
    const Size i = 2 * first;
    if constexpr (sizeof(T) == 2) {
      const Size count = lesser(2 * kLanes, dim - i);
      const __mmask32 mask = count == 2 * kLanes ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
      return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, row + i));
    } else {
      return round(load_part_or_none(at(row, i), lanes_from(i, dim)),
                   load_part_or_none(at(row, i + kLanes), lanes_from(i + kLanes, dim)));
    }
  }
  template <class T>
  static V load_part_or_none(const T* p, int lanes) {
    return lanes == kLanes ? load(p) : lanes ? load_part(p, lanes) : set1(0);
  }
  template <class T>
  static V load_words(const T* row, Size first) {
    if constexpr (sizeof(T) == 2) {
      return _mm512_loadu_ps(row + 2 * first);
    } else {
      return round(load(at(row, 2 * first)), load(at(row, 2 * first + kLanes)));
    }
  }
  static V load_words(const Nibbles* row, Size first) {
    // A byte's codes go to the words' low bits; the table of 32 says the same whatever the bit above a code.
    const __m512i table =
        _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                                 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at(row, 2 * first))));
    const __m512i apart = _mm512_or_si512(codes, _mm512_slli_epi32(codes, 12));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(apart, table));
  }
  // Elements 0 … 15 and 16 … 31 of two tokens, in pairs.
  static void interleave(V first, V second, V* pairs) {
    const __m512i low = _mm512_add_epi32(_mm512_set1_epi32(0x200000), counting_words());
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x100010));
    const __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
    pairs[0] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
    pairs[1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
  }
  template <class T>
  static constexpr bool kLieAsWords = sizeof(T) == 2;
  template <class To, class T>
  static void put_step(To to, const T* const* tokens, Size begin, Size end) {
    Size i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      V pairs[2];
      interleave(load_words(tokens[0], i / 2), load_words(tokens[1], i / 2), pairs);
      store(to(i), pairs[0]);
      store(to(i + kLanes), pairs[1]);
    }
    for (; i < end; i += kLanes) {
      const int lanes = lanes_from(i, end);
      const __m512i first = _mm512_castps_si512(take(at(tokens[0], i), lanes));
      const __m512i second = _mm512_castps_si512(take(at(tokens[1], i), lanes));
      // Both are exact in bfloat16, so their low halves are 0.
      store(to(i), _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(first, 16), second)));
    }
  }
  template <class T>
  static void load_step(const T* const* tokens, Size first, V* parts) {
    interleave(load_words(tokens[0], first / 2), load_words(tokens[1], first / 2), parts);
  }
  // Of a step that lacks its second token.
  template <class T>
  static void load_last(const T* const* tokens, Size first, V* parts) {
    interleave(load_words(tokens[0], first / 2), set1(0), parts);
  }
  // Lane l: l in both halves.
  static __m512i counting_words() {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_or_si512(lane, _mm512_slli_epi32(lane, 16));
  }
  static void put_weights(float* words, const V* weights) { store(words, round(weights[0], weights[1])); }
  static V as_stored(V weight) {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(weight);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static V without_last(V step) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(step), _mm512_set1_epi32(0xffff)));
  }
};
