// Products of 9 to 64 rows of x with a weight in rows (kernels/row_layout.py) of codes, for sm_80 and later. One or two
// dozen rows are bound by reading the weight, more by tensor cores and by what x costs on its way from L2: therefore a
// block has 32 · WARPS features (of gated products as many of either half together), which share x in shared memory.
//
// Compiled with BITS and FLOATS (decode.cuh), GROUP_SETS (skinny.cu); TILES, of 8 rows of x, all of which a block has;
// WARPS, each with two parts of 16 features; STAGES (steps that are on their way or worked on), BLOCKS (of a
// multiprocessor).
//
// Blocks stay, and take steps of inputs of one tile after the other ("StreamK": whole tiles, then an equal stretch of
// the line of those that are left: M. Osama et al., Stream-K, arXiv:2301.03598). What a block has of a tile that is not
// its own alone goes to `partial`, and skinny_reduce adds it up in order. As in skinny.cu, codes are multiplied as
// integers and scales meet sums; the sums of x that offsets need are found once for all warps, a step ahead.
#include "linear/gemm/epilogue.cuh"
#include "linear/gemm/stream_k.cuh"

#ifndef GROUP_SETS
#define GROUP_SETS 0
#endif
#ifndef TILES
#define TILES 2
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
constexpr int kThreads = WARPS * 32, kStages = STAGES, kParts = 2;
static_assert(BITS < 16);
constexpr bool kGrouped = GROUP_SETS > 0, kHasSums = !FLOATS;
constexpr int kGroupSets = kGrouped ? GROUP_SETS : kSets;
constexpr int kGroups = kSets / kGroupSets;  // that a step has a part of
constexpr int kScaleSets = kHasBytes ? 1 : kGroupSets;
constexpr int kChunks = kSets * 4;  // of 16 bytes, of a row of x
constexpr int kRows = TILES * 8, kXBytes = kRows * kChunks * 16;
constexpr int kCodeBytes = kParts * 2 * 32 * 16, kQparams = kGrouped ? kGroups * kParts * 16 : 0;
constexpr int kWarpBytes = kCodeBytes + kQparams * 4, kStageBytes = kXBytes + WARPS * kWarpBytes;
constexpr int kSums = kHasSums ? kGroups * kRows : 0;  // floats, for one of two steps
constexpr int kAhead = kHasSums ? kStages - 3 : kStages - 2;
static_assert(kAhead >= 0);

// Rows lie in different halves of the banks by turns: a warp's reads of 8 rows meet none twice.
__device__ __forceinline__ int place(int row, int chunk) { return (row * kChunks + (chunk ^ row % 2 * 4)) * 16; }

struct Cursor {
  int round, tile, step;
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    skinny_shared(const uint4* weight, const void* qparams, const bf16* x, const float* bias, void* out, float* partial,
                  int rows, int features, int inputs, int k_tiles, int group_sets, int epilogue, int out_floats,
                  int x_stride, int out_stride, int column, int tiles, int steps, int waves, int rest) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool is_gated = epilogue >= kGatedSilu;
  const int outputs = is_gated ? features / 2 : features;
  const Epilogue target = {bias, out, rows, outputs, epilogue, out_floats, out_stride, column};
  const StreamK shares = {tiles, steps, waves, rest, static_cast<int>(gridDim.x)};
  const int block = blockIdx.x, line_begin = shares.begin(block), stretch = shares.begin(block + 1) - line_begin;
  const int whole = min(waves, block < tiles - rest ? (tiles - rest - block - 1) / shares.blocks + 1 : 0);
  const int count = whole * steps + stretch;
  const auto enter = [&](int round) {
    if (round < whole) return Cursor{round, block + round * shares.blocks, 0};
    const int at = round == whole ? line_begin : (line_begin / steps + 1) * steps;
    return Cursor{round, tiles - rest + at / steps, at % steps};
  };
  const auto first_output = [&](int tile) { return (tile * WARPS + warp) * target.each(); };
  // Feature i of part p, the last one again where there are no more.
  const auto feature = [&](int tile, int p, int i) {
    const int f = first_output(tile) + i;
    return is_gated ? p * outputs + min(f, outputs - 1) : min(f + p * 16, features - 1);
  };
  const int groups = (inputs + 32 * group_sets - 1) / (32 * group_sets);

