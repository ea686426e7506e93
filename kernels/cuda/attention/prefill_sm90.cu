// Prefill attention over paged KV, bfloat16, for sm_90a: FlashAttention-3 (J. Shah et al., arXiv:2407.08608) with the
// heads of a group in the rows of one tile. One warpgroup copies queries, keys and values into shared memory; two
// others have 64 rows each and take turns, so that the tensor cores multiply for one while the other is at its softmax.
// Within one, too, the scores of a tile are multiplied while the values of the tile before are. Bound by the tensor
// cores; next come exponentials (16 a cycle: half the time of the products at a head_dim of 128). Compiled with
// HEAD_DIM (64 or 128; 192 with fewer elements of values), VALUE_DIM (the same, or 128), PARTIAL (1: float32 states of
// parts of the tokens, to be merged) and what scores.cuh names.
#include "attention/scores.cuh"
#include "ptx/ptx.cuh"
#include "ptx/ptx_sm90.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef PARTIAL
#define PARTIAL 0
#endif
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif
constexpr int D = HEAD_DIM, kValue = VALUE_DIM, kTokens = 128, kRows = 128, kGroup = 128, kThreads = 3 * kGroup;
// A tile is columns of 64 elements; a column is 128 rows of 128 bytes, their 16-byte chunks swizzled by the row.
constexpr int kColumn = 128 * 128, kTile = D / 64 * kColumn, kSlots = D <= 128 ? 6 : 3;
constexpr int kChunks = D <= 128 ? D / 8 : 8, kAtOnce = 32 / kChunks;  // 16-byte chunks of a row that a warp copies at
constexpr int kPasses = D / 8 / kChunks, kValuePasses = kPasses * kValue / D;  // once, and rows; columns come in passes

// What the tensor cores read, but for its address: columns of 128 bytes with that swizzle; eight rows take 1,024 bytes.
constexpr uint64_t kSwizzled = static_cast<uint64_t>(1) << 62 | static_cast<uint64_t>(1024 >> 4) << 32;
constexpr uint64_t kAlong = kSwizzled | 1 << 16;  // rows along k: a product needs 16 of one column's elements
constexpr uint64_t kAcross = kSwizzled | kColumn >> 4 << 16;  // k along rows: and all columns
__device__ __forceinline__ uint64_t matrix(uint64_t kind, uint32_t at) { return kind | (at & 0x3ffff) >> 4; }

// What one round of a block is about.
struct Item {
  int head0, group;                    // of the query heads that share these keys
  int first_query, rows;               // of the request; row i is query i / group and head head0 + i % group
  long long first_out;                 // row of out
  int row0, begin, tiles;              // first row; tiles of tokens that it sees, the last of which comes first
  int before, end, all_see, all_from;  // tokens before the first query; up to where rows see, up to where and from
                                       // where all do
};

struct Shared {
  char *queries, *slots;
  uint32_t full, empty, queries_full, queries_empty;  // barriers, of slots one each
  Item* item;

  __device__ explicit Shared(char* all) {
    char* const begin = all + (1024 - smem(all) % 1024) % 1024;
    queries = begin, slots = begin + kTile;
    char* const end = slots + kSlots * kTile;
    full = smem(end), empty = full + kSlots * 8, queries_full = empty + kSlots * 8, queries_empty = queries_full + 8;
    item = reinterpret_cast<Item*>(end + (2 * kSlots + 2) * 8);
  }
};

// The slots one after the other, keys one tile ahead of values.
struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

// What a block has to do, of `cut` tiles for each KV head in as many parts: those of some heads, which share what the
// GPU's cache holds, before those of others. In rounds there and back, so that with the longest items first all blocks
// have about as much to do; who had none in the last round begins with the next heads.
struct Items {
  const int cut, parts, kv_heads, heads_at_once;
  int head_from, round, offset;
  int tile, kv_head, part;

  __device__ Items(int cut, int parts, int kv_heads, int heads_at_once)
      : cut(cut), parts(parts), kv_heads(kv_heads), heads_at_once(heads_at_once), head_from(0), round(0), offset(0) {}
  __device__ __forceinline__ bool next() {
    const int blocks = gridDim.x;
    for (; head_from < kv_heads; head_from += heads_at_once, round = 0) {
      const int some = min(heads_at_once, kv_heads - head_from), items = cut * parts * some;
      const int me = (blockIdx.x + blocks - offset) % blocks;
      const int item = round * blocks + (round % 2 ? blocks - 1 - me : me);
      ++round;
      if (item < items) {
        tile = item / parts / some, kv_head = head_from + item / parts % some, part = item % parts;
        return true;
      }
      offset = (offset + items) % blocks;
    }
    return false;
  }
};

