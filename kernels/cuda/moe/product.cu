// Products of the rows of each expert with that expert's weight in rows (kernels/row_layout.py), bound by reading the
// weights of those that have rows, once for each kRows rows. What has rows is found on the device, from where the slots
// of each place begin: nothing here depends on a routing but what blocks do.
//
// Compiled with BITS and FLOATS (decode.cuh); GROUP_SETS, sets of 32 inputs of a span that share scales (0: all
// inputs share float32 ones); MODE, what becomes of a product (below); TILES, of 8 rows; WARPS, and STAGES, spans of a
// warp that are on their way; WORDS, whether experts begin at multiples of 4 bytes only.
//
// A tile is up to kRows slots of one expert and 16 features, gated 8 of either half, which a lane then has together; a
// span is 128 inputs of it. All tiles are one line, of which a block has an equal share, neighbours; the spans of these
// are one line again, of which its warps have equal shares. So no warp meets another before the end, where tiles that
// lie in the shares of several are added up, and copies run ahead over the ends of tiles. Of kSum, a block owns
// features of all experts: what it has of each slot is kept, and added up by tokens, in order of their places. Its
// copies, and those of a product that comes after another kernel than the router's, begin while the kernel ahead still
// runs, by what the routing is then, which is looked at again.
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
#ifndef WARPS
#define WARPS 8
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef WORDS
#define WORDS 0
#endif
constexpr int kSlots = 0, kGated = 1, kSum = 2;  // rows of slots, gated ones, and weighted sums of a token's
constexpr int kThreads = 32 * WARPS, kStages = STAGES, kRows = 8 * TILES;
constexpr int kSpanSets = 4, kSpanTiles = kSpanSets / kSets;  // k tiles of a span
constexpr bool kGrouped = GROUP_SETS > 0, kHasSums = BITS < 16 && !FLOATS;
constexpr int kGroupSets = kGrouped ? GROUP_SETS : kSpanSets, kGroups = kSpanSets / kGroupSets;
constexpr int kScaleSets = kHasBytes ? 1 : kGroupSets;
constexpr int kQparams = kGrouped ? kGroups * 16 : 0;  // words of a span
constexpr int kCodeBytes = kSpanTiles * 1024, kStageBytes = kCodeBytes + kQparams * 4;
constexpr int kEach = MODE == kGated ? 8 : 16;  // outputs of a tile
constexpr int kHeld = 512;

// How x, weights and out lie; sizes are of elements.
struct Product {
  long long place_bytes, qparams_at;  // of a place, and where its qparams begin
  int places, rows, top_k, x_top_k, features, inputs, k_tiles, groups;
  unsigned by_group;  // 2^32 over the number of spans, or of sets, that share scales, rounded up; 0: of one
  int x_stride, out_stride, column, activation, out_floats, adds, sum_tiles, is_settled;
};

struct Tile {
  int index, place, first, rows, until;  // slots in order of places, from `first` on; those of the place end at `until`
  int begin, end;                        // outputs
};

__device__ __forceinline__ void copy_chunk(uint32_t to, const uint4* from, bool is_there) {
  if constexpr (WORDS) {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy4(to + i * 4, reinterpret_cast<const uint32_t*>(from) + i, is_there);
  } else {
    copy16(to, from, is_there);
  }
}

