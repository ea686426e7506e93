// What needs no more of a row than the element at hand: sums, SwiGLU, GeGLU and the clamped SwiGLU, soft caps, rows
// gathered; and scales for 128 elements.
//
// A thread has one unit of 16 bytes (of the widest type), a thread block a piece of a row; many are on their way at
// once. Memory bounds all of them, and at few rows the launch.
//
// OP: kPlain (out = source), kAdd (source += addend), kSilu, kGelu, kClamped, kGather (out = source[ids - first]) or
// kSoftCap (out = cap · tanh(source / cap)). SOURCE, ADDEND, OUT: types. With OUT of 8 bits there are scales for 128
// elements.
#include "rows/elements.cuh"

enum Op { kPlain, kAdd, kSilu, kGather, kGelu, kSoftCap, kClamped };
constexpr bool kIsQuantised = OUT == kInt8 || OUT == kE4m3;
constexpr int kUnit = SOURCE == kFloat32 || ADDEND == kFloat32 || OUT == kFloat32 ? 4 : 8;
constexpr int kGroup = 128 / kUnit;  // lanes

// `pieces` thread blocks have a row. scales[row · scale_row + group · scale_group].
extern "C" __global__ void __launch_bounds__(256)
    elementwise(void* source, const void* addend, const int* ids, int first_id, int count, float cap, void* out,
                float* scales, long long scale_row, long long scale_group, int width, int pieces) {
  const long long row = blockIdx.x / static_cast<unsigned>(pieces);
  const int at = (blockIdx.x % static_cast<unsigned>(pieces) * blockDim.x + threadIdx.x) * kUnit, left = width - at;
  const long long to = row * width + at;
  float x[kUnit] = {}, y[kUnit];
  let_next_begin();
  wait_for_ahead();
  if (left > 0) {
    if constexpr (OP == kGather) {
      const long long from = static_cast<long long>(ids[row]) - first_id;
      if (from >= 0 && from < count) load<SOURCE, kUnit>(source, from * width + at, left, x);
    } else if constexpr (OP == kAdd) {
      load<SOURCE, kUnit>(source, to, left, x);
      load<ADDEND, kUnit>(addend, to, left, y);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[j] += y[j];
    } else if constexpr (OP == kSilu || OP == kGelu || OP == kClamped) {
      load<SOURCE, kUnit>(source, to + row * width, left, x);
      load<SOURCE, kUnit>(source, to + row * width + width, left, y);
#pragma unroll
      for (int j = 0; j < kUnit; ++j)
        x[j] = OP == kClamped ? clamped_swiglu(x[j], y[j]) : (OP == kGelu ? gelu(x[j]) : silu(x[j])) * y[j];
    } else {
      load<SOURCE, kUnit>(source, to, left, x);
      if constexpr (OP == kSoftCap) {
#pragma unroll
        for (int j = 0; j < kUnit; ++j) x[j] = cap * tanhf(x[j] / cap);
      }
    }
  }
  if constexpr (kIsQuantised) {
    unsigned top = 0;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) top = max(top, size_bits(x[j]));
#pragma unroll
    for (int o = kGroup / 2; o; o >>= 1) top = max(top, __shfl_xor_sync(~0u, top, o));
    const Scale<OUT> scale(__uint_as_float(top));
    if (threadIdx.x % kGroup == 0 && left > 0) scales[row * scale_row + at / 128 * scale_group] = scale.scale;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) x[j] = scale(x[j]);
  }
  if (left > 0) store<OUT, kUnit>(OP == kAdd ? source : out, to, left, x);
}
