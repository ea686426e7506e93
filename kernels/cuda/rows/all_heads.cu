// RMSNorm of all heads of queries, and of all heads of keys, together: means of squares, and what is done with them.
#include "ptx/ptx.cuh"

constexpr int kThreads = 256;

// out[row][kind] = sum over heads of shares[kind][head] · the head's squares: block row of x [rows, heads, dim].
extern "C" __global__ void __launch_bounds__(kThreads)
    mean_squares(const bf16* x, const float* shares, float* out, int heads, int dim) {
  __shared__ float parts[2][kThreads / 32];
  let_next_begin();
  wait_for_ahead();
  const long long row = blockIdx.x;
  const int width = heads * dim;
  float sums[2] = {};
  for (int at = threadIdx.x; at < width; at += kThreads) {
    const float value = wide(x[row * width + at]);
    const int head = at / dim;
    sums[0] = fmaf(shares[head], value * value, sums[0]);
    sums[1] = fmaf(shares[heads + head], value * value, sums[1]);
  }
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
    for (int o = 16; o; o >>= 1) sums[kind] += __shfl_xor_sync(~0u, sums[kind], o);
    if (threadIdx.x % 32 == 0) parts[kind][threadIdx.x / 32] = sums[kind];
  }
  __syncthreads();
  if (threadIdx.x >= 2) return;
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) total += parts[threadIdx.x][warp];
  out[row * 2 + threadIdx.x] = total;
}

// x[row][i] *= weight[i] / sqrt(means[row][kind] + eps) of the first q_width elements of a row (kind 0) and the k_width
// behind them (kind 1).
extern "C" __global__ void __launch_bounds__(kThreads)
    norm_heads(bf16* x, const float* means, const float* q_weight, const float* k_weight, float eps, long long rows,
               int width, int q_width, int k_width) {
  let_next_begin();
  wait_for_ahead();
  const int normed = q_width + k_width;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; at < rows * normed; at += step) {
    const long long row = at / normed;
    const int i = static_cast<int>(at % normed), kind = i >= q_width;
    const float weight = kind ? k_weight[i - q_width] : q_weight[i];
    bf16* const to = x + row * width + i;
    *to = narrow(wide(*to) * rsqrtf(means[row * 2 + kind] + eps) * weight);
  }
}
