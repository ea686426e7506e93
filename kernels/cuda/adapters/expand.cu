// The second product of low-rank adapters: what it makes of the few sums of a row is added to the row's product with
// the layer's weight (kernels/adapter_layout.py has the layout of the matrices), or with GATED what both make together
// goes through the activation to `out`. Bound by the rows and by the matrices of the adapters that they have; of few
// rows by how often an answer of memory is waited for, so that as much as can be is asked for at once.
//
// Compiled with GATED, the activation's number in decode.cuh, or 0; OUT_FLOATS: `out`, or of GATED the product, is
// float32, else of 16 bits. A block has some rows, neighbours in the order of the routing, and two panels of one part,
// or of GATED two of either half. A warp has 32 columns of 16 rows at once, of which lane 4 g + t has columns 8 t and
// on of rows g and g + 8: column n of product j of four is column n / 2 · 8 + 2 j + n % 2, which is how 16 bytes of a
// rank become matrix fragments. Rows of other adapters are zeros in the product of one. A sum is two 16-bit numbers,
// the second of which is what the first one lacks. Sums are float32, and added once they are complete.
#include "linear/decode.cuh"

#ifndef GATED
#define GATED 0
#endif
#ifndef OUT_FLOATS
#define OUT_FLOATS 0
#endif
constexpr int kThreads = 128, kHalves = GATED ? 2 : 1, kPanels = 2, kSplits = GATED ? 5 : 10;
constexpr int kBlocks = GATED ? 4 : 6;  // that have registers on a multiprocessor
constexpr int kWords = OUT_FLOATS ? 8 : 4, kStages = 3, kStageBytes = kHalves * 2 * kWords / 4 * 512;  // of a warp

struct Expansion {
  int places, rows, tile_rows, panels, rank, parts, splits, out_stride, product_stride;
};

// A lane's 8 columns of the rows of `product` or `out`, float32 or of 16 bits.
template <bool kFloats>
struct Columns {
  char* base;
  long long row_bytes;
  int left;  // so many are there
  bool is_whole;

  __device__ __forceinline__ Columns(const void* of, int begin, int left, int stride)
      : base(static_cast<char*>(const_cast<void*>(of)) + begin * static_cast<long long>(kFloats ? 4 : 2)),
        row_bytes(static_cast<long long>(stride) * (kFloats ? 4 : 2)),
        left(left),
        is_whole(left >= 8 && (reinterpret_cast<size_t>(base) | row_bytes) % 16 == 0) {}
  // To shared memory: where they begin at multiples of 16 bytes, else nothing is copied.
  __device__ __forceinline__ void copy(int row, uint32_t to) const {
    if (!is_whole) return;
#pragma unroll
    for (int i = 0; i < (kFloats ? 2 : 1); ++i) copy16(to + i * 512, base + row * row_bytes + i * 16, true);
  }
  // What `copy` has brought, or from where it lies.
  __device__ __forceinline__ void load(int row, const char* copied, float* x) const {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      if (is_whole && kFloats) {
        const float4 four = *reinterpret_cast<const float4*>(copied + i / 4 * 512);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      } else if (is_whole) {
        const uint2 four = *reinterpret_cast<const uint2*>(copied + i / 4 * 8);
        x[i] = wide_low(four.x), x[i + 1] = wide_high(four.x), x[i + 2] = wide_low(four.y),
        x[i + 3] = wide_high(four.y);
      } else {
#pragma unroll
        for (int e = i; e < i + 4; ++e) x[e] = e < left ? value(base + row * row_bytes, e) : 0;
      }
    }
  }
  __device__ __forceinline__ void store(int row, const float* x) const {
    char* const to = base + row * row_bytes;
    if (is_whole && kFloats) {
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        *reinterpret_cast<float4*>(to + i * 4) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    } else if (is_whole) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e >= left) continue;
        if (kFloats)
          reinterpret_cast<float*>(to)[e] = x[e];
        else
          reinterpret_cast<bf16*>(to)[e] = narrow(x[e]);
      }
    }
  }

 private:
  __device__ __forceinline__ static float value(const char* at, int e) {
    return kFloats ? reinterpret_cast<const float*>(at)[e] : wide(reinterpret_cast<const bf16*>(at)[e]);
  }
};

