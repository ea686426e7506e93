// The second product of low-rank adapters: what it makes of the few sums of a row is added to the row's product with
// the layer's weight (kernels/adapter_layout.py has the layout of the matrices), or with GATED what both make together
// goes through the activation to `out`. Bound by reading the matrices of the adapters that have rows, and by the rows.
//
// `expand` is for few rows, `expand_many` for many. Compiled with ROWS, which a thread of `expand` has at once; GATED;
// OUT_FLOATS: `out`, or of GATED the product, is float32, else of 16 bits. A block has some rows of one adapter and 16
// panels, or of GATED 16 of either half, a thread 8 columns of one; all of a thread's part of the matrix it reads
// itself, and asks for it before the kernel ahead has ended: see row_tile.cuh. Sums are float32, and added once they
// are complete.
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
  int* const rows_of = reinterpret_cast<int*>(shared + kHalves * kRanks * kThreads * 16);  // [tile_rows]
  float* const low = reinterpret_cast<float*>(rows_of + e.tile_rows);                      // [tile_rows][parts][even]
  const int even = (e.rank + 1) / 2 * 2, width = e.parts * e.rank;

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
  const auto enter = [&](int index) {
    tile = row_tile(starts, e.places, e.rows, index, e.tile_rows, GATED);
    if (tile.count == 0) return;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      own_ranks[h] = tile.place < e.places ? min(max(ranks[tile.place * e.parts + part + h], 0), e.rank) : 0;
    ask(0);
    if (threadIdx.x < tile.count) rows_of[threadIdx.x] = row_of(tile, slots, e.rows, threadIdx.x);
  };
  // kRows rows of what is there, asked for at once.
  uint32_t old[kHalves][kRows][Columns::kWords];
  const auto ask_old = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i >= tile.count || columns.left <= 0) continue;
      const long long at = static_cast<long long>(rows_of[first + i]) * (GATED ? e.product_stride : e.out_stride);
      columns.load(GATED ? product : out, at, old[0][i]);
      if (GATED) seconds.load(product, at, old[kHalves - 1][i]);
    }
  };

  let_next_begin();
  enter(blockIdx.y);
  __syncthreads();
  wait_for_ahead();
  for (int index = blockIdx.y; tile.count;) {
    ask_old(0);
    const bool has_low = tile.place < e.places;
    const int of_row = e.parts * even;
    for (int at = threadIdx.x; has_low && at < tile.count * of_row; at += kThreads) {
      const int i = at / of_row, p = at % of_row / even, r = at % even;
      float total = 0;
      if (r < min(ranks[tile.place * e.parts + p], e.rank)) {
        const float* const its = sums + static_cast<long long>(rows_of[i]) * width + p * e.rank + r;
#pragma unroll 4
        for (int s = 0; s < e.splits; ++s) total += its[static_cast<long long>(s) * e.rows * width];
      }
      low[at] = total;
    }
    wait_for<0>();
    __syncthreads();
    for (int first = 0; first < tile.count; first += kRows) {
      if (first) ask_old(first);
      float sum[kHalves][kRows][8] = {};
      for (int first_rank = 0; has_low && first_rank < e.rank; first_rank += kRanks) {
        if (first_rank || (first && e.rank > kRanks)) ask(first_rank), wait_for<0>();
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
              if (first + i >= tile.count) continue;
              const float* const own = low + (first + i) * of_row + (part + h) * even + first_rank + r;
              const float2 x = *reinterpret_cast<const float2*>(own);
#pragma unroll
              for (int c = 0; c < 8; ++c)
                sum[h][i][c] = fmaf(x.y, weights[h][1][c], fmaf(x.x, weights[h][0][c], sum[h][i][c]));
            }
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first + i >= tile.count || columns.left <= 0) continue;
        float value[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          value[c] = Columns::value(old[0][i], c) + sum[0][i][c];
          if (GATED) {
            const float up = Columns::value(old[kHalves - 1][i], c) + sum[kHalves - 1][i][c];
            value[c] = gated(value[c], up, e.activation);
          }
        }
        columns.store<OUT_FLOATS && !GATED>(out, static_cast<long long>(rows_of[first + i]) * e.out_stride, value);
      }
    }
    __syncthreads();
    enter(index += gridDim.y);
    __syncthreads();
  }
  wait_for<0>();
}

