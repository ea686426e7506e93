// Attention over latents of 512 elements and 64 that turn, in pages of 16 bits, for sm_90a, where the heads of some
// queries fill tiles of 64 rows: a row of the cache is the key of all, and its first 512 elements are the value. Bound
// by the tensor cores with 128 heads.
//
// Two warpgroups share the tile: of every two units of 64 tokens, each multiplies the keys of one and makes weights of
// the scores, which it passes on through shared memory, and both multiply the weights of either unit with half of the
// columns of its values; so softmax hides behind the other's products ("seesaw": FlashMLA, DeepSeek 2025). A warp of a
// third one has units of tokens copied ahead, page by page, through a tensor map.
//
// Work is cut over the whole batch as in attend.cu, but `beside` blocks, of tiles that read the same tokens, have a
// stretch together: what one reads lies in the GPU's cache for the others. As a cluster, each of whose blocks copies a
// part for all, they are slower by a fifth.
#include "latent/attend/cut_sm90.cuh"

constexpr int kRows = 64, kBlock = 3 * kGroup, kSides = 2 * kGroup, kColumns = L / 2;  // of a side
constexpr int kTile = kChunks * kChunk, kSlots = 2;                                    // a chunk has 64 queries, too
// Parts of a slot, which come and go by themselves: what turns, which is of use for scores alone, and each side's
// values.
constexpr int kParts = 3, kHalf = L / 2 / 64;
__device__ __forceinline__ constexpr int part_of(int chunk) { return chunk == kChunks - 1 ? 0 : 1 + chunk / kHalf; }

// Hardware barriers: the weights of a side are there, threads of a side, of both.
enum { kWeights = 1, kOwn = 3, kBoth = 5 };

struct Shared {
  char *queries, *slots, *weights;
  float *tops, *totals;                               // [2][kRows]; [2][2][kRows]
  uint32_t full, empty, queries_full, queries_empty;  // barriers: of parts that are there, that are free
  Item* item;
  int *is_last, *sums;

  __device__ explicit Shared(char* all) {
    char* const begin = all + (1024 - smem(all) % 1024) % 1024;
    queries = begin, slots = begin + kTile, weights = slots + kSlots * kTile;
    tops = reinterpret_cast<float*>(weights + kChunk), totals = tops + 2 * kRows;
    item = reinterpret_cast<Item*>(totals + 4 * kRows);
    char* const end = reinterpret_cast<char*>(item + 1);
    full = smem(end), empty = full + kSlots * kParts * 8, queries_full = empty + kSlots * kParts * 8;
    queries_empty = queries_full + 8;
    is_last = reinterpret_cast<int*>(end + (kSlots * 2 * kParts + 2) * 8), sums = is_last + 1;
  }
};

// A slot of a side, for a unit.
struct Slot {
  char* memory;
  uint32_t keys, values;  // of their bytes
  uint32_t full, empty, parity;

  Slot() = default;
  __device__ __forceinline__ Slot(const Shared& shared, int unit, int side) {
    const int i = unit % kSlots;
    memory = shared.slots + i * kTile;
    keys = smem(memory), values = keys + side * kHalf * kChunk;
    full = shared.full + i * kParts * 8, empty = shared.empty + i * kParts * 8, parity = unit / kSlots % 2;
  }
};

