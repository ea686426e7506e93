// Products of up to 8 rows of x with a weight in rows (kernels/row_layout.py), for sm_80 and later.
// Bound by reading the weight, once, at the speed of memory. Every block has an equal share of the features, so that
// all end together; copies run ahead from one pass to the next, and begin while the kernel ahead still runs.
//
// Compiled with BITS and FLOATS (decode.cuh); GROUP_SETS, sets of 32 inputs of a k tile that share float16 scales (0:
// all inputs share float32 ones); WHOLE, whether x is multiplied as integers, too; TILES, of 8 rows of x, or 4 as
// integers; PARTS, of up to 16 features, that a warp has at once; WARPS and STAGES (k tiles of a warp that are on
// their way); BLOCKS (of a multiprocessor); RESIDENT, whether x stays in shared memory, for blocks that go over it
// again and again or have to make integers of it, or comes along with the weight.
//
// A block's features are neighbours (gated: of either half), in passes of PARTS parts of one size; its warps take k
// tiles of inputs in turn and add up in shared memory at the end of a pass. Features are rows of the product on tensor
// cores, rows of x its columns: with inputs in the order in which a thread's 16 bytes hold them, these are matrix
// fragments as they come, and so are 16 bytes of x. Codes are multiplied as integers; scales are applied once a group,
// to the sums of codes · x and of x itself. To make bfloat16 of codes takes more instructions than there are in the
// time that they take from memory, so x becomes integers of 16 bits with a scale for each k tile: two columns, 256 ·
// high + low.
//
// ADAPTED: with what a low-rank adapter adds to the product, of one row and 16-bit elements; see one_row.cuh.
#include "linear/gemm/integer_x.cuh"
#ifndef ADAPTED
#define ADAPTED 0
#endif
#if ADAPTED
#include "adapters/one_row.cuh"
#endif

// What an output needs beside the product.
struct Beside {
  float2 qparams[2];
  float bias[2], before;
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    skinny(const uint4* weight, const void* qparams, const bf16* x, const float* bias, void* out, int rows,
           int features, int inputs, int k_tiles, int group_sets, int epilogue, int out_floats, int x_stride,
           int out_stride, int column
#if ADAPTED
           ,
           const __grid_constant__ OneRow adapters
#endif
    ) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool is_gated = PARTS == 2 && epilogue >= kGatedSilu;
  const int outputs = is_gated ? features / 2 : features;
  // This block's outputs, in passes of up to `wide`.
  const auto share = [&](int block) { return static_cast<int>(static_cast<long long>(outputs) * block / gridDim.x); };
  const int begin = share(blockIdx.x), end = share(blockIdx.x + 1), all = end - begin;
  const int parts = is_gated ? 1 : PARTS, passes = (all + parts * 16 - 1) / (parts * 16);
  const int each = passes ? (all + passes * parts - 1) / (passes * parts) : 1, wide = each * parts;
  // Feature i of part p of the pass from `first` on; the last one again where there are no more.
  const auto output = [&](int first, int p, int i) { return first + (is_gated ? 0 : p * each) + i; };
  const auto feature = [&](int first, int p, int i) {
    return min(output(first, p, i), end - 1) + (is_gated ? p * outputs : 0);
  };
  const int count = warp < k_tiles ? (k_tiles - warp - 1) / WARPS + 1 : 0;  // of this warp's k tiles

  // What is asked for runs kStages - 1 k tiles ahead: where this lane's codes, qparams and inputs are, counted on from
  // k tile to k tile.
  int asked = begin, asked_k_tile = warp;
  uint32_t from[PARTS][2];  // of 16 bytes
  const int groups = (inputs + 32 * group_sets - 1) / (32 * group_sets);
  const int sets = GROUP_SETS < kSets ? kGroupSets : group_sets;  // of a group: known here where it is within a k tile
  const int group0 = warp * kSets / sets, within0 = warp * kSets % sets;
  const int more_groups = WARPS * kSets / sets, more_within = WARPS * kSets % sets;
  int group, within;
  const uint32_t* pair_from[kQparamCopies + 1];
  const auto enter = [&] {
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = min(g + 8 * h, each - 1);
        from[p][h] = static_cast<uint32_t>(feature(asked, p, i)) * (k_tiles * 4) + warp * 4 + t;
      }
#pragma unroll
    for (int j = 0; j < kQparamCopies; ++j) {
      const int at = j * 32 + lane;
      pair_from[j] = static_cast<const uint32_t*>(qparams) + feature(asked, at / 16 % PARTS, min(at % 16, each - 1)) +
                     static_cast<long long>(at / (PARTS * 16)) * features;
    }
    group = group0, within = within0;
  };
  if (passes) enter();
  char* const stages = shared + warp * (kStages * kStageBytes) + lane * 16;
  uint32_t stages_at = smem(stages);
  keep(stages_at);
  const auto ask_weight = [&](uint32_t to) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        copy16(to + (p * 2 + h) * 512, weight + from[p][h], g + 8 * h < each);  // none twice
        from[p][h] += WARPS * 4;
      }
    if constexpr (kGrouped) {
#pragma unroll
      for (int j = 0; j < kQparamCopies; ++j) {
        const int at = j * 32 + lane;
        const bool is_there = group + at / (PARTS * 16) < groups;
        if (kQparams % 32 == 0 || at < kQparams)
          copy4(to - lane * 16 + kCodeBytes + kXBytes + place_of_pair(at),
                is_there ? pair_from[j] + static_cast<long long>(group) * features : pair_from[0], is_there);
      }
      group += more_groups, within += more_within;
      if (within >= sets) within -= sets, ++group;
    }
  };
  const auto go_on = [&] {
    asked_k_tile += WARPS;
    if (asked_k_tile >= k_tiles) asked_k_tile = warp, asked += wide, enter();
  };
  const bf16* x_from[TILES];  // of this lane, of k tile 0; rows that are not there are the last one again
