// Attention over latents of 512 elements and 64 that turn, in pages of 16 bits, for sm_90a, where the heads of some
// queries are few: bound by memory. Tokens are the rows of both products and heads their columns, so that nothing is
// padded: scores [64 tokens][heads] = keys · queries, and sums [512][heads] = values^T · weights, the keys and values
// from the same shared memory.
// Compiled with ROWS (16, 32 or 48, of a tile) and SLOTS (chunks of shared memory).
//
// A warp has chunks of units copied ahead into a ring, page by page, through a tensor map; three copy the queries of
// the next piece. A warpgroup makes weights of scores, and two multiply them with half of the columns of values each, a
// unit behind. Work is cut over the whole batch as in attend.cu; whose piece of a tile is the last to come merges all
// of them, its own from registers.
#include "latent/attend/cut_sm90.cuh"

#ifndef ROWS
#define ROWS 16
#endif
#ifndef SLOTS
#define SLOTS 22
#endif
constexpr int kRows = ROWS, kSlots = SLOTS, kSides = 2;
constexpr int kBlock = (2 + kSides) * kGroup, kOwn = (kChunks - 1) / kSides;  // chunks of values of a side
constexpr int kSums = kRows / 2, kPairs = kRows / 8;                          // pairs of heads of a lane
constexpr int kQueryChunk = kRows * 128, kQueries = kChunks * kQueryChunk, kQuerySlots = kRows == 48 ? 1 : 2;
constexpr int kChains = 2;                      // sums of scores, which products take in turn
constexpr int kAtOnce = 3;                      // chunks that are asked for at once
constexpr int kTogether = kRows == 16 ? 2 : 1;  // pairs of heads that are merged at once
static_assert(kRows == 16 || kRows == 32 || kRows == 48, "rows of a tile");
static_assert(kSlots > kChunks, "a unit and more");

enum { kScoring = 1, kSumming = 2 };  // hardware barriers

struct Shared {
  char *queries, *slots, *weights;  // [kQuerySlots]; [kSlots]; [2], a row a head, along tokens
  float *highs, *keeps;             // [2][4][kRows]: of a warp's tokens; [2][kRows]
  float2* states;                   // [2][kRows]: the highest score and the sum of weights
  Item* items;                      // [kQuerySlots]
  uint32_t full, empty;             // barriers: of slots that are there, that are free
  uint32_t queries_full, queries_empty, weights_full, weights_empty, states_full;
  int *is_last, *sums;

  __device__ explicit Shared(char* all) {
    queries = all + (1024 - smem(all) % 1024) % 1024;
    slots = queries + kQuerySlots * kQueries, weights = slots + kSlots * kChunk;
    highs = reinterpret_cast<float*>(weights + 2 * kQueryChunk), keeps = highs + 8 * kRows;
    states = reinterpret_cast<float2*>(keeps + 2 * kRows);
    items = reinterpret_cast<Item*>(states + 2 * kRows);
    char* const end = reinterpret_cast<char*>(items + 2);
    full = smem(end), empty = full + kSlots * 8, queries_full = empty + kSlots * 8;
    queries_empty = queries_full + 16, weights_full = queries_empty + 16, weights_empty = weights_full + 16;
    states_full = weights_empty + 16;
    is_last = reinterpret_cast<int*>(end + kSlots * 16 + 80), sums = is_last + 2;
  }
};

// A place in a ring of slots.
template <int kCount>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int by = 1) {
    slot += by;
    if (slot >= kCount) slot -= kCount, parity ^= 1;
  }
  __device__ __forceinline__ Ring operator+(int by) const {
    Ring x = *this;
    x.advance(by);
    return x;
  }
};

// Sums of parts in their order: kTogether times two heads of eight, of columns of kOwn chunks, as they come out of
// products. States: the highest scores and sums of weights of both heads.
struct Merger {
  float x[kTogether][kOwn][4], top[kTogether][2], total[kTogether][2];