// x_top_k: 1 where slots of a token share its row of x, else top_k. sum_tiles: tiles of a block's features, of kSum.
// is_settled: whether another kernel than the router's is ahead.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expert_product(const char* weight, const bf16* x, const float* bias, const int* starts, const int* slots,
                   const float* factors, void* out, Product p) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int outputs = MODE == kGated ? p.features / 2 : p.features, all_slots = p.rows * p.top_k;
  const auto share = [](int all, int i, int of) {  // where the i-th of so many equal shares begins
    const int each = static_cast<unsigned>(all) / static_cast<unsigned>(of);
    return each * i + min(i, all - each * of);
  };
  const int begin = MODE == kSum ? share(outputs, blockIdx.x, gridDim.x) : 0;
  const int own = MODE == kSum ? share(outputs, blockIdx.x + 1, gridDim.x) - begin : outputs;
  const int feature_tiles = MODE == kSum ? p.sum_tiles : (outputs + kEach - 1) / kEach;
  const int last_output = begin + own, of_tile = MODE == kSum ? (own + feature_tiles - 1) / feature_tiles : kEach;
  const int spans = (p.k_tiles + kSpanTiles - 1) / kSpanTiles;

  float4* const parts = reinterpret_cast<float4*>(shared + WARPS * kStages * kStageBytes);  // [WARPS][2][TILES][32]
  float* const products = reinterpret_cast<float*>(parts + WARPS * 2 * TILES * 32);         // [slots][own]
  float* const held_factors = products + (MODE == kSum ? all_slots * own : 0);
  int* const held = reinterpret_cast<int*>(held_factors + (MODE == kSum ? kHeld : 0));
  int* const of_warps = held + kHeld;               // [WARPS]
  int* const starts_of = of_warps + WARPS;          // [places + 1]
  int* const places_of = starts_of + p.places + 1;  // [places]: those that have rows, in order
  int* const tiles_before = places_of + p.places;   // [places]: row tiles of those before
  if (MODE == kSum)
    for (int i = threadIdx.x; i < all_slots * own; i += kThreads) products[i] = 0;

  // Whatever starts hold, no tile is of a place that is not there. Returns the number of row tiles.
  int with_rows = 0;
  const auto list = [&] {
    constexpr int kBits = 20;  // tiles so far, and above these bits places
    int before = 0;
    // Each is read once: what is listed is what is looked at again, though they may change meanwhile.
    for (int i = threadIdx.x; i <= p.places; i += kThreads) starts_of[i] = min(max(__ldcg(starts + i), 0), all_slots);
    __syncthreads();
    for (int first = 0; first < p.places; first += kThreads) {
      const int place = first + threadIdx.x;
      const int from = place < p.places ? starts_of[place] : 0, until = place < p.places ? starts_of[place + 1] : 0;
      const int count = (max(until - from, 0) + kRows - 1) / kRows, mine = count | (count ? 1 << kBits : 0);
      int up_to = mine;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const int other = __shfl_up_sync(~0u, up_to, o);
        if (lane >= o) up_to += other;
      }
      if (lane == 31) of_warps[warp] = up_to;
      __syncthreads();
      int its = lane < WARPS ? of_warps[lane] : 0, earlier = lane < warp ? its : 0;
#pragma unroll
      for (int o = 16; o; o >>= 1) its += __shfl_xor_sync(~0u, its, o), earlier += __shfl_xor_sync(~0u, earlier, o);
      const int so_far = before + earlier + up_to - mine;
      if (count) places_of[so_far >> kBits] = place, tiles_before[so_far >> kBits] = so_far & ((1 << kBits) - 1);
      before += its;
      __syncthreads();
    }
    with_rows = before >> kBits;
    return before & ((1 << kBits) - 1);
  };

  int tile0 = 0, all_spans = 0, run = 0, run_end = 0;  // the block's first tile and its spans; this warp's
  const auto share_out = [&] {
    const int line = list() * feature_tiles;
    tile0 = MODE == kSum ? 0 : share(line, blockIdx.x, gridDim.x);
    all_spans = (MODE == kSum ? line : share(line, blockIdx.x + 1, gridDim.x) - tile0) * spans;
    run = share(all_spans, warp, WARPS), run_end = share(all_spans, warp + 1, WARPS);
  };
  const auto enter_place = [&](Tile& tile, int index, int tiles) {
    const int place = places_of[index], from = starts_of[place];
    tile.index = index, tile.place = place, tile.first = from + tiles * kRows, tile.until = starts_of[place + 1];
    tile.rows = min(kRows, tile.until - tile.first);
  };
  const auto tile_at = [&](int i) {
    const int row_tile = (tile0 + i) / feature_tiles;
    int index = -1;
    for (int first = 0; first < with_rows; first += 32)
      index += __popc(__ballot_sync(~0u, first + lane < with_rows && tiles_before[first + lane] <= row_tile));
    Tile tile;
    enter_place(tile, index, row_tile - tiles_before[index]);
    tile.begin = begin + (tile0 + i) % feature_tiles * of_tile, tile.end = min(tile.begin + of_tile, last_output);
    return tile;
  };
  const auto advance = [&](Tile& tile) {
    tile.begin += of_tile;
    if (tile.begin >= last_output) {
      tile.begin = begin, tile.first += kRows;
      if (tile.first < tile.until)
        tile.rows = min(kRows, tile.until - tile.first);
      else
        enter_place(tile, tile.index + 1, 0);
    }
    tile.end = min(tile.begin + of_tile, last_output);
  };
  // Feature i of the 16 that are rows of a tile's product; the last one again where there are no more.
  const auto feature = [&](const Tile& tile, int i) {
    return min(tile.begin + i % kEach, tile.end - 1) + (i < kEach ? 0 : outputs);
  };
  const auto slot_at = [&](int i) { return i < kHeld ? held[i] : slots[i]; };

  // What is asked for, kStages - 1 spans ahead.
  char* const stages = shared + warp * (kStages * kStageBytes);
  uint32_t stages_at = smem(stages) + lane * 16;
  keep(stages_at);
  bool is_real = MODE == kSum || p.is_settled;
  int asked = 0, asked_span = 0;
  Tile asked_tile;
  const uint4* from[2];
  const uint32_t* qparams_from = nullptr;
  const auto enter = [&] {
    const char* const expert = weight + asked_tile.place * p.place_bytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const long long row = static_cast<long long>(feature(asked_tile, g + 8 * h)) * (p.k_tiles * 4);
      from[h] = reinterpret_cast<const uint4*>(expert) + row + asked_span * (kSpanTiles * 4) + t;
    }
    const auto* const pairs = reinterpret_cast<const uint32_t*>(expert + p.qparams_at);
    if (kQparams) qparams_from = pairs + feature(asked_tile, lane % 16);
  };
  const auto ask = [&](int stage) {
    const uint32_t to = stages_at + stage;
    const auto copy = [&](int i, bool is_there) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        copy_chunk(to + (i * 2 + h) * 512, is_there ? from[h] + i * 4 : from[h], is_there && is_real);
    };
    if (kSpanTiles == 1 || (asked_span + 1) * kSpanTiles <= p.k_tiles) {
#pragma unroll
      for (int i = 0; i < kSpanTiles; ++i) copy(i, true);
    } else {
#pragma unroll
      for (int i = 0; i < kSpanTiles; ++i) copy(i, asked_span * kSpanTiles + i < p.k_tiles);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) from[h] += kSpanTiles * 4;
