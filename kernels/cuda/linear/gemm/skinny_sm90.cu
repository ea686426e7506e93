// Products of up to 64 rows of x with a weight in rows (kernels/row_layout.py) of 4-bit codes, on Hopper. Bound by
// decoding them beside what tensor cores need, which at 64 rows is as long as reading the weight.
//
// Compiled with BITS and FLOATS (decode.cuh); GROUP_SETS, sets of 32 inputs of a step that share float16 scales (0:
// all inputs share float32 ones); STAGES (steps that are on their way or worked on).
//
// A block has one tile of the features (gated: the same number of either half), 16 a warp, and all rows of x; of the
// inputs all, or one of `splits` stretches, whose sums go to `partial` for skinny_sum. Warpgroups multiply: features
// are rows of a, which comes from registers as mma.sync would have it, rows of x columns of b, in shared memory. There
// x's inputs lie in the order in which a's registers have them: pairs are copied one by one. Codes of one scale a
// channel are multiplied as integers, and scales meet sums; with groups, they become 16-bit elements before.
#include "linear/decode.cuh"
#include "ptx/ptx_sm90.cuh"

#ifndef GROUP_SETS
#define GROUP_SETS 0
#endif
#ifndef STAGES
#define STAGES 5
#endif
static_assert(BITS == 4 && !FLOATS);
constexpr int kTiles = 8;                              // of 8 rows of x
constexpr int kStages = STAGES, kAhead = kStages - 2;  // products of one step still run while another is asked for
constexpr int kInputs = kSets * 32;                    // of a step
constexpr bool kGrouped = GROUP_SETS > 0;
constexpr int kGroupSets = kGrouped ? GROUP_SETS : kSets, kGroups = kSets / kGroupSets;
constexpr int kColumns = kTiles * 8, kXTile = kColumns * 128, kXBytes = kInputs / 64 * kXTile;
constexpr int kQparams = kGrouped ? kGroups * 16 : 0, kWarpBytes = 1024 + kQparams * 4;
constexpr int kPitch = kColumns + 1;  // floats
static_assert(kAhead >= 1);

// Rows of 128 bytes along k, in blocks of 8 whose 16 bytes are swapped as their number says.
constexpr uint64_t kAlong = static_cast<uint64_t>(1) << 62 | static_cast<uint64_t>(1024 >> 4) << 32 | 1 << 16;
__device__ __forceinline__ uint64_t matrix(uint32_t at) { return kAlong | (at & 0x3ffff) >> 4; }
// Byte of 4 bytes of a row: word `i` of the 16-byte chunk `chunk`.
__device__ __forceinline__ uint32_t place(int row, int chunk, int i) {
  return row * 128 + ((chunk ^ row % 8) * 4 + i) * 4;
}

