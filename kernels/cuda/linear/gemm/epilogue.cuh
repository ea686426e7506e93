// What becomes of products of rows of x with features of a weight, as fragments of m16n8k16 hold them: lane 4·g + t has
// features g and g + 8 of each of two parts, of rows 2·t and 2·t + 1 of 8.
#pragma once
#include "linear/decode.cuh"

struct Epilogue {
  const float* bias;  // or null
  void* out;
  int rows, outputs, epilogue, out_floats, out_stride, column;

  // Features that warps of a tile have of outputs, and how many of each: gated, the parts are of either half.
  __device__ __forceinline__ int each() const { return epilogue >= kGatedSilu ? 16 : 32; }
  // `sum`: of output `first` + g, rows `row0` and on, of which this lane has 2·t.
  __device__ __forceinline__ void put(const float (*sum)[4], int first, int row0) const {
    const int lane = threadIdx.x % 32, feature = first + lane / 4, row = row0 + lane % 4 * 2;
    float value[2][4], before[2][4];
    bool is_there[2][4];
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int f = feature + e / 2 * 8 + (epilogue >= kGatedSilu ? 0 : p * 16);
        is_there[p][e] = f < outputs && row + e % 2 < rows;
        before[p][e] = epilogue == kAdd && is_there[p][e] ? static_cast<const float*>(out)[at(f, row + e % 2)] : 0;
        value[p][e] = sum[p][e];
        if (bias && is_there[p][e]) value[p][e] += bias[f + (epilogue >= kGatedSilu ? p * outputs : 0)];
      }
#pragma unroll
    for (int p = 0; p < 2; ++p)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!is_there[p][e] || (epilogue >= kGatedSilu && p == 1)) continue;
        float x = value[p][e];
        if (epilogue >= kGatedSilu) x = gated(x, value[1][e], epilogue);
        const long long to = at(feature + e / 2 * 8 + (epilogue >= kGatedSilu ? 0 : p * 16), row + e % 2);
        if (out_floats)
          static_cast<float*>(out)[to] = before[p][e] + x;
        else
          static_cast<bf16*>(out)[to] = narrow(x);
      }
  }

 private:
  __device__ __forceinline__ long long at(int feature, int row) const {
    return static_cast<long long>(row) * out_stride + column + feature;
  }
};
