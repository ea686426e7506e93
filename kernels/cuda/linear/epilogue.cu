// The pass behind products of many rows, which cuBLAS multiplies: scales, bias, SwiGLU or GeGLU, or the sum with what
// is there. Bound by memory: 16 bytes a thread, one pass.
//
// Compiled with BITS and FLOATS (decode.cuh); FROM_CODES (sums of codes in int32, else 16-bit elements, or, with
// FROM_BF16, bfloat16 whatever these are), SCALED (sums of e4m3 codes, which take the scales of their row and feature
// here: cuBLAS is faster without, and they are bfloat16, as half precision ends too early) and WIDTH, features of a
// thread (8, or 1 where rows are not aligned).
#include "linear/dequantise.cuh"

#ifndef FROM_CODES
#define FROM_CODES 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#ifndef FROM_BF16
#define FROM_BF16 !FP16
#endif
#ifndef WIDTH
#define WIDTH 8
#endif

constexpr bool kHasFactors = FROM_CODES || SCALED;
constexpr float kProductBase = FROM_CODES ? -128.0f : 0.0f;  // of codes as cuBLAS had them
constexpr int kPieces = FROM_CODES ? 2 : 1;                  // of 16 bytes, that eight features of a product have
constexpr int kRows = FROM_CODES ? 2 : 4;  // whose products a thread asks for before it looks at the first

// What WIDTH features take, whatever the row.
struct Features {
  float scale[WIDTH], offset[WIDTH], bias[WIDTH];

  __device__ __forceinline__ Features(const void* qparams, const float* all, int feature) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
      if (kHasFactors) qparams_of(qparams, feature + e, 0, kProductBase, scale[e], offset[e]);
      bias[e] = all ? all[feature + e] : 0;
    }
  }
};

__device__ __forceinline__ void ask(const void* products, long long at, uint4* pieces) {
  if (WIDTH == 8) {
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const char*>(products) + at * kPieces * 2);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = stream16(from + i);
  } else {
    pieces[0].x = FROM_CODES ? static_cast<const uint32_t*>(products)[at] : static_cast<const bf16*>(products)[at];
  }
}

__device__ __forceinline__ void values_of(const uint4* pieces, const Features& of, float scale, float sum,
                                          float* values) {
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    if (FROM_CODES) {
      const float product = static_cast<float>(static_cast<int>(word(pieces[e / 4], e % 4)));
      values[e] = scale * (of.scale[e] * product - of.offset[e] * sum);
    } else {
      const uint32_t bits = word(pieces[0], e / 2) >> e % 2 * 16 & 0xffff;
      values[e] = FROM_BF16 ? __uint_as_float(bits << 16) : wide(bits);
      if (SCALED) values[e] *= scale * of.scale[e];
    }
    values[e] += of.bias[e];
  }
}

// WIDTH features of a row: 32 or 16 bytes of out, or a single one.
__device__ __forceinline__ void put(float* values, void* out, long long to, bool adds, int out_floats) {
  if (out_floats) {
    float* const into = static_cast<float*>(out) + to;
    if (WIDTH == 8 && reinterpret_cast<size_t>(into) % 16 == 0) {
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        float4* const four = reinterpret_cast<float4*>(into + e);
        float4 sum = adds ? *four : make_float4(0, 0, 0, 0);
        sum.x += values[e], sum.y += values[e + 1], sum.z += values[e + 2], sum.w += values[e + 3];
        *four = sum;
      }
    } else {
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) into[e] = adds ? into[e] + values[e] : values[e];
    }
  } else if (WIDTH == 8) {
    *reinterpret_cast<uint4*>(static_cast<bf16*>(out) + to) = packed(values);
  } else {
    static_cast<bf16*>(out)[to] = narrow(values[0]);
  }
}

// products [rows, features] → out [rows, out_stride] from `column` on. `scales` and `sums` of the rows of x, and
// `qparams`, are those of products of codes. Blocks of the grid's y go from kRows rows to the next.
extern "C" __global__ void __launch_bounds__(256)
    finish(const void* products, const float* scales, const float* sums, const void* qparams, const float* bias,
           void* out, int rows, int features, int epilogue, int out_floats, int out_stride, int column) {
  const bool is_gated = epilogue >= kGatedSilu;
  const int outputs = is_gated ? features / 2 : features;
  const int feature = (blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
  if (feature >= outputs) return;
  const Features gates(qparams, bias, feature), ups(qparams, bias, is_gated ? outputs + feature : feature);
  let_next_begin();
  wait_for_ahead();
  for (int first = blockIdx.y * kRows; first < rows; first += gridDim.y * kRows) {
    uint4 pieces[kRows][kPieces], others[kRows][kPieces];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= rows) break;
      const long long at = static_cast<long long>(first + r) * features + feature;
      ask(products, at, pieces[r]);
      if (is_gated) ask(products, at + outputs, others[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first + r;
      if (row >= rows) break;
      const float scale = kHasFactors ? scales[row] : 1, sum = FROM_CODES ? sums[row] : 0;
      float values[WIDTH];
      values_of(pieces[r], gates, scale, sum, values);
      if (is_gated) {
        float factors[WIDTH];
        values_of(others[r], ups, scale, sum, factors);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
          limit(values[e], factors[e], epilogue);
          values[e] = __fdividef(values[e], 1.0f + __expf(-logit_of(values[e], epilogue))) * factors[e];
        }
      }
      put(values, out, static_cast<long long>(row) * out_stride + column + feature, epilogue == kAdd, out_floats);
    }
  }
}
