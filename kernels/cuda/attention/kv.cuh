// Keys and values as pages hold them, and what they look like in shared memory.
// Compiled with HEAD_DIM, a multiple of 16 up to 256, FORMAT, and SCALED, 1 where pages hold a zero and a scale for
// each token and head.
#ifndef ALLSPAN_KV
#define ALLSPAN_KV
#include "ptx/ptx.cuh"

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
// … of the row `rows` further on, a multiple of a power of two that the row's number is less than.
template <int kPitch>
__device__ __forceinline__ uint32_t rows_on(uint32_t at, int rows) {
  constexpr int kMask = kPitch >= 128 ? 7 : kPitch / 16 - 1, kShift = kPitch >= 128 ? 0 : kPitch == 64 ? 1 : 2;
  return (at ^ ((rows >> kShift & kMask) << 4)) + rows * kPitch;
}
#endif
