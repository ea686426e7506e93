// Keys and values as pages hold them, and what they look like in shared memory.
// Compiled with HEAD_DIM, a multiple of 16 up to 256, FORMAT, and SCALED, 1 where pages hold a zero and a scale for
// each token and head. Codes reach the tensor cores as bfloat16 (or, with FP16, half precision), which holds all of
// them exactly.
#ifndef ALLSPAN_KV
#define ALLSPAN_KV
#include "ptx.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef FORMAT
#define FORMAT 0
#endif
#ifndef SCALED
#define SCALED (FORMAT == 1 || FORMAT == 2)
#endif
constexpr int kBf16 = 0, kInt8 = 1, kUint4 = 2, kE4m3 = 3;
constexpr int D = HEAD_DIM, kFormat = FORMAT;
constexpr bool kIsCodes = kFormat != kBf16, kScaled = SCALED;
constexpr int kBits = kFormat == kBf16 ? 16 : kFormat == kUint4 ? 4 : 8;
constexpr int kRow = D * kBits / 8;  // bytes of a token's row
constexpr int kChunks = kRow / 16;
constexpr int kSteps = D / 16, kOut = D / 8;
static_assert(D % (kBits == 16 ? 16 : kBits == 8 ? 32 : 64) == 0 && D <= 256, "head size");

// Bytes from row to row, so that chunks can be swizzled within what lies side by side in the banks.
__device__ constexpr int pitch(int row) { return row <= 32 ? 32 : row <= 64 ? 64 : (row + 127) / 128 * 128; }

// 16-byte chunk `c` of row `r`: 8 rows of one chunk, or 2 rows of all, lie in different banks.
template <int kPitch>
__device__ __forceinline__ int chunk(int r, int c) {
  constexpr int kMask = kPitch >= 128 ? 7 : kPitch / 16 - 1, kShift = kPitch >= 128 ? 0 : kPitch == 64 ? 1 : 2;
  return r * kPitch + ((c ^ (r >> kShift & kMask)) << 4);
}

// N words of a row in shared memory, from byte `at` on, a multiple of N * 4.
template <int kPitch, int N>
__device__ __forceinline__ void load_words(uint32_t* w, const char* tile, int row, int at) {
#pragma unroll
  for (int i = 0; i < N; i += N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1) {
    const int byte = at + i * 4;
    const char* from = tile + chunk<kPitch>(row, byte >> 4) + (byte & 15);
    if (N % 4 == 0) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    } else if (N % 2 == 0) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      w[i] = x.x, w[i + 1] = x.y;
    } else {
      w[i] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
}

// Of a soft cap. Differences from 1 are what it costs near 0: 1e-7.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + power(x * 2.885390081777927f));
}

// A word's codes as pairs of 16-bit elements, code i of the low 16 bits beside code i of the high ones. uint4's come
// out larger by kBias, the number of kUnitPair, whose last bits count ones.
constexpr int kPairs = kBits == 4 ? 4 : 2;
constexpr float kBias = kFormat == kUint4 ? (FP16 ? 1024.0f : 128.0f) : 0.0f;
constexpr uint32_t kUnitPair = FP16 ? 0x64006400u : 0x43004300u, kSigns = 0x80008000u;
__device__ __forceinline__ void spread(uint32_t* pairs, uint32_t word) {
  if (kFormat == kUint4) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = (word >> 4 * i & 0x000f000fu) | kUnitPair;
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t bytes = word >> 8 * i;
      if (kFormat == kInt8)  // the unit and the low seven bits, less the unit and, of a negative number, 128
        pairs[i] = add_pairs((bytes & 0x007f007fu) | kUnitPair, (bytes & 0x00800080u) | kUnitPair | kSigns);
      else if (FP16)  // the exponent's bias is less by 8
        pairs[i] = multiply_pairs((bytes << 8 & kSigns) | (bytes << 7 & 0x3f803f80u), 0x5c005c00u);
      else  // … by 120
        pairs[i] = multiply_pairs((bytes << 8 & 0x80008000u) | (bytes << 4 & 0x07f007f0u), 0x7b807b80u);
    }
  }
}
#endif
