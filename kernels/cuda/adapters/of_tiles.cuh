// What low-rank adapters add to tiles of 128 rows of a gated product, as further steps of the same sums, for sm_90a:
// the sums of the first product against panels of each adapter that has rows in the tile; other rows have zeros. So
// numbers of panels are finite, also behind an adapter's rank. Sums become 16-bit numbers, as x is.
#pragma once
#include "ptx/ptx_sm90.cuh"

struct OfTiles {
  const uint32_t* pairs;  // [rows][2][steps][8]: the sums of two ranks each, 0 behind an adapter's rank; see pack_sums
  const int* of_rows;     // [rows]: the place of each
  int places, panels_of_place, rank;  // places: up to 64

  static constexpr int kPanel = 16 * 128, kHalf = 4 * kPanel;  // bytes: 16 ranks of 64 columns, of 256
  // What the tensor cores read, but for its address: rows of 128 bytes along the columns. A half's sums meet its panels
  // and, instead of those of the other half, zeros.
  static constexpr uint64_t kAcross = static_cast<uint64_t>(1) << 62 | static_cast<uint64_t>(1024 >> 4) << 32 |
                                      static_cast<uint64_t>(kPanel >> 4) << 16;

  __device__ __forceinline__ int steps() const { return (rank + 15) / 16; }
  // −1: none.
  __device__ __forceinline__ int place_of(int row, int rows) const {
    const int place = row < rows ? of_rows[row] : -1;
    return place >= 0 && place < places ? place : -1;
  }
  // By a warp: a bit for each place that has rows among the 128 from row0 on.
  __device__ __forceinline__ uint64_t present(int row0, int rows) const {
    uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = place_of(row0 + i * 32 + threadIdx.x % 32, rows);
      if (place >= 0) bits |= static_cast<uint64_t>(1) << place;
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const uint32_t low = __shfl_xor_sync(~0u, static_cast<uint32_t>(bits), o);
      const uint32_t high = __shfl_xor_sync(~0u, static_cast<uint32_t>(bits >> 32), o);
      bits |= static_cast<uint64_t>(high) << 32 | low;
    }
    return bits;
  }
};

// A lane's part of the sums of its warp's 16 rows, of 16 ranks: fragments of either half.
struct LowFragments {
  int place[2];  // of rows g and g + 8
  uint32_t pairs[2][4];

  __device__ __forceinline__ void find_places(const OfTiles& of, int row0, int rows) {
#pragma unroll
    for (int q = 0; q < 2; ++q) place[q] = of.place_of(row0 + threadIdx.x % 32 / 4 + q * 8, rows);
  }
  __device__ __forceinline__ void load(const OfTiles& of, int step, int row0, int rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + g + i % 2 * 8;
        const long long at = ((static_cast<long long>(row) * 2 + h) * of.steps() + step) * 8 + t + i / 2 * 4;
        pairs[h][i] = row < rows ? of.pairs[at] : 0;
      }
  }
  // d += those of the rows of a place · its panels, of which `b` is the first half.
  __device__ __forceinline__ void multiply_panels(float (&d)[128], int of_place, uint64_t b) const {
    uint32_t a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[h][i] = place[i % 2] == of_place ? pairs[h][i] : 0;
    begin_products();
#pragma unroll
    for (int h = 0; h < 2; ++h) multiply_values(d, a[h], b + h * (OfTiles::kHalf >> 4));
    end_products();
    wait_products<0>();
  }
};