#pragma unroll
  for (int n = 0; n < TILES; ++n) x_from[n] = x + static_cast<long long>(min(n * 8 + g, rows - 1)) * x_stride + t * 8;
  const auto ask_x = [&](uint32_t to, int k_tile) {
    if constexpr (!kIsResident) {
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          const int at = (k_tile * kSets + set) * 32;
          if (n * 8 + g < rows) copy16(to + kCodeBytes + (set * TILES + n) * 512, x_from[n] + at, at + t * 8 < inputs);
        }
    }
  };
  const int steps = count * passes;
  int first_k_tiles[kStages - 1];
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    first_k_tiles[i] = asked_k_tile;
    if (i < steps) ask_weight(stages_at + i * kStageBytes), go_on();
    if (kIsResident) commit();
  }
  let_next_begin();
  const auto beside_weight = [&](int first, int i) {
    Beside beside = {};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (p == 1 && !is_gated) continue;
      const int f = first + i + p * outputs;
      if (BITS < 16 && !kGrouped) beside.qparams[p] = static_cast<const float2*>(qparams)[f];
      if (bias) beside.bias[p] = bias[f];
    }
    return beside;
  };
  const int width = min(wide, all), mine = threadIdx.x % max(width, 1), my_row = threadIdx.x / max(width, 1);
  Beside beside = {};
  if (my_row < rows && passes) beside = beside_weight(begin, mine);
#if ADAPTED
  // Behind what lies there else, sums and x.
  const int x_bytes = kIsResident ? ((k_tiles * kSets) | 1) * 64 : 0;
  char* const behind = shared + WARPS * kStages * kStageBytes + 2 * WARPS * kPitch * 4 + x_bytes;
  OneRowColumns<WARPS> adapter(adapters, reinterpret_cast<float*>(behind));
  const auto ask_numbers = [&](int first) {
    const int p = lane / 16, i = lane % 16, o = output(first, p, i);
    adapter.ask(is_gated, p, p < PARTS && i < each && o < end ? o : -1);
  };
  if (passes) ask_numbers(begin);
#endif
  wait_for_ahead();  // the weight is there before any kernel; x and out are not
#if ADAPTED
  adapter.copy_sums();
