// Decode attention over paged KV, for sm_80 and later: one query a request, up to 16 query heads a KV head. Bounded by
// memory: each key and value is read once, and as many bytes are on their way as hide the latency.
// Compiled with what kv.cuh and decode_tile.cuh name, WARPS, STAGES (tiles of a warp in shared memory) and BLOCKS (of a
// multiprocessor: one merges while another multiplies).
//
// Work is cut over the whole batch ("stream-K": M. Osama et al., arXiv:2301.03598): all units of kUnit tokens of all
// (request, KV head) pairs are one line, of which each thread block takes an equal stretch. Within a stretch every warp
// takes its tile of each unit, on its own: copies in flight, also over the end of a pair, online softmax; only at the
// end of a pair the warps are merged. Who has a pair whole writes the output; else partial results go to the workspace
// and the last one to come merges them in order.
#include "attention/decode_tile.cuh"

#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
constexpr int kWarps = WARPS, kStages = STAGES, kThreads = kWarps * 32, kUnit = kTile * kWarps;  // tokens
constexpr int kWarpBytes = kStages * kStageBytes;
#include "attention/decode_merge.cuh"

struct Cursor {
  int request, kv_head, unit, units;  // units of the request, for each head
};

// q: [rows, heads or more, D], rows q_stride elements apart. Scales: [pages, kv_heads, 2, page size]: zeros, then
// scales. Strides: bytes. rows: [requests], of q and out, -1: the request is left out; null: 0, 1, …
// first_heads: [kv_heads + 1], null: as many query heads for each. out: [rows, heads, D]; lse:
// [rows, heads] or null, base 2. partial: [grid * 2][kPart]. counters: [requests * kv_heads], zero before and after.
// window: tokens before its own that a query sees, -1: all. Scores times scale are logarithms to base 2; with a cap,
// cap * tanh(scores * scale). slopes, sinks: [heads], to base e.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    decode(const bf16* q_, long long q_stride, const char* k_, const char* v_, const float* k_scales,
           const float* v_scales, long long page_stride, long long head_stride, long long token_stride,
           const int* indptr, const int* indices, const int* kv_lens, const int* rows, const int* first_heads,
           bf16* out, float* lse, float* partial, int* counters, int requests, int kv_heads, int heads, int page_shift,
           int window, float scale, float cap, const float* slopes, const float* sinks) {
  const Result result = {out, lse, sinks, heads};
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  char* const tiles = shared + warp * kWarpBytes;
  char* const query_slots = shared + kWarps * kWarpBytes;                          // [kStages][kHeads][kQueryRow]
  int* const begins = reinterpret_cast<int*>(query_slots + kStages * kQuerySlot);  // [requests + 1], in units of a head
  int* const lengths = begins + requests + 1;                                      // [requests]
  int* const starts = lengths + requests;                                          // [requests], of pages
  int* const places = starts + requests;                                           // [requests], rows
  int* const first_head = places + requests;                                       // [kv_heads + 1]

  let_next_begin();  // where blocks of this one have ended, or leave room: products ask for their weights
  wait_for_ahead();

  // The line of work: every thread block finds out for itself.
  __shared__ int warp_sums[kWarps], is_last;
#pragma unroll 4
  for (int r = threadIdx.x; r < requests; r += kThreads) {
    const int length = kv_lens[r], row = rows ? rows[r] : r, start = indptr[r];
    lengths[r] = row < 0 ? 0 : length, starts[r] = start, places[r] = row;
  }
  int carry = 0;
  for (int base = 0; base < requests; base += kThreads) {
    const int r = base + threadIdx.x;
    int x = 0;
    if (r < requests) {
      const int tokens = lengths[r], row = places[r];
      x = ((window < 0 ? tokens : min(tokens, window + 1)) + kUnit - 1) / kUnit;
      if (tokens == 0 && row >= 0 && r % gridDim.x == blockIdx.x)
        for (int h = 0; h < heads; ++h) {
          const long long head = static_cast<long long>(row) * heads + h;
          for (int i = 0; i < D; i += 8) *reinterpret_cast<uint4*>(out + head * D + i) = make_uint4(0, 0, 0, 0);
          if (lse) lse[head] = -kInf;
        }
    }
    for (int o = 1; o < 32; o <<= 1) {
      const int y = __shfl_up_sync(~0u, x, o);
      if (lane >= o) x += y;
    }
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    int before = carry;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_sums[w];
      carry += warp_sums[w];
    }
    if (r < requests) begins[r + 1] = before + x;
    __syncthreads();
  }
  if (threadIdx.x == 0) begins[0] = 0;
  for (int h = threadIdx.x; h <= kv_heads; h += kThreads)
    first_head[h] = first_heads ? first_heads[h] : heads / kv_heads * h;
  __syncthreads();
  // Thread block b has units b * each + min(b, more) and on, `each` of them or one more; none has none.
  const int all = carry * kv_heads, grid = min(static_cast<int>(gridDim.x), all);
  if (static_cast<int>(blockIdx.x) >= grid) return;
  const int each = all / grid, more = all % grid, mine = blockIdx.x;
  const int first_unit = mine * each + min(mine, more), count = each + (mine < more);
  const auto owner = [&](int unit) {
    return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each;
  };

  // Units of a request lie together, its heads one after the other.
  Cursor at;
  {
    int low = 0, high = requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begins[middle] * kv_heads <= first_unit)
        low = middle;
      else
        high = middle;
    }
    const int offset = first_unit - begins[low] * kv_heads, units = begins[low + 1] - begins[low];
    at = {low, offset / units, offset % units, units};
  }
  const auto next_pair = [&](Cursor& c) {
    c.unit = 0;
    if (++c.kv_head < kv_heads) return;
    c.kv_head = 0;
    do ++c.request;
    while (begins[c.request + 1] == begins[c.request]);
    c.units = begins[c.request + 1] - begins[c.request];
  };
  const auto first_token = [&](int length) { return window < 0 ? 0 : max(0, length - 1 - window); };

  // What is asked for runs kStages - 1 tiles ahead; pages one tile more.
  constexpr int kLooks = (kTile + 31) / 32;
  // Zeros and scales of four tokens lie together.
  const auto aligned = [](const float* scales) { return reinterpret_cast<unsigned long long>(scales) % 16 == 0; };
  const bool has_fours = window < 0 && page_shift >= 2 && aligned(k_scales) && aligned(v_scales);
  Cursor ahead = at;
  bool is_new = true;  // a pair, whose queries come with its first tile
  int pairs_ahead = 0;
  int length = 0, token0 = 0, page[kLooks];  // page: of this lane's token, of lane % kTile, and of those 32 on
  const int* pages = indices;
  const int in_page = (1 << page_shift) - 1;
  const auto look_up = [&] {
    token0 = first_token(length) + ahead.unit * kUnit + warp * kTile;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int token = token0 + i * 32 + lane % kTile;
      page[i] = token < length ? __ldg(pages + (token >> page_shift)) : 0;
    }
  };
  const auto enter = [&] { length = lengths[ahead.request], pages = indices + starts[ahead.request]; };
  enter();
  look_up();
  const auto ask_scales = [&](uint32_t to) {  // [keys' zeros, scales, values' zeros, scales][kTile]
    if (has_fours) {
#pragma unroll
      for (int i = 0; i < kTile / 32; ++i) {
        const int fours = i * 32 + lane, which = fours / (kTile / 4), in_tile = fours % (kTile / 4) * 4;
        int its_page = 0;
#pragma unroll
        for (int n = 0; n < kLooks; ++n) {
          const int found = __shfl_sync(~0u, page[n], in_tile % 32);
          if (in_tile / 32 == n) its_page = found;
        }
        const int token = token0 + in_tile;
        const float* const of_head =
            (which < 2 ? k_scales : v_scales) + ((ahead.kv_head * 2 + which % 2) << page_shift) + (token & in_page);
        copy16(to + fours * 16, of_head + its_page * static_cast<long long>(kv_heads << page_shift + 1),
               token < length);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLooks; ++i) {
        const int token = token0 + i * 32 + lane;
        const bool is_there = token < length;
        const long long row = (static_cast<long long>(page[i]) * kv_heads + ahead.kv_head) * 2;
#pragma unroll
        for (int which = 0; which < 4; ++which)
          copy4(to + (which * kTile + i * 32 + lane) * 4,
                (which < 2 ? k_scales : v_scales) +
                    (is_there ? ((row + which % 2) << page_shift) + (token & in_page) : 0),
                is_there);
      }
    }
  };
  const auto ask_queries = [&] {  // every warp, the same: then each has waited for them when its own have come
    const int first = first_head[ahead.kv_head], group = first_head[ahead.kv_head + 1] - first;
    const bf16* const from = q_ + places[ahead.request] * q_stride + first * D;
    const uint32_t to = smem(query_slots + pairs_ahead % kStages * kQuerySlot);
    for (int x = lane; x < group * (D / 8); x += 32)
      copy16(to + x / (D / 8) * kQueryRow + x % (D / 8) * 16, from + x * 8, true);
    ++pairs_ahead, is_new = false;
  };
  const auto ask = [&](int i) {
    if (i < count) {
      if (is_new) ask_queries();
      const uint32_t to = smem(tiles + i % kStages * kStageBytes);
      const char *const k = k_ + ahead.kv_head * head_stride, *const v = v_ + ahead.kv_head * head_stride;
      long long from[kLooks];
#pragma unroll
      for (int n = 0; n < kLooks; ++n) {
        const int token = token0 + n * 32 + lane % kTile;
        from[n] = token < length ? page[n] * page_stride + (token & in_page) * token_stride : 0;
      }
#pragma unroll
      for (int j = 0; j < kTile * kChunks / 32; ++j) {
        const int row = (j * 32 + lane) / kChunks, c = (j * 32 + lane) % kChunks;
        long long byte = __shfl_sync(~0u, from[0], row % 32);
#pragma unroll
        for (int n = 1; n < kLooks; ++n) {
          const long long other = __shfl_sync(~0u, from[n], row % 32);
          if (row / 32 == n) byte = other;
        }
        const bool is_there = token0 + row < length;
        const uint32_t place = to + chunk<kPitch>(place_of(row), c);
        copy16(place, k + byte + c * 16, is_there);
        copy16(place + kTileBytes, v + byte + c * 16, is_there);
      }
      if (kScaled) ask_scales(to + 2 * kTileBytes);
      if (i + 1 < count) {
        if (++ahead.unit == ahead.units) {
          const int before = ahead.request;
          next_pair(ahead);
          is_new = true;
          if (ahead.request != before) enter();
        }
        look_up();
      }
    }
    commit();
  };

  Queries queries;
  State state;
  bool is_begun = false;
  int pairs = 0, piece_begin = 0;
  const auto begin_pair = [&] {
    const int first = first_head[at.kv_head], group = first_head[at.kv_head + 1] - first;
    queries.take(query_slots + pairs % kStages * kQuerySlot, group, scale, slopes + first);
    state.clear();
    is_begun = true, piece_begin = at.unit, ++pairs;
  };
  ask_queries();
  commit();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) ask(i);
  wait_for<kStages - 1>();  // the first queries come before the tiles
  __syncwarp();
  begin_pair();
  for (int i = 0; i < count; ++i) {
    wait_for<kStages - 2>();
    __syncwarp();
    ask(i + kStages - 1);
    if (!is_begun) begin_pair();
    const char* const tile = tiles + i % kStages * kStageBytes;
    const int seen = lengths[at.request] - first_token(lengths[at.request]);
    const int there = seen - at.unit * kUnit - warp * kTile;
    if (there > 0) {
      Product s[kHalves][kSixteens];
      multiply_keys(s, queries, smem(tile));
      state.add(s, queries, tile, there, cap);
    }
    const Cursor done = at;
    if (++at.unit < at.units && i + 1 < count) continue;

    const int head0 = first_head[done.kv_head], group = first_head[done.kv_head + 1] - head0;
    const long long head = static_cast<long long>(places[done.request]) * heads + head0;
    const bool is_whole = piece_begin == 0 && done.unit + 1 == done.units;
    float* const part = partial + (static_cast<long long>(mine) * 2 + (piece_begin == 0)) * kPart;
    char* const stage = shared + i % kStages * kStageBytes;  // of the first warp, until all ask again
    state.put_down(stage + warp * kWarpBytes, group);
    if (i + 1 < count) next_pair(at);
    is_begun = false;
    __syncthreads();
    merge_warps(result, part, stage, head, group, is_whole);
    __syncthreads();
    if (is_whole) continue;
    // The stretches that have parts of this pair are those of neighbouring thread blocks.
    const int pair0 = begins[done.request] * kv_heads + done.kv_head * done.units;
    const int begin_block = owner(pair0), end_block = owner(pair0 + done.units - 1);
    if (threadIdx.x == 0) {
      int* const counter = counters + done.request * kv_heads + done.kv_head;
      __threadfence();
      is_last = atomicAdd(counter, 1) == end_block - begin_block;
      __threadfence();
      if (is_last) *counter = 0;
    }
    __syncthreads();
    if (is_last) merge_blocks(result, partial, stage, begin_block, end_block - begin_block + 1, head, group);
    __syncthreads();
  }
  wait_for<0>();
}
