// Products of the rows of each expert with that expert's weight in rows (kernels/row_layout.py), bound by reading the
// weights of those that have rows, once for each kRows rows. What has rows is found on the device, from where the slots
// of each place begin: nothing here depends on a routing but what blocks do.
//
// Compiled with BITS and FLOATS (decode.cuh); GROUP_SETS as in skinny.cu; MODE, what becomes of a product (below);
// TILES, of 8 rows; WARPS_K and WARPS_F, warps along the inputs and along the features; STAGES, k tiles of a warp that
// are on their way.
//
// A unit is up to kRows slots of one expert and 16 features of each of WARPS_F warps; gated, 8 of either half, which a
// lane then has together. Warps take k tiles in turn and add up in shared memory at the end of a unit; copies run
// ahead over the ends of units. Of kSum, a block owns features, and goes over the units of all places in order, so that
// a token's sum has one order.
#include "linear/decode.cuh"

#ifndef GROUP_SETS
#define GROUP_SETS 0
#endif
#ifndef MODE
#define MODE 0
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef WARPS_K
#define WARPS_K 16
#endif
#ifndef WARPS_F
#define WARPS_F 1
#endif
#ifndef STAGES
#define STAGES 4
#endif
constexpr int kSlots = 0, kGated = 1, kSum = 2;  // rows of slots, gated ones, and weighted sums of a token's
constexpr int kThreads = 32 * WARPS_K * WARPS_F, kStages = STAGES, kRows = 8 * TILES;
constexpr bool kGrouped = GROUP_SETS > 0, kHasSums = BITS < 16 && !FLOATS;
constexpr int kGroupSets = kGrouped ? GROUP_SETS : kSets, kGroups = kSets / kGroupSets;  // of a k tile
constexpr int kQparams = kGrouped ? kGroups * 16 : 0, kQparamCopies = (kQparams + 31) / 32;
constexpr int kXBytes = kSets * TILES * 512, kStageBytes = 1024 + kXBytes + kQparams * 4;
constexpr int kEach = MODE == kGated ? 8 : 16, kOutputs = kEach * WARPS_F;  // outputs of a warp, and of a unit
constexpr int kPitch = 17, kHeld = 512;

// How x, weights and out lie; sizes are of elements.
struct Product {
  long long place_bytes, qparams_at;  // of a place, and where its qparams begin
  int places, rows, top_k, x_top_k, features, inputs, k_tiles, group_sets, groups;
  int x_stride, out_stride, column, activation, out_floats, adds, pad;
};

struct Unit {
  int place, first, rows, feature;  // slots in order of places, from `first` on; output 0
};

