// How the queries of a step are cut into tiles, and these into stretches of thread blocks: see attend.cu. Whoever
// merges the parts of tiles later finds them the same way.
#ifndef ALLSPAN_LATENT_CUT
#define ALLSPAN_LATENT_CUT
#include "ptx/ptx.cuh"

constexpr int kTokens = 32, kThreads = 256;  // of a unit, of a block

// Row i of a request is query i / heads and head i % heads. end: tokens that the tile's last row sees.
struct Tile {
  int request, row0, rows, before, end;
  long long first_out;  // row of q and out of the request's first query
};

// Either requests of one query each, `of_each` tiles a request, where places [requests] says the rows of q and out (-1:
// the request is left out; null: 0, 1, ...); or cut [.., 2], a request (-1: none) and the first of 128 of its queries,
// of `of_each` tiles, with qo_indptr. Those see `is_before` alone the tokens before the request's queries.
struct Tiles {
  const int *cut, *qo_indptr, *places, *kv_lens;
  int count, of_each, heads, is_before;

  // Of a row of a request; without a division where it has one.
  __device__ __forceinline__ int query(int row) const { return row < heads ? 0 : row / heads; }
  __device__ __forceinline__ int request(int i) const {
    const int of = of_each == 1 ? i : i / of_each;
    return cut ? max(cut[2 * of], 0) : of;
  }
  __device__ __forceinline__ Tile tile(int i, int tile_rows) const {
    const int of = of_each == 1 ? i : i / of_each, row0 = (i - of * of_each) * tile_rows;
    Tile x;
    if (!cut) {  // without a division
      const int place = places ? places[of] : of, length = kv_lens[of];
      x.request = of, x.row0 = row0, x.rows = place >= 0 ? heads : 0, x.before = length - (place >= 0);
      x.end = row0 < x.rows ? max(0, is_before ? x.before : length) : 0, x.first_out = max(place, 0);
      return x;
    }
    x.request = max(cut[2 * of], 0), x.row0 = max(cut[2 * of + 1], 0) * heads + row0;
    x.first_out = qo_indptr[x.request];
    const int queries = cut[2 * of] < 0 ? 0 : qo_indptr[x.request + 1] - static_cast<int>(x.first_out);
    const int length = kv_lens[x.request];
    x.rows = queries * heads, x.before = length - queries;
    const int last = min(x.row0 + tile_rows, x.rows) - 1;
    x.end = x.row0 < x.rows ? max(0, is_before ? x.before : min(length, x.before + last / heads + 1)) : 0;
    return x;
  }
};

// Fills begins [count + 1], in units; returns all units. All threads of a block come here.
__device__ __forceinline__ int line_of(const Tiles& list, int tile_rows, int* begins, int* warp_sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int carry = 0;
  for (int base = 0; base < list.count; base += kThreads) {
    const int i = base + threadIdx.x;
    int x = i < list.count ? (list.tile(i, tile_rows).end + kTokens - 1) / kTokens : 0;
    for (int o = 1; o < 32; o <<= 1) {
      const int y = __shfl_up_sync(~0u, x, o);
      if (lane >= o) x += y;
    }
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    int before = carry;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += warp_sums[w];
      carry += warp_sums[w];
    }
    if (i < list.count) begins[i + 1] = before + x;
    __syncthreads();
  }
  if (threadIdx.x == 0) begins[0] = 0;
  __syncthreads();
  return carry;
}

// The tile that has this unit.
__device__ __forceinline__ int find(const int* begins, int count, int unit) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begins[middle] <= unit)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Block b has the units from begin(b) to begin(b + 1).
struct Cut {
  int blocks, each, more;

  // Where every block of a later product merges the parts, tiles are in few: about four units each, or 16 parts.
  __device__ __forceinline__ Cut(int units, int grid, int tiles, bool is_merged_later) {
    if (is_merged_later) grid = min(grid, max(16 * tiles, units / 4));
    blocks = min(grid, units), each = blocks ? units / blocks : 0, more = blocks ? units % blocks : 0;
  }
  __device__ __forceinline__ int begin(int block) const { return block * each + min(block, more); }
  __device__ __forceinline__ int owner(int unit) const {
    return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each;
  }
};

// How a launch over requests of one query each was cut, for who merges parts later: tiles of `tile_rows`, `beside` of
// which have stretches together, in units of `unit` tokens, at least `least` a tile, over `grid` blocks.
struct Cutting {
  int tile_rows, grid, beside, unit, least, heads;

  __device__ __forceinline__ int of_each() const { return (heads + tile_rows * beside - 1) / (tile_rows * beside); }
  // Fills begins [rows * of_each() + 1], in units. One thread comes here.
  __device__ __forceinline__ void line(const int* kv_lens, int rows, int* begins) const {
    int all = 0;
    for (int i = 0; i < rows * of_each(); ++i)
      begins[i] = all, all += max(least, (kv_lens[i / of_each()] + unit - 1) / unit);
    begins[rows * of_each()] = all;
  }
  __device__ __forceinline__ Cut cut(const int* begins, int rows) const {
    const int tiles = rows * of_each();
    return Cut(begins[tiles], grid / beside, tiles, true);
  }
};