  // What is asked for runs kStages - 1 steps ahead. What is not there is not read: its address may be anything.
  Cursor ahead = enter(0);
  const uint4* from[kParts][2];
  const uint32_t* pairs = nullptr;
  const auto find = [&] {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        from[p][h] =
            weight + (static_cast<long long>(feature(ahead.tile, p, g + 8 * h)) * k_tiles + ahead.step) * 4 + t;
    if (kGrouped) pairs = static_cast<const uint32_t*>(qparams) + feature(ahead.tile, lane / 16, lane % 16);
  };
  find();
  const auto go_on = [&] {
    if (++ahead.step == steps) {
      ahead = enter(ahead.round + 1), find();
    } else {
#pragma unroll
      for (int p = 0; p < kParts; ++p) from[p][0] += 4, from[p][1] += 4;
    }
  };
  const uint32_t base = smem(shared), weight_to = base + kXBytes + warp * kWarpBytes + lane * 16;
  const auto ask_weight = [&](int stage) {
    const uint32_t to = weight_to + stage * kStageBytes;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h) copy16(to + (p * 2 + h) * 512, from[p][h], true);
    if (kGrouped) {
      const int first = GROUP_SETS < kSets ? ahead.step * kGroups : ahead.step * kSets / group_sets;
      const uint32_t* at = pairs + static_cast<long long>(first) * features;
#pragma unroll
      for (int j = 0; j < kGroups; ++j, at += features)
        copy4(to - lane * 12 + kCodeBytes + j * 128, at, first + j < groups);
    }
  };
  // Of x every thread copies the same 16 bytes of one row in kRowsBetween.
  constexpr int kRowsBetween = kThreads / kChunks;
  static_assert(kRows % kRowsBetween == 0 && kRowsBetween % 2 == 0);
  const int x_row = threadIdx.x / kChunks, x_input = threadIdx.x % kChunks * 8;
  const bf16* const x_from = x + static_cast<long long>(x_row) * x_stride + x_input;
  const uint32_t x_to = base + place(x_row, threadIdx.x % kChunks);
  const auto ask_x = [&](int stage, int step) {
    const int input = step * (kSets * 32);
    const bf16* at = x_from + input;
    const bool is_there = x_input + input < inputs;
#pragma unroll
    for (int j = 0; j < kRows; j += kRowsBetween, at += static_cast<long long>(kRowsBetween) * x_stride)
      copy16(x_to + stage * kStageBytes + j * kChunks * 16, at, is_there && x_row + j < rows);
  };

  int steps_of_x[kStages - 1];
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    steps_of_x[i] = ahead.step;
    if (i < count) ask_weight(i);
    if (i + 1 < count) go_on();
  }
  let_next_begin();
  wait_for_ahead();  // the weight is there before any kernel; x and out are not
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < count) ask_x(i, steps_of_x[i]);
    commit();
  }

  // Sums of x over the inputs of each group, of step i, for all warps: each has some of them.
  float* const x_sums = reinterpret_cast<float*>(shared + kStages * kStageBytes);  // [2][kGroups][kRows]
  const auto add_up = [&](int stage, int turn) {
    const char* const rows_of_x = shared + stage * kStageBytes;
    const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
    constexpr int kAll = TILES * kGroups, kMine = (kAll + WARPS - 1) / WARPS;
    float sum[kMine][4];
#pragma unroll
    for (int set = 0; set < kGroupSets; ++set) {  // one step of all sums, then the next: none waits for itself
      uint4 b[kMine];
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        const int mine = min(j * WARPS + warp, kAll - 1), n = mine % TILES, group = mine / TILES;
        b[j] = *reinterpret_cast<const uint4*>(rows_of_x + place(n * 8 + g, (group * kGroupSets + set) * 4 + t));
      }
#pragma unroll
      for (int j = 0; j < kMine; ++j)
        if (set == 0)
          multiply_anew(sum[j], ones, b[j].x, b[j].y);
        else
          multiply(sum[j], ones, b[j].x, b[j].y);
#pragma unroll
      for (int j = 0; j < kMine; ++j) multiply(sum[j], ones, b[j].z, b[j].w);
    }
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int mine = j * WARPS + warp, n = mine % TILES, group = mine / TILES;
      if (g == 0 && mine < kAll)
        *reinterpret_cast<float2*>(x_sums + turn * kSums + group * kRows + n * 8 + t * 2) =
            make_float2(sum[j][0], sum[j][1]);
    }
  };
  if (kHasSums && count > 0) {
    wait_for<kStages - 2>();
    __syncthreads();
    add_up(0, 0);
  }

  float sum[TILES][kParts][4] = {}, x_sum[TILES][2] = {};
  Cursor at = enter(0);
  int stage_at = 0;
  for (int i = 0; i < count; ++i) {
    wait_for<kAhead>();
    __syncthreads();
    if (i + kStages - 1 < count) {
      const int free = stage_at == 0 ? kStages - 1 : stage_at - 1;
      ask_weight(free), ask_x(free, ahead.step);
      if (i + kStages < count) go_on();
    }
    commit();
    const int next = stage_at + 1 == kStages ? 0 : stage_at + 1;
    if (kHasSums && i + 1 < count) add_up(next, 1 - i % 2);

    const char* const stage = shared + stage_at * kStageBytes;
    stage_at = next;
    const char* const codes = stage + kXBytes + warp * kWarpBytes;
    const float* const sums_of_step = x_sums + i % 2 * kSums;
    uint4 chunk[kParts][2];
#pragma unroll
    for (int group = 0; group < kSets / kScaleSets; ++group) {
      float group_sum[TILES][kParts][4];
#pragma unroll
      for (int s = 0; s < kScaleSets; ++s) {
        const int set = group * kScaleSets + s;
        uint32_t a[kParts][2][4];
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          if (set == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
              chunk[p][h] = *reinterpret_cast<const uint4*>(codes + (p * 2 + h) * 512 + lane * 16);
          }
          uint32_t low[4], high[4];
          decode(chunk[p][0], set, low);
          decode(chunk[p][1], set, high);
          a[p][0][0] = low[0], a[p][0][1] = high[0], a[p][0][2] = low[1], a[p][0][3] = high[1];
          a[p][1][0] = low[2], a[p][1][1] = high[2], a[p][1][2] = low[3], a[p][1][3] = high[3];
        }
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const uint4 b = *reinterpret_cast<const uint4*>(stage + place(n * 8 + g, set * 4 + t));
#pragma unroll
          for (int p = 0; p < kParts; ++p) {
            float* const c = kGrouped ? group_sum[n][p] : sum[n][p];
            if (kGrouped && s == 0)
              multiply_anew(c, a[p][0], b.x, b.y);
            else
              multiply(c, a[p][0], b.x, b.y);
            multiply(c, a[p][1], b.z, b.w);
          }
        }
      }
      if (kHasSums && !kGrouped) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const float2 of_x = *reinterpret_cast<const float2*>(sums_of_step + n * 8 + t * 2);
          x_sum[n][0] += of_x.x, x_sum[n][1] += of_x.y;
        }
      }
      if (kGrouped) {
        const int of = group * kScaleSets / kGroupSets;
        float scale[kParts][2], offset[kParts][2];
#pragma unroll
        for (int p = 0; p < kParts; ++p)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t pair =
                *reinterpret_cast<const uint32_t*>(codes + kCodeBytes + (of * 32 + p * 16 + g + 8 * h) * 4);
            scale[p][h] = kUnit * scale_of(pair, group), offset[p][h] = kBase * scale[p][h] + offset_of(pair);
          }
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const float2 of_x = kHasSums ? *reinterpret_cast<const float2*>(sums_of_step + group * kRows + n * 8 + t * 2)
                                       : make_float2(0, 0);