#pragma unroll
    for (int j = 0; j < kQparams; j += 32) {
      const int row = (j + lane) / 16;
      const int index = kGroups == 1 ? asked_span : asked_span * kSpanSets + row * kGroupSets;
      const int at = p.by_group == 0 ? index : static_cast<int>(__umulhi(index, p.by_group));
      const bool is_there = at < p.groups;
      if (kQparams % 32 == 0 || j + lane < kQparams)
        copy4(to - lane * 16 + kCodeBytes + (j + lane) * 4,
              qparams_from + static_cast<long long>(is_there ? at : 0) * p.features, is_there && is_real);
    }
    if (++asked_span == spans) {
      asked_span = 0;
      if (asked + 1 < run_end) advance(asked_tile), enter();
    }
    ++asked;
  };
  Tile first_of_run;
  const auto begin_asking = [&] {
    asked = run, asked_span = run % spans;
    if (run < run_end) first_of_run = asked_tile = tile_at(run / spans), enter();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (asked < run_end) ask(i * kStageBytes);
      commit();
    }
  };

  // Of kSum: where the i-th of a block's sums goes, and what is there.
  const auto place_of_sum = [&](int i) { return static_cast<long long>(i / own) * p.out_stride + begin + i % own; };
  const auto read_out = [&](int i) {
    const long long at = place_of_sum(i);
    return p.out_floats ? static_cast<const float*>(out)[at] : wide(static_cast<const bf16*>(out)[at]);
  };
  float before = 0;  // of this thread's first sum: it is asked for early
  // Twice: while the kernel ahead still runs by what the routing is then, if only so that the instructions are in the
  // cache, and again unless that was right.
  if (MODE == kSum) let_next_begin();
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    if (turn) {
      wait_for_ahead();
      bool is_other = !is_real;
      if (is_real)
        for (int i = threadIdx.x; i <= p.places; i += kThreads) is_other |= __ldcg(starts + i) != starts_of[i];
      for (int i = threadIdx.x; i < min(all_slots, kHeld); i += kThreads) {
        held[i] = slots[i];
        if (MODE == kSum) held_factors[i] = factors[i];
      }
      if (MODE == kSum && p.adds && threadIdx.x < p.rows * own) before = read_out(threadIdx.x);
      if (!__syncthreads_or(is_other)) break;
      wait_for<0>();
      is_real = true;
    }
    share_out();
    begin_asking();
  }
  if (MODE != kSum) let_next_begin();

  // This lane has outputs of features g and g + 8 in rows 2 t and 2 t + 1 of each 8.
  const auto finish = [&](const Tile& tile, const float* more, float (&sum)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[n][h * 2] += more[h], sum[n][h * 2 + 1] += more[h];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = n * 8 + t * 2 + e;
        if (row >= tile.rows) continue;
        const int slot = slot_at(tile.first + row);
#pragma unroll
        for (int h = 0; h < (MODE == kGated ? 1 : 2); ++h) {
          const int output = tile.begin + g + 8 * h;
          if (output >= tile.end) continue;
          const float value = MODE == kGated ? gated(sum[n][e], sum[n][2 + e], p.activation) : sum[n][h * 2 + e];
          const long long to = static_cast<long long>(slot) * p.out_stride + p.column + output;
          if (MODE == kSum)
            products[slot * own + output - begin] = value;
          else if (p.out_floats)
            static_cast<float*>(out)[to] = value;
          else
            static_cast<bf16*>(out)[to] = narrow(value);
        }
      }
  };

  const auto biases_of = [&](const Tile& tile, float* more) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      more[h] = bias ? bias[static_cast<long long>(tile.place) * p.features + feature(tile, g + 8 * h)] : 0;
  };

  Tile tile;
  const bf16* x_from[TILES];
  uint4 b[kSpanSets][TILES];
  int k = run % spans;
  const auto enter_rows = [&] {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int slot = slot_at(tile.first + (n * 8 + g < tile.rows ? n * 8 + g : 0));
      const int row = p.x_top_k == 1 ? slot / p.top_k : slot;
      x_from[n] = x + static_cast<long long>(row) * p.x_stride + k * 128 + t * 8;
    }
  };
  const auto load_x = [&] {
    const bool is_whole = (k + 1) * 128 <= p.inputs;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int set = 0; set < kSpanSets; ++set) {
        if (is_whole) {
          b[set][n] = *reinterpret_cast<const uint4*>(x_from[n] + set * 32);
        } else {
          b[set][n] = make_uint4(0, 0, 0, 0);
          if (k * 128 + set * 32 + t * 8 < p.inputs) b[set][n] = *reinterpret_cast<const uint4*>(x_from[n] + set * 32);
        }
      }
      x_from[n] += 128;
    }
  };

  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  int stage_at = 0, free_at = (kStages - 1) * kStageBytes;  // bytes
  const int first_tile = run / spans;
  bool is_first_tile = true, is_whole = k == 0;  // whether this warp has had all spans of the tile so far
  float2 qparams[2] = {};
  float biases[2] = {};
  // Two sums of each output, so that products wait for each other half as often.
  float sum[TILES][4] = {}, more_sum[TILES][4] = {}, group_sum[TILES][4] = {}, x_sum[TILES][4] = {};
  for (int at = run; at < run_end; ++at) {
    if (at == run || k == 0) {
      if (at == run)
        tile = first_of_run;
      else
        advance(tile);
      enter_rows();
      biases_of(tile, biases);
      if (BITS < 16 && !kGrouped)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const char* const pairs = weight + tile.place * p.place_bytes + p.qparams_at;
          qparams[h] = reinterpret_cast<const float2*>(pairs)[feature(tile, g + 8 * h)];
        }
    }
    load_x();
    if (kQparams) __syncwarp();  // qparams are copied by other lanes
    if (asked < run_end) ask(free_at);
    commit();
    wait_for<kStages - 1>();
    if (kQparams) __syncwarp();
    const char* const stage = stages + stage_at;
    free_at = stage_at;
    stage_at = stage_at == (kStages - 1) * kStageBytes ? 0 : stage_at + kStageBytes;
    uint4 chunk[2];
