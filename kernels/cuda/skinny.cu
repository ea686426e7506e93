// Products of a few rows of x with a weight in rows (kernels/rows.py), for sm_80 and later.
// Bound by reading the weight, once, at the speed of memory: 6 to 7 KB of it are on their way for each warp.
//
// Compiled with BITS and FLOATS (codes.cuh); GROUP_SETS, sets of 32 inputs of a slab that share float16 numbers (0: all
// inputs share float32 ones); TILES, of 8 rows of x; PARTS, of 16 features; WARPS and STAGES (slabs of a warp that are
// on their way).
//
// A block has 16 or 32 features (of gated products 16 of either half); its warps take slabs of inputs in turn and add
// up in shared memory at the end. Features are rows of the product on tensor cores, rows of x its columns: with inputs
// in the order in which a thread's 16 bytes hold them, these are matrix fragments as they come, and so are 16 bytes of
// x. Codes are multiplied as whole numbers; scales are applied once a group, to the sums of codes · x and of x itself.
#include "codes.cuh"

#ifndef GROUP_SETS
#define GROUP_SETS 0
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 8
#endif
constexpr int kThreads = WARPS * 32, kStages = STAGES;
constexpr bool kGrouped = GROUP_SETS > 0, kHasSums = BITS < 16 && !FLOATS;
constexpr int kGroupSets = kGrouped ? GROUP_SETS : kSets;
constexpr int kGroups = kSets / kGroupSets;  // that a slab has a part of
constexpr int kCodeBytes = PARTS * 2 * 32 * 16, kNumbers = kGrouped ? kGroups * PARTS * 16 : 0;
constexpr int kStageBytes = kCodeBytes + kNumbers * 4;
constexpr int kStride = 20, kTile = 8 * kStride;  // floats of a row, and of 8: a warp's stores meet no bank twice
constexpr int kWarpFloats = PARTS * TILES * kTile + TILES * 8;
constexpr uint32_t kOnes = 0x3f803f80;

// With so many warps two blocks are to fit; to say 1 where they have no need makes the compiler spill registers.
#if WARPS == 16
#define BOUNDS __launch_bounds__(kThreads, 2)
#else
#define BOUNDS __launch_bounds__(kThreads)
#endif

extern "C" __global__ void BOUNDS skinny(const uint4* weight, const void* numbers, const bf16* x, const float* bias,
                                         void* out, int rows, int features, int inputs, int slabs, int group_sets,
                                         int epilogue, int out_floats, int x_stride, int out_stride, int column) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_tiles = (rows + TILES * 8 - 1) / (TILES * 8);
  const int row0 = blockIdx.x % row_tiles * (TILES * 8);
  const bool is_gated = PARTS == 2 && epilogue == kGated;
  const int outputs = is_gated ? features / 2 : features, wide = is_gated ? 16 : 16 * PARTS;
  const int first = blockIdx.x / row_tiles * wide;
  // Feature i of part p, the last one again where there are no more.
  const auto feature = [&](int p, int i) {
    return is_gated ? p * outputs + min(first + i, outputs - 1) : min(first + p * 16 + i, features - 1);
  };
  // Where this lane's next codes, numbers and inputs are, counted on from slab to slab: to find them anew would be as
  // much work as the products.
  uint32_t from[PARTS][2];  // of 16 bytes
#pragma unroll
  for (int p = 0; p < PARTS; ++p)
