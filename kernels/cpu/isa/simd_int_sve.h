// Codes, integers and floats of 16 features at a time, for linear_int.inc: SVE, one or two registers each, of the
// length that -msve-vector-bits fixes.
#pragma once

#include <arm_sve.h>

#include <cstdint>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int kRegisterBits = __ARM_FEATURE_SVE_BITS, kParts = 512 / kRegisterBits, kRegisterWords = kRegisterBits / 32,
              kRegisterBytes = kRegisterBits / 8;
static_assert(kParts == 1 || kParts == 2, "a register is half a row of codes, or a whole one");

typedef svfloat32_t Floats __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
typedef svint32_t Ints __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
typedef svuint8_t Bytes __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
typedef svint8_t SignedBytes __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));

struct V {
  Floats at[kParts];
};
struct I {
  Ints at[kParts];
};
struct Raw {  // 64 codes
  Bytes at[kParts];
};
struct W {
  SignedBytes at[kParts];
};
typedef SignedBytes X;

template <class T, class Part>
inline T parts(Part part) {
  if constexpr (kParts == 1) {
    return {{part(0)}};
  } else {
    return {{part(0), part(1)}};
  }
}
inline svbool_t words() { return svptrue_b32(); }
inline svbool_t bytes() { return svptrue_b8(); }

inline V zero() {
  return parts<V>([](int) -> Floats { return svdup_f32(0); });
}
inline V load(const float* p) {
  return parts<V>([&](int i) -> Floats { return svld1_f32(words(), p + i * kRegisterWords); });
}
inline void store(float* p, V v) {
  for (int i = 0; i < kParts; ++i) svst1_f32(words(), p + i * kRegisterWords, v.at[i]);
}
inline V broadcast(const char* p) {
  const Floats v = svdup_f32(*reinterpret_cast<const float*>(p));
  return parts<V>([&](int) -> Floats { return v; });
}
inline V mul(V a, V b) {
  return parts<V>([&](int i) -> Floats { return svmul_f32_x(words(), a.at[i], b.at[i]); });
}
inline V fma(V a, V b, V c) {
  return parts<V>([&](int i) -> Floats { return svmla_f32_x(words(), c.at[i], a.at[i], b.at[i]); });
}
inline V fnma(V a, V b, V c) {
  return parts<V>([&](int i) -> Floats { return svmls_f32_x(words(), c.at[i], a.at[i], b.at[i]); });
}
inline V load_half(const uint8_t* p) {
  return parts<V>([&](int i) -> Floats {
    const svuint32_t halves = svld1uh_u32(words(), reinterpret_cast<const uint16_t*>(p) + i * kRegisterWords);
    return svcvt_f32_f16_x(words(), svreinterpret_f16_u32(halves));
  });
}
inline V load_unsigned(const uint8_t* p) {
  return parts<V>(
      [&](int i) -> Floats { return svcvt_f32_u32_x(words(), svld1ub_u32(words(), p + i * kRegisterWords)); });
}
inline V load_low(const uint8_t* p) {
  return parts<V>([&](int i) -> Floats {
    const svuint32_t whole = svld1ub_u32(words(), p + i * kRegisterWords);
    return svcvt_f32_u32_x(words(), svand_n_u32_x(words(), whole, 15));
  });
}
inline V load_high(const uint8_t* p) {
  return parts<V>([&](int i) -> Floats {
    const svuint32_t whole = svld1ub_u32(words(), p + i * kRegisterWords);
    return svcvt_f32_u32_x(words(), svlsr_n_u32_x(words(), whole, 4));
  });
}
// 2^(byte - 128): the smallest two are no normal floats.
inline V load_exponents(const uint8_t* p) {
  return parts<V>([&](int i) -> Floats {
    const svint32_t e = svreinterpret_s32_u32(svld1ub_u32(words(), p + i * kRegisterWords));
    const svuint32_t least = svreinterpret_u32_s32(svmin_n_s32_x(words(), e, 1));
    const svint32_t small = svlsl_s32_x(words(), svdup_s32(0x00200000), least);
    const svint32_t normal = svlsl_n_s32_x(words(), svsub_n_s32_x(words(), e, 1), 23);
    return svreinterpret_f32_s32(svmax_s32_x(words(), normal, small));
  });
}
inline V load_signed(const uint8_t* p) {
  return parts<V>([&](int i) -> Floats {
    return svcvt_f32_s32_x(words(), svld1sb_s32(words(), reinterpret_cast<const int8_t*>(p) + i * kRegisterWords));
  });
}

