// The first product of low-rank adapters: rows of x with the matrix of each one's adapter, whose few features are as
// deep as x. Bound by reading the matrices of the adapters that have rows, and of many rows by reading x.
//
// Compiled with ROW_TILES, of 8 rows, and FEATURE_TILES, of 16 features, of a block. Blocks are (rows, features, part
// of the inputs): sums of the parts are added up by the second product, which reads few numbers. Rows are neighbours in
// the order of the routing, so that most are of one adapter; those of others are zeros in the product of one. A block
// asks for the matrix of its first row before the kernel ahead has ended: places and slots may be read early, see
// route.cu.
//
// Features are rows of the product on tensor cores, rows of x its columns; with inputs in the order in which a thread's
// 16 bytes hold them, both are matrix fragments as they come. A set is 32 inputs; warps take sets in turn.
#include "ptx/ptx.cuh"

#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef FEATURE_TILES
#define FEATURE_TILES 1
#endif
constexpr int kWarps = 8, kThreads = kWarps * 32, kRows = 8 * ROW_TILES, kFeatures = 16 * FEATURE_TILES;
constexpr int kAtOnce = FEATURE_TILES > 1 ? 1 : ROW_TILES > 2 ? 2 : 4;  // sets of a warp
constexpr int kBlocks = ROW_TILES > 1 ? 2 : 3;                          // that have registers on a multiprocessor
constexpr int kPitch = kFeatures + 4;

// a [places][features][sets of 32]; x [rows, x_stride]; sums [parts of the inputs][rows][features].
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    shrink(const uint4* a, const bf16* x, const int* places_of, const int* slots, float* sums, int places, int rows,
           int features, int inputs, int sets, int x_stride) {
  DYNAMIC_SHARED(shared);
  float* const of_warps = reinterpret_cast<float*>(shared);  // [kWarps][kRows][kPitch]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_feature = blockIdx.y * kFeatures;
  const auto share = [&](int part) { return static_cast<int>(static_cast<long long>(sets) * part / gridDim.z); };
  const int begin = share(blockIdx.z) + warp, end = share(blockIdx.z + 1);

  // Lane i's, of the i-th row; place −1: none.
  const int first = blockIdx.x * kRows, count = min(kRows, rows - first);
  int row = 0, place = -1;
  let_next_begin();
  if (lane < count) {
    row = min(max(__ldcg(slots + first + lane), 0), rows - 1), place = __ldcg(places_of + row);
    if (place < 0 || place >= places) place = -1;
  }
  int of_mine[ROW_TILES];  // the places of rows whose inputs this lane has
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n) of_mine[n] = __shfl_sync(~0u, place, n * 8 + g);
  const unsigned all = __ballot_sync(~0u, place >= 0);
  const int first_place = __shfl_sync(~0u, place, 0);  // −1: none has one, as those come last
  uint4 weights[kAtOnce][FEATURE_TILES][2], columns[kAtOnce][ROW_TILES];
  const uint4* from[FEATURE_TILES][2];
  const auto enter = [&](int its_place) {
#pragma unroll
    for (int f = 0; f < FEATURE_TILES; ++f)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int feature = min(first_feature + f * 16 + g + h * 8, features - 1);
        from[f][h] = a + (static_cast<long long>(its_place) * features + feature) * sets * 4 + t;
      }
  };
  const auto ask_weights = [&](int i, int set) {
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
        const bool is_there = of_mine[n] >= 0 && set + i * kWarps < end && at + t * 8 < inputs;
        columns[i][n] = is_there ? load16(from[n] + at) : make_uint4(0, 0, 0, 0);
      }
  };

  if (all) {
    enter(first_place);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) ask_weights(i, begin);
  }
  wait_for_ahead();
  if (!all) return;
  float sum[FEATURE_TILES][ROW_TILES][4] = {};
  for (int set = begin; set < end;) {
    ask_x(set);
    const int later = set + kWarps * kAtOnce;
    for (unsigned left = all; left;) {
      const int its_place = __shfl_sync(~0u, place, __ffs(left) - 1);
      left &= ~__ballot_sync(~0u, place == its_place);
      // What is asked for meanwhile: the next adapter's, or the first one's of later inputs.
      const int next_place = left ? __shfl_sync(~0u, place, __ffs(left) - 1) : first_place;
      const int next = left ? set : later;
      enter(next_place);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        uint4 own[ROW_TILES];
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) own[n] = of_mine[n] == its_place ? columns[i][n] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
          const uint4 &low = weights[i][f][0], &high = weights[i][f][1];
          const uint32_t fragments[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
          for (int n = 0; n < ROW_TILES; ++n) {
            multiply(sum[f][n], fragments[0], own[n].x, own[n].y);
            multiply(sum[f][n], fragments[1], own[n].z, own[n].w);
          }
        }
        if (next < end) ask_weights(i, next);
      }
    }
    set = later;
  }
  float* const part = sums + static_cast<long long>(blockIdx.z) * rows * features;
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
    if (i < count && feature < features) part[static_cast<long long>(to) * features + feature] = total;
  }
}
