// The second product of low-rank adapters: what it makes of the few sums of a row is added to the row's product with
// the layer's weight (kernels/adapter_layout.py has the layout of the matrices), or with GATED what both make together
// goes through the activation to `out`. Bound by reading the matrices of the adapters that have rows, and by the rows.
//
// Compiled with ROWS, which a thread has at once; GATED; OUT_FLOATS: `out`, or of GATED the product, is float32, else
// of 16 bits. A block has some rows of one adapter and 16 panels, or of GATED 16 of either half, a thread 8 columns of
// one; all of a thread's part of the matrix it reads itself, and asks for it before the kernel ahead has ended: see
// row_tile.cuh. Sums are float32, and added once they are complete.
#include "adapters/row_tile.cuh"
#include "linear/decode.cuh"

#ifndef GATED
#define GATED 0
#endif
#ifndef OUT_FLOATS
#define OUT_FLOATS 0
#endif
#ifndef ROWS
#define ROWS 4
#endif
constexpr int kThreads = 128, kRows = ROWS, kHalves = GATED ? 2 : 1, kRanks = 16;

struct Expansion {
  int places, rows, tile_rows, panels, rank, parts, splits, out_stride, product_stride, activation;
};

// 8 columns of `product` or `out`: where they lie together from a multiple of 16 bytes on, at once.
struct Columns {
  static constexpr int kWords = OUT_FLOATS ? 8 : 4;
  int begin, left;  // of those, so many are there

  __device__ __forceinline__ bool is_whole(const void* at) const {
    return left >= 8 && reinterpret_cast<size_t>(at) % 16 == 0;
  }
  // As they lie in memory.
  __device__ __forceinline__ void load(const void* from, long long row, uint32_t* words) const {
    const char* const at = static_cast<const char*>(from) + (row + begin) * (OUT_FLOATS ? 4 : 2);
    if (is_whole(at)) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(at)[i];
        words[i * 4] = four.x, words[i * 4 + 1] = four.y, words[i * 4 + 2] = four.z, words[i * 4 + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (OUT_FLOATS) {
        words[i] = i < left ? reinterpret_cast<const uint32_t*>(at)[i] : 0;
      } else {
        const bf16* const own = reinterpret_cast<const bf16*>(at);
        words[i] = (i * 2 < left ? own[i * 2] : 0u) | (i * 2 + 1 < left ? own[i * 2 + 1] : 0u) << 16;
      }
    }
  }
  __device__ __forceinline__ static float value(const uint32_t* words, int i) {
    if (OUT_FLOATS) return __uint_as_float(words[i]);
    return i % 2 ? wide_high(words[i / 2]) : wide_low(words[i / 2]);
  }
  template <bool kFloats>
  __device__ __forceinline__ void store(void* to, long long row, const float* x) const {
    const long long at = row + begin;
    if (kFloats) {
      float* const own = static_cast<float*>(to) + at;
      if (is_whole(own)) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          reinterpret_cast<float4*>(own)[i] = make_float4(x[i * 4], x[i * 4 + 1], x[i * 4 + 2], x[i * 4 + 3]);
        return;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < left) own[i] = x[i];
    } else {
      bf16* const own = static_cast<bf16*>(to) + at;
      if (is_whole(own)) {
        *reinterpret_cast<uint4*>(own) =
            make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
        return;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < left) own[i] = narrow(x[i]);
    }
  }
};