// panels [places][panels][rank][64]; ranks [places][parts]; ends [parts]; sums [splits][rows][parts · rank], whose
// splits are added up; places [rows], and slots, the rows in their order, those without an adapter behind; product
// [rows, product_stride], of GATED. Places and slots may be read early: see route.cu.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    expand(const bf16* panels, const int* ranks, const int* ends, const float* sums, const int* places,
           const int* slots, const void* product, void* out, Expansion e) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int steps = (e.rank + 15) / 16, pitch = kHalves * steps * 8 + 4, width = e.parts * e.rank;
  char* const stages = shared + warp * kStages * kStageBytes + lane * 16;                       // what is there
  int* const rows_of = reinterpret_cast<int*>(shared + kThreads / 32 * kStages * kStageBytes);  // [tile_rows]
  int* const places_of = rows_of + e.tile_rows;                                                 // −1: none
  int* const ranks_of = places_of + e.tile_rows;                                                // [kHalves][tile_rows]
  uint32_t* const low = reinterpret_cast<uint32_t*>(ranks_of + kHalves * e.tile_rows);          // [tile_rows][pitch]
  uint32_t* const rest = low + e.tile_rows * pitch;  // … what those pairs lack

  // This warp's panel and columns, and this lane's; of GATED those of the second half are as many further on.
  int part = 0, before = 0, from = 0, block = blockIdx.x;  // panels, columns and blocks of earlier parts
  for (; !GATED && part + 1 < e.parts; ++part) {
    const int count = (ends[part] - from + 63) / 64, blocks = (count + kPanels - 1) / kPanels;
    if (block < blocks) break;
    block -= blocks, before += count, from = ends[part];
  }
  const int in_part = block * kPanels + warp / 2, in_panel = warp % 2 * 32, panel = before + in_part;
  const int of_half = GATED ? e.panels / 2 : 0, begin = from + in_part * 64 + in_panel + t * 8, until = ends[part];
  const bool is_there = panel < (GATED ? of_half : e.panels) && begin - t * 8 < until;
  const int left_columns = is_there ? until - begin : 0;
  const Columns<OUT_FLOATS && !GATED> columns(out, begin, left_columns, e.out_stride);
  const Columns<OUT_FLOATS> old[2] = {
      {GATED ? product : out, begin, left_columns, GATED ? e.product_stride : e.out_stride},
      {product, begin + until, left_columns, e.product_stride}};

  const int first_slot = blockIdx.y * e.tile_rows, count = min(e.tile_rows, e.rows - first_slot);
  let_next_begin();
  if (threadIdx.x < e.tile_rows) {
    int row = 0, place = -1;
    if (threadIdx.x < count) {
      row = min(max(__ldcg(slots + first_slot + threadIdx.x), 0), e.rows - 1), place = __ldcg(places + row);
      if (place >= e.places || place < 0) place = -1;
    }
    rows_of[threadIdx.x] = row, places_of[threadIdx.x] = place;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      ranks_of[h * e.tile_rows + threadIdx.x] = place < 0 ? 0 : min(ranks[place * e.parts + part + h], e.rank);
  }
  __syncthreads();

  // Where numbers of an adapter lie, of this warp's columns.
  const auto numbers_of = [&](int place, int h) {
    return panels + (static_cast<long long>(place) * e.panels + panel + h * of_half) * e.rank * 64 + in_panel;
  };
  uint4 numbers[kHalves][2];  // of ranks g and g + 8 of a step
  int asked = -1;             // place and step
  const auto ask = [&](int slot, int step) {
    asked = places_of[slot] * steps + step;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const bf16* const its = numbers_of(places_of[slot], h) + t * 8;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int r = step * 16 + b * 8 + g;
        numbers[h][b] = make_uint4(0, 0, 0, 0);
        if (is_there && r < ranks_of[h * e.tile_rows + slot]) numbers[h][b] = load16(its + r * 64);
      }
    }
  };
  const bool has_any = places_of[0] >= 0;
  if (has_any) {
    ask(0, 0);
    for (int slot = 1; slot < count && is_there; ++slot)  // others come to L2 meanwhile
      if (const int place = places_of[slot]; place >= 0 && place != places_of[slot - 1])
        for (int r = lane / 2 % 16; r < e.rank; r += 16)
          if (lane % 2 < kHalves) prefetch_l2(numbers_of(place, lane % 2) + r * 64);
  }
  const auto ask_old = [&](int first_row) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int i = first_row + q * 8 + g;
      if (first_row >= count || (GATED ? i >= count : places_of[i] < 0)) continue;
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        old[h].copy(rows_of[i],
                    smem(stages) + first_row / 16 % kStages * kStageBytes + (h * 2 + q) * (kWords / 4) * 512);
    }
    commit();
  };
  wait_for_ahead();
  if (!GATED && !has_any) return;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) ask_old(i * 16);
  for (int i = threadIdx.x / 8; has_any && i < (count + 15) / 16 * 16; i += kThreads / 8)
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      for (int step = 0; step < steps; ++step) {
        const int pair = step * 8 + threadIdx.x % 8, own = ranks_of[h * e.tile_rows + i] - pair * 2;
        const float* const its = sums + static_cast<long long>(rows_of[i]) * width + (part + h) * e.rank + pair * 2;
        float2 total = make_float2(0, 0);
        if (e.rank % 2)  // not together
#pragma unroll 1
          for (int at = 0; own > 0 && at < e.splits; ++at) {
            const float* const from_split = its + static_cast<long long>(at) * e.rows * width;
            total.x += from_split[0], total.y += own > 1 ? from_split[1] : 0;
          }
        for (int s0 = 0; own > 0 && e.rank % 2 == 0 && s0 < e.splits; s0 += kSplits) {
          float2 of_split[kSplits];
#pragma unroll
          for (int s = 0; s < kSplits; ++s) {
            const float* const from_split = its + static_cast<long long>(s0 + s) * e.rows * width;
            of_split[s] = s0 + s < e.splits ? *reinterpret_cast<const float2*>(from_split) : make_float2(0, 0);
          }
#pragma unroll
          for (int s = 0; s < kSplits; ++s) total.x += of_split[s].x, total.y += of_split[s].y;
        }
        if (own < 2) total.y = 0;
        const uint32_t near = pack(total.x, total.y);
        const int to = i * pitch + h * steps * 8 + pair;
        low[to] = near, rest[to] = pack(total.x - wide_low(near), total.y - wide_high(near));
      }
  __syncthreads();

  uint32_t b[kHalves][4][2];
  int held = -1;  // place and step
  for (int first_row = 0; first_row < count; first_row += 16) {
    ask_old(first_row + (kStages - 1) * 16);
    const int mine = lane < 16 ? places_of[first_row + lane] : -1;
    unsigned left = __ballot_sync(~0u, mine >= 0);
    if (!GATED && !left) break;  // those without an adapter come last
    float sum[kHalves][4][4] = {};
    while (left) {
      const int slot = __ffs(left) - 1, place = __shfl_sync(~0u, mine, slot);
      left &= ~__ballot_sync(~0u, mine == place);
      const bool has_it[2] = {places_of[first_row + g] == place, places_of[first_row + 8 + g] == place};
      for (int step = 0; step < steps; ++step) {
        if (const int now = place * steps + step; held != now) {
          if (asked != now) ask(first_row + slot, step);
          held = now;
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
              for (int i = 0; i < 2; ++i) b[h][j][i] = transpose(word(numbers[h][i], j));
        }
        // The next ones come meanwhile.
        if (step + 1 < steps)
          ask(first_row + slot, step + 1);
        else if (left)
          ask(first_row + __ffs(left) - 1, 0);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const int at = (first_row + g) * pitch + (h * steps + step) * 8 + t, later = at + 8 * pitch;
          const uint32_t near[4] = {has_it[0] ? low[at] : 0, has_it[1] ? low[later] : 0, has_it[0] ? low[at + 4] : 0,
                                    has_it[1] ? low[later + 4] : 0};
          const uint32_t far[4] = {has_it[0] ? rest[at] : 0, has_it[1] ? rest[later] : 0, has_it[0] ? rest[at + 4] : 0,
                                   has_it[1] ? rest[later + 4] : 0};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            multiply(sum[h][j], near, b[h][j][0], b[h][j][1]);
            multiply(sum[h][j], far, b[h][j][0], b[h][j][1]);
          }
        }
      }
    }
    wait_for<kStages - 1>();
    const char* const stage = stages + first_row / 16 % kStages * kStageBytes;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int i = first_row + q * 8 + g;
      if (left_columns <= 0 || (GATED ? i >= count : places_of[i] < 0)) continue;
      const int row = rows_of[i];
      float value[kHalves][8];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        old[h].load(row, stage + (h * 2 + q) * (kWords / 4) * 512, value[h]);
#pragma unroll
        for (int n = 0; n < 8; ++n) value[h][n] += sum[h][n / 2][q * 2 + n % 2];
      }
#pragma unroll
      for (int n = 0; GATED && n < 8; ++n) value[0][n] = gated(value[0][n], value[kHalves - 1][n], GATED);
      columns.store(row, value[0]);
    }
  }
  wait_for<0>();
}
