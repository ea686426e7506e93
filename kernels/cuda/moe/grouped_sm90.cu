// Products of many rows of each expert with that expert's weight in rows (kernels/row_layout.py), for sm_90a: out[slot]
// = x · weight[place]ᵀ (· scales of rows and features + bias), as 16-bit elements or float32, or activation(first half)
// · second half.
//
// A persistent block makes tiles of up to 128 slots of one place by 256 features, which it finds from where the slots
// of each place begin: nothing here depends on a routing but what blocks do. Blocks take tiles in order, each when it
// has time, so that those that read the same part of a weight, or the same rows, do so at about the same time. Four
// warps gather rows of x by the slots, and one thread asks for tiles of the weight, ahead, into a ring; two warpgroups
// with 64 rows each multiply, and one of them has nothing to do where a tile has 64 rows or fewer. Outputs are
// scattered through a little shared memory of each warp, while the ring fills for the next tile. Of a gated product, a
// tile has 128 features of each half. Bound by the tensor cores, or by reading the weights where places have few rows.
//
// Compiled with E4M3 (elements of x and weight; else of 16 bits), GATED, OUT_FLOATS and, of e4m3, BLOCKS: rows of x and
// features of the weight have a scale for each 128 inputs, and so tiles, of half the features, have sums of those
// beside all.
//
// With BITS (8 or 4) and FLOATS (decode.cuh) and GROUP_SETS (as product.cu has it), the weight is packed: the warps
// that gather rows copy its k tiles ahead, as they are, and make 16-bit elements of them where the tensor cores read
// them, while those multiply the step before.
#include "linear/decode.cuh"
#include "ptx/ptx_sm90.cuh"

#ifndef E4M3
#define E4M3 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef OUT_FLOATS
#define OUT_FLOATS 0
#endif
#ifndef BLOCKS
#define BLOCKS 0
#endif
#ifndef GROUP_SETS
#define GROUP_SETS 0
#endif
constexpr bool kPacked = BITS < 16, kGrouped = GROUP_SETS > 0;
static_assert(!(GATED && OUT_FLOATS) && (E4M3 || !BLOCKS) && !(E4M3 && kPacked));
constexpr int kFeatures = BLOCKS ? 128 : 256, kHalf = kFeatures / 2;  // of a tile, and those that are copied at once
constexpr int kRows = 128, kStages = BLOCKS ? 6 : kPacked ? 3 : 4, kLead = 2, kGroup = 128, kThreads = 3 * kGroup;
constexpr int kKept = 4;                                   // tiles of which a block has notes
constexpr int kBand = 16;                                  // tiles of rows that meet all features together
constexpr int kTile = 128 * 128, kHalfTile = kHalf * 128;  // bytes: of x, and of half of the weight's
constexpr int kScales = BLOCKS ? 1024 : 0;                 // … of the rows, then of the features
constexpr int kStage = kTile + 2 * kHalfTile + kScales;
constexpr int kAcross = GATED ? kHalf : kFeatures;                     // outputs of a tile
constexpr int kColumns = OUT_FLOATS ? 32 : 64, kChunk = kColumns / 8;  // outputs in 128 bytes, and in 16
constexpr int kPiece = 16 * 128;                                       // bytes that a warp stores at once: its 16 rows
constexpr int kPieces = kAcross / kColumns, kTiles = kColumns / 8;     // and tiles of 8 features in a piece
constexpr int kEach = kRows / 16;                                      // rows that a thread gathers
// Of packed weights: steps of a k tile, words of qparams that it needs of a feature, and k tiles that are held.
constexpr int kSteps = kPacked ? kSets / 2 : 1, kGroupSets = kGrouped && GROUP_SETS < kSets ? GROUP_SETS : kSets;
constexpr int kWords = kGrouped ? kSets / kGroupSets : 2, kHeld = kPacked ? (kWords == 1 ? 3 : 2) : 0;
constexpr int kCodeBytes = kFeatures * 64, kHeldBytes = kCodeBytes + kFeatures * kWords * 4;
constexpr int kBarrierBytes = ((2 * kStages + kHeld) * 8 + 15) / 16 * 16;

