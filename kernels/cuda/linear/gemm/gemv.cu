// Products of one row of x with a weight in rows (kernels/row_layout.py), for sm_80 and later: what a single stream
// decodes with. Bound by reading the weight, once, at the speed of memory; codes of 4 bits as much by instructions.
//
// Compiled with BITS and FLOATS (decode.cuh); GROUP_SETS, sets of 32 inputs of a k tile that share scales (0: all
// inputs share float32 ones); WARPS and STAGES (units of a warp that are on their way); BLOCKS, that have to have
// registers on a multiprocessor.
//
// A block has an equal share of the features, in tiles of 16; a unit is two k tiles, 128 bytes, of a tile's features.
// All units of a block are one line, of which its warps take one after the other, so that they read neighbouring memory
// and none meets another before the end, where the sums of each (tile, warp) are added up. Copies run ahead over the
// ends of tiles, and begin while the kernel ahead still runs.
//
// Features are rows of the product on tensor cores; with a single row of x there are columns left over. Codes meet x as
// integers of 16 bits, 256 · high + low with a scale for each 128 inputs (a quad of sets): two columns. Each set
// of a quad has two of its own, so that the four lanes of a feature have the sums of one set each, and scales of groups
// are applied four sets at a time. e4m3 codes become halves, and so does x, with a power of two for each quad.
#include "linear/decode.cuh"

#ifndef GROUP_SETS
#define GROUP_SETS 0
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
constexpr int kThreads = WARPS * 32, kStages = STAGES;
constexpr bool kGrouped = GROUP_SETS > 0, kIsWhole = BITS < 16 && !FLOATS;
constexpr int kGroupSets = kGrouped ? GROUP_SETS : 1;
constexpr int kQuads = BITS == 4 ? 2 : 1;  // of a unit, of codes
constexpr int kQparams = kGrouped ? kQuads * 2 : 0;
constexpr int kStageBytes = 2048 + kQparams * 128;
constexpr float kLack = BITS == 4 ? 0 : -128;  // what is multiplied, less the code

// x in shared memory: of codes a quad after the other, a lane's 8 bytes (or, of halves, a set's t-th 16 bytes)
// together; of 16-bit elements as it is. And of each set of a quad its scale and, of integers, its sum.
struct Row {
  char* x;
  float2* beside;

  // 8 neighbours, of 16 bits' precision. All lanes come here, neighbours with neighbouring inputs. Returns what this
  // set adds to the sum of x, in one lane of it.
  __device__ __forceinline__ float settle(const float* v, int chunk, bool is_there) const {
    unsigned top = 0;  // of what is not a number, larger than of infinity
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max(top, __float_as_uint(v[i]) & 0x7fffffff);
#pragma unroll
    for (int o = 8; o; o >>= 1) top = max(top, __shfl_xor_sync(~0u, top, o));
    if constexpr (FLOATS) {
      const unsigned exponent = min(max(top >> 23, 1u), 253u);
      const float by = __uint_as_float(top < 0x7f800000 ? exponent << 23 : 0x7fffffff);
      const float times = __uint_as_float((254 - exponent) << 23);
      if (is_there) {
        *reinterpret_cast<uint4*>(x + chunk * 16) =
            make_uint4(pack_halves(v[0] * times, v[2] * times), pack_halves(v[1] * times, v[3] * times),
                       pack_halves(v[4] * times, v[6] * times), pack_halves(v[5] * times, v[7] * times));
        if (chunk % 4 == 0) beside[chunk / 4] = make_float2(by, 0);
      }
      return 0;
    }
    const float most = __uint_as_float(top), times = most > 1e-30f && most < kInf ? 32512.0f / most : 0;
    // The lower bits of what this makes of a small whole number are that number.
    constexpr float kWhole = 12582912.0f;
    constexpr uint32_t kWholeBits = 0x4b400000;
    uint32_t low[8], high[8];  // bytes 0 and 1
    int all = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      low[i] = __float_as_uint(fmaf(v[i], times, kWhole)), high[i] = low[i] + 128;
      all += static_cast<int>(low[i] - kWholeBits);
    }
#pragma unroll
    for (int o = 2; o; o >>= 1) all += __shfl_xor_sync(~0u, all, o);
    // Bytes are in the order in which masks find codes.
    constexpr int kOrder[2][4] = {{0, BITS == 4 ? 4 : 1, BITS == 4 ? 1 : 2, BITS == 4 ? 5 : 3},
                                  {BITS == 4 ? 2 : 4, BITS == 4 ? 6 : 5, BITS == 4 ? 3 : 6, 7}};
    uint32_t lows[2], highs[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const int *const o = kOrder[w], a = o[0], b = o[1], c = o[2], d = o[3];
      lows[w] = __byte_perm(__byte_perm(low[a], low[b], 0x0040), __byte_perm(low[c], low[d], 0x0040), 0x5410);
      highs[w] = __byte_perm(__byte_perm(high[a], high[b], 0x0051), __byte_perm(high[c], high[d], 0x0051), 0x5410);
    }
    // Neither is a number, if `by` is not.
    const float by = most * (1 / 32512.0f), sum = by * 0 + static_cast<float>(all);
    if (!is_there) return 0;
    uint2* const to = reinterpret_cast<uint2*>(x) + chunk / 4 * 8 + chunk % 4;
    to[0] = make_uint2(highs[0], highs[1]), to[4] = make_uint2(lows[0], lows[1]);
    if (chunk % 4) return 0;
    beside[chunk / 4] = make_float2(by, sum);
    return by * sum;
  }
};