// Copies of a warp of the first warpgroup: rows 32 warp to 32 warp + 31 of each tile.
struct Copies {
  int lane, chunk_of_lane, row_of_lane, first;
  uint32_t at, swizzled;

  __device__ Copies() {
    lane = threadIdx.x % 32, row_of_lane = lane / kChunks, chunk_of_lane = lane % kChunks;
    first = threadIdx.x / 32 * 32 + row_of_lane;
    at = chunk_of_lane / 8 * kColumn + first * 128, swizzled = (chunk_of_lane % 8 ^ row_of_lane) << 4;
  }
  // Copy `step` has row first + step * kAtOnce.
  __device__ __forceinline__ uint32_t place(uint32_t tile, int step) const {
    return tile + at + step * kAtOnce * 128 + (swizzled ^ (step * kAtOnce % 8 << 4));
  }
};

struct Pages {
  int of[2];  // of rows 0 to 15 of the warp's, and of rows 16 to 31
};

// tiles: [cut][2]: request (-1: none), and first row of the tile, those that see most first; row i of a request is
// query i / group and head i % group of the KV head's. first_heads: [kv_heads + 1], or null: as many query heads for
// each. The tiles of heads_at_once KV heads come before those of the next ones. Part i of a tile's tokens goes to out
// and lse from row i * q_rows on. slopes, sinks and after: see prefill.cu.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    prefill_sm90(const bf16* q, long long q_stride, const char* k_cache, const char* v_cache, long long page_stride,
                 long long head_stride, long long token_stride, const int* tiles, const int* qo_indptr,
                 const int* page_indptr, const int* indices, const int* kv_lens, const int* first_heads, void* out,
                 float* lse, int parts, int q_rows, int heads, int kv_heads, int heads_at_once, int cut, int page_shift,
                 int is_causal, int window, float scale, float cap, const float* slopes, const float* sinks,
                 const int* after) {
  DYNAMIC_SHARED(memory);
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(shared.full + i * 8, kGroup);  // threads that copy
      barrier_init(shared.empty + i * 8, 8);      // warps that multiply
    }
    barrier_init(shared.queries_full, kGroup + 1);  // and the item
    barrier_init(shared.queries_empty, 8);
  }
  __syncthreads();

  if (threadIdx.x < kGroup) {
    give_registers<56>();
    Copies copies;
    Ring ring;
    uint32_t parity = 1;
    const auto give = [&](const Item& item) {
      barrier_wait(shared.queries_empty, parity);
      parity ^= 1;
      if (threadIdx.x == 0) {
        *shared.item = item;
        barrier_arrive(shared.queries_full);
      }
    };
    for (Items items(cut, parts, kv_heads, heads_at_once); items.next();) {
      const int tile = items.tile, kv_head = items.kv_head, part = items.part;
      const int request = tiles[2 * tile], row0 = tiles[2 * tile + 1];
      if (request < 0) continue;
      const int even = heads / kv_heads, head0 = first_heads ? first_heads[kv_head] : even * kv_head;
      const int group = first_heads ? first_heads[kv_head + 1] - head0 : even;
      const int first_query = qo_indptr[request], queries = qo_indptr[request + 1] - first_query;
      const int length = kv_lens[request], rows = queries * group, before = length - queries;
      if (row0 >= rows) continue;
      const int last_row = min(row0 + kRows, rows) - 1;
      int end = is_causal ? min(length, before + last_row / group + 1) : length;
      const int all_see = is_causal ? min(end, before + row0 / group + 1) : length;
      const int all_from = window < 0 ? 0 : before + last_row / group - window;
      const int least = window < 0 ? 0 : max(0, before + row0 / group - window);  // pages before may be another's
      int count = max(1, (end + kTokens - 1) / kTokens);
      int begin = min(least / kTokens, count - 1);
      if (PARTIAL) {
        const int each = (count - begin + parts - 1) / parts;
        begin += part * each, count = min(count, begin + each), end = min(end, count * kTokens);
        if (begin >= count) begin = 0, count = 1, end = 0;  // a part of none
      }
      const int* pages = indices + page_indptr[request];
      const int look_from = least >> page_shift << page_shift;
      const long long lane_offset =
          kv_head * head_stride + copies.row_of_lane * token_stride + copies.chunk_of_lane * 16;

      const auto look_up = [&](int tile) {
        Pages found;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = tile * kTokens + copies.first - copies.row_of_lane + half * 16;
          found.of[half] = token >= look_from && token < end ? __ldg(pages + (token >> page_shift)) : 0;
        }
        return found;
      };
      const auto copy = [&](const char* cache, int tile, const Pages& from, int passes) {
        barrier_wait(shared.empty + ring.slot * 8, ring.parity ^ 1);
        const unsigned seen = max(0, end - least);
        const uint32_t to = smem(shared.slots) + ring.slot * kTile;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = tile * kTokens + copies.first + half * 16;
          const int in_page = (token - copies.row_of_lane) & ((1 << page_shift) - 1);
          const char* row = cache + (from.of[half] * page_stride + in_page * token_stride + lane_offset);
#pragma unroll
          for (int step = 0; step < 16 / kAtOnce; ++step) {
            const bool is_there =
                WINDOW ? static_cast<unsigned>(token - least + step * kAtOnce) < seen : token + step * kAtOnce < end;
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass)
              if (pass < passes)
                copy16(copies.place(to, half * (16 / kAtOnce) + step) + pass * kColumn,
                       is_there ? row + pass * 128 : cache, is_there);
            row += kAtOnce * token_stride;
          }
        }
        barrier_arrive_with_copies(shared.full + ring.slot * 8);
        ring.next();
      };

      Pages now = look_up(count - 1), last = now;
      for (int at = count - 1; at >= begin; --at) {
        const Pages next = look_up(at - 1);
        copy(k_cache, at, now, kPasses);
        if (at == count - 1) {
          give({head0, group, first_query, rows, static_cast<long long>(part) * q_rows + first_query, row0, begin,
                count, before, end, min(end, all_see), all_from});
#pragma unroll 4
          for (int step = 0; step < 32 / kAtOnce; ++step) {
            const int row = row0 + copies.first + step * kAtOnce;
            const bool is_there = row < rows;
            const long long from =
                (first_query + row / group) * q_stride + (head0 + row % group) * D + copies.chunk_of_lane * 8;
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass)
              copy16(copies.place(smem(shared.queries), step) + pass * kColumn, q + (is_there ? from + pass * 64 : 0),
                     is_there);
          }
          barrier_arrive_with_copies(shared.queries_full);
        } else {
          copy(v_cache, at + 1, last, kValuePasses);
        }
        last = now, now = next;
      }
      copy(v_cache, begin, last, kValuePasses);
    }
    give({});
    barrier_arrive_with_copies(shared.queries_full);
  } else {
    take_registers<224>();
    const int side = __shfl_sync(~0u, threadIdx.x / kGroup, 0) - 1, thread = threadIdx.x % kGroup, lane = thread % 32;
    const int my_turn = 1 + side, other_turn = 2 - side;
    const uint64_t queries = matrix(kAlong, smem(shared.queries) + side * 64 * 128);
    const uint64_t keys = matrix(kAlong, smem(shared.slots)), values = matrix(kAcross, smem(shared.slots));
    Ring ring;
    uint32_t parity = 0;
    float o[kValue / 2], s[kTokens / 2];
    uint32_t p[kTokens / 4];
    const auto wait_full = [&] { barrier_wait(shared.full + ring.slot * 8, ring.parity); };
    const auto release = [&](uint32_t barrier) {
      if (lane == 0) barrier_arrive(barrier);
    };
    const auto multiply_scores = [&](int slot) {
      const uint64_t at = keys + (slot * kTile >> 4);
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        const int ahead = (step / 4 * kColumn + step % 4 * 32) >> 4;
        multiply_keys(s, queries + ahead, at + ahead, step > 0);
      }
      end_products();
    };
    const auto multiply_weights = [&] {
      const uint64_t at = values + (ring.slot * kTile >> 4);
#pragma unroll
      for (int step = 0; step < kTokens / 16; ++step) multiply_values(o, p + 4 * step, at + (step * 16 * 128 >> 4));
      end_products();
    };

    if (side == 1) turn_arrive(other_turn, 2 * kGroup);
    for (;; parity ^= 1) {
      barrier_wait(shared.queries_full, parity);
      const Item item = *shared.item;
      // The same for all lanes, which the compiler is to know: then what products read is in uniform registers.
      const int begin = __shfl_sync(~0u, item.begin, 0), last = __shfl_sync(~0u, item.tiles, 0) - 1;
      if (last < 0) break;
      const int my_row = item.row0 + side * 64 + thread / 32 * 16 + lane / 4;  // and eight further on
      int from[2], seen[2];  // column from which a row sees, for this lane's first one, and how many columns
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = item.before + (my_row + h * 8) / item.group;
        from[h] = window < 0 ? 0 : max(0, at - window);
        seen[h] = max(0, (is_causal ? min(item.end, at + 1) : item.end) - from[h]);
        from[h] -= lane % 4 * 2;
      }
      const float scale_log2 = kIsBent ? 1 : scale;
      float slope[2];  // of these rows, to base 2
      int own[2];      // the query's place, less this lane's first column