// Floats of a part of a tile: sums of each row, then the highest score and the sum of weights of each.
__device__ constexpr int kPart(int rows, int latent) { return rows * (latent + 2); }

struct Merged {
  float4 sum;
  float top, total;
};
// Four columns of a row, of `pieces` parts, kAtOnce of them on their way at once. Every `beside`-th block has one. Only
// the first has the tile's beginning, as its last piece; others have theirs as their first.
template <int kAtOnce>
__device__ __forceinline__ Merged merge_parts(const float* parts, int pieces, int beside, int rows, int latent, int row,
                                              int column) {
  const int part = kPart(rows, latent);
  const auto piece = [&](int i) { return parts + (i == 0 ? part : static_cast<long long>(i) * 2 * beside * part); };
  Merged x = {make_float4(0, 0, 0, 0), -kInf, 0};
  for (int b0 = 0; b0 < (kAtOnce == 4 ? 1 : pieces); b0 += kAtOnce) {
    float2 s[kAtOnce];
    float4 y[kAtOnce];
    float high = x.top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      s[i] = make_float2(-kInf, 0), y[i] = make_float4(0, 0, 0, 0);
      if (kAtOnce == 4 && i >= pieces) continue;
      const float* const from = piece(min(b0 + i, pieces - 1));  // of many, more than there are: no branch
      s[i] = __ldcg(reinterpret_cast<const float2*>(from + rows * latent + row * 2));
      y[i] = __ldcg(reinterpret_cast<const float4*>(from + row * latent + column));
      if (b0 + i >= pieces) s[i] = make_float2(-kInf, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) high = fmaxf(high, s[i].x);
    const float base = high == -kInf ? 0 : high, keep = power(x.top - base);
    x.total *= keep, x.sum.x *= keep, x.sum.y *= keep, x.sum.z *= keep, x.sum.w *= keep, x.top = high;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float by = power(s[i].x - base);
      x.total += s[i].y * by;
      x.sum.x += y[i].x * by, x.sum.y += y[i].y * by, x.sum.z += y[i].z * by, x.sum.w += y[i].w * by;
    }
  }
  return x;
}
// Where the parts of a head of a row lie; none where one block had all tokens.
struct Parts {
  const float* first;
  int pieces;

  __device__ __forceinline__ Parts(const Cutting& cutting, const Cut& cut, const int* begins, int row, int head,
                                   const float* partial, int latent) {
    const int together = cutting.tile_rows * cutting.beside, tile = row * cutting.of_each() + head / together;
    first = nullptr, pieces = 1;
    if (begins[tile + 1] == begins[tile]) return;
    const int block = cut.owner(begins[tile]);
    pieces = cut.owner(begins[tile + 1] - 1) - block + 1;
    const long long part = static_cast<long long>(block) * cutting.beside + head % together / cutting.tile_rows;
    first = partial + part * 2 * kPart(cutting.tile_rows, latent);
  }
};
// Writes rows [there][kLatent] of a tile, and their logarithms unless these are null, by kAll threads.
template <int kOfTile, int kLatent, int kAll>
__device__ __forceinline__ void merge_tile(const float* parts, int pieces, int beside, int there, int thread, bf16* out,
                                           float* lse) {
  const auto write = [&](int slot, const Merged& merged) {
    const int row = slot / (kLatent / 4), column = slot % (kLatent / 4) * 4;
    const float once = merged.total == 0 ? 0 : 1 / merged.total;
    *reinterpret_cast<uint2*>(out + row * kLatent + column) =
        make_uint2(pack(merged.sum.x * once, merged.sum.y * once), pack(merged.sum.z * once, merged.sum.w * once));
    if (lse && column == 0) lse[row] = merged.total == 0 ? -kInf : merged.top + log2f(merged.total);
  };
  const int slots = there * (kLatent / 4);
  if (pieces <= 4) {  // several slots of a thread, so that as many bytes are on their way
    constexpr int kSlots = 4;
    for (int first = thread; first < slots; first += kSlots * kAll) {
      Merged merged[kSlots];
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const int slot = min(first + k * kAll, slots - 1);
        merged[k] =
            merge_parts<4>(parts, pieces, beside, kOfTile, kLatent, slot / (kLatent / 4), slot % (kLatent / 4) * 4);
      }
#pragma unroll
      for (int k = 0; k < kSlots; ++k)
        if (first + k * kAll < slots) write(first + k * kAll, merged[k]);
    }
  } else {
    for (int slot = thread; slot < slots; slot += kAll)
      write(slot,
            merge_parts<8>(parts, pieces, beside, kOfTile, kLatent, slot / (kLatent / 4), slot % (kLatent / 4) * 4));
  }
}
#endif