__device__ __forceinline__ void widen8(const uint4& chunk, float* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i * 2] = wide_low(word(chunk, i)), v[i * 2 + 1] = wide_high(word(chunk, i));
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// What an output needs beside the product.
struct Beside {
  float2 qparams[2];
  float bias[2], before;
};

// 1 << group_shift: sets of a group.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    gemv(const uint4* weight, const void* qparams, const uint4* x, const float* bias, void* out, int features,
         int inputs, int k_tiles, int groups, int group_shift, int epilogue, int out_floats, int column) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool is_gated = epilogue >= kGatedSilu;
  const int outputs = is_gated ? features / 2 : features;
  const auto share = [&](int block) { return static_cast<int>(static_cast<long long>(outputs) * block / gridDim.x); };
  const int begin = share(blockIdx.x), all = share(blockIdx.x + 1) - begin, own = is_gated ? 2 * all : all;
  const int units = (k_tiles + 1) / 2, tiles = (own + 15) / 16, line = tiles * units;
  const int count = max(line - warp + WARPS - 1, 0) / WARPS;  // of this warp's units

  char* const stages = shared + warp * (kStages * kStageBytes);
  uint32_t stages_at = smem(stages) + lane * 16;
  keep(stages_at);
  const int chunks = units * (32 / BITS) * 4;  // times 8 inputs
  Row row;
  row.x = shared + WARPS * kStages * kStageBytes;
  row.beside = reinterpret_cast<float2*>(row.x + chunks * 16);
  float* const slots = reinterpret_cast<float*>(row.beside + chunks / 4);  // [tiles][WARPS][16]
  float* const of_warps = slots + tiles * WARPS * 16;                      // [WARPS]

  // What is asked for, kStages - 1 units ahead: features g and g + 8 of a tile.
  int asked_tile = warp / units, asked = warp % units;
  const uint4* from[2];
  const uint32_t* qparam_from[2];
  const auto enter = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = min(asked_tile * 16 + g + h * 8, own - 1),
                feature = i < all ? begin + i : outputs + begin + i - all;
      from[h] = weight + static_cast<long long>(feature) * (k_tiles * 4) + asked * 8 + t;
      qparam_from[h] = static_cast<const uint32_t*>(qparams) + feature;
    }
  };
  if (count) enter();
  const auto ask = [&](int stage) {
    const uint32_t to = stages_at + stage * kStageBytes;
    const bool has_second = asked * 2 + 1 < k_tiles;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      copy16(to + h * 512, from[h], true);
      copy16(to + (2 + h) * 512, from[h] + 4, has_second);
    }
    if constexpr (kGrouped) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int set = (asked * kQuads + q) * 4 + t;
        const int group = min(GROUP_SETS < kSets ? set / kGroupSets : set >> group_shift, groups - 1);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          copy4(to - lane * 16 + 2048 + (lane * kQparams + q * 2 + h) * 4,
                qparam_from[h] + static_cast<long long>(group) * features, true);
      }
    }
    for (asked += WARPS; asked >= units; asked -= units) ++asked_tile;
    enter();
  };
  int left = count;  // to be asked for
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (left > 0) ask(i), --left;
    commit();
  }
  let_next_begin();

  const auto beside_weight = [&](int i) {
    Beside beside = {};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (p == 1 && !is_gated) continue;
      const int f = begin + i + p * outputs;
      if (!kGrouped) beside.qparams[p] = static_cast<const float2*>(qparams)[f];
      if (bias) beside.bias[p] = bias[f];
    }
    return beside;
  };
  const auto adds_to = [&](int i) { return static_cast<const float*>(out)[column + begin + i]; };
  Beside mine = {};
  if (threadIdx.x < all) mine = beside_weight(threadIdx.x);
  for (int i = threadIdx.x; i < tiles * WARPS * 16; i += kThreads) slots[i] = 0;
  const int whole_warps = (chunks + 31) / 32 * 32;
  float total = 0;   // of x, as it is in integers
  wait_for_ahead();  // the weight is there before any kernel; x and out are not
  if (epilogue == kAdd && threadIdx.x < all) mine.before = adds_to(threadIdx.x);
  constexpr int kAtOnce = 5;
  for (int begins = threadIdx.x; begins < whole_warps; begins += kThreads * kAtOnce) {
    uint4 eight[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int chunk = begins + j * kThreads;
      eight[j] = make_uint4(0, 0, 0, 0);
      if (chunk < inputs / 8) eight[j] = load16(x + chunk);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int chunk = begins + j * kThreads;
      if (chunk >= whole_warps) continue;
      float v[8];
      widen8(eight[j], v);
      total += row.settle(v, chunk, chunk < chunks);
    }
  }
  if (kIsWhole && !kGrouped) {
    total = sum_of_warp(total);
    if (lane == 0) of_warps[warp] = total;
  }
  __syncthreads();

  int tile = warp / units, k = warp % units, stage = 0, free = kStages - 1;
  float sum[2] = {};
  for (int at = 0; at < count; ++at) {
    if (left > 0) ask(free), --left;
    commit();
    wait_for<kStages - 1>();
    const char* const held = stages + stage * kStageBytes;
    free = stage;
    stage = stage == kStages - 1 ? 0 : stage + 1;
    uint4 chunk[2][2];  // of each k tile, of each feature
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) chunk[s][h] = *reinterpret_cast<const uint4*>(held + (s * 2 + h) * 512 + lane * 16);
    uint32_t pairs[kQuads][2] = {};
    if constexpr (kGrouped) {
      const char* const from_pairs = held + 2048 + lane * (kQparams * 4);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const uint2 of_features = *reinterpret_cast<const uint2*>(from_pairs + q * 8);
        pairs[q][0] = of_features.x, pairs[q][1] = of_features.y;
      }
    }
    if constexpr (kIsWhole) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int quad = k * kQuads + q;
        const uint2 of_lane = reinterpret_cast<const uint2*>(row.x)[quad * 32 + lane];
        const float2 beside = row.beside[quad * 4 + t];
        int c[4];
