// Codes, integers and floats of 16 features at a time, for linear_int.inc: NEON, four registers each. Bytes are
// multiplied by dot products of bytes without a sign and such with one (i8mm), else by dot products of bytes with a
// sign (dotprod), else by products of these, added in pairs: what the compiler's flags allow.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

struct V {
  float32x4_t at[4];
};
struct Raw {  // 64 codes
  uint8x16_t at[4];
};

template <class T, class Part>
inline T four(Part part) {
  return {{part(0), part(1), part(2), part(3)}};
}

inline V all(float32x4_t v) { return {{v, v, v, v}}; }
inline V zero() { return all(vdupq_n_f32(0)); }
inline V load(const float* p) {
  return four<V>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, V v) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v.at[i]);
}
inline V broadcast(const char* p) { return all(vld1q_dup_f32(reinterpret_cast<const float*>(p))); }
inline V mul(V a, V b) {
  return four<V>([&](int i) { return vmulq_f32(a.at[i], b.at[i]); });
}
inline V fma(V a, V b, V c) {
  return four<V>([&](int i) { return vfmaq_f32(c.at[i], a.at[i], b.at[i]); });
}
inline V fnma(V a, V b, V c) {
  return four<V>([&](int i) { return vfmsq_f32(c.at[i], a.at[i], b.at[i]); });
}
inline V load_half(const uint8_t* p) {
  return four<V>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
}
inline V unsigned_of(uint8x16_t bytes) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
}
inline V load_unsigned(const uint8_t* p) { return unsigned_of(vld1q_u8(p)); }
inline V load_low(const uint8_t* p) { return unsigned_of(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
inline V load_high(const uint8_t* p) { return unsigned_of(vshrq_n_u8(vld1q_u8(p), 4)); }
// 2^(byte - 128): the smallest two are no normal floats.
inline V load_exponents(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  const uint32x4_t wide[4] = {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)),
                              vmovl_high_u16(high)};
  return four<V>([&](int i) {
    const int32x4_t e = vreinterpretq_s32_u32(wide[i]), one = vdupq_n_s32(1);
    const int32x4_t small = vshlq_s32(vdupq_n_s32(0x00200000), vminq_s32(e, one));
    return vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32(vsubq_s32(e, one), 23), small));
  });
}
inline V load_signed(const uint8_t* p) {
  const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}

inline Raw load_raw(const uint8_t* p) {
  return four<Raw>([&](int i) { return vld1q_u8(p + 16 * i); });
}
inline void store_raw(uint8_t* p, Raw v) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, v.at[i]);
}
inline Raw low_halves(Raw v) {
  return four<Raw>([&](int i) { return vandq_u8(v.at[i], vdupq_n_u8(15)); });
}
inline Raw high_halves(Raw v) {
  return four<Raw>([&](int i) { return vshrq_n_u8(v.at[i], 4); });
}
// Codes, and `Value` more where a bit of the 64 at p is 1.
template <int Value>
inline Raw add_bits(Raw low, const uint8_t* p) {
  const uint8x16_t bits = vreinterpretq_u8_u64(vld1q_dup_u64(reinterpret_cast<const uint64_t*>(p)));
  const uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  return four<Raw>([&](int i) {
    const uint8x16_t bytes =
        vcombine_u8(vdup_n_u8(static_cast<uint8_t>(2 * i)), vdup_n_u8(static_cast<uint8_t>(2 * i + 1)));
    return vorrq_u8(low.at[i], vandq_u8(vtstq_u8(vqtbl1q_u8(bits, bytes), own), vdupq_n_u8(Value)));
  });
}
// Bits 2·at and 2·at + 1 of each byte.
inline Raw two_bits(Raw v, int at) {
  const int8x16_t left = vdupq_n_s8(static_cast<int8_t>(-2 * at));
  return four<Raw>([&](int i) { return vandq_u8(vshlq_u8(v.at[i], left), vdupq_n_u8(3)); });
}
inline Raw look_up(Raw codes, const uint8_t* values) {
  const uint8x16_t table = vld1q_u8(values);
  return four<Raw>([&](int i) { return vqtbl1q_u8(table, codes.at[i]); });
}
// Codes of 4 bits in either half of `pairs`, and two more bits of each in bits 2·(quad % 4) of `high`.
inline Raw join6(Raw pairs, Raw high, int quad) {
  const Raw low = quad < 4 ? low_halves(pairs) : high_halves(pairs);
  const int8x16_t left = vdupq_n_s8(static_cast<int8_t>(4 - quad % 4 * 2));
  return four<Raw>([&](int i) { return vorrq_u8(low.at[i], vandq_u8(vshlq_u8(high.at[i], left), vdupq_n_u8(48))); });
}