// What the tensor cores read, but for its address: rows of 128 bytes along k, swizzled; eight take 1,024 bytes.
constexpr uint64_t kAlong = static_cast<uint64_t>(1) << 62 | static_cast<uint64_t>(1024 >> 4) << 32 | 1 << 16;
__device__ __forceinline__ uint64_t matrix(uint32_t at) { return kAlong | (at & 0x3ffff) >> 4; }

// How x, weights and out lie; sizes are of elements, but for chunks of 16 bytes and steps of 128 along the inputs.
struct Product {
  long long place_bytes, qparams_at;  // of a place, and where its qparams begin
  int places, top_k, x_top_k, features, outputs, steps, x_chunks, x_stride_chunks, out_stride, activation, scale_stride,
      k_tiles, qparams, group_tiles;  // of packed weights: the last, k tiles that share qparams
};

// A tile: what those that multiply it need to know, found while rows and weights of the tile before are asked for.
struct Unit {
  int place, first, rows, output;  // slots in order of places, from `first` on
};
struct Notes {
  Unit unit;
  int slots[kRows];
  float scales[kRows];        // of e4m3
  float2 columns[kFeatures];  // scale and bias
};

template <int N>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == N) slot = 0, parity ^= 1;
  }
};

// The 8 inputs of a set that a chunk holds, as 16-bit elements; `set` is that within the chunk, `of_tile` that of the
// k tile. qparams: the word of a group, or scale and offset.
__device__ __forceinline__ uint4 elements_of(const uint4& chunk, int set, int of_tile, const uint32_t* qparams) {
  uint32_t pairs[4];
  decode(chunk, set, pairs);
  if constexpr (kHasBytes && !FP16) {  // powers of two: bfloat16 has all products
    const uint32_t scale = __byte_perm(__float_as_uint(scale_of(qparams[0], of_tile)), 0, 0x3232);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = multiply_pairs(pairs[j], scale);
  } else {
    float scale = kGrouped ? scale_of(qparams[0], of_tile) : __uint_as_float(qparams[0]);
    const float offset = kBase * scale + (kGrouped ? offset_of(qparams[0]) : __uint_as_float(qparams[1]));
    scale *= kUnit;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      pairs[j] = pack(fmaf(scale, wide(pairs[j] & 0xffff), -offset), fmaf(scale, wide(pairs[j] >> 16), -offset));
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// x_top_k: 1 where slots of a token share its row of x, else top_k. row_scales of e4m3 [rows of x], in blocks
// [steps][scale_stride]; bias [places]
// [features] or null; taken_by_all: 0, the tiles that blocks have taken beside their first.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_sm90(const __grid_constant__ TensorMap weight, const char* weights, const uint4* x, const float* row_scales,
                 const float* bias, const int* starts, const int* slots, int* taken_by_all, void* out, Product p) {
  DYNAMIC_SHARED(memory);
  char* const begin = memory + (1024 - smem(memory) % 1024) % 1024;
  char* const held = begin + kStages * kStage;
  char* const pieces = held + kHeld * kHeldBytes;
  const uint32_t stages = smem(begin), full = smem(pieces) + 8 * kPiece, empty = full + kStages * 8;
  const uint32_t came = empty + kStages * 8;
  Notes* const notes = reinterpret_cast<Notes*>(pieces + 8 * kPiece + kBarrierBytes);  // [kKept]
  int* const tiles_before = reinterpret_cast<int*>(notes + kKept);                     // [places + 1]
  int* const starts_of = tiles_before + p.places + 1;                                  // [places + 1]
  int* const taken = starts_of + p.places + 1;  // [kKept]: tiles of this block, in turn
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i * 8, kGroup + (kPacked ? kGroup : 1));
      barrier_init(empty + i * 8, 8);  // warps that multiply
    }
    for (int i = 0; i < kHeld; ++i) barrier_init(came + i * 8, kGroup);
    fence_shared();  // copies count at them
  }
  wait_for_ahead();
  let_next_begin();
  const auto take = [&] { return static_cast<int>(gridDim.x) + atomicAdd(taken_by_all, 1); };
  if (threadIdx.x == kGroup) taken[0] = blockIdx.x, taken[1] = take();
  for (int i = threadIdx.x; i <= p.places; i += kThreads) starts_of[i] = starts[i];
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
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

  const int feature_tiles = (p.outputs + kAcross - 1) / kAcross, count = tiles_before[p.places] * feature_tiles;
  const int second = GATED ? p.outputs : kHalf;  // features from one half of a tile's to the other
  const auto unit_at = [&](int tile) {
    const int row_tile = tile / feature_tiles;
    int low = 0, high = p.places;  // tiles_before[low] <= row_tile < tiles_before[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (tiles_before[middle] <= row_tile ? low : high) = middle;
    }
    const int of_place = tile - tiles_before[low] * feature_tiles, row_tiles = tiles_before[high] - tiles_before[low];
    const int band0 = of_place / (kBand * feature_tiles) * kBand, in_band = min(kBand, row_tiles - band0);
    const int rest = of_place - band0 * feature_tiles;
    Unit unit;
    unit.place = low, unit.first = starts_of[low] + (band0 + rest % in_band) * kRows;
    unit.rows = min(kRows, starts_of[high] - unit.first);
    unit.output = rest / in_band * kAcross;
    return unit;
  };

  if (threadIdx.x < kGroup) {
    give_registers<kPacked ? 88 : 56>();
    const int chunk = threadIdx.x % 8, line = threadIdx.x / 8, to_chunk = line * 128 + ((chunk ^ line % 8) << 4);
    const int me = threadIdx.x;  // the row and the columns of which this thread makes notes
    const auto row_of = [&](int slot) { return p.x_top_k == 1 ? slot / p.top_k : slot; };
    const auto slot_of = [&](const Unit& unit) { return me < unit.rows ? slots[unit.first + me] : 0; };
    const auto scale_of = [&](int slot) { return E4M3 && !BLOCKS ? row_scales[row_of(slot)] : 1.0f; };
    const auto feature_of = [&](const Unit& unit, int column, bool& is_there) {
      const int feature = unit.output + column % kHalf + column / kHalf * second;
      is_there = (GATED ? unit.output + column % kHalf : feature) < p.outputs;
      return feature;
    };
    const auto column_of = [&](const Unit& unit, int column) {
      bool is_there;
      const int feature = feature_of(unit, column, is_there);
      const float2* const qparams =
          reinterpret_cast<const float2*>(weights + unit.place * p.place_bytes + p.qparams_at);
      return make_float2(E4M3 && !BLOCKS && is_there ? qparams[feature].x : 1.0f,
                         bias && is_there ? bias[static_cast<long long>(unit.place) * p.features + feature] : 0.0f);
    };
    const auto note = [&](int turn, const Unit& unit, int slot, float scale, float2 first, float2 other) {
      Notes& of_tile = notes[turn % kKept];
      if (me == 0) of_tile.unit = unit;
      of_tile.slots[me] = slot, of_tile.scales[me] = scale;
      of_tile.columns[me] = first;
      if (kFeatures > 128) of_tile.columns[me + kFeatures - 128] = other;
    };
    // Of a packed weight, four threads have eight columns, each another chunk of every k tile: two neighbours of those
    // that store together have columns 4 apart, which are swizzled into other banks.
    const int quad = me / 4, column0 = me / 32 * 8 + me % 32 / 8 + me / 4 % 2 * 4, part = me % 4;
    // What is asked for next of it: where this thread's chunks and qparams begin in either half of a tile's columns.
    const char *codes_from[2], *qparams_from[2];
    unsigned has_columns = 0;
    int asked = 0;
    const int more_codes = p.k_tiles * 2048, more_qparams = (kGrouped ? 4 : 8) * 32;  // bytes, to 32 columns further
    const auto enter = [&](const Unit& unit) {
      const char* const expert = weights + unit.place * p.place_bytes;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        bool is_there;
        const long long feature = feature_of(unit, column0 + h * 128, is_there);
        codes_from[h] = expert + feature * p.k_tiles * 64 + part * 16;
        qparams_from[h] = expert + p.qparams_at + feature * (kGrouped ? 4 : 8);
      }
      has_columns = 0, asked = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bool is_there;
        feature_of(unit, column0 + i * 32, is_there);
        has_columns |= is_there << i;
      }
    };
    const auto ask = [&](int slot) {
      const uint32_t to = smem(held) + slot * kHeldBytes;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool is_there = has_columns >> i & 1;
        copy16(to + (i * kGroup + me) * 16, is_there ? codes_from[i / 4] + i % 4 * more_codes : weights, is_there);
      }
      const int group = p.group_tiles > 1 ? asked / p.group_tiles : asked * kWords;