#pragma unroll
        for (int set = 0; set < 4; ++set) {
          const int k_tile = BITS == 4 ? q : set / 2;
          const uint32_t low = g / 2 == set ? of_lane.x : 0, high = g / 2 == set ? of_lane.y : 0;
          uint32_t a[4];
          decode_whole(chunk[k_tile][0], chunk[k_tile][1], BITS == 4 ? set : set % 2, a);
          if (set == 0)
            multiply_whole_anew(c, a, low, high);
          else
            multiply_whole(c, a, low, high);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float product = static_cast<float>(c[h * 2] * 256 + c[h * 2 + 1]);
          if constexpr (kGrouped) {
            const float scale = scale_of(pairs[q][h], 0);
            product = scale * product - (kLack * scale + offset_of(pairs[q][h])) * beside.y;
          }
          sum[h] = fmaf(beside.x, product, sum[h]);
        }
      }
    } else {
      float c[4] = {};
#pragma unroll
      for (int set = 0; set < 2 * kSets; ++set) {
        const uint4 b = reinterpret_cast<const uint4*>(row.x)[(k * 2 * kSets + set) * 4 + t];
        const uint4 &first_chunk = chunk[set / kSets][0], &second_chunk = chunk[set / kSets][1];
        uint32_t low[4], high[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          widen_e4m3(low + half * 2, word(first_chunk, set % kSets * 2 + half));
          widen_e4m3(high + half * 2, word(second_chunk, set % kSets * 2 + half));
        }
        const uint32_t a[2][4] = {{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}};
        multiply_halves(c, a[0], b.x, b.y), multiply_halves(c, a[1], b.z, b.w);
      }
      const float by = row.beside[k * 4].x;
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = fmaf(kGrouped ? by * scale_of(pairs[0][h], 0) : by, c[h * 2], sum[h]);
    }
    const int before = tile;
    for (k += WARPS; k >= units; k -= units) ++tile;
    if (tile != before || at + 1 == count) {  // of that tile, there is no more here
      float* const slot = slots + (before * WARPS + warp) * 16;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kIsWhole) sum[h] += __shfl_xor_sync(~0u, sum[h], 1), sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (t == 0) slot[g + h * 8] = sum[h];
        sum[h] = 0;
      }
    }
  }
  __syncthreads();

  const auto product = [&](int p, int i, const Beside& beside) {
    const int f = p * all + i, tile = f / 16;
    float value = 0, of_x = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) value += slots[(tile * WARPS + w) * 16 + f % 16];
    if constexpr (!kGrouped) {
      value *= beside.qparams[p].x;
      if constexpr (kIsWhole) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) of_x += of_warps[w];
        value -= (kLack * beside.qparams[p].x + beside.qparams[p].y) * of_x;
      }
    }
    return value + beside.bias[p];
  };
  for (int i = threadIdx.x; i < all; i += kThreads) {
    if (i >= kThreads) {
      mine = beside_weight(i);
      if (epilogue == kAdd) mine.before = adds_to(i);
    }
    float value = product(0, i, mine);
    if (is_gated) value = gated(value, product(1, i, mine), epilogue);
    if (out_floats)
      static_cast<float*>(out)[column + begin + i] = value + mine.before;
    else
      static_cast<bf16*>(out)[column + begin + i] = narrow(value);
  }
  wait_for<0>();
}