constexpr bool kByteDot = true;
constexpr int kTilePanelsAtOnce = 1, kProductRows = 24;

typedef int8x16_t X;
inline X load_x(const char* numbers, int quad) {
  return vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(numbers) + quad));
}

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int kCodeBias = 0;
typedef Raw W;
template <int Bits>
inline W widen(Raw v) {
  return v;
}
#else
constexpr int kCodeBias = 128;
struct W {
  int8x16_t at[4];
};
template <int Bits>
inline W widen(Raw v) {
  const uint8x16_t top = vdupq_n_u8(Bits == 8 ? 128 : 0);
  return four<W>([&](int i) { return vreinterpretq_s8_u8(Bits == 8 ? veorq_u8(v.at[i], top) : v.at[i]); });
}
#endif

#ifdef __ARM_FEATURE_DOTPROD
// Sums, dots and codes of three rows, and one broadcast, are 29 of 32 registers.
constexpr int kTileRows = 3, kAlonePanels = 2, kPassesTogether = 2;

struct I {
  int32x4_t at[4];
};
template <class Part>
inline I ints(Part part) {
  return four<I>(part);
}
inline I load_int(const void* p) {
  return ints([&](int i) { return vld1q_s32(static_cast<const int32_t*>(p) + 4 * i); });
}
inline I broadcast_int(const char* p) {
  const int32x4_t v = vld1q_dup_s32(reinterpret_cast<const int32_t*>(p));
  return {{v, v, v, v}};
}
inline int32x4_t folded(I v, int i) { return v.at[i]; }
inline I dot(I sum, W w, X x) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  return ints([&](int i) { return vusdotq_s32(sum.at[i], w.at[i], x); });
#else
  return ints([&](int i) { return vdotq_s32(sum.at[i], w.at[i], x); });
#endif
}
#else
constexpr int kTileRows = 2, kAlonePanels = 1, kPassesTogether = 1;

// Of each feature two sums, side by side, which are added when they are needed.
struct I {
  int32x4_t at[8];
};
template <class Part>
inline I ints(Part part) {
  return {{part(0), part(1), part(2), part(3), part(4), part(5), part(6), part(7)}};
}
inline I load_int(const void* p) {
  return ints([&](int i) {
    const int32x4_t whole = vld1q_s32(static_cast<const int32_t*>(p) + i / 2 * 4), none = vdupq_n_s32(0);
    return i % 2 ? vzip2q_s32(whole, none) : vzip1q_s32(whole, none);
  });
}
inline I broadcast_int(const char* p) {
  const int32x4_t v = vzip1q_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(p)), vdupq_n_s32(0));
  return {{v, v, v, v, v, v, v, v}};
}
inline int32x4_t folded(I v, int i) { return vpaddq_s32(v.at[2 * i], v.at[2 * i + 1]); }
inline I dot(I sum, W w, X x) {
  return ints([&](int i) {
    const int8x16_t codes = w.at[i / 2];
    return vpadalq_s16(sum.at[i], i % 2 ? vmull_high_s8(codes, x) : vmull_s8(vget_low_s8(codes), vget_low_s8(x)));
  });
}
#endif

inline I zero_int() {
  return ints([](int) { return vdupq_n_s32(0); });
}
inline void store_int(void* p, I v) {
  for (int i = 0; i < 4; ++i) vst1q_s32(static_cast<int32_t*>(p) + 4 * i, folded(v, i));
}
inline I add(I a, I b) {
  return ints([&](int i) { return vaddq_s32(a.at[i], b.at[i]); });
}
inline I shift8(I v) {
  return ints([&](int i) { return vshlq_n_s32(v.at[i], 8); });
}
inline V to_float(I v) {
  return four<V>([&](int i) { return vcvtq_f32_s32(folded(v, i)); });
}

}  // namespace