// x_top_k: 1 where slots of a token share its row of x, else top_k.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expert_product(const char* weight, const bf16* x, const float* bias, const int* starts, const int* slots,
                   const float* factors, void* out, Product p) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_k = warp % WARPS_K, warp_f = warp / WARPS_K;
  const int outputs = MODE == kGated ? p.features / 2 : p.features;
  const auto share = [&](int block) { return static_cast<int>(static_cast<long long>(outputs) * block / gridDim.x); };
  const int begin = MODE == kSum ? share(blockIdx.x) : 0, end = MODE == kSum ? share(blockIdx.x + 1) : outputs;

  float* const sums = reinterpret_cast<float*>(shared + WARPS_K * WARPS_F * kStages * kStageBytes);
  float* const x_sums = sums + 2 * WARPS_K * WARPS_F * kRows * kPitch;  // [2][WARPS_K][kRows]
  float* const totals = x_sums + (kHasSums && !kGrouped ? 2 * WARPS_K * kRows : 0);
  int* const held = reinterpret_cast<int*>(totals + (MODE == kSum ? p.rows * kOutputs : 0));
  int* const tiles_before = held + kHeld;              // [places + 1]: row tiles of the places before
  int* const starts_of = tiles_before + p.places + 1;  // [places + 1]
  if (MODE == kSum)
    for (int i = threadIdx.x; i < p.rows * kOutputs; i += kThreads) totals[i] = 0;
  let_next_begin();
  wait_for_ahead();
  for (int i = threadIdx.x; i <= p.places; i += kThreads) starts_of[i] = starts[i];
  __syncthreads();
  const int all = starts_of[p.places];
  for (int i = threadIdx.x; i < min(all, kHeld); i += kThreads) held[i] = slots[i];
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first < p.places; first += 32) {
      const int place = first + lane;
      const int own = place < p.places ? (starts_of[place + 1] - starts_of[place] + kRows - 1) / kRows : 0;
      int up_to = own;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const int other = __shfl_up_sync(~0u, up_to, o);
        if (lane >= o) up_to += other;
      }
      if (place < p.places) tiles_before[place] = before + up_to - own;
      before += __shfl_sync(~0u, up_to, 31);
    }
    if (lane == 0) tiles_before[p.places] = before;
  }
  __syncthreads();
  const auto slot_at = [&](int i) { return i < kHeld ? held[i] : slots[i]; };

  const int row_tiles = tiles_before[p.places], feature_tiles = (outputs + kOutputs - 1) / kOutputs;
  const int line = MODE == kSum ? row_tiles : row_tiles * feature_tiles;
  const int first_unit = MODE == kSum ? 0 : blockIdx.x, step = MODE == kSum ? 1 : gridDim.x;
  const int units = line > first_unit ? (line - first_unit + step - 1) / step : 0;
  const auto unit_at = [&](int i) {
    const int at = first_unit + i * step, tile = MODE == kSum ? at : at / feature_tiles;
    int low = 0, high = p.places;  // tiles_before[low] <= tile < tiles_before[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tiles_before[middle] <= tile ? low : high) = middle;
    }
    Unit unit;
    unit.place = low, unit.first = starts_of[low] + (tile - tiles_before[low]) * kRows;
    unit.rows = min(kRows, starts_of[low + 1] - unit.first);
    unit.feature = MODE == kSum ? begin : at % feature_tiles * kOutputs;
    return unit;
  };
  // Feature i of the 16 that are rows of a warp's product; the last one again where there are no more.
  const auto feature = [&](const Unit& unit, int i) {
    const int output = min(unit.feature + warp_f * kEach + i % kEach, end - 1);
    return output + (i < kEach ? 0 : outputs);
  };

  const int count = warp_k < p.k_tiles ? (p.k_tiles - warp_k - 1) / WARPS_K + 1 : 0;  // of this warp's k tiles
  const int sets = GROUP_SETS < kSets ? kGroupSets : p.group_sets;                    // of a group
  const uint4* from[2];
  const uint32_t* pair_from[kQparamCopies + 1];
  const bf16* x_from[TILES];
  int asked_unit = 0, asked = 0, asked_rows = 0;
  const auto enter = [&] {
    const Unit unit = unit_at(asked_unit);
    const char* const own = weight + unit.place * p.place_bytes;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      from[h] = reinterpret_cast<const uint4*>(own) +
                static_cast<long long>(feature(unit, g + 8 * h)) * (p.k_tiles * 4) + warp_k * 4 + t;
#pragma unroll
    for (int j = 0; j < kQparamCopies; ++j)
      pair_from[j] = reinterpret_cast<const uint32_t*>(own + p.qparams_at) + feature(unit, (j * 32 + lane) % 16);
    asked_rows = unit.rows;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
      if (n * 8 + g < asked_rows) {
        const int slot = slot_at(unit.first + n * 8 + g);
        x_from[n] = x + static_cast<long long>(p.x_top_k == 1 ? slot / p.top_k : slot) * p.x_stride + t * 8;
      }
  };
  char* const stages = shared + warp * (kStages * kStageBytes) + lane * 16;
  uint32_t stages_at = smem(stages);
  keep(stages_at);
  const auto ask = [&](uint32_t to) {
    const int k_tile = warp_k + asked * WARPS_K;
#pragma unroll
    for (int h = 0; h < 2; ++h) copy16(to + h * 512, from[h], true), from[h] += WARPS_K * 4;
#pragma unroll
    for (int j = 0; j < kQparamCopies; ++j) {
      const int at = j * 32 + lane, group = k_tile * kSets / sets + at / 16;
      const bool is_there = group < p.groups;
      if (kQparams % 32 == 0 || at < kQparams)
        copy4(to - lane * 16 + 1024 + kXBytes + at * 4,
              is_there ? pair_from[j] + static_cast<long long>(group) * p.features : pair_from[j], is_there);
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const int at = (k_tile * kSets + set) * 32;
        const bool is_there = at + t * 8 < p.inputs;
        if (n * 8 + g < asked_rows)
          copy16(to + 1024 + (set * TILES + n) * 512, is_there ? x_from[n] + at : x_from[n], is_there);
      }
    if (++asked == count) {
      asked = 0;
      if (++asked_unit < units) enter();
    }
  };
  if (units) enter();
  int left = units * count;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (left > 0) ask(stages_at + i * kStageBytes), --left;
    commit();
  }

  // The output that this thread writes of each unit, in rows `my_row` and on.
  const int mine = threadIdx.x % kOutputs, my_row = threadIdx.x / kOutputs;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  int stage_at = 0, free_at = (kStages - 1) * kStageBytes;  // bytes
  for (int u = 0; u < units; ++u) {
    const Unit unit = unit_at(u);
    const int output = unit.feature + mine;
    const bool is_mine = output < end;
    float2 qparams[2] = {};
    float biases[2] = {};
#pragma unroll
    for (int h = 0; h < (MODE == kGated ? 2 : 1); ++h) {
      const int f = min(output, end - 1) + h * outputs;
      if (BITS < 16 && !kGrouped)
        qparams[h] = reinterpret_cast<const float2*>(weight + unit.place * p.place_bytes + p.qparams_at)[f];
      if (bias) biases[h] = bias[static_cast<long long>(unit.place) * p.features + f];
    }
    float sum[TILES][4] = {}, group_sum[TILES][4] = {}, x_sum[TILES][4] = {};
    for (int k = 0; k < count; ++k) {
      if (kGrouped) __syncwarp();  // qparams are copied by other lanes
      if (left > 0) ask(stages_at + free_at), --left;
      commit();
      wait_for<kStages - 1>();
      if (kGrouped) __syncwarp();
      const char* const stage = stages + stage_at;
      free_at = stage_at;
      stage_at = stage_at == (kStages - 1) * kStageBytes ? 0 : stage_at + kStageBytes;
      const uint4 first = *reinterpret_cast<const uint4*>(stage);
      const uint4 second = *reinterpret_cast<const uint4*>(stage + 512);
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        uint32_t low[4], high[4];
        decode(first, set, low);
        decode(second, set, high);
        const uint32_t a[2][4] = {{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}};
        const bool is_first = kGrouped && set % kGroupSets == 0;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const uint4 b = *reinterpret_cast<const uint4*>(stage + 1024 + (set * TILES + n) * 512);
          float* const c = kGrouped ? group_sum[n] : sum[n];
          if (is_first)
            multiply_anew(c, a[0], b.x, b.y);
          else
            multiply(c, a[0], b.x, b.y);
          multiply(c, a[1], b.z, b.w);
          if constexpr (kHasSums) {
            if (is_first)
              multiply_anew(x_sum[n], ones, b.x, b.y);
            else
              multiply(x_sum[n], ones, b.x, b.y);
            multiply(x_sum[n], ones, b.z, b.w);
          }
        }
        if (kGrouped && (set + 1) % kGroupSets == 0) {
          const char* const pairs = stage - lane * 16 + 1024 + kXBytes + (set / kGroupSets * 16 + g) * 4;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t pair = *reinterpret_cast<const uint32_t*>(pairs + h * 32);
            const float scale = kUnit * scale_of(pair), offset = kBase * scale + offset_of(pair);
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float& c = sum[n][h * 2 + e];
                c += scale * group_sum[n][h * 2 + e];
                if (kHasSums) c -= offset * x_sum[n][e];
              }
          }
        }
      }
    }

    float* const of_unit = sums + u % 2 * (WARPS_K * WARPS_F * kRows * kPitch);
    float* const x_of_unit = x_sums + u % 2 * (WARPS_K * kRows);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = n * 8 + t * 2 + e;
        float* const to = of_unit + (warp * kRows + row) * kPitch + g;
        to[0] = sum[n][e], to[8] = sum[n][e + 2];
        if (kHasSums && !kGrouped && g == 0 && warp_f == 0) x_of_unit[warp_k * kRows + row] = x_sum[n][e];
      }
    __syncthreads();
    for (int row = my_row; row < unit.rows && is_mine; row += kThreads / kOutputs) {
      float value[2] = {}, of_x = 0;
      const float* const at = of_unit + (mine / kEach * WARPS_K * kRows + row) * kPitch + mine % kEach;
#pragma unroll
      for (int w = 0; w < WARPS_K; ++w) {
        value[0] += at[w * kRows * kPitch];
        if (MODE == kGated) value[1] += at[w * kRows * kPitch + 8];
        if (kHasSums && !kGrouped) of_x += x_of_unit[w * kRows + row];
      }
#pragma unroll
      for (int h = 0; h < (MODE == kGated ? 2 : 1); ++h) {
        if (BITS < 16 && !kGrouped) {
          value[h] *= kUnit * qparams[h].x;
          if (kHasSums) value[h] -= (kBase * kUnit * qparams[h].x + qparams[h].y) * of_x;
        }
        value[h] += biases[h];
      }
      const int slot = slot_at(unit.first + row);
      if (MODE == kSum) {
        totals[slot / p.top_k * kOutputs + mine] += factors[slot] * value[0];
        continue;
      }
      const float product = MODE == kGated ? gated(value[0], value[1], p.activation) : value[0];
      const long long to = static_cast<long long>(slot) * p.out_stride + p.column + output;
      if (p.out_floats)
        static_cast<float*>(out)[to] = product;
      else
        static_cast<bf16*>(out)[to] = narrow(product);
    }
  }
  wait_for<0>();
  if (MODE != kSum) return;
  __syncthreads();
  const int own = end - begin;
  for (int i = threadIdx.x; i < p.rows * own; i += kThreads) {
    const int row = i / own, output = i % own;
    const long long to = static_cast<long long>(row) * p.out_stride + begin + output;
    const float total = totals[row * kOutputs + output];
    if (p.out_floats)
      static_cast<float*>(out)[to] = p.adds ? static_cast<float*>(out)[to] + total : total;
    else
      static_cast<bf16*>(out)[to] = narrow(p.adds ? wide(static_cast<bf16*>(out)[to]) + total : total);
  }
}