// The same by tensor cores, where the multiplications would take longer than memory. A warp has 32 columns of 16 rows
// at once, of which lane 4 g + t has columns 8 t and on of rows g and g + 8: column n of product j of four is column n
// / 2 · 8 + 2 j + n % 2. A sum is two 16-bit numbers, the second of which is what the first one lacks.
extern "C" __global__ void __launch_bounds__(kThreads)
    expand_many(const bf16* panels, const int* ranks, const int* ends, const float* sums, const int* starts,
                const int* slots, const void* product, void* out, Expansion e) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int steps = (e.rank + 15) / 16, of_row = e.parts * steps * 8, width = e.parts * e.rank;  // pairs of ranks
  int* const rows_of = reinterpret_cast<int*>(shared);                                           // [tile_rows]
  uint32_t* const low = reinterpret_cast<uint32_t*>(rows_of + e.tile_rows);  // [tile_rows][parts][steps][8]
  uint32_t* const rest = low + e.tile_rows * of_row;                         // … what those lack
  const int half_panels = e.panels / 2, most_panels = GATED ? half_panels : e.panels;
  const int first_panel = blockIdx.x * (kThreads / 8) + warp * 4;
  RowTile tile;
  const auto enter = [&](int index) {
    tile = row_tile(starts, e.places, e.rows, index, e.tile_rows, GATED);
    if (threadIdx.x < tile.count) rows_of[threadIdx.x] = row_of(tile, slots, e.rows, threadIdx.x);
  };
  let_next_begin();
  enter(blockIdx.y);
  __syncthreads();
  wait_for_ahead();
  for (int index = blockIdx.y; tile.count;) {
    const bool has_low = tile.place < e.places;
    const int groups = (tile.count + 15) / 16;
    for (int at = threadIdx.x; has_low && at < groups * 16 * of_row; at += kThreads) {
      const int i = at / of_row, p = at % of_row / (steps * 8), pair = at % (steps * 8);
      const int own = i < tile.count ? min(ranks[tile.place * e.parts + p], e.rank) : 0;
      float x[2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = pair * 2 + h;
        if (r >= own) continue;
        const float* const its = sums + static_cast<long long>(rows_of[i]) * width + p * e.rank + r;
        for (int s = 0; s < e.splits; ++s) x[h] += its[static_cast<long long>(s) * e.rows * width];
      }
      const uint32_t near = pack(x[0], x[1]);
      low[at] = near, rest[at] = pack(x[0] - wide_low(near), x[1] - wide_high(near));
    }
    __syncthreads();
    int part = 0, before = 0, from = 0;  // panels and columns of earlier parts
    for (int c = 0; c < 8; ++c) {
      const int panel = first_panel + c / 2, in_panel = c % 2 * 32;
      if (panel >= most_panels) break;
      while (!GATED && part + 1 < e.parts && panel >= before + (ends[part] - from + 63) / 64)
        before += (ends[part] - from + 63) / 64, from = ends[part], ++part;
      const int begin = from + (panel - before) * 64 + in_panel + t * 8;
      const Columns columns{begin, ends[part] - begin}, seconds{begin + ends[0], columns.left};
      uint32_t weights[kHalves][4][2];
      const auto fetch = [&](int step) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const int own = has_low ? min(ranks[tile.place * e.parts + part + h], e.rank) : 0;
          const long long at = static_cast<long long>(tile.place) * e.panels + panel + h * half_panels;
          const bf16* const its = panels + at * e.rank * 64 + in_panel + g / 2 * 8 + g % 2;
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
              const int r = step * 16 + b * 8 + t * 2;
              const uint32_t first = r < own ? its[r * 64 + j * 2] : 0,
                             second = r + 1 < own ? its[r * 64 + 64 + j * 2] : 0;
              weights[h][j][b] = first | second << 16;
            }
        }
      };
      fetch(0);
      for (int group = 0; group < groups; ++group) {
        uint32_t old[kHalves][2][Columns::kWords];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const int i = group * 16 + q * 8 + g;
          if (i >= tile.count || columns.left <= 0) continue;
          const long long at = static_cast<long long>(rows_of[i]) * (GATED ? e.product_stride : e.out_stride);
          columns.load(GATED ? product : out, at, old[0][q]);
          if (GATED) seconds.load(product, at, old[kHalves - 1][q]);
        }
        float sum[kHalves][4][4] = {};
        for (int step = 0; has_low && step < steps; ++step) {
          if (steps > 1) fetch(step);
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            const int at = (group * 16 + g) * of_row + ((part + h) * steps + step) * 8 + t, later = at + 8 * of_row;
            const uint32_t a[2][4] = {{low[at], low[later], low[at + 4], low[later + 4]},
                                      {rest[at], rest[later], rest[at + 4], rest[later + 4]}};
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
              for (int k = 0; k < 2; ++k) multiply(sum[h][j], a[k], weights[h][j][0], weights[h][j][1]);
          }
        }
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const int i = group * 16 + q * 8 + g;
          if (i >= tile.count || columns.left <= 0) continue;
          float value[8];
#pragma unroll
          for (int c8 = 0; c8 < 8; ++c8) {
            value[c8] = Columns::value(old[0][q], c8) + sum[0][c8 / 2][q * 2 + c8 % 2];
            if (GATED) {
              const float up = Columns::value(old[kHalves - 1][q], c8) + sum[kHalves - 1][c8 / 2][q * 2 + c8 % 2];
              value[c8] = gated(value[c8], up, e.activation);
            }
          }
          columns.store<OUT_FLOATS && !GATED>(out, static_cast<long long>(rows_of[i]) * e.out_stride, value);
        }
      }
    }
    __syncthreads();
    enter(index += gridDim.y);
    __syncthreads();
  }
}