  __device__ __forceinline__ Merger() {
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      top[n][0] = top[n][1] = -kInf, total[n][0] = total[n][1] = 0;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) x[n][c][0] = x[n][c][1] = x[n][c][2] = x[n][c][3] = 0;
    }
  }
  __device__ __forceinline__ void add(const float4 (&sums)[kTogether][kOwn], const float4 (&states)[kTogether]) {
#pragma unroll
    for (int n = 0; n < kTogether; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float its_top = e ? states[n].z : states[n].x, its_total = e ? states[n].w : states[n].y;
        const float high = fmaxf(top[n][e], its_top), base = high == -kInf ? 0 : high;
        const float keep = power(top[n][e] - base), by = power(its_top - base);
        total[n][e] = total[n][e] * keep + its_total * by, top[n][e] = high;
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
          const float4 y = sums[n][c];
          x[n][c][e] = x[n][c][e] * keep + (e ? y.y : y.x) * by;
          x[n][c][2 + e] = x[n][c][2 + e] * keep + (e ? y.w : y.z) * by;
        }
      }
  }
  // Rows [there][L] from the eights of heads n0 on, and columns from `first` on, 16 a chunk.
  __device__ __forceinline__ void write(bf16* out, float* lse, int n0, int first, int there) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      float once[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        once[e] = total[n][e] == 0 ? 0 : 1 / total[n][e];
        const int head = (n0 + n) * 8 + lane % 4 * 2 + e;
        if (lse && head < there) lse[head] = total[n][e] == 0 ? -kInf : top[n][e] + log2f(total[n][e]);
      }
      // A lane has two heads of a column; then a head of two columns, and of four: 32 bytes of four lanes.
      const int head = (n0 + n) * 8 + lane / 4, column = first + lane % 2 * 8 + lane / 2 % 2 * 4;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        const float* const z = x[n][c];
        const uint32_t low = transpose(pack(z[0] * once[0], z[1] * once[1]));
        const uint32_t high = transpose(pack(z[2] * once[0], z[3] * once[1]));
        const uint32_t other = __shfl_xor_sync(~0u, lane % 2 ? low : high, 1);
        if (head < there)
          *reinterpret_cast<uint2*>(out + head * L + column + c * 64) =
              lane % 2 ? make_uint2(other, high) : make_uint2(low, other);
      }
    }
  }
};