// pages: the cache, [pages, page size, L + 64], of which tiles have 64 tokens or a page. Others: see attend.cu; `tiles`
// and `of_each` count those of beside * 64 rows, and the grid is a multiple of `beside`.
extern "C" __global__ void __launch_bounds__(kBlock, 1)
    attend_sm90(const __grid_constant__ TensorMap pages, const bf16* q, long long q_stride, const bf16* q_turned,
                long long turned_stride, int turned_head, const int* cut_tiles, const int* qo_indptr, const int* places,
                const int* kv_lens, int tiles, int of_each, int heads, int is_before, const int* indptr,
                const int* indices, int page_shift, float scale, bf16* out, float* lse, float* partial, int* counters,
                int merges, int beside) {
  DYNAMIC_SHARED(memory);
  const Shared shared(memory);
  const int lane = threadIdx.x % 32;
  const Tiles list = {cut_tiles, qo_indptr, places, kv_lens, tiles, of_each, heads, is_before};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots * kParts; ++i) barrier_init(shared.full + i * 8, 1);
    for (int i = 0; i < kSlots * kParts; ++i) barrier_init(shared.empty + i * 8, kGroup / 32);  // warps of a side
    barrier_init(shared.queries_full, kGroup + 1);
    barrier_init(shared.queries_empty, kSides / 32);
    fence_shared();  // copies count at them
  }
  let_next_begin();
  wait_for_ahead();

  auto line = Line<kRows>::of_block<kBlock>(list, indptr, beside, !merges, shared.sums);
  if (line.is_empty()) return;

  if (threadIdx.x < kGroup) {
    give_registers<56>();
    const int warp = threadIdx.x / 32, boxes = kUnit >> min(page_shift, 6), box_rows = kUnit / boxes;
    int asked = 0;
    uint32_t parity = 1;
    Item item;
    const auto give = [&] {
      barrier_wait(shared.queries_empty, parity);
      parity ^= 1;
      if (threadIdx.x == 0) {
        *shared.item = item;
        barrier_arrive(shared.queries_full);
      }
    };
    while (line.next(item)) {
      give();
      // A warp copies 16 queries, a row at once: 64 lanes' worth of the latent, and 8 of what turns.
#pragma unroll 1
      for (int r = 0; r < 16; ++r) {
        const int row = warp * 16 + r, of_request = item.row0 + row;
        const bool is_there = of_request < item.rows;
        const long long place = item.first_out + of_request / heads;
        const int head = of_request % heads;
        const bf16* const latent = q + (is_there ? place * q_stride + head * L : 0);
        const bf16* const turned = q_turned + (is_there ? place * turned_stride + head * turned_head : 0);
        const uint32_t to = smem(shared.queries) + row * 128 + ((lane % 8 ^ row % 8) << 4);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          copy16(to + (half * 4 + lane / 8) * kChunk, latent + half * 256 + lane * 8, is_there);
        if (lane < 8) copy16(to + (kChunks - 1) * kChunk, turned + lane * 8, is_there);
      }
      barrier_arrive_with_copies(shared.queries_full);
      if (warp > 0) continue;
      const int* const own_pages = indices + item.first_page;
      for (int u = 0; u < item.units; ++u, ++asked) {
        const int token = item.token0 + u * kUnit + lane * box_rows, slot = asked % kSlots;
        const bool is_seen = lane < boxes && token < item.group_end;
        const int page = is_seen ? __ldg(own_pages + (token >> page_shift)) : 0;
        // Behind the last row of a page there are zeros.
        const int row = is_seen ? token & ((1 << page_shift) - 1) : 1 << page_shift;
        const uint32_t to = smem(shared.slots) + slot * kTile + lane * box_rows * 128;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          barrier_wait(shared.empty + (slot * kParts + part) * 8, asked / kSlots % 2 ^ 1);
          const uint32_t full = shared.full + (slot * kParts + part) * 8;
          if (lane == 0) barrier_arrive_for(full, (part ? kHalf : 1) * kChunk);
          __syncwarp();
          if (lane < boxes) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c)
              if (part_of(c) == part) copy_tile(to + c * kChunk, pages, c * 64, row, page, full);
          }
          __syncwarp();
        }
      }
    }
    give();
    barrier_arrive_with_copies(shared.queries_full);
  } else {
    take_registers<224>();
    const int side = __shfl_sync(~0u, threadIdx.x / kGroup, 0) - 1, thread = threadIdx.x % kGroup;
    const int my_row = thread / 32 * 16 + lane / 4;  // and eight further on
    float o[kColumns / 2], s[kUnit / 2];
    uint32_t p[kUnit / 4], kept[16];  // kept: the queries' last chunk
    float top[2], total[2], keep[2];
    int read = 0;      // units before the piece
    Slot mine, other;  // of the unit of a pair whose scores this side has, and of the other one

    const auto wait_full = [&](const Slot& slot, int part) { barrier_wait(slot.full + part * 8, slot.parity); };
    const auto release = [&](uint32_t barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    const auto release_part = [&](const Slot& slot, int part) { release(slot.empty + part * 8); };
    // The other's product with values, asked for before one's scores, has been made.
    const auto end_values = [&] {
      wait_products<1>();
      settle(o);
      release_part(other, 1 + side);
    };
    // Scores s of the tokens of a unit, in a batch for each part; `after_values` have been made behind the first. What
    // lies behind the last token may be anything, and 0 · NaN is NaN.
    const auto ask_scores = [&](int there, bool after_values) {
      if (there < kUnit) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) wait_full(mine, part);
        const int bytes = (kUnit - there) * 128;
        for (int at = thread * 16; at < bytes; at += kGroup * 16)
#pragma unroll
          for (int c = 0; c < kChunks; ++c)
            *reinterpret_cast<uint4*>(mine.memory + c * kChunk + there * 128 + at) = make_uint4(0, 0, 0, 0);
        fence_shared();
        turn_wait(kOwn + side, kGroup);
      }
#pragma unroll
      for (int i = 0; i < kUnit / 2; ++i) s[i] = 0;
      const Matrix queries(kAlong, smem(shared.queries)), keys(kAlong, mine.keys);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int c = (i + kChunks - 1) % kChunks;  // in the order in which they come
        if (i == 0 || part_of(c) != part_of((i + kChunks - 2) % kChunks)) {
          if (i > 0) end_products();
          if (i == 1 && after_values) end_values();
          wait_full(mine, part_of(c));
          begin_products();
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int ahead = c * kChunk + k * 32;
          if (c == kChunks - 1)
            multiply_rows(s, kept + k * 4, keys + ahead);
          else
            multiply_keys(s, queries + ahead, keys + ahead, i + k > 0);
        }
      }
      end_products();
    };
    // o += weights · values of this side's columns; weights of this side or the other's.
    const auto ask_values = [&](bool is_own) {
      const Matrix values(kAcross, is_own ? mine.values : other.values), weights(kAlong, smem(shared.weights));
      begin_products();
#pragma unroll
      for (int k = 0; k < kUnit / 16; ++k) {
        if (is_own)
          multiply_values(o, p + 4 * k, values + k * 16 * 128);
        else
          multiply_values(o, weights + k * 32, values + k * 16 * 128);
      }
      end_products();
    };
    const auto rescale = [&] {
      if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) o[i] *= keep[i / 2 % 2];
      }
    };
    // Takes over the highest scores that the other side has found.
    const auto follow = [&] {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float high = shared.tops[(1 - side) * kRows + my_row + h * 8];
        keep[h] = power(top[h] - (high == -kInf ? 0 : high));
        total[h] *= keep[h], top[h] = high;
      }
    };
    // Gives the weights p to the other side, and the highest scores.
    const auto publish = [&] {
#pragma unroll
      for (int i = 0; i < kUnit / 4; ++i) {
        const int row = my_row + i % 2 * 8, c = i / 2;
        *reinterpret_cast<uint32_t*>(shared.weights + row * 128 + ((c ^ row % 8) << 4) + lane % 4 * 4) = p[i];
      }
      if (lane % 4 == 0) shared.tops[side * kRows + my_row] = top[0], shared.tops[side * kRows + my_row + 8] = top[1];
      fence_shared();
      turn_arrive(kWeights + side, kSides);
    };

    for (uint32_t turn = 0;; ++turn) {
      barrier_wait(shared.queries_full, turn % 2);
      Item item = *shared.item;
      fence_shared();
      // The same for all lanes, which the compiler is to know.
      item.end = __shfl_sync(~0u, item.end, 0), item.all_see = __shfl_sync(~0u, item.all_see, 0);
      const int count = __shfl_sync(~0u, item.units, 0), token0 = __shfl_sync(~0u, item.token0, 0);
      if (count < 0) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = thread / 32 * 16 + lane % 16, c = i * 2 + lane / 16;
        load4(kept + i * 4, smem(shared.queries) + (kChunks - 1) * kChunk + row * 128 + ((c ^ row % 8) << 4));
      }
      int sees[2];  // tokens, less this lane's first column