#endif
  const auto place = [&](int first, int i, int row) {
    return static_cast<long long>(row) * out_stride + column + first + i;
  };
  if (epilogue == kAdd && my_row < rows && passes)
    beside.before = static_cast<const float*>(out)[place(begin, mine, my_row)];

  float* const sums = reinterpret_cast<float*>(shared + WARPS * kStages * kStageBytes);  // of two passes by turns
  float* const warp_sums = sums + 2 * WARPS * rows * kPitch;                             // of x, [WARPS][kRows]
  // Of x as integers, for each group and row: the scale of the k tile, and their sum.
  float2* const of_groups = reinterpret_cast<float2*>(warp_sums + (kHasSums ? WARPS * kRows : 0));
  char* const x_at = reinterpret_cast<char*>(of_groups + (kIsWhole ? k_tiles * kGroups * rows : 0));
  const int x_pitch = ((k_tiles * kSets) | 1) * (kIsWhole ? 32 : 64);
  const char* x_of[TILES];  // of this lane, of k tile `warp`
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int last = (kIsWhole ? 2 * rows : rows) - 1;
    x_of[n] = x_at + min(n * 8 + g, last) * x_pitch + (warp * kSets * 4 + t) * (kIsWhole ? 8 : 16);
  }
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  float x_sum[TILES][4] = {};
  if constexpr (kIsResident) {
    // A thread has 8 inputs of a row, several times over: neighbours in a warp have neighbouring ones, up to whole
    // warps.
    const int chunks = k_tiles * kSets * 4, padded = (chunks + 31) / 32 * 32;
    constexpr int kAtOnce = 4;
    int row = 0, c = threadIdx.x;
    const auto settle_row = [&] {
      for (; c >= padded && row < rows; c -= padded) ++row;
    };
    settle_row();
    while (row < rows) {
      uint4 chunk[kAtOnce];
      int rows_of[kAtOnce], chunks_of[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        rows_of[j] = row, chunks_of[j] = c;
        chunk[j] = row < rows && c * 8 < inputs ? load16(x + static_cast<long long>(row) * x_stride + c * 8)
                                                : make_uint4(0, 0, 0, 0);
        c += kThreads, settle_row();
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int r = rows_of[j], at = chunks_of[j];
        if (r >= rows) continue;
        if constexpr (kIsWhole) {
          const Whole whole(chunk[j]);
          if (at < chunks) {
            *reinterpret_cast<uint2*>(x_at + r * 2 * x_pitch + at * 8) = whole.high;
            *reinterpret_cast<uint2*>(x_at + (r * 2 + 1) * x_pitch + at * 8) = whole.low;
            if (at % (kGroupSets * 4) == 0)
              of_groups[at / (kGroupSets * 4) * rows + r] = make_float2(whole.by, whole.sum);
          }
        } else if (at < chunks) {
          *reinterpret_cast<uint4*>(x_at + r * x_pitch + at * 16) = chunk[j];
        }
      }
    }
    __syncthreads();
  } else {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < steps) ask_x(stages_at + i * kStageBytes, first_k_tiles[i]);
      commit();
    }
  }

  int left = steps - (kStages - 1), stage_at = 0, free_at = (kStages - 1) * kStageBytes;  // bytes
  for (int pass = 0, first = begin; pass < passes; ++pass, first += wide) {
    if (pass > 0 && my_row < rows && mine < min(wide, end - first)) {
      beside = beside_weight(first, mine);
      if (epilogue == kAdd) beside.before = static_cast<const float*>(out)[place(first, mine, my_row)];
    }
#if ADAPTED
    if (pass > 0) ask_numbers(first);
#endif
    float sum[PARTS][TILES][4] = {}, group_sum[PARTS][TILES][4] = {};
    for (int k = 0; k < count; ++k) {
      if (kGrouped) __syncwarp();  // qparams are copied by other lanes
      if (left > 0) {
        ask_weight(stages_at + free_at), ask_x(stages_at + free_at, asked_k_tile), go_on(), --left;
      }
      commit();
      wait_for<kStages - 1>();
      if (kGrouped) __syncwarp();
      const char* const stage = stages + stage_at;
      free_at = stage_at;
      stage_at = stage_at == (kStages - 1) * kStageBytes ? 0 : stage_at + kStageBytes;
      uint4 chunk[PARTS][2];
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) chunk[p][h] = *reinterpret_cast<const uint4*>(stage + (p * 2 + h) * 512);
      const float2* const of_x = of_groups + (k * WARPS + warp) * kGroups * rows;
      if constexpr (kIsWhole) {
        int whole[PARTS][TILES][4];
        float k_tile_sum[PARTS][TILES][2], by[TILES];
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          uint2 b[TILES];
#pragma unroll
          for (int n = 0; n < TILES; ++n)
            b[n] = *reinterpret_cast<const uint2*>(x_of[n] + k * (WARPS * kSets * 32) + set * 32);
#pragma unroll
          for (int p = 0; p < PARTS; ++p) {
            uint32_t a[4];
            decode_whole(chunk[p][0], chunk[p][1], set, a);
#pragma unroll
            for (int n = 0; n < TILES; ++n)
              if (set % kGroupSets == 0)
                multiply_whole_anew(whole[p][n], a, b[n].x, b[n].y);
              else
                multiply_whole(whole[p][n], a, b[n].x, b[n].y);
          }
          if ((set + 1) % kGroupSets) continue;
          float x_total[TILES];
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            const float2 of_group = of_x[set / kGroupSets * rows + min(n * 4 + t, rows - 1)];
            by[n] = of_group.x, x_total[n] = of_group.y, x_sum[n][0] += of_group.x * of_group.y;
          }
          Pairs pairs;
          if (kGrouped) pairs = *reinterpret_cast<const Pairs*>(stage - lane * 16 + pairs_at(set / kGroupSets, g));
#pragma unroll
          for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
              for (int n = 0; n < TILES; ++n) {
                float& c = k_tile_sum[p][n][h];
                c = static_cast<float>(whole[p][n][h * 2] * 256 + whole[p][n][h * 2 + 1]);
                if (!kGrouped) continue;
                const float scale = scale_of(pairs.of[p][h], set), offset = kLack * scale + offset_of(pairs.of[p][h]);
                group_sum[p][n][h] = set < kGroupSets ? scale * c : group_sum[p][n][h] + scale * c;
                c = group_sum[p][n][h] -= offset * x_total[n];
              }
        }
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int n = 0; n < TILES; ++n) sum[p][n][h] += by[n] * k_tile_sum[p][n][h];
      } else {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          uint4 b[TILES];
#pragma unroll
          for (int n = 0; n < TILES; ++n)
            b[n] = *reinterpret_cast<const uint4*>(kIsResident ? x_of[n] + k * (WARPS * kSets * 64) + set * 64
                                                               : stage + kCodeBytes + (set * TILES + n) * 512);
#pragma unroll
          for (int p = 0; p < PARTS; ++p) {
            uint32_t low[4], high[4];
            decode(chunk[p][0], set, low);
            decode(chunk[p][1], set, high);
            const uint32_t a[2][4] = {{low[0], high[0], low[1], high[1]}, {low[2], high[2], low[3], high[3]}};
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
              float* const c = kGrouped ? group_sum[p][n] : sum[p][n];
              if (kGrouped && set % kScaleSets == 0)
                multiply_anew(c, a[0], b[n].x, b[n].y);
              else
                multiply(c, a[0], b[n].x, b[n].y);
              multiply(c, a[1], b[n].z, b[n].w);
            }
          }
          if constexpr (kHasSums) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
              if (kGrouped && set % kGroupSets == 0)
                multiply_anew(x_sum[n], ones, b[n].x, b[n].y);
              else
                multiply(x_sum[n], ones, b[n].x, b[n].y);
              multiply(x_sum[n], ones, b[n].z, b[n].w);
            }
          }
          if (kGrouped && (set + 1) % kScaleSets == 0) {
            const Pairs pairs = *reinterpret_cast<const Pairs*>(stage - lane * 16 + pairs_at(set / kGroupSets, g));
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const float scale = kTimes * scale_of(pairs.of[p][h], set);
                const float offset = kLack * scale + offset_of(pairs.of[p][h]);
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
    }

    float* const of_pass = sums + pass % 2 * (WARPS * rows * kPitch);
    constexpr int kOfLane = kIsWhole ? 1 : 2;  // rows of a tile
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < kOfLane; ++e) {
        const int row = n * kTileRows + t * kOfLane + e;
        if (row >= rows) continue;
        float* const to = of_pass + (warp * rows + row) * kPitch + g;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) to[p * 16] = sum[p][n][e], to[p * 16 + 8] = sum[p][n][e + kOfLane];
        if (kHasSums && !kGrouped && g == 0 && pass == 0) warp_sums[warp * kRows + row] = x_sum[n][e];
      }