// pages: the cache, [pages, page size, L + 64], of which tiles have 64 tokens or a page. Others: see attend.cu.
extern "C" __global__ void __launch_bounds__(kBlock, 1)
    attend_few_sm90(const __grid_constant__ TensorMap pages, const bf16* q, long long q_stride, const bf16* q_turned,
                    long long turned_stride, int turned_head, const int* cut_tiles, const int* qo_indptr,
                    const int* places, const int* kv_lens, int tiles, int of_each, int heads, int is_before,
                    const int* indptr, const int* indices, int page_shift, float scale, bf16* out, float* lse,
                    float* partial, int* counters, int merges) {
  DYNAMIC_SHARED(memory);
  const Shared shared(memory);
  const int lane = threadIdx.x % 32;
  const Tiles list = {cut_tiles, qo_indptr, places, kv_lens, tiles, of_each, heads, is_before};
  if (threadIdx.x == 0) {
    fetch_map(pages);
    for (int i = 0; i < kQuerySlots; ++i) {
      barrier_init(shared.queries_full + i * 8, 3 * 32 + 1);
      barrier_init(shared.queries_empty + i * 8, 4 + 4 * kSides);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.weights_full + i * 8, kGroup);
      barrier_init(shared.weights_empty + i * 8, 4 * kSides);
      barrier_init(shared.states_full + i * 8, 4);
    }
  }
  if (threadIdx.x < kSlots)
    barrier_init(shared.full + threadIdx.x * 8, 1), barrier_init(shared.empty + threadIdx.x * 8, 4);
  fence_shared();  // copies count at them
  let_next_begin();
  wait_for_ahead();
  auto line = Line<kRows>::of_block<kBlock>(list, indptr, 1, !merges, shared.sums);
  if (line.is_empty()) return;

  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const int thread = threadIdx.x % kGroup;
  Ring<kQuerySlots> query_slot;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  Item item;
  if (group == 0) {
    give_registers<40>();
    if (warp > 0) {
      for (bool is_there = true; is_there; query_slot.advance()) {
        is_there = line.next(item);
        barrier_wait(shared.queries_empty + query_slot.slot * 8, query_slot.parity ^ 1);
        const uint32_t full = shared.queries_full + query_slot.slot * 8;
        if (warp == 1 && lane == 0) {
          shared.items[query_slot.slot] = item;
          barrier_arrive(full);
        }
        for (int row = warp - 1; row < kRows && is_there; row += 3) {
          const int of_request = item.row0 + row, query = list.query(of_request), head = of_request - query * heads;
          const bool has_row = of_request < item.rows;
          const long long place = item.first_out + query;
          const bf16* const latent = q + (has_row ? place * q_stride + head * L : 0);
          const bf16* const turned = q_turned + (has_row ? place * turned_stride + head * turned_head : 0);
          const uint32_t to =
              smem(shared.queries) + query_slot.slot * kQueries + row * 128 + ((lane % 8 ^ row % 8) << 4);
#pragma unroll
          for (int half = 0; half < 2; ++half)
            copy16(to + (half * 4 + lane / 8) * kQueryChunk, latent + half * 256 + lane * 8, has_row);
          if (lane < 8) copy16(to + (kChunks - 1) * kQueryChunk, turned + lane * 8, has_row);
        }
        barrier_arrive_with_copies(full);
      }
    }
    const int box_shift = min(page_shift, 6), boxes = kUnit >> box_shift, box_rows = 1 << box_shift;
    const int own_chunk = lane >> (6 - box_shift), own_box = lane & (boxes - 1);
    Ring<kSlots> ring;
    while (warp == 0 && line.next(item)) {
      const int* const own_pages = indices + item.first_page;
      int page = 0, token = 0;
      for (int u = 0, box = 0; u < item.units; ++u, box = (box + boxes) % 32) {
        if (box == 0) {  // a lane looks up the page of a box, for those of some units
          token = item.token0 + (u + own_chunk) * kUnit + own_box * box_rows;
          page = token < item.group_end ? __ldg(own_pages + (token >> page_shift)) : -1;
        }
        const int from = (box + own_box) % 32, its_page = __shfl_sync(~0u, page, from);
        const int its_token = __shfl_sync(~0u, token, from);
        // Behind the last row of a page there are zeros.
        const int row = its_page >= 0 ? its_token & ((1 << page_shift) - 1) : 1 << page_shift;
        for (int i = 0; i < kChunks; i += kAtOnce, ring.advance(kAtOnce)) {
          const int own = i + own_chunk, c = own == 0 ? kChunks - 1 : own - 1;
          const Ring<kSlots> slot = ring + min(own_chunk, kAtOnce - 1);
          const uint32_t full = shared.full + slot.slot * 8;
          barrier_wait(shared.empty + slot.slot * 8, slot.parity ^ 1);
          if (own_chunk < kAtOnce && own_box == 0) barrier_arrive_for(full, kChunk);
          __syncwarp();
          if (own_chunk < kAtOnce)
            copy_tile(smem(shared.slots) + slot.slot * kChunk + own_box * box_rows * 128, pages, c * 64, row,
                      max(its_page, 0), full);
        }
      }
    }
  } else if (group == 1) {
    Ring<kSlots> ring;
    Ring<2> weight_slot;
    for (;; query_slot.advance()) {
      barrier_wait(shared.queries_full + query_slot.slot * 8, query_slot.parity);
      item = shared.items[query_slot.slot];
      fence_shared();
      // The same for all lanes, which the compiler is to know.
      item.all_see = __shfl_sync(~0u, item.all_see, 0), item.token0 = __shfl_sync(~0u, item.token0, 0);
      item.end = __shfl_sync(~0u, item.end, 0), item.units = __shfl_sync(~0u, item.units, 0);
      if (item.units < 0) break;
      if (item.units == 0) release(shared.queries_empty + query_slot.slot * 8);  // no last unit does
      // Of heads lane % 4 * 2 and the next, of each eight. `total`: of this lane's tokens alone.
      float top[kPairs][2], total[kPairs][2];
      int sees[kPairs][2];
#pragma unroll
      for (int n = 0; n < kPairs; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          top[n][e] = -kInf, total[n][e] = 0;
          sees[n][e] = min(item.end, item.before + list.query(item.row0 + n * 8 + lane % 4 * 2 + e) + 1);
        }
      const Matrix queries(kAlong, smem(shared.queries) + query_slot.slot * kQueries);
      for (int u = 0; u < item.units; ++u, weight_slot.advance()) {
        float chains[kChains][kSums];
        const int turned_slot = ring.slot;
        begin_products();
#pragma unroll
        for (int i = 0; i < kChunks; ++i, ring.advance()) {
          const int c = (i + kChunks - 1) % kChunks;  // in the order in which they come
          barrier_wait(shared.full + ring.slot * 8, ring.parity);
          const Matrix keys(kAlong, smem(shared.slots) + ring.slot * kChunk);
#pragma unroll
          for (int k = 0; k < 4; ++k)
            multiply_keys(chains[k % kChains], keys + k * 32, queries + (c * kQueryChunk + k * 32),
                          i > 0 || k >= kChains);
        }
        end_products();
        wait_products<0>();
#pragma unroll
        for (int i = 0; i < kChains; ++i) settle(chains[i]);
        release(shared.empty + turned_slot * 8);
        const bool is_last = u + 1 == item.units;
        if (is_last) release(shared.queries_empty + query_slot.slot * 8);
        float (&s)[kSums] = chains[0];
#pragma unroll
        for (int i = 1; i < kChains; ++i)
#pragma unroll
          for (int j = 0; j < kSums; ++j) s[j] += chains[i][j];

        const int token0 = item.token0 + u * kUnit, own_token = token0 + warp * 16 + lane / 4;
        if (token0 + kUnit > item.all_see) {
#pragma unroll
          for (int j = 0; j < kSums; ++j)
            if (own_token + j / 2 % 2 * 8 >= sees[j / 4][j % 2]) s[j] = -kInf;
        }
        float high[kPairs][2], keep[kPairs][2];
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float x = fmaxf(s[n * 4 + e], s[n * 4 + 2 + e]);
#pragma unroll
            for (int o = 4; o < 32; o <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
            high[n][e] = x;
          }
        float* const highs = shared.highs + weight_slot.slot * 4 * kRows + lane % 4 * 2;
        if (lane < 4) {
#pragma unroll
          for (int n = 0; n < kPairs; ++n)
            *reinterpret_cast<float2*>(highs + warp * kRows + n * 8) = make_float2(high[n][0], high[n][1]);
        }
        turn_wait(kScoring, kGroup);
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 other = *reinterpret_cast<const float2*>(highs + w * kRows + n * 8);
            high[n][0] = fmaxf(high[n][0], other.x), high[n][1] = fmaxf(high[n][1], other.y);
          }
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float next = fmaxf(top[n][e], high[n][e] * scale), base = next == -kInf ? 0 : next;
            keep[n][e] = power(top[n][e] - base), top[n][e] = next;
            float sum = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& weight = s[n * 4 + h * 2 + e];
              sum += weight = power(fmaf(weight, scale, -base));
            }
            total[n][e] = total[n][e] * keep[n][e] + sum;
          }
        }
        barrier_wait(shared.weights_empty + weight_slot.slot * 8, weight_slot.parity ^ 1);
        char* const weights = shared.weights + weight_slot.slot * kQueryChunk;
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t pair = transpose(pack(s[n * 4 + h * 2], s[n * 4 + h * 2 + 1]));
            *reinterpret_cast<uint32_t*>(weights + (n * 8 + lane / 4) * 128 + ((warp * 2 + h ^ lane / 4) << 4) +
                                         lane % 4 * 4) = pair;
          }
        if (thread < 4) {
#pragma unroll
          for (int n = 0; n < kPairs; ++n)
            *reinterpret_cast<float2*>(shared.keeps + weight_slot.slot * kRows + n * 8 + thread * 2) =
                make_float2(keep[n][0], keep[n][1]);
        }
        // What lies behind the last token may be anything, and 0 · NaN is NaN.
        const int there = max(0, min(kUnit, item.end - token0));
        if (there < kUnit) {
#pragma unroll
          for (int c = 0; c < kChunks - 1; ++c) {
            char* const values = shared.slots + (ring.slot + kSlots - kChunks + 1 + c) % kSlots * kChunk;
            for (int at = there * 128 + thread * 16; at < kChunk; at += kGroup * 16)
              *reinterpret_cast<uint4*>(values + at) = make_uint4(0, 0, 0, 0);
          }
        }
        fence_shared();
        barrier_arrive(shared.weights_full + weight_slot.slot * 8);
        if (is_last) {
#pragma unroll
          for (int n = 0; n < kPairs; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
              for (int o = 4; o < 32; o <<= 1) total[n][e] += __shfl_xor_sync(~0u, total[n][e], o);
            }
          turn_wait(kScoring, kGroup);  // all have read the highest scores
          if (lane < 4) {
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
              *reinterpret_cast<float2*>(highs + warp * kRows + n * 8) = make_float2(total[n][0], total[n][1]);
          }
          turn_wait(kScoring, kGroup);
          if (thread < 4) {
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < 4; ++w) sum += highs[w * kRows + n * 8 + e];
                shared.states[weight_slot.slot * kRows + n * 8 + thread * 2 + e] = make_float2(top[n][e], sum);
              }
            barrier_arrive(shared.states_full + weight_slot.slot * 8);
          }
        }
      }
    }
  } else {
    take_registers<kSides == 1 ? 240 : 168>();
    const int side = group - 2, member = threadIdx.x - 2 * kGroup;
    const auto own_words = [&](float* part) { return reinterpret_cast<float4*>(part) + member; };
    Ring<kSlots> ring;
    Ring<2> weight_slot;
    uint32_t ends = 0;  // parities of states_full
    for (;; query_slot.advance()) {
      barrier_wait(shared.queries_full + query_slot.slot * 8, query_slot.parity);
      item = shared.items[query_slot.slot];
      fence_shared();
      item.units = __shfl_sync(~0u, item.units, 0);
      release(shared.queries_empty + query_slot.slot * 8);
      if (item.units < 0) break;
      volatile int& is_last = shared.is_last[item.is_first];  // a block has one piece of either kind that is cut
      float o[kOwn][kSums];
#pragma unroll
      for (int c = 0; c < kOwn; ++c)
#pragma unroll
        for (int j = 0; j < kSums; ++j) o[c][j] = 0;
      float2 states[kPairs][2];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) states[n][0] = states[n][1] = make_float2(-kInf, 0);
      for (int u = 0; u < item.units; ++u, ring.advance(kChunks), weight_slot.advance()) {
        barrier_wait(shared.weights_full + weight_slot.slot * 8, weight_slot.parity);
        float2 keep[kPairs];
        bool keeps_all = true;
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          keep[n] = *reinterpret_cast<const float2*>(shared.keeps + weight_slot.slot * kRows + n * 8 + lane % 4 * 2);
          keeps_all &= keep[n].x == 1 && keep[n].y == 1;
        }
        if (!__all_sync(~0u, keeps_all)) {
#pragma unroll
          for (int c = 0; c < kOwn; ++c)
#pragma unroll
            for (int j = 0; j < kSums; ++j) o[c][j] *= j % 2 ? keep[j / 4].y : keep[j / 4].x;
        }
        Ring<kSlots> slots[kOwn];
        Matrix values[kOwn];
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
          slots[c] = ring + (1 + side * kOwn + c);
          values[c] = Matrix(kAcross, smem(shared.slots) + slots[c].slot * kChunk);
        }
        const Matrix weights(kAlong, smem(shared.weights) + weight_slot.slot * kQueryChunk);
        begin_products();