extern "C" __global__ void __launch_bounds__(640, 1)
    skinny_sm90(const uint4* weight, const void* qparams, const bf16* x, const float* bias, void* out, float* partial,
                int rows, int features, int inputs, int k_tiles, int group_sets, int epilogue, int out_floats,
                int x_stride, int out_stride, int column, int tiles, int splits) {
  DYNAMIC_SHARED(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warps = blockDim.x / 32;
  const uint32_t base = (smem(memory) + 1023) / 1024 * 1024;
  char* const shared = memory + (base - smem(memory));
  const bool is_gated = epilogue >= kGatedSilu;
  const int outputs = is_gated ? features / 2 : features;
  const int tile = blockIdx.x / splits, split = blockIdx.x % splits;
  const auto share = [](int all, int i, int of) { return static_cast<int>(static_cast<long long>(all) * i / of); };
  const int begin = share(outputs, tile, tiles), width = share(outputs, tile + 1, tiles) - begin;
  const int mine = is_gated ? width * 2 : width;  // features of this block
  const int step0 = share(k_tiles, split, splits), count = share(k_tiles, split + 1, splits) - step0;
  // Feature i of the block; the last one again where there are no more.
  const auto feature = [&](int i) {
    const int j = min(i, mine - 1);
    return begin + (j < width ? j : outputs + j - width);
  };

  const int stage_bytes = (kXBytes + warps * kWarpBytes + 1023) / 1024 * 1024;
  const uint4* from[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    from[h] = weight + (static_cast<long long>(feature(warp * 16 + g + 8 * h)) * k_tiles + step0) * 4 + t;
  const int groups = (inputs + 32 * group_sets - 1) / (32 * group_sets);
  const uint32_t* const pairs = static_cast<const uint32_t*>(qparams) + feature(warp * 16 + lane % 16);
  const int codes_at = kXBytes + warp * kWarpBytes;
  const auto ask_weight = [&](int stage, int i) {
    const uint32_t to = base + stage * stage_bytes + codes_at + lane * 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) copy16(to + h * 512, from[h] + i * 4, true);
    if constexpr (kGrouped) {
      const int first = GROUP_SETS < kSets ? (step0 + i) * kGroups : (step0 + i) * kSets / group_sets;
#pragma unroll
      for (int j = 0; j < kQparams; j += 32) {
        const int group = first + (j + lane) / 16;
        if (j + lane < kQparams)
          copy4(to - lane * 16 + 1024 + ((j + lane) / 16 * 16 + lane % 8 * 2 + lane / 8 % 2) * 4,
                pairs + static_cast<long long>(min(group, groups - 1)) * features, group < groups);
      }
    }
  };
  // A warp copies 64 inputs of a row at once, two a lane: those that a thread's 16 bytes have to chunks of their own.
  const uint32_t x_chunk = lane / 16 * 4 + lane % 4, x_word = lane % 16 / 4;
  const auto ask_x = [&](int stage, int i) {
    const uint32_t to = base + stage * stage_bytes;
    const int input0 = (step0 + i) * kInputs + lane * 2;
#pragma unroll
    for (int part = 0; part < kInputs / 64; ++part)
      for (int row = warp; row < rows; row += warps)
        copy4(to + part * kXTile + place(row, x_chunk, x_word),
              x + static_cast<long long>(row) * x_stride + input0 + part * 64, input0 + part * 64 < inputs);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (i < count) ask_weight(i, i);
  let_next_begin();
  float2 scales[2] = {};
  if (!kGrouped) {
#pragma unroll
    for (int h = 0; h < 2; ++h) scales[h] = static_cast<const float2*>(qparams)[feature(warp * 16 + g + 8 * h)];
  }
  wait_for_ahead();  // the weight is there before any kernel; x and out are not
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < count) ask_x(i, i);
    commit();
  }

  float sum[kTiles * 4] = {};
  constexpr int kMost = (kTiles + 3) / 4;  // tiles of x that a warp has to add up
  float x_sum[kMost][4] = {};
  int stage = 0, free_stage = kAhead;
  for (int i = 0; i < count; ++i) {
    wait_for<kAhead - 1>();
    fence_shared();
    __syncthreads();
    if (i + kAhead < count) ask_weight(free_stage, i + kAhead), ask_x(free_stage, i + kAhead);
    commit();
    const uint32_t x_at = base + stage * stage_bytes;
    const char* const codes = shared + stage * stage_bytes + codes_at;
    free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    uint4 chunk[2];
    uint32_t a[2][2][4], scale[2], offset[2];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (set == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) chunk[h] = *reinterpret_cast<const uint4*>(codes + h * 512 + lane * 16);
      }
      if (kGrouped && set % kGroupSets == 0) {
        const uint2 both = *reinterpret_cast<const uint2*>(codes + 1024 + (set / kGroupSets * 16 + g * 2) * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t pair = h ? both.y : both.x;
          const float by = scale_of(pair, 0), more = 8 * by - offset_of(pair);
          scale[h] = pack(by, by), offset[h] = pack(more, more);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t pair[4];
        decode(chunk[h], set, pair);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (kGrouped) {  // less 1024 + 8, or 128 + 8
            const uint32_t code = FP16 ? add_pairs(pair[j] | 0x64006400, 0xe408e408) : add_pairs(pair[j], 0xc308c308);
            pair[j] = multiply_add(code, scale[h], offset[h]);
          }
          a[set % 2][j / 2][j % 2 * 2 + h] = pair[j];
        }
      }
      const uint64_t b = matrix(x_at + set / 2 * kXTile + set % 2 * 64);
      begin_products();
      multiply_rows(sum, a[set % 2][0], b);
      multiply_rows(sum, a[set % 2][1], b + (32 >> 4));
      end_products();
      if constexpr (!kGrouped) {
        const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
        const char* const x_of = shared + (x_at - base) + set / 2 * kXTile;
#pragma unroll
        for (int m = 0; m < kMost; ++m) {
          const int n = warp + m * warps;
          if (n >= kTiles) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int k = set % 2 * 4 + half * 2;
            multiply(x_sum[m], ones, *reinterpret_cast<const uint32_t*>(x_of + place(n * 8 + g, k, t)),
                     *reinterpret_cast<const uint32_t*>(x_of + place(n * 8 + g, k + 1, t)));
          }
        }
      }
      wait_products<1>();
    }
  }
  wait_products<0>();
  settle(sum);
  wait_for<0>();

  float* const x_sums = reinterpret_cast<float*>(shared + kStages * stage_bytes);
  if constexpr (!kGrouped) {
#pragma unroll
    for (int m = 0; m < kMost; ++m) {
      const int n = warp + m * warps;
      if (n < kTiles && g == 0)
        *reinterpret_cast<float2*>(x_sums + n * 8 + t * 2) = make_float2(x_sum[m][0], x_sum[m][1]);
    }
  }
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = warp * 16 + g + 8 * h, row = n * 8 + t * 2;
      if (i >= mine || row >= rows) continue;
      float2 value = make_float2(sum[n * 4 + h * 2], sum[n * 4 + h * 2 + 1]);
      if (!kGrouped) {
        const float less = kBase * scales[h].x + scales[h].y;
        value.x = value.x * (kUnit * scales[h].x) - less * x_sums[row];
        value.y = value.y * (kUnit * scales[h].x) - less * x_sums[row + 1];
      }
      if (splits > 1) {
        float* const to = partial + (static_cast<long long>(split) * features + feature(i)) * kColumns + row;
        *reinterpret_cast<float2*>(to) = value;
      } else {
        sums[i * kPitch + row] = value.x, sums[i * kPitch + row + 1] = value.y;
      }
    }
  if (splits > 1) return;
  __syncthreads();
  for (int at = threadIdx.x; at < width * rows; at += blockDim.x) {
    const int i = at % width, row = at / width;
    const long long to = static_cast<long long>(row) * out_stride + column + begin + i;
    float value = sums[i * kPitch + row] + (bias ? bias[begin + i] : 0);
    if (is_gated) {
      const float up = sums[(width + i) * kPitch + row] + (bias ? bias[outputs + begin + i] : 0);
      value = gated(value, up, epilogue);
    }
    if (!out_floats)
      static_cast<bf16*>(out)[to] = narrow(value);
    else
      static_cast<float*>(out)[to] = value + (epilogue == kAdd ? static_cast<const float*>(out)[to] : 0);
  }
}

