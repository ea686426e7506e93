// Rows of x as integers of 16 bits, which meet quantised integers on integer tensor cores: see skinny.cu.
#pragma once
#include "linear/gemm/skinny_shape.cuh"

// 8 inputs of x as integers, `by` times which they are, of 16 bits: 256 · high + low. Bytes are in the order in
// which masks find codes. A k tile has a scale, and `sum` is of a group. All lanes of a warp come here, neighbours with
// neighbouring inputs.
struct Whole {
  uint2 high, low;
  float by, sum;

  __device__ __forceinline__ explicit Whole(const uint4& chunk) {
    float x[8];
    unsigned top = 0;  // of what is not a number, larger than of infinity
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i * 2] = wide_low(word(chunk, i)), x[i * 2 + 1] = wide_high(word(chunk, i));
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max(top, __float_as_uint(x[i]) & 0x7fffffff);
#pragma unroll
    for (int o = kSets * 2; o; o >>= 1) top = max(top, __shfl_xor_sync(~0u, top, o));
    const float most = __uint_as_float(top), times = most > 1e-30f && most < kInf ? 32512.0f / most : 0;
    int all = 0, halves[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int whole = __float2int_rn(x[i] * times);
      all += whole;
      halves[0][i] = (whole + 128) >> 8, halves[1][i] = whole & 255;
    }
#pragma unroll
    for (int o = kGroupSets * 2; o; o >>= 1) all += __shfl_xor_sync(~0u, all, o);
    by = most * (1 / 32512.0f), sum = by * 0 + static_cast<float>(all);  // neither a number, if by is not
    constexpr int kOrder[2][4] = {{0, BITS == 4 ? 4 : 1, BITS == 4 ? 1 : 2, BITS == 4 ? 5 : 3},
                                  {BITS == 4 ? 2 : 4, BITS == 4 ? 6 : 5, BITS == 4 ? 3 : 6, 7}};
    uint32_t words[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        words[half][w] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[half][w] |= (halves[half][kOrder[w][i]] & 255) << 8 * i;
      }
    high = make_uint2(words[0][0], words[0][1]), low = make_uint2(words[1][0], words[1][1]);
  }
};
