// The first product of low-rank adapters: rows of x with the matrix of each one's adapter, whose few features are as
// deep as x. Bound by reading the matrices of the adapters that have rows, and of many rows by reading x.
//
// Compiled with ROW_TILES, of 8 rows, and FEATURE_TILES, of 16 features, of a block. Blocks are (row tile, features,
// part of the inputs): sums of the parts are added up by the second product, which reads few numbers. A block goes on
// to the next row tile but so many; for its first one it asks for the matrix before the kernel ahead has ended.
//
// Features are rows of the product on tensor cores, rows of x its columns; with inputs in the order in which a thread's
// 16 bytes hold them, both are matrix fragments as they come. A set is 32 inputs; warps take sets in turn.
#include "adapters/row_tile.cuh"

#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef FEATURE_TILES
#define FEATURE_TILES 1
#endif
constexpr int kWarps = 8, kThreads = kWarps * 32, kRows = 8 * ROW_TILES, kFeatures = 16 * FEATURE_TILES;
constexpr int kAtOnce = ROW_TILES * FEATURE_TILES > 4 ? 2 : ROW_TILES > 1 ? 4 : 5;  // sets of a warp
constexpr int kPitch = kFeatures + 4;

// a [places][features][sets of 32]; x [rows, x_stride]; sums [parts of the inputs][rows][features].
extern "C" __global__ void __launch_bounds__(kThreads)
    shrink(const uint4* a, const bf16* x, const int* starts, const int* slots, float* sums, int places, int rows,
           int features, int inputs, int sets, int x_stride) {
  DYNAMIC_SHARED(shared);
  float* const of_warps = reinterpret_cast<float*>(shared);  // [kWarps][kRows][kPitch]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_feature = blockIdx.y * kFeatures;
  const auto share = [&](int part) { return static_cast<int>(static_cast<long long>(sets) * part / gridDim.z); };
  const int begin = share(blockIdx.z) + warp, end = share(blockIdx.z + 1);

  RowTile tile;
  int row = 0;  // lane i's, of the tile's i-th
  const auto enter = [&](int index) {
    tile = row_tile(starts, places, rows, index, kRows, false);
    row = row_of(tile, slots, rows, lane);
  };
  uint4 weights[kAtOnce][FEATURE_TILES][2], columns[kAtOnce][ROW_TILES];
  const auto ask_weights = [&](int set) {
    const uint4* from[FEATURE_TILES][2];
#pragma unroll
    for (int f = 0; f < FEATURE_TILES; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int feature = min(first_feature + f * 16 + g + h * 8, features - 1);
        from[f][h] = a + (static_cast<long long>(tile.place) * features + feature) * sets * 4 + t;
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int f = 0; f < FEATURE_TILES; ++f)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          weights[i][f][h] = set + i * kWarps < end ? load16(from[f][h] + static_cast<long long>(set + i * kWarps) * 4)
                                                    : make_uint4(0, 0, 0, 0);
  };
  const auto ask_x = [&](int set) {
    const bf16* from[ROW_TILES];
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
      from[n] = x + static_cast<long long>(__shfl_sync(~0u, row, n * 8 + g)) * x_stride + t * 8;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
        const int at = (set + i * kWarps) * 32;
        const bool is_there = n * 8 + g < tile.count && set + i * kWarps < end && at + t * 8 < inputs;
        columns[i][n] = is_there ? load16(from[n] + at) : make_uint4(0, 0, 0, 0);
      }
  };

  let_next_begin();
  enter(blockIdx.x);
  if (tile.count) ask_weights(begin);
  wait_for_ahead();
  float* const part = sums + static_cast<long long>(blockIdx.z) * rows * features;
  for (int index = blockIdx.x; tile.count;) {
    ask_x(begin);
    float sum[FEATURE_TILES][ROW_TILES][4] = {};
    for (int set = begin; set < end;) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
          const uint4 &low = weights[i][f][0], &high = weights[i][f][1];
          const uint32_t fragments[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
          for (int n = 0; n < ROW_TILES; ++n) {
            multiply(sum[f][n], fragments[0], columns[i][n].x, columns[i][n].y);
            multiply(sum[f][n], fragments[1], columns[i][n].z, columns[i][n].w);
          }
        }
      set += kWarps * kAtOnce;
      if (set < end) ask_weights(set), ask_x(set);
    }
    // Lane 4 g + t has features g and g + 8 of rows 2 t and 2 t + 1.
#pragma unroll
    for (int f = 0; f < FEATURE_TILES; ++f)
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          of_warps[(warp * kRows + n * 8 + t * 2 + e % 2) * kPitch + f * 16 + g + e / 2 * 8] = sum[f][n][e];
    __syncthreads();
    for (int at = threadIdx.x; at < kRows * kFeatures; at += kThreads) {  // whole warps
      const int i = at / kFeatures, f = at % kFeatures, feature = first_feature + f;
      const int to = __shfl_sync(~0u, row, i % 32);
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += of_warps[(w * kRows + i) * kPitch + f];
      if (i < tile.count && feature < features) part[static_cast<long long>(to) * features + feature] = total;
    }
    __syncthreads();
    enter(index += gridDim.x);
    if (tile.count) ask_weights(begin);
  }
}