// panels [places][panels][rank][64]; ranks [places][parts]; ends [parts]; sums [splits][rows][parts · rank], whose
// splits are added up; product [rows, product_stride], of GATED.
extern "C" __global__ void __launch_bounds__(kThreads)
    expand(const uint4* panels, const int* ranks, const int* ends, const float* sums, const int* starts,
           const int* slots, const void* product, void* out, Expansion e) {
  DYNAMIC_SHARED(shared);
  uint4* const held = reinterpret_cast<uint4*>(shared) + threadIdx.x;  // [kHalves][kRanks][kThreads]
  float* const low = reinterpret_cast<float*>(shared + kHalves * kRanks * kThreads * 16);  // [kRows][parts][kRanks]
  const int lane = threadIdx.x % 32;

  // This thread's panel and columns; of GATED those of the second half are as many further on.
  const int panel = blockIdx.x * (kThreads / 8) + threadIdx.x / 8, half_panels = e.panels / 2;
  int part = 0, before = 0, from = 0;  // panels and columns of earlier parts
  for (int p = 0; !GATED && p + 1 < e.parts; ++p) {
    const int end = ends[p], count = (end - from + 63) / 64;
    if (panel < before + count) break;
    part = p + 1, before += count, from = end;
  }
  const int begin = from + (panel - before) * 64 + threadIdx.x % 8 * 8;
  const bool is_there = panel < (GATED ? half_panels : e.panels);
  const Columns columns{begin, is_there ? ends[part] - begin : 0}, seconds{begin + ends[0], columns.left};

  RowTile tile;
  int own_ranks[kHalves];
  const auto enter = [&] { tile = row_tile(starts, e.places, e.rows, blockIdx.y, e.tile_rows, GATED); };
  const auto enter_place = [&] {
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      own_ranks[h] = tile.place < e.places ? min(max(ranks[tile.place * e.parts + part + h], 0), e.rank) : 0;
  };
  const auto ask = [&](int first_rank) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const long long own = static_cast<long long>(tile.place) * e.panels + panel + h * half_panels;
      const uint4* const at = panels + (own * e.rank + first_rank) * 8 + threadIdx.x % 8;
      const uint32_t to = smem(held + h * kRanks * kThreads);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const bool is_own = is_there && first_rank + r < own_ranks[h];
        copy16(to + r * kThreads * 16, is_own ? at + r * 8 : panels, is_own);
      }
    }
    commit();
  };

  let_next_begin();
  enter();
  if (tile.count) enter_place(), ask(0);
  wait_for_ahead();
  const RowTile then = tile;
  enter();
  if (tile.count == 0) {
    wait_for<0>();
    return;
  }
  if (tile.place != then.place || then.count == 0) {
    wait_for<0>();
    enter_place(), ask(0);
  }
  const int numbers = kRows * e.parts * kRanks, width = e.parts * e.rank;
  for (int first = 0; first < tile.count; first += kRows) {
    const RowTile group{tile.place, tile.first + first, min(kRows, tile.count - first)};
    const int row = row_of(group, slots, e.rows, lane);
    uint32_t old[kHalves][kRows][Columns::kWords];
    float sum[kHalves][kRows][8] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int own = __shfl_sync(~0u, row, i);
      if (i >= group.count || columns.left <= 0) continue;
      const void* const its = GATED ? product : out;
      const long long at = static_cast<long long>(own) * (GATED ? e.product_stride : e.out_stride);
      columns.load(its, at, old[0][i]);
      if (GATED) seconds.load(its, at, old[kHalves - 1][i]);
    }
    for (int first_rank = 0; first_rank < e.rank && tile.place < e.places; first_rank += kRanks) {
      if (first_rank || (first && e.rank > kRanks)) ask(first_rank);
      for (int base = 0; base < numbers; base += kThreads) {
        const int at = base + threadIdx.x, i = at / (e.parts * kRanks), r = first_rank + at % kRanks;
        const int own = __shfl_sync(~0u, row, min(i, kRows - 1));
        float total = 0;
        const int p = at / kRanks % e.parts;
        if (at < numbers && i < group.count && r < min(ranks[tile.place * e.parts + p], e.rank)) {
          const float* const its = sums + static_cast<long long>(own) * width + p * e.rank + r;
#pragma unroll 4
          for (int s = 0; s < e.splits; ++s) total += its[static_cast<long long>(s) * e.rows * width];
        }
        if (at < numbers) low[at] = total;
      }
      wait_for<0>();
      __syncthreads();
      const int count = min(kRanks, e.rank - first_rank);
      for (int r = 0; r < count; r += 2) {
        float weights[kHalves][2][8];
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 eight = held[(h * kRanks + r + j) * kThreads];
#pragma unroll
            for (int c = 0; c < 4; ++c)
              weights[h][j][c * 2] = wide_low(word(eight, c)), weights[h][j][c * 2 + 1] = wide_high(word(eight, c));
          }
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            const float2 x = *reinterpret_cast<const float2*>(low + (i * e.parts + part + h) * kRanks + r);
#pragma unroll
            for (int c = 0; c < 8; ++c)
              sum[h][i][c] = fmaf(x.y, weights[h][1][c], fmaf(x.x, weights[h][0][c], sum[h][i][c]));
          }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int own = __shfl_sync(~0u, row, i);
      if (i >= group.count || columns.left <= 0) continue;
      const long long to = static_cast<long long>(own) * e.out_stride;
      float value[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        value[c] = Columns::value(old[0][i], c) + sum[0][i][c];
        if (GATED) {
          const float up = Columns::value(old[kHalves - 1][i], c) + sum[kHalves - 1][i][c];
          value[c] = gated(value[c], up, e.activation);
        }
      }
      columns.store<OUT_FLOATS && !GATED>(out, to, value);
    }
  }
  wait_for<0>();
}