#pragma unroll
    for (int h = 0; h < 2; ++h) from[p][h] = static_cast<uint32_t>(feature(p, g + 8 * h)) * (slabs * 4) + warp * 4 + t;
  const int groups = (inputs + 32 * group_sets - 1) / (32 * group_sets);
  const int sets = GROUP_SETS < kSets ? kGroupSets : group_sets;  // of a group: known here where it is within a slab
  constexpr int kLanesGroups = PARTS == 1 ? 2 : 1;                // whose numbers the lanes copy at once
  const uint32_t* const pairs = static_cast<const uint32_t*>(numbers) + feature(lane / 16 % PARTS, lane % 16);
  int group = warp * kSets / sets + lane / 16 % kLanesGroups, within = warp * kSets % sets;
  const bf16* x_from[TILES];
  int left[TILES];  // inputs from there on
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int row = row0 + n * 8 + g, input = warp * (kSets * 32) + t * 8;
    x_from[n] = x + static_cast<long long>(row < rows ? row : 0) * x_stride + input;
    left[n] = row < rows ? inputs - input : 0;
  }

  char* const stages = shared + warp * (kStages * kStageBytes) + lane * 16;
  const uint32_t numbers_at = smem(shared + warp * (kStages * kStageBytes) + kCodeBytes) + lane * 4;
  const int count = warp < slabs ? (slabs - warp - 1) / WARPS + 1 : 0;
  const auto ask = [&](int i) {
    if (i < count) {
      char* const to = stages + i % kStages * kStageBytes;
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          copy16(smem(to + (p * 2 + h) * 512), weight + from[p][h], true);
          from[p][h] += WARPS * 4;
        }
      if (kGrouped) {
#pragma unroll
        for (int j = 0; j < kNumbers; j += 32) {
          const int at = group + j / 32 * kLanesGroups;
          const bool is_there = at < groups;
          if (j + lane < kNumbers)
            copy4(numbers_at + i % kStages * kStageBytes + j * 4,
                  pairs + (is_there ? static_cast<long long>(at) * features : 0), is_there);
        }
        group += WARPS * kSets / sets, within += WARPS * kSets % sets;
        if (within >= sets) within -= sets, ++group;
      }
    }
    commit();
  };
  float sum[PARTS][TILES][4] = {}, group_sum[PARTS][TILES][4] = {}, x_sum[TILES][4] = {};
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) ask(i);
  let_next_begin();
  wait_for_ahead();  // the weight is there before any kernel; x and out are not
  // What this thread's output needs beside the product is on its way meanwhile, where other blocks do not fill the
  // wait.
  const int output = first + threadIdx.x % wide, output_row = row0 + threadIdx.x / wide;
  const bool is_output = PARTS == 1 && output < outputs && output_row < rows && threadIdx.x / wide < TILES * 8;
  const float first_bias = bias && is_output ? bias[output] : 0;
  const float before =
      epilogue == kAdd && is_output
          ? static_cast<const float*>(out)[static_cast<long long>(output_row) * out_stride + column + output]
          : 0;
  for (int i = 0; i < count; ++i) {
    uint4 b[kSets][TILES];
#pragma unroll
    for (int set = 0; set < kSets; ++set)
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        b[set][n] = left[n] > set * 32 ? load16(x_from[n] + set * 32) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
    for (int n = 0; n < TILES; ++n) x_from[n] += WARPS * kSets * 32, left[n] -= WARPS * kSets * 32;
    wait_for<kStages - 2>();
    __syncwarp();
    ask(i + kStages - 1);
    const char* const stage = stages + i % kStages * kStageBytes;
    uint4 chunk[PARTS][2];
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h) chunk[p][h] = *reinterpret_cast<const uint4*>(stage + (p * 2 + h) * 512);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        uint32_t low[4], high[4];
        decode(chunk[p][0], set, low);
        decode(chunk[p][1], set, high);
        const uint32_t a[2][4] = {{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}};
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          float* const c = kGrouped ? group_sum[p][n] : sum[p][n];
          if (kGrouped && set % kGroupSets == 0)
            multiply_anew(c, a[0], b[set][n].x, b[set][n].y);
          else
            multiply(c, a[0], b[set][n].x, b[set][n].y);
          multiply(c, a[1], b[set][n].z, b[set][n].w);
        }
      }
      if (kHasSums) {
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          if (kGrouped && set % kGroupSets == 0)
            multiply_anew(x_sum[n], ones, b[set][n].x, b[set][n].y);
          else
            multiply(x_sum[n], ones, b[set][n].x, b[set][n].y);
          multiply(x_sum[n], ones, b[set][n].z, b[set][n].w);
        }
      }
      if (kGrouped && (set + 1) % kGroupSets == 0) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int at = (set / kGroupSets * PARTS + p) * 16 + g + 8 * h;
            const uint32_t pair = *reinterpret_cast<const uint32_t*>(stage - lane * 16 + kCodeBytes + at * 4);
            const float scale = scale_of(pair), offset = kBase * scale + offset_of(pair);
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float& c = sum[p][n][h * 2 + e];
                c += scale * group_sum[p][n][h * 2 + e];
                if (kHasSums) c -= offset * x_sum[n][e];
              }
          }
      }
    }
  }
  wait_for<0>();
  __syncthreads();

  float* const sums_of = reinterpret_cast<float*>(shared);  // of warps, over what the stages held
  float* const mine = sums_of + warp * kWarpFloats;
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        mine[(p * TILES + n) * kTile + (t * 2 + e % 2) * kStride + g + e / 2 * 8] = sum[p][n][e];
    if (g == 0) {
      mine[PARTS * TILES * kTile + n * 8 + t * 2] = x_sum[n][0];
      mine[PARTS * TILES * kTile + n * 8 + t * 2 + 1] = x_sum[n][1];
    }
  }
  __syncthreads();

  // Feature i of part p times row `row` of this block, with the numbers of channels and the bias.
  const auto product = [&](int p, int i, int row) {
    float value = 0, of_x = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      value += sums_of[w * kWarpFloats + (p * TILES + row / 8) * kTile + row % 8 * kStride + i];
      if (!kGrouped && kHasSums) of_x += sums_of[w * kWarpFloats + PARTS * TILES * kTile + row];
    }
    const int f = feature(p, i);
    if (BITS < 16 && !kGrouped) {
      const float2 pair = static_cast<const float2*>(numbers)[f];
      value *= pair.x;
      if (kHasSums) value -= (kBase * pair.x + pair.y) * of_x;
    }
    return value;
  };
  for (int at = threadIdx.x; at < wide * TILES * 8; at += kThreads) {
    const int i = at % wide, row = at / wide;
    if (row0 + row >= rows || first + i >= outputs) continue;
    const bool is_first = PARTS == 1 && at == threadIdx.x;
    const long long to = static_cast<long long>(row0 + row) * out_stride + column + first + i;
    float value = product(is_gated ? 0 : i / 16, i % 16, row);
    if (bias) value += is_first ? first_bias : bias[first + i];
    if (is_gated) {
      const float up = product(PARTS - 1, i, row) + (bias ? bias[outputs + first + i] : 0);
      value = value / (1.0f + __expf(-value)) * up;
    }
    if (!out_floats)
      static_cast<bf16*>(out)[to] = narrow(value);
    else if (epilogue == kAdd)
      static_cast<float*>(out)[to] = value + (is_first ? before : static_cast<const float*>(out)[to]);
    else
      static_cast<float*>(out)[to] = value;
  }
}
