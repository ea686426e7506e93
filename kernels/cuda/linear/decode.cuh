// What rows of packed weights hold (kernels/row_layout.py), as pairs of 16-bit elements (ptx.cuh). Compiled with BITS
// (16: such elements themselves, 8 or 4) and FLOATS (e4m3, of 4 bits e2m1) or not.
#pragma once
#include "ptx/ptx.cuh"

#ifndef BITS
#define BITS 16
#endif
#ifndef FLOATS
#define FLOATS 0
#endif
constexpr int kSets = 16 / BITS;  // of 32 inputs, in a k tile
// What a decoded code is more than the code: small integers are cheapest in bfloat16 as 128 + code, and bytes lie
// less 128. In half precision they are subnormal numbers as they are, and e4m3 numbers 2^8 times smaller: what is
// decoded times kUnit is the code.
constexpr float kBase = FP16 || FLOATS ? 0.0f : BITS == 4 ? 128.0f : BITS == 8 ? -128.0f : 0.0f;
constexpr float kUnit = !FP16 || BITS == 16 ? 1.0f : !FLOATS ? 16777216.0f : BITS == 4 ? 32768.0f : 256.0f;

constexpr uint32_t kOnes = FP16 ? 0x3c003c00 : 0x3f803f80;

__device__ __forceinline__ uint32_t word(const uint4& chunk, int i) {
  return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

// Bytes `low` and `high` of four, signed integers: what their lower 7 bits are more than 0 as 128 + bits, less 4
// times 32, or 64 where the sign bit, which is the last of the exponent there, is set. All exact.
__device__ __forceinline__ uint32_t pair_of_bytes(uint32_t bytes, int low, int high) {
  if (FP16) return __byte_perm(bytes ^ 0x80808080, 0, 0x4040 | low | high << 8);
  const uint32_t pair = __byte_perm(bytes, 0, 0x4040 | low | high << 8);
  return multiply_add(and_or(pair, 0x00800080, 0x42004200), 0xc080c080, and_or(pair, 0x007f007f, 0x43004300));
}

// Two e4m3 numbers in the upper bytes of halves: their bits are those of a bfloat16 2^120 times smaller.
__device__ __forceinline__ uint32_t pair_of_floats(uint32_t halves) {
  if (FP16) return (halves >> 1 & 0x3f803f80) | (halves & 0x80008000);
  return multiply_pairs((halves >> 4 & 0x07f007f0) | (halves & 0x80008000), 0x7b807b80);
}

// Twice two e2m1 numbers, in the lowest bits of halves: their bits are those of a bfloat16 2^126 times smaller, or of a
// half-precision number 2^14 times smaller.
__device__ __forceinline__ uint32_t pair_of_small_floats(uint32_t halves) {
  const uint32_t signs = halves << 12 & 0x80008000;
  if (FP16) return (halves << 9 & 0x0e000e00) | signs;
  return multiply_pairs((halves << 6 & 0x01c001c0) | signs, 0x7f007f00);
}

// What a group's 32 bits are: two halves; of e4m3 codes a float32 scale, which has no offset beside it; of e2m1 codes
// four groups' exponents, of which set % 4 says one: 2^(e - 128), the first two of which are subnormal numbers.
constexpr bool kHasBytes = FLOATS && BITS == 4;
__device__ __forceinline__ float scale_of(uint32_t qparams, int set) {
  if (!kHasBytes) return FLOATS ? __uint_as_float(qparams) : half_wide(qparams & 0xffff);
  const uint32_t e = qparams >> set % 4 * 8 & 0xff;
  return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}
__device__ __forceinline__ float offset_of(uint32_t qparams) { return FLOATS ? 0.0f : half_wide(qparams >> 16); }

// What becomes of a product: it is stored, or added to what is there, or, from kGatedSilu on, activation(first half) ·
// second half is stored.
constexpr int kAdd = 1, kGatedSilu = 2, kGatedGelu = 3, kGatedClamped = 4;

// gelu by tanh is x · logistic(2 · what tanh is of).
__device__ __forceinline__ float logit_of(float gate, int epilogue) {
  if (epilogue == kGatedClamped) return gate * 1.702f;
  return epilogue == kGatedGelu ? gate * fmaf(gate * gate, 0.0713548163f, 1.59576912f) : gate;
}
// What gate and up are before they meet: clamped_swiglu of kernels/ops.py limits both, and leaves a NaN one.
__device__ __forceinline__ void limit(float& gate, float& up, int epilogue) {
  if (epilogue != kGatedClamped) return;
  gate = gate > 7.0f ? 7.0f : gate;
  up = (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up) + 1.0f;
}
__device__ __forceinline__ float gated(float gate, float up, int epilogue) {
  limit(gate, up, epilogue);
  return __fdividef(gate, 1.0f + __expf(-logit_of(gate, epilogue))) * up;
}

// The chunk's 8 inputs of a set: four pairs.
__device__ __forceinline__ void decode(const uint4& chunk, int set, uint32_t* pairs) {
  if (BITS == 16) {
    pairs[0] = chunk.x, pairs[1] = chunk.y, pairs[2] = chunk.z, pairs[3] = chunk.w;
  } else if (BITS == 4) {
    const uint32_t codes = word(chunk, set);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      pairs[j] = FLOATS ? pair_of_small_floats(codes >> 4 * j)
                 : FP16 ? codes >> 4 * j & 0x000f000f
                        : and_or(codes >> 4 * j, 0x000f000f, 0x43004300);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t bytes = word(chunk, set * 2 + half);
      if (FLOATS) {
        pairs[half * 2] = pair_of_floats(__byte_perm(bytes, 0, 0x1404));
        pairs[half * 2 + 1] = pair_of_floats(__byte_perm(bytes, 0, 0x3424));
      } else {
        pairs[half * 2] = pair_of_bytes(bytes, 0, 1);
        pairs[half * 2 + 1] = pair_of_bytes(bytes, 2, 3);
      }
    }
  }
}

// Words of codes of two features, 8 apart, as m16n8k32 has them.
__device__ __forceinline__ void decode_whole(const uint4& first, const uint4& second, int set, uint32_t* a) {
  if (BITS == 4) {
    const uint32_t x = word(first, set), y = word(second, set);
    a[0] = x & 0x0f0f0f0f, a[1] = y & 0x0f0f0f0f, a[2] = x >> 4 & 0x0f0f0f0f, a[3] = y >> 4 & 0x0f0f0f0f;
  } else {
    a[0] = word(first, set * 2), a[1] = word(second, set * 2);
    a[2] = word(first, set * 2 + 1), a[3] = word(second, set * 2 + 1);
  }
}
