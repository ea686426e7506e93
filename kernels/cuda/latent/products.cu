// Products of a few rows with a matrix of each head: those of queries with what makes keys, and those of sums of
// latents with what makes values. Bounded by memory: a thread block has some features of a head, whose weights are on
// their way before the kernel ahead has ended. Compiled with INPUTS and MERGES (1: rows whose tokens were cut lie in
// the parts that attend.cu left, which every block merges for itself).
#include "latent/cut.cuh"

#ifndef INPUTS
#define INPUTS 512
#endif
#ifndef MERGES
#define MERGES 1
#endif
constexpr int kInputs = INPUTS, kMostRows = 16, kWarps = kThreads / 32;
constexpr int kWords = (kInputs / 8 + 31) / 32;  // 16-byte words of a feature that a lane has
constexpr int kFeatures = kWords > 1 ? 2 : 8;    // of a warp
static_assert(INPUTS % 8 == 0, "inputs");

// x: [rows, heads, ..], rows x_stride and heads x_head elements apart; weight: [heads, features, INPUTS]; out:
// likewise. partial, kv_lens: of attend.cu or attend_sm90.cu, of requests of one query each, row for row, whose grid
// had tiles of `tile_rows`, `beside` of which have stretches together, in units of `unit` tokens, at least `least` a
// tile.
extern "C" __global__ void __launch_bounds__(kThreads)
    latent_product(const bf16* x, long long x_stride, int x_head, const bf16* weight, bf16* out, long long out_stride,
                   int out_head, int rows, int heads, int features, const float* partial, const int* kv_lens,
                   int tile_rows, int grid, int beside, int unit, int least) {
  __shared__ float inputs[kMostRows][kInputs];
  __shared__ int begins[kMostRows * 8 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
  const int feature0 = (blockIdx.y * kWarps + warp) * kFeatures;
  const bf16* const of_head = weight + static_cast<long long>(head) * features * kInputs;
  uint4 w[kFeatures][kWords];
#pragma unroll
  for (int f = 0; f < kFeatures; ++f)
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = i * 32 + lane;
      w[f][i] = make_uint4(0, 0, 0, 0);
      if (feature0 + f < features && word < kInputs / 8)
        w[f][i] = load16(of_head + static_cast<long long>(feature0 + f) * kInputs + word * 8);
    }
  let_next_begin();
  wait_for_ahead();
  const Cutting cutting = {tile_rows, grid, beside, unit, least, heads};
  if (MERGES) {
    if (threadIdx.x == 0) cutting.line(kv_lens, rows, begins);
    __syncthreads();
  }
  const Cut cut = MERGES ? cutting.cut(begins, rows) : Cut(0, 1, 1, true);
  for (int slot = threadIdx.x; slot < rows * (kInputs / 4); slot += kThreads) {
    const int row = slot / (kInputs / 4), column = slot % (kInputs / 4) * 4;
    float4 sum;
    const float* parts = nullptr;
    int pieces = 1;
    if (MERGES) {
      const Parts of_row(cutting, cut, begins, row, head, partial, kInputs);
      parts = of_row.first, pieces = of_row.pieces;
    }
    if (pieces > 1) {
      const Merged merged = merge_parts<8>(parts, pieces, beside, tile_rows, kInputs, head % tile_rows, column);
      const float once = merged.total == 0 ? 0 : 1 / merged.total;
      sum = make_float4(merged.sum.x * once, merged.sum.y * once, merged.sum.z * once, merged.sum.w * once);
    } else {
      const uint2 pairs = *reinterpret_cast<const uint2*>(x + row * x_stride + head * x_head + column);
      sum = make_float4(wide_low(pairs.x), wide_high(pairs.x), wide_low(pairs.y), wide_high(pairs.y));
    }
    *reinterpret_cast<float4*>(&inputs[row][column]) = sum;
  }
  __syncthreads();
  for (int row = 0; row < rows; ++row) {
    float sums[kFeatures] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = i * 32 + lane;
      if (word >= kInputs / 8) continue;
      const float4 low = *reinterpret_cast<const float4*>(&inputs[row][word * 8]);
      const float4 high = *reinterpret_cast<const float4*>(&inputs[row][word * 8 + 4]);
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) {
        const uint4 y = w[f][i];
        float& sum = sums[f];
        sum = fmaf(low.x, wide_low(y.x), fmaf(low.y, wide_high(y.x), sum));
        sum = fmaf(low.z, wide_low(y.y), fmaf(low.w, wide_high(y.y), sum));
        sum = fmaf(high.x, wide_low(y.z), fmaf(high.y, wide_high(y.z), sum));
        sum = fmaf(high.z, wide_low(y.w), fmaf(high.w, wide_high(y.w), sum));
      }
    }
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
#pragma unroll
      for (int o = 16; o; o >>= 1) sums[f] += __shfl_xor_sync(~0u, sums[f], o);
      if (lane == 0 && feature0 + f < features)
        out[row * out_stride + head * out_head + feature0 + f] = narrow(sums[f]);
    }
  }
}
