// What needs a whole row before its first element can be written: RMSNorm, alone or with the residual's sum, LayerNorm,
// and a scale for each row of int8 or fp8.
//
// A thread block has a row, in registers: it is read once, its sum goes through one barrier, and it is written once. So
// memory bounds it: 12 bytes an element with a float32 residual, bfloat16 in and out. Which thread sums what depends on
// the width alone, hence a row's bits on the row alone.
//
// OP: kPlain, kNorm, kSilu or kLayerNorm. SOURCE: the type of what is read (with ADDEND, a type, also written: source
// += addend); OUT: of what is written, and GROUPED, whether scales are for a row or for 128 elements of it. WEIGHT: of
// the norm's weight. UNITS: how many units a thread has, of THREADS at most.
#include "rows/elements.cuh"

enum Op { kPlain, kNorm, kSilu, kLayerNorm };
constexpr bool kNorms = OP == kNorm || OP == kLayerNorm;
constexpr bool kIsQuantised = OUT == kInt8 || OUT == kE4m3;
// Neighbouring threads have neighbouring units: an access of a warp is one run of memory, of every type.
constexpr int kUnit = SOURCE == kFloat32 || ADDEND == kFloat32 || OUT == kFloat32 ? 4 : 8;
constexpr int kGroup = 128 / kUnit;  // lanes

// Of all elements that a thread has: those behind a row's end are 0.
__device__ __forceinline__ float sum_of(const float (*x)[kUnit]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < UNITS; ++i)
#pragma unroll
    for (int j = 0; j < kUnit; ++j) sum += x[i][j];
  return sum;
}
// Of all threads of a block; parts: shared memory for 32 numbers.
__device__ __forceinline__ float sum_of_block(float sum, float* parts) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (lane == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = lane < blockDim.x / 32 ? parts[lane] : 0;
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_rows(const void* addend, void* source, long long source_stride, const void* weight, float eps, void* out,
              float* scales, long long scale_row, long long scale_group, int width) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const long long row = blockIdx.x;
  const long long first = row * width, from = row * source_stride;

  // Weights are there from the beginning. All loads come before the first store, which the compiler cannot move them
  // over.
  float x[UNITS][kUnit], y[UNITS][kUnit], w[UNITS][kUnit];
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const int at = (threadIdx.x + i * blockDim.x) * kUnit;
    if constexpr (kNorms)
      if (at < width) load<WEIGHT, kUnit>(weight, at, width - at, w[i]);
  }
  let_next_begin();
  wait_for_ahead();
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const int at = (threadIdx.x + i * blockDim.x) * kUnit;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) x[i][j] = 0;
    if (at >= width) continue;
    load<SOURCE, kUnit>(source, from + at, width - at, x[i]);
    if constexpr (ADDEND != kNothing) load<ADDEND, kUnit>(addend, first + at, width - at, y[i]);
    if constexpr (OP == kSilu) {
      load<SOURCE, kUnit>(source, from + width + at, width - at, y[i]);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] = silu(x[i][j]) * y[i][j];
    }
  }
  if constexpr (OP == kLayerNorm) {
    __shared__ float parts[32];
    const float mean = sum_of_block(sum_of(x), parts) / width;
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] = (threadIdx.x + i * blockDim.x) * kUnit + j < width ? x[i][j] - mean : 0;
  }
  float sum = 0;
  unsigned top = 0;
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const int at = (threadIdx.x + i * blockDim.x) * kUnit;
    if (at >= width) continue;
    if constexpr (ADDEND != kNothing) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] = rounded<SOURCE>(x[i][j] + y[i][j]);
      store<SOURCE, kUnit>(source, from + at, width - at, x[i]);
    }
    if constexpr (kNorms) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) sum = fmaf(x[i][j], x[i][j], sum), x[i][j] *= w[i][j];
    }
    if constexpr (kIsQuantised && !GROUPED) {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) top = max(top, size_bits(x[i][j]));
    }
  }

  float by = 1;
  if constexpr (kNorms || !GROUPED) {
    __shared__ float sums[32];
    __shared__ unsigned tops[32];
    if constexpr (kNorms) {
#pragma unroll
      for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    }
    if constexpr (kIsQuantised && !GROUPED) top = __reduce_max_sync(~0u, top);
    if (lane == 0) sums[warp] = sum, tops[warp] = top;
    __syncthreads();
    if constexpr (kNorms) {
      sum = lane < warps ? sums[lane] : 0;
#pragma unroll
      for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
      by = rsqrtf(sum / width + eps);
    }
    if constexpr (kIsQuantised && !GROUPED) top = __reduce_max_sync(~0u, lane < warps ? tops[lane] : 0u);
  }

  if constexpr (!kIsQuantised) {
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      const int at = (threadIdx.x + i * blockDim.x) * kUnit;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] *= by;
      if (at < width) store<OUT, kUnit>(out, first + at, width - at, x[i]);
    }
  } else if constexpr (!GROUPED) {
    const Scale<OUT> scale(__uint_as_float(top) * by);
    if (threadIdx.x == 0) scales[row * scale_row] = scale.scale;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      const int at = (threadIdx.x + i * blockDim.x) * kUnit;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] = scale(x[i][j] * by);
      if (at < width) store<OUT, kUnit>(out, first + at, width - at, x[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      const int at = (threadIdx.x + i * blockDim.x) * kUnit;
      top = 0;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) top = max(top, size_bits(x[i][j] *= by));
#pragma unroll
      for (int o = kGroup / 2; o; o >>= 1) top = max(top, __shfl_xor_sync(~0u, top, o));
      const Scale<OUT> scale(__uint_as_float(top));
      if (lane % kGroup == 0 && at < width) scales[row * scale_row + at / 128 * scale_group] = scale.scale;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] = scale(x[i][j]);
      if (at < width) store<OUT, kUnit>(out, first + at, width - at, x[i]);
    }
  }
}
