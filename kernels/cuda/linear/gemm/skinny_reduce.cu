// Adds up what blocks of skinny_shared have of tiles that they share, in their order, and makes of it what the product
// is to become; thread for thread as they held it. A block has a tile's 8 rows. For sm_80 and later; bound by L2.
#include "linear/gemm/epilogue.cuh"
#include "linear/gemm/stream_k.cuh"

extern "C" __global__ void skinny_reduce(const float* partial, const float* bias, void* out, int rows, int outputs,
                                         int epilogue, int out_floats, int out_stride, int column, int row_tiles,
                                         int tiles, int steps, int rest, int blocks) {
  const Epilogue target = {bias, out, rows, outputs, epilogue, out_floats, out_stride, column};
  const StreamK shares = {tiles, steps, 0, rest, blocks};
  const int n = blockIdx.x % row_tiles, line = blockIdx.x / row_tiles;  // which tile, of those that are shared
  if (n * 8 >= rows) return;
  const int threads = blockDim.x, piece = row_tiles * 2 * threads;
  const int begin = shares.owner(line * steps), end = shares.owner(line * steps + steps - 1) + 1;
  const float4* const from = reinterpret_cast<const float4*>(partial) + n * 2 * threads + threadIdx.x;
  let_next_begin();
  wait_for_ahead();
  float sum[2][4] = {};
  constexpr int kAtOnce = 4;
  for (int b0 = begin; b0 < end; b0 += kAtOnce) {
    float4 part[kAtOnce][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int b = min(b0 + i, end - 1);
        const bool is_second = shares.begin(b) < line * steps;
        part[i][p] = __ldcg(from + static_cast<long long>(b * 2 + is_second) * piece + p * threads);
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (b0 + i >= end) continue;
        sum[p][0] += part[i][p].x, sum[p][1] += part[i][p].y, sum[p][2] += part[i][p].z, sum[p][3] += part[i][p].w;
      }
  }
  target.put(sum, (line + tiles - rest) * (threads / 32) * target.each() + threadIdx.x / 32 * target.each(), n * 8);
}