#pragma unroll
        for (int c = 0; c < kOwn; ++c) barrier_wait(shared.full + slots[c].slot * 8, slots[c].parity);
#pragma unroll
        for (int k = 0; k < kUnit / 16; ++k)
#pragma unroll
          for (int c = 0; c < kOwn; ++c) multiply_columns(o[c], values[c] + k * 16 * 128, weights + k * 32, true);
        end_products();
        if (u + 1 == item.units) {
          barrier_wait(shared.states_full + weight_slot.slot * 8, ends >> weight_slot.slot & 1);
          ends ^= 1 << weight_slot.slot;
#pragma unroll
          for (int n = 0; n < kPairs; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              states[n][e] = shared.states[weight_slot.slot * kRows + n * 8 + lane % 4 * 2 + e];
          // Whether all others have come, who then need not know of this piece.
          if (item.pieces > 1 && merges && member == 0)
            is_last = static_cast<int>(acquire(reinterpret_cast<uint32_t*>(counters + item.tile))) == item.pieces - 1;
        }
        wait_products<0>();
#pragma unroll
        for (int c = 0; c < kOwn; ++c) release(shared.empty + slots[c].slot * 8);
#pragma unroll
        for (int c = 0; c < kOwn; ++c) settle(o[c]);
        release(shared.weights_empty + weight_slot.slot * 8);
      }

      // The end of this piece.
      const long long first_head = item.first_out * heads + item.row0;
      bf16* const own_out = out + first_head * L;
      float* const own_lse = lse && member % kGroup < 4 ? lse + first_head : nullptr;
      const int there = item.rows - item.row0;  // rows, or more
      const auto part_of = [&](int block, bool is_first) {
        return partial + (static_cast<long long>(block) * 2 + is_first) * kPart(kRows, L);
      };
      float* const part = part_of(blockIdx.x, item.is_first);
      const auto states_of = [&](float* of, int n) {
        return reinterpret_cast<float4*>(of + kRows * L + (n * 8 + lane % 4 * 2) * 2);
      };
      const auto own_states = [&](int n) {
        return make_float4(states[n][0].x, states[n][0].y, states[n][1].x, states[n][1].y);
      };
      const auto own_sums = [&](int n, int c) {
        const float* const z = o[c] + n * 4;
        return make_float4(z[0], z[1], z[2], z[3]);
      };
      if (item.pieces > 1 && !merges) {
#pragma unroll
        for (int c = 0; c < kOwn; ++c)
#pragma unroll
          for (int j = 0; j < kSums; ++j) {
            const int head = j / 4 * 8 + lane % 4 * 2 + j % 2;
            const int column = (side * kOwn + c) * 64 + warp * 16 + j / 2 % 2 * 8 + lane / 4;
            if (head < there) part[head * L + column] = o[c][j];
          }
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
          if (member < 4) *states_of(part, n) = own_states(n);
        continue;
      }
      if (item.pieces > 1) {
        turn_wait(kSumming, kSides * kGroup);
        if (!is_last) {
#pragma unroll
          for (int n = 0; n < kPairs; ++n) {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) own_words(part)[(c * kPairs + n) * kSides * kGroup] = own_sums(n, c);
            if (member < 4) *states_of(part, n) = own_states(n);
          }
          turn_wait(kSumming, kSides * kGroup);
          if (member == 0) {
            __threadfence();
            is_last = atomicAdd(counters + item.tile, 1) == item.pieces - 1;
            __threadfence();
          }
          turn_wait(kSumming, kSides * kGroup);
          if (!is_last) continue;
        }
        if (member == 0) counters[item.tile] = 0;
      }
#pragma unroll
      for (int n0 = 0; n0 < kPairs; n0 += kTogether) {
        Merger merger;
        for (int i = 0; i < item.pieces; ++i) {
          float4 sums[kTogether][kOwn], its[kTogether];
          float* const from = part_of(item.begin_block + i, i == 0);
          const bool is_own = item.begin_block + i == static_cast<int>(blockIdx.x);
#pragma unroll
          for (int n = 0; n < kTogether; ++n) {
            its[n] = is_own ? own_states(n0 + n) : __ldcg(states_of(from, n0 + n));
#pragma unroll
            for (int c = 0; c < kOwn; ++c)
              sums[n][c] =
                  is_own ? own_sums(n0 + n, c) : __ldcg(own_words(from) + (c * kPairs + n0 + n) * kSides * kGroup);
          }
          merger.add(sums, its);
        }
        merger.write(own_out, side == 0 ? own_lse : nullptr, n0, side * kOwn * 64 + warp * 16, there);
      }
    }
  }
}