#pragma unroll
      for (int h = 0; SLOPES && h < 2; ++h) {
        const int row = min(my_row + h * 8, item.rows - 1), query = row / item.group;
        const int last = item.before + item.rows / item.group - 1;
        slope[h] = slopes[item.head0 + row % item.group] * kLog2E;
        own[h] = (after ? last + after[item.first_query + query] : item.before + query) - lane % 4 * 2;
      }
      float top[2] = {-kInf, -kInf}, total[2] = {0, 0}, keep[2];
#pragma unroll
      for (int i = 0; i < kValue / 2; ++i) o[i] = 0;

      // Of the scores s of a tile: hides what a row may not see, and makes of them weights, raising `top`.
      const auto soften = [&](int tile) {
        if (kIsBent) {
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) {
            const int h = i / 2 % 2, column = i / 4 * 8 + i % 2;
            s[i] = logit_of(s[i], scale, cap, slope[h], static_cast<float>(tile * kTokens - own[h]) + column);
          }
        }
        if ((tile + 1) * kTokens > item.all_see || tile * kTokens < item.all_from) {
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) {
            const int h = i / 2 % 2, column = i / 4 * 8 + i % 2;
            const unsigned in_row = tile * kTokens - from[h] + column;  // large before the first
            if (in_row >= seen[h]) s[i] = -kInf;
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float high = top[h];
#pragma unroll
          for (int n = 0; n < kTokens / 8; ++n) high = fmaxf(high, fmaxf(s[n * 4 + h * 2], s[n * 4 + h * 2 + 1]));
          high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
          high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
          const float base = high == -kInf ? 0 : high * scale_log2;
          keep[h] = power(fmaf(top[h], scale_log2, -base));
          top[h] = high;
          float sum = 0;
#pragma unroll
          for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& weight = s[n * 4 + h * 2 + e];
              sum += weight = power(fmaf(weight, scale_log2, -base));
            }
          total[h] = total[h] * keep[h] + sum;
        }
      };
      const auto pack_weights = [&] {
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
      };

      wait_full();
      fence_shared();
      begin_products();
      multiply_scores(ring.slot);
      wait_products<0>();
      settle(s);
      release(shared.empty + ring.slot * 8);
      ring.next();
      if (last == begin) release(shared.queries_empty);
      soften(last);
      pack_weights();

      for (int tile = last - 1; tile >= begin; --tile) {
        const int keys_slot = ring.slot;
        wait_full();
        ring.next();
        wait_full();
        fence_shared();
        turn_wait(my_turn, 2 * kGroup);
        begin_products();
        multiply_scores(keys_slot);
        multiply_weights();
        turn_arrive(other_turn, 2 * kGroup);
        wait_products<1>();
        settle(s);
        release(shared.empty + keys_slot * 8);
        if (tile == begin) release(shared.queries_empty);
        soften(tile);
        hold(total[0] + total[1]);
        wait_products<0>();
        settle(o);
        settle(s);  // weights go where the products just read the last ones
        release(shared.empty + ring.slot * 8);
        ring.next();
        if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {  // seldom, once a row has seen its highest score
#pragma unroll
          for (int i = 0; i < kValue / 2; ++i) o[i] *= keep[i / 2 % 2];
        }
        pack_weights();
      }
      wait_full();
      fence_shared();
      begin_products();
      multiply_weights();
      wait_products<0>();
      settle(o);
      release(shared.empty + ring.slot * 8);
      ring.next();

#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = total[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = my_row + h * 8;
        if (row >= item.rows) continue;
        top[h] *= scale_log2;
        const float kept =
            SINKS && !PARTIAL && sum > 0 ? join_sink(sinks[item.head0 + row % item.group], top[h], sum) : 1;
        const float by = sum > 0 ? kept / sum : 0;
        const long long head = (item.first_out + row / item.group) * heads + item.head0 + row % item.group;
#pragma unroll
        for (int n = 0; n < kValue / 8; ++n) {
          const long long at = head * kValue + n * 8 + lane % 4 * 2;
          const float x = o[n * 4 + h * 2] * by, y = o[n * 4 + h * 2 + 1] * by;
          if (PARTIAL)
            *reinterpret_cast<float2*>(static_cast<float*>(out) + at) = make_float2(x, y);
          else
            *reinterpret_cast<uint32_t*>(static_cast<bf16*>(out) + at) = pack(x, y);
        }
        if (lse && lane % 4 == 0) lse[head] = sum > 0 ? top[h] + log2f(sum) : -kInf;
      }
    }
    if (side == 0) turn_wait(my_turn, 2 * kGroup);
  }
}