#pragma unroll
      for (int m = 0; m < 2 * kWords; ++m) {
        const int j = m * 4 + part, i = j / kWords, own_group = group + j % kWords;
        const bool is_there = (has_columns >> i & 1) && (!kGrouped || own_group < p.qparams);
        const long long at = kGrouped ? static_cast<long long>(own_group) * p.features * 4 : j % kWords * 4;
        const char* const from = qparams_from[i / 4] + i % 4 * more_qparams + at;
        copy4(to + kCodeBytes + (j * (kGroup / 4) + quad) * 4, is_there ? from : weights, is_there);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) codes_from[h] += 64;
      ++asked;
      barrier_arrive_with_copies(came + slot * 8);
    };
    const auto unpack = [&](char* to, const char* from, int first_set) {  // two sets of a k tile
      const uint32_t* const words = reinterpret_cast<const uint32_t*>(from + kCodeBytes) + quad;
      constexpr int kEachSet = kGrouped && kGroupSets == 1 ? 2 : 1, kAtOnce = BITS == 4 ? 8 : 4;
#pragma unroll
      for (int first = 0; first < 8; first += kAtOnce) {
        // All are read before the first is stored: the compiler cannot know that these do not meet.
        uint4 chunks[kAtOnce];
        uint32_t qparams[kAtOnce][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const char* const codes = from + ((first + i) * kGroup + me) * 16;
          if (BITS == 4) {
            const uint2 both = *reinterpret_cast<const uint2*>(codes + first_set * 4);
            chunks[i] = make_uint4(both.x, both.y, 0, 0);
          } else {
            chunks[i] = *reinterpret_cast<const uint4*>(codes);
          }
          const uint32_t* const at = words + ((first + i) * kWords + (kGrouped ? first_set / kGroupSets : 0)) * 32;
          qparams[i][0] = at[0];
          qparams[i][1] = kEachSet == 2 || !kGrouped ? at[32] : 0;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint32_t own[2] = {qparams[i][kEachSet == 2 ? e : 0], qparams[i][1]};
            *reinterpret_cast<uint4*>(to + (column0 + (first + i) * 32) * 128 + ((e * 4 + part ^ column0 % 8) << 4)) =
                elements_of(chunks[i], e, first_set + e, own);
          }
      }
    };
    Ring<kHeld + !kPacked> held_ring;

    int tile = blockIdx.x, next = taken[1];
    if (tile < count) {
      const Unit unit = unit_at(tile);
      if (kPacked) enter(unit);
      for (int i = 0; i < kHeld; ++i) ask(i);
      const int slot = slot_of(unit);
      note(0, unit, slot, scale_of(slot), column_of(unit, me), column_of(unit, me + kFeatures - 128));
    }
    turn_wait(1, kGroup);
    Ring<kStages> ring;
    for (int turn = 0; tile < count; ++turn) {
      const int after = me == 0 && next < count ? take() : next;
      const Unit unit = notes[turn % kKept].unit, later = unit_at(min(next, count - 1));
      int from[kEach];  // chunks
#pragma unroll
      for (int i = 0; i < kEach; ++i) from[i] = row_of(notes[turn % kKept].slots[line + i * 16]) * p.x_stride_chunks;
      const int later_slot = slot_of(later);
      const float2 columns[2] = {column_of(later, me), column_of(later, me + kFeatures - 128)};
      float later_scale = 1;
      bool has_column;
      const int feature = feature_of(unit, me, has_column), own_row = row_of(notes[turn % kKept].slots[me]);
      const float* const column_scales =
          reinterpret_cast<const float*>(weights + unit.place * p.place_bytes + p.qparams_at) +
          (has_column ? feature : 0);
      for (int step = 0; step < p.steps; ++step) {
        const uint32_t to = stages + ring.slot * kStage, barrier = full + ring.slot * 8;
        barrier_wait(empty + ring.slot * 8, ring.parity ^ 1);
        if (!kPacked && me == 0) {
          const int element = step * (E4M3 ? 128 : 64);
          barrier_arrive_for(barrier, 2 * kHalfTile);
          copy_tile(to + kTile, weight, element, unit.output, unit.place, barrier);
          copy_tile(to + kTile + kHalfTile, weight, element, unit.output + second, unit.place, barrier);
        }
        if (BLOCKS) {
          const uint32_t scales = to + kTile + 2 * kHalfTile + me * 4;
          copy4(scales, row_scales + static_cast<long long>(step) * p.scale_stride + own_row, true);
          copy4(scales + 512, column_scales + static_cast<long long>(step) * p.features, has_column);
        }
        const int at = step * 8 + chunk;
        const bool is_there = at < p.x_chunks;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (line + i * 16 < unit.rows) copy16(to + to_chunk + i * 2048, x + from[i] + (is_there ? at : 0), is_there);
        barrier_arrive_with_copies(barrier);
        if (kPacked) {
          const int first_set = step % kSteps * 2;
          if (first_set == 0) barrier_wait(came + held_ring.slot * 8, held_ring.parity);
          unpack(begin + ring.slot * kStage + kTile, held + held_ring.slot * kHeldBytes, first_set);
          fence_shared();
          barrier_arrive(barrier);
          if (first_set + 2 == kSets) {
            __syncwarp();  // qparams were read by all
            if (asked == p.k_tiles && next < count) enter(later);
            if (asked < p.k_tiles) ask(held_ring.slot);
            held_ring.next();
          }
        }
        if (step == 1) later_scale = scale_of(later_slot);
        ring.next();
      }
      // Of tiles of two steps or more, those that multiply are at most two behind.
      note(turn + 1, later, later_slot, later_scale, columns[0], columns[1]);
      if (me == 0) taken[(turn + 2) % kKept] = after;
      turn_wait(1, kGroup);
      tile = next, next = taken[(turn + 2) % kKept];
    }
  } else {
    take_registers<kPacked ? 208 : 224>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4, side = warp / 4, lane = threadIdx.x % 32;
    const uint64_t a = matrix(stages + side * kTile / 2), b = matrix(stages + kTile);
    char* const piece_at = pieces + warp * kPiece;
    Ring<kStages> ring;
    float d[kFeatures / 2], of_block[kFeatures / 2];
    const auto release = [&](int slot) {
      if (lane == 0) barrier_arrive(empty + slot * 8);
    };

    // What goes out while the products of the next tile run: 16-bit outputs in pairs, rows' slots and the first output.
    uint32_t held[OUT_FLOATS ? 1 : kAcross / 4];
    int slot_of[4] = {-1, -1, -1, -1}, held_output = 0;
    const auto put = [&](int piece) {  // from shared memory
      __syncwarp();
      const int output = held_output + piece * kColumns + lane % 8 * kChunk;
      if (output >= p.outputs) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (slot_of[i] < 0) continue;
        const int row = i * 4 + lane / 8;
        const uint4 chunk = *reinterpret_cast<const uint4*>(piece_at + row * 128 + ((lane % 8 ^ row % 8) << 4));
        const long long to = static_cast<long long>(slot_of[i]) * p.out_stride + output;
        *reinterpret_cast<uint4*>(static_cast<char*>(out) + to * (OUT_FLOATS ? 4 : 2)) = chunk;
      }
    };
    char* const row_at = piece_at + lane / 4 * 128;
    const auto put_held = [&](int piece) {
      __syncwarp();  // all have read what was here
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<uint32_t*>(row_at + h * 1024 + ((i ^ lane / 4) << 4) + lane % 4 * 4) =
              held[(piece * kTiles + i) * 2 + h];
      put(piece);
    };
    bool has_held = false;
    if (side == 1 && p.steps > kLead && blockIdx.x < count) barrier_wait(full + kLead * 8, 0);
    int tile = blockIdx.x;
    for (int turn = 0; tile < count; tile = taken[++turn % kKept]) {
      barrier_wait(full + ring.slot * 8, ring.parity);  // for the notes, too
      const Notes& of_tile = notes[turn % kKept];
      const Unit unit = of_tile.unit;
      const bool has_rows = side * 64 < unit.rows;
      int last = 0;
      for (int step = 0; step < p.steps; ++step) {
        barrier_wait(full + ring.slot * 8, ring.parity);
        if (has_rows) {
          const uint32_t ahead = ring.slot * (kStage >> 4);
          fence_shared();
          begin_products();
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            const uint64_t x_at = a + ahead + part * 2, weight_at = b + ahead + part * 2;
#if BLOCKS
            multiply_tiles_e4m3(of_block, x_at, weight_at, part > 0);
#elif E4M3
            multiply_tiles_e4m3(d, x_at, weight_at, step + part > 0);
#else
            multiply_tiles(d, x_at, weight_at, step + part > 0);
#endif
          }
          end_products();
          if (!BLOCKS) wait_products<1>();
        }
        if (!BLOCKS && step > 0) release(last);
        last = ring.slot;
        ring.next();
        if (!OUT_FLOATS && has_held)
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece)
            if (step == piece || (step == p.steps - 1 && piece > step)) put_held(piece);
        if (BLOCKS) {
          if (has_rows) {
            const float* const scales = reinterpret_cast<const float*>(begin + last * kStage + kTile + 2 * kHalfTile);
            const float of_rows[2] = {scales[warp * 16 + lane / 4], scales[warp * 16 + lane / 4 + 8]};
            wait_products<0>();
            settle(of_block);
#pragma unroll
            for (int n = 0; n < kFeatures / 8; ++n) {
              const float2 two = *reinterpret_cast<const float2*>(scales + 128 + n * 8 + lane % 4 * 2);
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                float* const sums = d + n * 4 + h * 2;
                const float* const more = of_block + n * 4 + h * 2;
                sums[0] = (step > 0 ? sums[0] : 0) + more[0] * (of_rows[h] * two.x);
                sums[1] = (step > 0 ? sums[1] : 0) + more[1] * (of_rows[h] * two.y);
              }
            }
            __syncwarp();
          }
          release(last);
        }
      }
      has_held = false;
      if (!BLOCKS) {
        if (has_rows) wait_products<0>();
        settle(d);
        release(last);
      }
      if (!has_rows) continue;

      if ((E4M3 && !BLOCKS) || bias) {
        const float scale_of[2] = {of_tile.scales[warp * 16 + lane / 4], of_tile.scales[warp * 16 + lane / 4 + 8]};
#pragma unroll
        for (int n = 0; n < kFeatures / 8; ++n) {
          const float4 two = *reinterpret_cast<const float4*>(of_tile.columns + n * 8 + lane % 4 * 2);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float* const sums = d + n * 4 + h * 2;
            sums[0] = sums[0] * (scale_of[h] * two.x) + two.y, sums[1] = sums[1] * (scale_of[h] * two.z) + two.w;
          }
        }
      }
      held_output = unit.output;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 16 + i * 4 + lane / 8;
        slot_of[i] = row < unit.rows ? of_tile.slots[row] : -1;
      }
      if (OUT_FLOATS) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          __syncwarp();  // all have read what was here
#pragma unroll
          for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float* const sums = d + (piece * kTiles + i) * 4 + h * 2;
              const int to = h * 1024 + ((i * 2 + lane % 4 / 2 ^ lane / 4) << 4) + lane % 2 * 8;
              *reinterpret_cast<float2*>(row_at + to) = make_float2(sums[0], sums[1]);
            }
          put(piece);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kAcross / 4; ++i) {
          const float* const sums = d + i * 2;
          float value[2];
#pragma unroll
          for (int e = 0; e < 2; ++e)
            value[e] = GATED ? gated(sums[e], sums[kFeatures / 4 + e], p.activation) : sums[e];
          held[OUT_FLOATS ? 0 : i] = pack(value[0], value[1]);
        }
        has_held = true;
      }
    }
    if (!OUT_FLOATS && has_held)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) put_held(piece);
  }
}