#pragma unroll
    for (int set = 0; set < kSpanSets; ++set) {
      if (set % kSets == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          chunk[h] = *reinterpret_cast<const uint4*>(stage + (set / kSets * 2 + h) * 512 + lane * 16);
      }
      uint32_t pairs[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) decode(chunk[h], set % kSets, pairs[h]);
      const uint32_t a[2][4] = {{pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]},
                                {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]}};
      const bool is_first = kGrouped && set % kScaleSets == 0;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const uint4 column = b[set][n];
        float* const c = kGrouped ? group_sum[n] : sum[n];
        if (is_first)
          multiply_anew(c, a[0], column.x, column.y);
        else
          multiply(c, a[0], column.x, column.y);
        multiply(kGrouped ? c : more_sum[n], a[1], column.z, column.w);
        if constexpr (kHasSums) {
          if (is_first)
            multiply_anew(x_sum[n], ones, column.x, column.y);
          else
            multiply(x_sum[n], ones, column.x, column.y);
          multiply(x_sum[n], ones, column.z, column.w);
        }
      }
      if (kGrouped && (set + 1) % kScaleSets == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const char* const pairs_at = stage + kCodeBytes + (set / kGroupSets * 16 + g + 8 * h) * 4;
          const uint32_t pair = *reinterpret_cast<const uint32_t*>(pairs_at);
          const float scale = kUnit * scale_of(pair, set), offset = kBase * scale + offset_of(pair);
#pragma unroll
          for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& c = sum[n][h * 2 + e];
              c = fmaf(scale, group_sum[n][h * 2 + e], c);
              if (kHasSums) c = fmaf(-offset, x_sum[n][e], c);
            }
        }
      }
    }
    if (++k < spans && at + 1 < run_end) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = kGrouped || BITS == 16 ? 1.0f : kUnit * qparams[h].x;
      const float offset = kHasSums && !kGrouped ? kBase * scale + qparams[h].y : 0;
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& c = sum[n][h * 2 + e];
          c = scale * (c + more_sum[n][h * 2 + e]) - (kHasSums ? offset * x_sum[n][e] : 0);
        }
    }
    if (is_whole && k == spans)
      finish(tile, biases, sum);
    else