#pragma unroll
          for (int p = 0; p < kParts; ++p)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              sum[n][p][e] += scale[p][e / 2] * group_sum[n][p][e];
              if (kHasSums) sum[n][p][e] -= offset[p][e / 2] * (e % 2 ? of_x.y : of_x.x);
            }
        }
      }
    }

    if (++at.step < steps && i + 1 < count) continue;
    if (!kGrouped) {
#pragma unroll
      for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = static_cast<const float2*>(qparams)[feature(at.tile, p, g + 8 * h)];
#pragma unroll
          for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& c = sum[n][p][h * 2 + e];
              c *= kUnit * pair.x;
              if (kHasSums) c -= (kBase * pair.x + pair.y) * x_sum[n][e];
            }
        }
    }
    if (at.round < whole) {
#pragma unroll
      for (int n = 0; n < TILES; ++n) target.put(sum[n], first_output(at.tile), n * 8);
    } else {
      // A block's first piece, and its second, which is the beginning of a tile.
      float4* const to = reinterpret_cast<float4*>(partial) +
                         static_cast<long long>(block * 2 + (at.round > whole)) * (TILES * kParts * kThreads);
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int p = 0; p < kParts; ++p)
          to[(n * kParts + p) * kThreads + threadIdx.x] =
              make_float4(sum[n][p][0], sum[n][p][1], sum[n][p][2], sum[n][p][3]);
    }
    if (i + 1 < count) at = enter(at.round + 1);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      x_sum[n][0] = x_sum[n][1] = 0;
#pragma unroll
      for (int p = 0; p < kParts; ++p) sum[n][p][0] = sum[n][p][1] = sum[n][p][2] = sum[n][p][3] = 0;
    }
  }
  wait_for<0>();
}
