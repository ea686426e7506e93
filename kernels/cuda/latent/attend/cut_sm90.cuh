// What Hopper's kernels of attention over latents have in common: matrices in shared memory, units of 64 tokens, and
// the pieces of tiles that a block has.
#ifndef ALLSPAN_LATENT_CUT_SM90
#define ALLSPAN_LATENT_CUT_SM90
#include "latent/attend/cut.cuh"
#include "ptx/ptx_sm90.cuh"

constexpr int L = 512, kChunks = (L + 64) / 64, kUnit = 64, kGroup = 128;
// A chunk: 64 elements of 64 tokens, rows of 128 bytes, whose 16-byte parts are swizzled by the row.
constexpr int kChunk = 64 * 128;

// What the tensor cores read, but for its address: eight rows take 1,024 bytes.
constexpr uint64_t kSwizzled = static_cast<uint64_t>(1) << 62 | static_cast<uint64_t>(1024 >> 4) << 32;
constexpr uint64_t kAlong = kSwizzled | 1 << 16;             // rows along k
constexpr uint64_t kAcross = kSwizzled | kChunk >> 4 << 16;  // k along rows, columns in chunks
__device__ __forceinline__ uint64_t matrix(uint64_t kind, uint32_t at) { return kind | (at & 0x3ffff) >> 4; }
// … some bytes further on, where the compiler is not to keep all that it finds.
struct Matrix {
  uint32_t low;
  Matrix() = default;
  __device__ __forceinline__ Matrix(uint64_t kind, uint32_t at) : low(static_cast<uint32_t>(matrix(kind, at))) {
    keep(low);
  }
  __device__ __forceinline__ uint64_t operator+(int bytes) const {
    return kSwizzled >> 32 << 32 | (low + (bytes >> 4));
  }
};

// A block's piece of a tile.
struct Item {
  long long first_out;
  int row0, rows, before, end, all_see;  // as of a Tile; all_see: up to where all rows see
  int token0, units;                     // -1 units: there is no more
  int tile, begin_block, pieces;         // begin_block: who has the tile's first piece
  int is_first;                          // whether this is that one, or a part of it
  int first_page, group_end;  // first_page: in `indices`; group_end: up to where a row of any tile beside sees
};

__device__ __forceinline__ int units_of(const Tile& tile) {
  return tile.row0 < tile.rows ? max(1, (tile.end + kUnit - 1) / kUnit) : 0;
}

// The line of a launch's tiles, of beside * kRows rows, and where in it this block begins.
template <int kRows>
struct Line {
  const Tiles& list;
  const int* indptr;
  int beside;
  Cut cut = Cut(0, 1, 1, true);
  int unit, end_unit, first_unit;  // of this block: the next, the one behind the last, the first
  int i, begin;                    // the item with `unit`, and the units before it
  int first_page;                  // of that item

  // All kBlock threads come here. sums: [kBlock / 32 + 3], in shared memory. Blocks beyond cut.blocks * beside have
  // nothing.
  template <int kBlock>
  __device__ __forceinline__ static Line of_block(const Tiles& list, const int* indptr, int beside,
                                                  bool is_merged_later, int* sums) {
    Line x = {list, indptr, beside};
    // A thread has as many of the line's items as any.
    const int lane = threadIdx.x % 32, each = (list.count + kBlock - 1) / kBlock, own_begin = threadIdx.x * each;
    const int own_end = min(list.count, own_begin + each);
    const int own_page = own_begin < own_end ? indptr[list.request(own_begin)] : 0;  // asked for with the lengths
    int own = 0;
    for (int i = own_begin; i < own_end;) {
      const int its_units = x.units(i);
      own += its_units, i = x.after(i, its_units);
    }
    int before = own, units = 0;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int other = __shfl_up_sync(~0u, before, o);
      if (lane >= o) before += other;
    }
    if (lane == 31) sums[threadIdx.x / 32] = before;
    __syncthreads();
    before -= own;
    for (int w = 0; w < kBlock / 32; ++w) {
      if (w < static_cast<int>(threadIdx.x) / 32) before += sums[w];
      units += sums[w];
    }
    const int stretch = blockIdx.x / beside;
    x.cut = Cut(units, gridDim.x / beside, list.count, is_merged_later);
    x.unit = x.cut.begin(stretch), x.end_unit = x.cut.begin(stretch + 1), x.first_unit = x.unit;
    int* const first = sums + kBlock / 32;
    if (stretch < x.cut.blocks && before <= x.unit && x.unit < before + own) {
      int i = own_begin;
      if (each > 1)
        for (int more; before + (more = x.units(i)) <= x.unit; i = x.after(i, more)) before += more;
      first[0] = i, first[1] = before, first[2] = i == own_begin ? own_page : indptr[list.request(i)];
    }
    __syncthreads();
    x.i = first[0], x.begin = first[1], x.first_page = first[2];
    return x;
  }
  __device__ __forceinline__ bool is_empty() const { return static_cast<int>(blockIdx.x) / beside >= cut.blocks; }
  __device__ __forceinline__ int units(int item) const { return units_of(list.tile(item, kRows * beside)); }
  // Behind a tile without rows, a request has no more that have some.
  __device__ __forceinline__ int after(int item, int its_units) const {
    return its_units ? item + 1 : (item / list.of_each + 1) * list.of_each;
  }

  // The next piece of this block. Whether there is one; else it has -1 units.
  __device__ __forceinline__ bool next(Item& item) {
    const int sub = blockIdx.x % beside;
    while (unit < end_unit) {
      Tile tile = list.tile(i, kRows * beside);
      const int all = units_of(tile), from = unit - begin, count = min(begin + all, end_unit) - unit;
      const int me = i;
      begin += all, i = after(i, all);
      if (all == 0) continue;
      const int page = unit == first_unit ? first_page : indptr[tile.request];
      tile.row0 += sub * kRows;
      if (tile.row0 >= tile.rows) {
        unit += count;
        continue;
      }
      const int last_row = min(tile.row0 + kRows, tile.rows) - 1;
      const int begin_stretch = cut.owner(begin - all), pieces = cut.owner(begin - 1) - begin_stretch + 1;
      item = {tile.first_out,
              tile.row0,
              tile.rows,
              tile.before,
              min(tile.end, tile.before + list.query(last_row) + 1),
              min(tile.end, tile.before + list.query(tile.row0) + 1),
              from * kUnit,
              max(0, count),  // as the compiler is to know
              me * beside + sub,
              begin_stretch * beside + sub,
              pieces,
              from == 0,
              page,
              tile.end};
      unit += count;
      return true;
    }
    item = {}, item.units = -1;
    return false;
  }
};
#endif