// Adds up what blocks have of the same features, in order of the inputs, and makes of it what the product is to become.
// A thread has 4 rows of an output. Bound by L2.
extern "C" __global__ void skinny_sum(const float4* partial, const float* bias, void* out, int rows, int features,
                                      int epilogue, int out_floats, int out_stride, int column, int splits) {
  const bool is_gated = epilogue >= kGatedSilu;
  const int outputs = is_gated ? features / 2 : features;
  const int at = blockIdx.x * blockDim.x + threadIdx.x, i = at % outputs, row0 = at / outputs * 4;
  let_next_begin();
  const float biases[2] = {bias ? bias[i] : 0, bias && is_gated ? bias[outputs + i] : 0};
  wait_for_ahead();
  if (row0 >= rows) return;
  float value[2][4];
#pragma unroll
  for (int p = 0; p < 2; ++p) {
#pragma unroll
    for (int r = 0; r < 4; ++r) value[p][r] = biases[p];
    if (p == 1 && !is_gated) continue;
    const float4* from = partial + (static_cast<long long>(p * outputs + i) * kColumns + row0) / 4;
    for (int s = 0; s < splits; ++s, from += static_cast<long long>(features) * (kColumns / 4)) {
      const float4 more = __ldcg(from);
      value[p][0] += more.x, value[p][1] += more.y, value[p][2] += more.z, value[p][3] += more.w;
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (row0 + r >= rows) continue;
    const long long to = static_cast<long long>(row0 + r) * out_stride + column + i;
    float x = value[0][r];
    if (is_gated) x = gated(x, value[1][r], epilogue);
    if (!out_floats)
      static_cast<bf16*>(out)[to] = narrow(x);
    else
      static_cast<float*>(out)[to] = x + (epilogue == kAdd ? static_cast<const float*>(out)[to] : 0);
  }
}