#pragma unroll
      for (int h = 0; h < 2; ++h)
        sees[h] = min(item.end, item.before + (item.row0 + my_row + h * 8) / heads + 1) - lane % 4 * 2;
      // Makes weights p of the scores, raising `top`.
      const auto soften = [&](int first) {
        if (first + kUnit > item.all_see) {
#pragma unroll
          for (int i = 0; i < kUnit / 2; ++i)
            if (first + i / 4 * 8 + i % 2 >= sees[i / 2 % 2]) s[i] = -kInf;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float high = -kInf;
#pragma unroll
          for (int n = 0; n < kUnit / 8; ++n) high = fmaxf(high, fmaxf(s[n * 4 + h * 2], s[n * 4 + h * 2 + 1]));
          high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
          high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
          high = fmaxf(top[h], high * scale);
          const float base = high == -kInf ? 0 : high;
          keep[h] = power(top[h] - base);
          top[h] = high;
          float sum = 0;
#pragma unroll
          for (int n = 0; n < kUnit / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& weight = s[n * 4 + h * 2 + e];
              sum += weight = power(fmaf(weight, scale, -base));
            }
          total[h] = total[h] * keep[h] + sum;
        }
#pragma unroll
        for (int i = 0; i < kUnit / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
      };
      // Side 0 has the first unit of each pair: for all of the piece, in the same slot.
      const int begin = __shfl_sync(~0u, read, 0);
      mine = Slot(shared, begin + side, side), other = Slot(shared, begin + 1 - side, side);
      read += count;
      const auto next = [&] { mine.parity ^= 1, other.parity ^= 1; };
      const auto there = [&](int u) { return max(0, min(kUnit, item.end - (token0 + u * kUnit))); };
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] = -kInf, total[h] = 0;
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) o[i] = 0;

      // Branches of what is in a loop would have the compiler wait for all products.
      if (side == 0) {
        const auto take_own = [&](int u, bool has_more) {
          wait_products<0>();
          settle(s);
          release_part(mine, 0);
          if (!has_more) release(shared.queries_empty);
          soften(token0 + u * kUnit);
          publish();
          rescale();
        };
        const auto end_own = [&] {
          wait_products<0>();
          settle(o);
          release_part(mine, 1 + side);
        };
        const auto take_pair = [&](int u, bool has_more) {
          take_own(u, has_more);
          ask_values(true);
          end_own();
          turn_wait(kWeights + 1, kSides);
          follow();
          rescale();
          wait_full(other, 1 + side);
          ask_values(false);
        };
        ask_scores(there(0), false);
        int u = 0;
        for (; u + 2 < count; u += 2) {
          take_pair(u, true);
          next();
          ask_scores(there(u + 2), true);
        }
        if (u + 1 < count) {
          take_pair(u, false);
          wait_products<0>();
          settle(o);
          release_part(other, 1 + side);
        } else {
          take_own(u, false);
          ask_values(true);
          end_own();
        }
      } else {
        if (count == 1) release(shared.queries_empty);
        const auto take_other = [&] {
          turn_wait(kWeights, kSides);
          follow();
          rescale();
          wait_full(other, 1 + side);
          ask_values(false);
        };
        const auto end_other = [&] {
          wait_products<0>();
          settle(o);
          release_part(other, 1 + side);
        };
        int u = 0;
        for (; u + 1 < count; u += 2, next()) {
          ask_scores(there(u + 1), false);
          wait_products<0>();
          settle(s);
          release_part(mine, 0);
          take_other();
          if (u + 3 >= count) release(shared.queries_empty);
          soften(token0 + (u + 1) * kUnit);
          end_other();
          publish();
          rescale();
          ask_values(true);
          wait_products<0>();
          settle(o);
          release_part(mine, 1 + side);
        }
        if (u < count) {
          take_other();
          end_other();
        }
      }

      // The end of this piece.
      float* const totals = shared.totals + turn % 2 * 2 * kRows;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        if (lane % 4 == 0) totals[side * kRows + my_row + h * 8] = total[h];
      }
      turn_wait(kBoth, kSides);
      const bool is_whole = item.pieces == 1;
      float* const part = partial + (static_cast<long long>(blockIdx.x) * 2 + (token0 == 0)) * kPart(kRows, L);
      const long long first_head = item.first_out * heads + item.row0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = my_row + h * 8;
        if (item.row0 + row >= item.rows) continue;
        const float sum = total[h] + totals[(1 - side) * kRows + row], once = sum == 0 ? 0 : 1 / sum;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int column = side * kColumns + n * 8 + lane % 4 * 2;
          const float low = o[n * 4 + h * 2], high = o[n * 4 + h * 2 + 1];
          if (is_whole)
            *reinterpret_cast<uint32_t*>(out + (first_head + row) * L + column) = pack(low * once, high * once);
          else
            *reinterpret_cast<float2*>(part + row * L + column) = make_float2(low, high);
        }
        if (side == 0 && lane % 4 == 0) {
          if (!is_whole)
            *reinterpret_cast<float2*>(part + kRows * L + row * 2) = make_float2(top[h], sum);
          else if (lse)
            lse[first_head + row] = sum == 0 ? -kInf : top[h] + log2f(sum);
        }
      }
      if (is_whole || !merges) continue;
      turn_wait(kBoth, kSides);
      if (threadIdx.x == kGroup) {
        __threadfence();
        *shared.is_last = atomicAdd(counters + item.tile, 1) == item.pieces - 1;
        __threadfence();
        if (*shared.is_last) counters[item.tile] = 0;
      }
      turn_wait(kBoth, kSides);
      if (!*shared.is_last) continue;
      const float* const parts = partial + static_cast<long long>(item.begin_block) * 2 * kPart(kRows, L);
      merge_tile<kRows, L, kSides>(parts, item.pieces, beside, min(kRows, item.rows - item.row0), threadIdx.x - kGroup,
                                   out + first_head * L, lse ? lse + first_head : nullptr);
    }
  }
}
