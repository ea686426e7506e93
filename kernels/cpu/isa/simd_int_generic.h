// Codes, integers and floats of 16 features at a time, for linear_int.inc, in plain C++.
#pragma once

#include <cstdint>
#include <cstring>

#define UNROLL

namespace {

struct V {
  float at[16];
};
struct I {
  int32_t at[16];
};
struct Raw {  // 64 codes
  uint8_t at[64];
};

template <class T, class Element>
inline T each(Element element) {
  T result;
  for (int i = 0; i < static_cast<int>(sizeof result.at / sizeof result.at[0]); ++i) result.at[i] = element(i);
  return result;
}
template <class T>
inline T take(const void* p) {
  T result;
  std::memcpy(&result, p, sizeof result);
  return result;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
  // As a float of the same bits, 2^112 times too small; all of float16's numbers are normal ones then.
  uint32_t bits = magnitude << 13;
  if (magnitude >= 0x7c00) {
    bits = 0x7f800000 | magnitude << 13;
  } else if (magnitude < 0x0400) {
    const float small = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &small, 4);
  } else {
    bits += 112u << 23;
  }
  bits |= sign;
  return take<float>(&bits);
}

inline V zero() { return V{}; }
inline V load(const float* p) { return take<V>(p); }
inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
inline V broadcast(const char* p) {
  const float x = take<float>(p);
  return each<V>([&](int) { return x; });
}
inline V mul(V a, V b) {
  return each<V>([&](int i) { return a.at[i] * b.at[i]; });
}
inline V fma(V a, V b, V c) {
  return each<V>([&](int i) { return __builtin_fmaf(a.at[i], b.at[i], c.at[i]); });
}
inline V fnma(V a, V b, V c) {
  return each<V>([&](int i) { return __builtin_fmaf(-a.at[i], b.at[i], c.at[i]); });
}
inline V load_half(const uint8_t* p) {
  return each<V>([&](int i) { return half_to_float(take<uint16_t>(p + 2 * i)); });
}
inline V load_unsigned(const uint8_t* p) {
  return each<V>([&](int i) { return static_cast<float>(p[i]); });
}
inline V load_low(const uint8_t* p) {
  return each<V>([&](int i) { return static_cast<float>(p[i] & 15); });
}
inline V load_high(const uint8_t* p) {
  return each<V>([&](int i) { return static_cast<float>(p[i] >> 4); });
}
// 2^(byte - 128): the smallest two are no normal floats.
inline V load_exponents(const uint8_t* p) {
  return each<V>([&](int i) {
    const uint32_t bits = p[i] < 2 ? 0x00200000u << p[i] : (p[i] - 1u) << 23;
    return take<float>(&bits);
  });
}
inline V load_signed(const uint8_t* p) {
  return each<V>([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}

inline I zero_int() { return I{}; }
inline I load_int(const void* p) { return take<I>(p); }
inline void store_int(void* p, I v) { std::memcpy(p, &v, sizeof v); }
inline I broadcast_int(const char* p) {
  const int32_t x = take<int32_t>(p);
  return each<I>([&](int) { return x; });
}
inline I add(I a, I b) {
  return each<I>([&](int i) { return a.at[i] + b.at[i]; });
}
inline I shift8(I v) {
  return each<I>([&](int i) { return v.at[i] * 256; });
}
inline V to_float(I v) {
  return each<V>([&](int i) { return static_cast<float>(v.at[i]); });
}

inline Raw load_raw(const uint8_t* p) { return take<Raw>(p); }
inline void store_raw(uint8_t* p, Raw v) { std::memcpy(p, &v, sizeof v); }
inline Raw low_halves(Raw v) {
  return each<Raw>([&](int i) { return static_cast<uint8_t>(v.at[i] & 15); });
}
inline Raw high_halves(Raw v) {
  return each<Raw>([&](int i) { return static_cast<uint8_t>(v.at[i] >> 4); });
}
template <int Value>
inline Raw add_bits(Raw low, const uint8_t* p) {
  return each<Raw>([&](int i) { return static_cast<uint8_t>(low.at[i] + (p[i / 8] >> i % 8 & 1) * Value); });
}
inline Raw two_bits(Raw v, int at) {
  return each<Raw>([&](int i) { return static_cast<uint8_t>(v.at[i] >> 2 * at & 3); });
}
inline Raw look_up(Raw codes, const uint8_t* values) {
  return each<Raw>([&](int i) { return values[codes.at[i]]; });
}
inline Raw join6(Raw pairs, Raw high, int quad) {
  const Raw low = quad < 4 ? low_halves(pairs) : high_halves(pairs);
  return each<Raw>([&](int i) { return static_cast<uint8_t>(low.at[i] | (high.at[i] >> quad % 4 * 2 & 3) << 4); });
}

constexpr bool kByteDot = false;
constexpr int kCodeBias = 0, kPassesTogether = 0;
constexpr int kTileRows = 1, kTilePanelsAtOnce = 1, kAlonePanels = 1, kProductRows = 24;

typedef Raw W;
struct X {
  int16_t at[4];  // even, then odd places of a quad
};
template <int Bits>
inline W widen(Raw v) {
  return v;
}
inline X load_x(const char* numbers, int quad) { return take<X>(numbers + quad * 8); }
inline I dot(I sum, W w, X x) {
  for (int i = 0; i < 16; ++i) {
    const uint8_t* code = w.at + 4 * i;
    sum.at[i] += code[0] * x.at[0] + code[2] * x.at[1] + code[1] * x.at[2] + code[3] * x.at[3];
  }
  return sum;
}

}  // namespace