inline I zero_int() {
  return parts<I>([](int) -> Ints { return svdup_s32(0); });
}
inline I load_int(const void* p) {
  return parts<I>(
      [&](int i) -> Ints { return svld1_s32(words(), static_cast<const int32_t*>(p) + i * kRegisterWords); });
}
inline void store_int(void* p, I v) {
  for (int i = 0; i < kParts; ++i) svst1_s32(words(), static_cast<int32_t*>(p) + i * kRegisterWords, v.at[i]);
}
inline I broadcast_int(const char* p) {
  const Ints v = svdup_s32(*reinterpret_cast<const int32_t*>(p));
  return parts<I>([&](int) -> Ints { return v; });
}
inline I add(I a, I b) {
  return parts<I>([&](int i) -> Ints { return svadd_s32_x(words(), a.at[i], b.at[i]); });
}
inline I shift8(I v) {
  return parts<I>([&](int i) -> Ints { return svlsl_n_s32_x(words(), v.at[i], 8); });
}
inline V to_float(I v) {
  return parts<V>([&](int i) -> Floats { return svcvt_f32_s32_x(words(), v.at[i]); });
}

inline Raw load_raw(const uint8_t* p) {
  return parts<Raw>([&](int i) -> Bytes { return svld1_u8(bytes(), p + i * kRegisterBytes); });
}
inline void store_raw(uint8_t* p, Raw v) {
  for (int i = 0; i < kParts; ++i) svst1_u8(bytes(), p + i * kRegisterBytes, v.at[i]);
}
inline Raw low_halves(Raw v) {
  return parts<Raw>([&](int i) -> Bytes { return svand_n_u8_x(bytes(), v.at[i], 15); });
}
inline Raw high_halves(Raw v) {
  return parts<Raw>([&](int i) -> Bytes { return svlsr_n_u8_x(bytes(), v.at[i], 4); });
}
// Codes, and `Value` more where a bit of the 64 at p is 1.
template <int Value>
inline Raw add_bits(Raw low, const uint8_t* p) {
  const svuint8_t place = svindex_u8(0, 1), bits = svld1_u8(svwhilelt_b8(0, 8), p);
  const svuint8_t own = svlsl_u8_x(bytes(), svdup_u8(1), svand_n_u8_x(bytes(), place, 7));
  const svuint8_t byte = svlsr_n_u8_x(bytes(), place, 3);
  return parts<Raw>([&](int i) -> Bytes {
    const svuint8_t mine = svtbl_u8(bits, svadd_n_u8_x(bytes(), byte, static_cast<uint8_t>(i * kRegisterBytes / 8)));
    const svbool_t set = svcmpne_n_u8(bytes(), svand_u8_x(bytes(), mine, own), 0);
    return svorr_n_u8_m(set, low.at[i], Value);
  });
}
// Bits 2·at and 2·at + 1 of each byte.
inline Raw two_bits(Raw v, int at) {
  const uint8_t right = static_cast<uint8_t>(2 * at);
  return parts<Raw>(
      [&](int i) -> Bytes { return svand_n_u8_x(bytes(), svlsr_u8_x(bytes(), v.at[i], svdup_u8(right)), 3); });
}
inline Raw look_up(Raw codes, const uint8_t* values) {
  const svuint8_t table = svld1_u8(svwhilelt_b8(0, 16), values);
  return parts<Raw>([&](int i) -> Bytes { return svtbl_u8(table, codes.at[i]); });
}
// Codes of 4 bits in either half of `pairs`, and two more bits of each in bits 2·(quad % 4) of `high`.
inline Raw join6(Raw pairs, Raw high, int quad) {
  const Raw low = quad < 4 ? low_halves(pairs) : high_halves(pairs);
  const uint8_t right = static_cast<uint8_t>(quad % 4 * 2);
  return parts<Raw>([&](int i) -> Bytes {
    const svuint8_t two = svand_n_u8_x(bytes(), svlsr_u8_x(bytes(), high.at[i], svdup_u8(right)), 3);
    return svorr_u8_x(bytes(), low.at[i], svlsl_n_u8_x(bytes(), two, 4));
  });
}

constexpr bool kByteDot = true;
constexpr int kCodeBias = 128;  // dot products are of bytes with a sign
constexpr int kTileRows = 6, kTilePanelsAtOnce = kParts == 1 ? 2 : 1, kAlonePanels = 2, kProductRows = 24;
constexpr int kPassesTogether = kParts == 1 ? 4 : 3;

template <int Bits>
inline W widen(Raw v) {
  return parts<W>([&](int i) -> SignedBytes {
    if constexpr (Bits == 8) return svreinterpret_s8_u8(sveor_n_u8_x(bytes(), v.at[i], 128));
    return svreinterpret_s8_u8(v.at[i]);
  });
}
inline X load_x(const char* numbers, int quad) {
  return svreinterpret_s8_s32(svdup_s32(reinterpret_cast<const int32_t*>(numbers)[quad]));
}
inline I dot(I sum, W w, X x) {
  return parts<I>([&](int i) -> Ints { return svdot_s32(sum.at[i], w.at[i], x); });
}

}  // namespace