#if ADAPTED
    if (count == 0) commit();            // no step has the copies with it
    if (count < kStages) wait_for<0>();  // … and else the first one has
    __syncwarp();
    adapter.add_to(of_pass + warp * kPitch + lane);
#endif
    __syncthreads();
    // Output i, of part p of the features.
    const auto product = [&](int p, int i, int row, const Beside& beside) {
      float value = 0, of_x = 0;
      const float* at = of_pass + row * kPitch + (is_gated ? p * 16 + i : i / each * 16 + i % each);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        value += at[w * rows * kPitch];
        if (kHasSums && !kGrouped) of_x += warp_sums[w * kRows + row];
      }
      if (BITS < 16 && !kGrouped) {
        value *= kTimes * beside.qparams[p].x;
        if (kHasSums) value -= (kLack * beside.qparams[p].x + beside.qparams[p].y) * of_x;
      }
      return value + beside.bias[p];
    };
    const int now = min(wide, end - first);
    for (int i = mine, row = my_row; row < rows;) {
      if (i < now) {
        const long long to = place(first, i, row);
        if (row != my_row) {
          beside = beside_weight(first, i);
          if (epilogue == kAdd) beside.before = static_cast<const float*>(out)[to];
        }
        float value = product(0, i, row, beside);
        if (is_gated) value = gated(value, product(1, i, row, beside), epilogue);
        if (out_floats)
          static_cast<float*>(out)[to] = value + beside.before;
        else
          static_cast<bf16*>(out)[to] = narrow(value);
      }
      i += kThreads;
      row += i / width, i %= width;
    }
  }
  wait_for<0>();
}
