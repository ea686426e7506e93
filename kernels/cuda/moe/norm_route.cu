// RMSNorm of a few rows of the residual stream, a router's product with them in float32 and the choice of experts: see
// `norm_route` in kernels/fused_ops.py. One cluster of blocks, so that logits are exchanged without another launch:
// every block norms all rows and multiplies them with the weights of its experts, which it asks for before it waits,
// all of its warps if there are fewer experts; the first block gets all logits, in its shared memory, and chooses.
//
// Compiled with what choose.cuh names; ROWS, the most rows; and UNITS, four elements of a row that a thread norms.
#include "moe/choose.cuh"

#ifndef ROWS
#define ROWS 1
#endif
#ifndef UNITS
#define UNITS 1
#endif
constexpr int kWarps = 16, kThreads = kWarps * 32, kAhead = 8;  // kAhead: 16 bytes of weights that a lane holds
constexpr int kMostOwn = 32 * EACH / CLUSTER > kWarps ? 32 * EACH / CLUSTER : kWarps;  // parts of experts of a block

// residual, norm, weight and weight_bias (or null) are float32; width is a multiple of 4, weight [experts][width].
// Written: x [n, width], logits [n, experts], and what `route` writes.
extern "C" __global__ void OF_CLUSTER __launch_bounds__(kThreads, 1)
    norm_route(const float4* residual, const float4* norm, float eps, uint2* x, const float4* weight,
               const float* weight_bias, float* logits, const float* bias, const int* places, const int* rows,
               unsigned long long* load, int n, int width, Router router, int num_places, int* own_places,
               float* weights, int* slots, int* starts) {
  DYNAMIC_SHARED(shared);
  __shared__ float sums[ROWS][kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = CLUSTER > 1 ? blockIdx.x : 0;
  const int experts = router.experts, chunks = width / 4;
  const int each = (experts + CLUSTER - 1) / CLUSTER, begin = min(rank * each, experts);
  const int end = min(begin + each, experts);
  // Warps that share an expert, each of which has every so many-th run of 32 chunks.
  const int parts = max(1, kWarps / each), part = warp % parts, first = begin + warp / parts, stride = 32 * parts;
  uint2* const held_x = reinterpret_cast<uint2*>(shared);                       // [ROWS][chunks]
  float* const held_logits = reinterpret_cast<float*>(held_x + ROWS * chunks);  // [n][experts], of the first block
  float* const products = held_logits + n * experts;                            // [ROWS][kMostOwn]
  const Board board(reinterpret_cast<char*>(products + ROWS * kMostOwn), n, router.top_k, num_places);
  if (CLUSTER > 1) cluster_arrive();  // this block's memory is there
  const float4* from = weight + static_cast<long long>(first) * chunks + part * 32 + lane;
  const int left = chunks - part * 32 - lane;  // chunks of a row from this lane's first on
  float4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (first < end && i * stride < left) ahead[i] = from[i * stride];
  for (int expert = begin + warp; expert < end; expert += kWarps)
    for (int chunk = lane * 8; chunk < chunks; chunk += 256)
      prefetch_l2(weight + static_cast<long long>(expert) * chunks + chunk);
  float4 norm_of[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    const int chunk = threadIdx.x + u * kThreads;
    norm_of[u] = chunk < chunks ? norm[chunk] : make_float4(0, 0, 0, 0);
  }
  Experts all_experts;
  if (rank == 0 && warp < n) all_experts.load(places, bias, router);
  let_next_begin();
  wait_for_ahead();
  const bool is_padding = rank == 0 && warp < n && rows && rows[warp] < 0;

  float4 v[ROWS][UNITS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int chunk = threadIdx.x + u * kThreads;
      v[r][u] = make_float4(0, 0, 0, 0);
      if (r < n && chunk < chunks) v[r][u] = residual[static_cast<long long>(r) * chunks + chunk];
    }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float sum = 0;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const float4& four = v[r][u];
      sum = fmaf(four.x, four.x, fmaf(four.y, four.y, fmaf(four.z, four.z, fmaf(four.w, four.w, sum))));
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[r][warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float by = rsqrtf(warp_sum(lane < kWarps ? sums[r][lane] : 0.0f) / width + eps);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      const int chunk = threadIdx.x + u * kThreads;
      if (chunk >= chunks) continue;
      const float4 &four = v[r][u], &w = norm_of[u];
      const uint2 pairs =
          make_uint2(pack(four.x * w.x * by, four.y * w.y * by), pack(four.z * w.z * by, four.w * w.w * by));
      held_x[r * chunks + chunk] = pairs;
      if (r < n && r % CLUSTER == rank) x[static_cast<long long>(r) * chunks + chunk] = pairs;
    }
  }
  if (CLUSTER > 1) cluster_wait();  // the first block's memory is there
  __syncthreads();

  const int at_once = kWarps / parts;  // experts
  for (int expert = first; expert < end; expert += at_once, from += static_cast<long long>(at_once) * chunks) {
    float sum[ROWS] = {};
    const auto add = [&](int i, const float4& w) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const uint2 pairs = held_x[r * chunks + part * 32 + lane + i];
        sum[r] = fmaf(wide_low(pairs.x), w.x, fmaf(wide_high(pairs.x), w.y, sum[r]));
        sum[r] = fmaf(wide_low(pairs.y), w.z, fmaf(wide_high(pairs.y), w.w, sum[r]));
      }
    };
    int at = 0;
    if (expert == first) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (i * stride < left) add(i * stride, ahead[i]);
      at = kAhead * stride;
    }
    for (; at + 7 * stride < left; at += 8 * stride) {
      float4 eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = from[at + i * stride];
#pragma unroll
      for (int i = 0; i < 8; ++i) add(at + i * stride, eight[i]);
    }
    for (; at < left; at += stride) add(at, from[at]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float total = warp_sum(sum[r]);
      if (lane == 0) products[r * kMostOwn + (expert - begin) * parts + part] = total;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (end - begin) * n; i += kThreads) {
    const int r = i / (end - begin), expert = begin + i % (end - begin);
    float total = weight_bias ? weight_bias[expert] : 0.0f;
    for (int p = 0; p < parts; ++p) total += products[r * kMostOwn + (expert - begin) * parts + p];
    logits[r * experts + expert] = total;
    *(CLUSTER > 1 ? of_block(held_logits + r * experts + expert, 0) : held_logits + r * experts + expert) = total;
  }
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
    if (rank) return;
  } else {
    __syncthreads();
  }
  const auto load_row = [&](Logits& to, int row) {
    to.load(held_logits + row * experts, experts);
    return is_padding;  // rows are fewer than warps: a warp's own
  };
  choose_and_sort<1>(board, load_row, all_experts, places, load, n, router, num_places,
                     {own_places, weights, slots, starts});
}