#pragma unroll
      for (int n = 0; n < TILES; ++n)
        parts[((warp * 2 + !is_first_tile) * TILES + n) * 32 + lane] =
            make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = more_sum[n][e] = x_sum[n][e] = 0;
    k = 0, is_first_tile = false, is_whole = true;
  }
  wait_for<0>();
  __syncthreads();

  // The warp that has a tile's last spans, but not the first, adds up what the others have of it, in order.
  const int last_of_first = (first_tile + 1) * spans;
  if (run < run_end && run % spans && run_end >= last_of_first) {
    const auto run_of = [&](int w) { return share(all_spans, w, WARPS); };
    int earliest = warp;
    while (run_of(earliest) > first_tile * spans) --earliest;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = 0;
    for (int w = earliest; w <= warp; ++w) {
      if (run_of(w) == run_of(w + 1)) continue;
      const int which = w * 2 + (run_of(w) / spans != first_tile);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float4 part = parts[(which * TILES + n) * 32 + lane];
        sum[n][0] += part.x, sum[n][1] += part.y, sum[n][2] += part.z, sum[n][3] += part.w;
      }
    }
    biases_of(first_of_run, biases);
    finish(first_of_run, biases, sum);
  }
  if (MODE != kSum) return;
  __syncthreads();
  for (int at = threadIdx.x; at < p.rows * own; at += kThreads) {
    const int row = at / own, output = at % own;
    float total = 0;
    for (int j = 0; j < p.top_k; ++j) {
      const int slot = row * p.top_k + j;
      total = fmaf(slot < kHeld ? held_factors[slot] : factors[slot], products[slot * own + output], total);
    }
    if (p.adds) total += at < kThreads ? before : read_out(at);
    const long long to = place_of_sum(at);
    if (p.out_floats)
      static_cast<float*>(out)[to] = total;
    else
      static_cast<bf16*>(out)[to] = narrow(total);
  }
}
