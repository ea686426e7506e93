// Some rows of one adapter, which a thread block multiplies at once. Rows are sorted by adapter: `slots` has them in
// the order of their places, `starts` where those of each place begin; behind the last place's lie those of no adapter.
//
// A kernel may read these before the one ahead has ended: nothing begins before route.cu has written them. Where others
// have, they must be there before the kernel ahead begins. Whatever they hold, no tile is of a place or a row that is
// not there.
#pragma once
#include "ptx/ptx.cuh"

struct RowTile {
  int place, first, count;  // in the order of slots; 0 rows: there is no such tile
};

// Tile `index` of up to `most` rows each, the same in all lanes of a warp; all lanes come here. with_rest: rows without
// an adapter have tiles, too, of the place `places`.
__device__ __forceinline__ RowTile row_tile(const int* starts, int places, int rows, int index, int most,
                                            bool with_rest) {
  const int lane = threadIdx.x % 32, all = places + with_rest;
  const auto start = [&](int place) { return min(max(__ldcg(starts + place), 0), rows); };
  int before = 0;  // tiles of earlier places
  for (int first = 0; first < all; first += 32) {
    const int place = first + lane;
    int from = 0, until = 0;
    if (place < all) from = start(place), until = place < places ? start(place + 1) : rows;
    const int tiles = (max(until - from, 0) + most - 1) / most;
    int up_to = tiles;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int other = __shfl_up_sync(~0u, up_to, o);
      if (lane >= o) up_to += other;
    }
    const unsigned later = __ballot_sync(~0u, index < before + up_to);
    const int owner = later ? __ffs(later) - 1 : 31;
    const int skipped = before + __shfl_sync(~0u, up_to - tiles, owner);
    from = __shfl_sync(~0u, from, owner), until = __shfl_sync(~0u, until, owner);
    before += __shfl_sync(~0u, up_to, 31);
    if (!later) continue;
    const int at = from + (index - skipped) * most;
    return {first + owner, at, min(most, until - at)};
  }
  return {0, 0, 0};
}

// The row of slot i of a tile; the first one again where there are no more.
__device__ __forceinline__ int row_of(const RowTile& tile, const int* slots, int rows, int i) {
  const int slot = __ldcg(slots + min(tile.first + (i < tile.count ? i : 0), rows - 1));
  return min(max(slot, 0), rows - 1);
}
