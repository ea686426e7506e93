// Decode attention over paged KV, bfloat16, for sm_80 and later: one query a request, up to 16 query heads a KV head.
// Compiled with HEAD_DIM (64, 128 or 256), STAGES (tiles of a warp that are on their way) and WARPS.
//
// Work is cut over the whole batch ("stream-K": M. Osama et al., arXiv:2301.03598): all blocks of kBlock tokens of all
// (request, KV head) pairs are one line, of which each thread block takes an equal stretch. Within a stretch every warp
// takes 16 tokens in turn, on its own: copies in flight, scores and values by mma.sync (16 query rows x 8 tokens x 16
// elements), online softmax; only at the end of a pair the warps are merged. Who has a pair whole writes the output;
// else partial results go to the workspace and the last one to come merges them in order.
#include "ptx.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef WARPS
#define WARPS 4
#endif
constexpr int D = HEAD_DIM, kWarps = WARPS, kStages = STAGES, kTile = 16;
constexpr int kBlock = kTile * kWarps;    // tokens of a unit of work
constexpr int kRow = D * 2;               // bytes of a token's row
constexpr int kTileBytes = kTile * kRow;  // of K or of V
constexpr int kSteps = D / 16, kOut = D / 8;
constexpr int kThreads = kWarps * 32;
constexpr int kMerged = 64;                                     // pieces merged at a time
constexpr int kSlots = (16 * D / 4 + kThreads - 1) / kThreads;  // of a thread, of an output of 16 rows

struct Params {
  const bf16* q;       // [rows, heads or more, D]
  long long q_stride;  // of a row
  const bf16 *k, *v;
  long long page_stride, head_stride, token_stride;  // elements
  const int *indptr, *indices, *kv_lens;
  const int* rows;         // [requests]: of q and out, -1: the request is left out; null: 0, 1, …
  const int* first_heads;  // [kv_heads + 1], null: as many query heads for each
  bf16* out;               // [rows, heads, D]
  float* lse;              // [rows, heads] or null, base 2
  float* partial;          // [grid * 2][16][D + 2]
  int* counters;           // [requests * kv_heads], zero before and after
  int requests, kv_heads, heads, page_shift;
  float scale_log2;

  __device__ __forceinline__ int row(int request) const { return rows ? rows[request] : request; }
  __device__ __forceinline__ int length(int request) const { return row(request) < 0 ? 0 : kv_lens[request]; }
  __device__ __forceinline__ int first_head(int kv_head) const {
    return first_heads ? first_heads[kv_head] : heads / kv_heads * kv_head;
  }
};

// 16-byte chunk `c` of row `r` in a tile, rows swizzled so that ldmatrix meets no bank twice.
__device__ __forceinline__ uint32_t chunk(int r, int c) { return r * kRow + ((c ^ (r & 7)) << 4); }

struct State {
  float out[kOut][4];
  float top[2], total[2];  // of rows lane / 4 and lane / 4 + 8
};

// Merges `pieces` partial results, those of thread blocks begin_block and on, into the heads from `head` on.
__device__ __noinline__ void merge(const Params& p, float* weights, int begin_block, int pieces, int first_slot,
                                   long long head, int group) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kPart = 16 * (D + 2);
  const float* const parts = p.partial + static_cast<long long>(begin_block) * 2 * kPart;
  const auto piece = [&](int i) { return parts + i * (2 * kPart) + (i == 0 ? first_slot * kPart : 0); };
  float4 sum[kSlots];
  float tops[kSlots], totals[kSlots];
#pragma unroll
  for (int k = 0; k < kSlots; ++k) sum[k] = make_float4(0, 0, 0, 0), tops[k] = -kInf, totals[k] = 0;
  for (int done = 0; done < pieces; done += kMerged) {
    const int some = min(kMerged, pieces - done);
    __syncthreads();
    for (int at = threadIdx.x; at < some * 16; at += kThreads)
      if (at % 16 < group) {
        const float* from = piece(done + at / 16) + 16 * D + at % 16;
        weights[at % 16 * kMerged + at / 16] = __ldcg(from);
        weights[(16 + at % 16) * kMerged + at / 16] = __ldcg(from + 16);
      }
    __syncthreads();
    for (int row = warp; row < group; row += kWarps) {
      float top = -kInf;
      for (int b = lane; b < some; b += 32) top = fmaxf(top, weights[row * kMerged + b]);
#pragma unroll
      for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      float total = 0;
      for (int b = lane; b < some; b += 32) {
        const float by = power(weights[row * kMerged + b] - top);
        total += weights[(16 + row) * kMerged + b] * by;
        weights[row * kMerged + b] = by;
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
      if (lane == 0) weights[32 * kMerged + row] = top, weights[32 * kMerged + 16 + row] = total;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int at = threadIdx.x + k * kThreads, row = at / (D / 4), col = at % (D / 4) * 4;
      if (row >= group) continue;
      const float theirs = weights[32 * kMerged + row], next = fmaxf(tops[k], theirs);
      const float ours = power(tops[k] - next), by = power(theirs - next);
      float4 part = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int b = 0; b < some; ++b) {
        const float w = weights[row * kMerged + b];
        const float4 x = __ldcg(reinterpret_cast<const float4*>(piece(done + b) + row * D + col));
        part.x += x.x * w, part.y += x.y * w, part.z += x.z * w, part.w += x.w * w;
      }
      sum[k].x = sum[k].x * ours + part.x * by, sum[k].y = sum[k].y * ours + part.y * by;
      sum[k].z = sum[k].z * ours + part.z * by, sum[k].w = sum[k].w * ours + part.w * by;
      totals[k] = totals[k] * ours + weights[32 * kMerged + 16 + row] * by, tops[k] = next;
    }
  }
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    const int at = threadIdx.x + k * kThreads, row = at / (D / 4), col = at % (D / 4) * 4;
    if (row >= group) continue;
    const float by = 1.0f / totals[k];
    *reinterpret_cast<uint2*>(p.out + (head + row) * D + col) =
        make_uint2(pack(sum[k].x * by, sum[k].y * by), pack(sum[k].z * by, sum[k].w * by));
    if (p.lse && col == 0) p.lse[head + row] = tops[k] + log2f(totals[k]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    decode(const bf16* q_, long long q_stride, const bf16* k_, const bf16* v_, long long page_stride,
           long long head_stride, long long token_stride, const int* indptr, const int* indices, const int* kv_lens,
           const int* rows, const int* first_heads, bf16* out, float* lse, float* partial, int* counters, int requests,
           int kv_heads, int heads, int page_shift, float scale_log2) {
  const Params p = {q_,      q_stride, k_,       v_,       page_stride, head_stride, token_stride,
                    indptr,  indices,  kv_lens,  rows,     first_heads, out,         lse,
                    partial, counters, requests, kv_heads, heads,       page_shift,  scale_log2};
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  char* const tiles = shared + warp * (kStages * 2 * kTileBytes);
  int* const begins =
      reinterpret_cast<int*>(shared + kWarps * kStages * 2 * kTileBytes);  // [requests + 1] units a head

  // The line of work: every thread block finds out for itself.
  __shared__ int warp_sums[kWarps];
  int carry = 0;
  for (int base = 0; base < p.requests; base += kThreads) {
    const int r = base + threadIdx.x;
    const int tokens = r < p.requests ? p.length(r) : 0;
    int x = (tokens + kBlock - 1) / kBlock;
    for (int o = 1; o < 32; o <<= 1) {
      const int y = __shfl_up_sync(~0u, x, o);
      if (lane >= o) x += y;
    }
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    int before = carry, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_sums[w];
      all += warp_sums[w];
    }
    if (r < p.requests) begins[r + 1] = before + x;
    if (r < p.requests && tokens == 0 && r % gridDim.x == blockIdx.x && p.row(r) >= 0) {
      for (int h = 0; h < heads; ++h) {
        const long long head = static_cast<long long>(p.row(r)) * heads + h;
        for (int i = 0; i < D; i += 8) *reinterpret_cast<uint4*>(p.out + head * D + i) = make_uint4(0, 0, 0, 0);
        if (p.lse) p.lse[head] = -kInf;
      }
    }
    carry += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) begins[0] = 0;
  __syncthreads();
  const long long units = static_cast<long long>(carry) * p.kv_heads;
  // No stretch is empty: who holds a pair is told from the numbers alone.
  const long long grid = min(static_cast<long long>(gridDim.x), units);
  if (blockIdx.x >= grid) return;
  long long unit = units * blockIdx.x / grid;
  const long long end = units * (blockIdx.x + 1) / grid;

  while (unit < end) {
    // Which request and head: units of a request lie together, its heads one after the other.
    int low = 0, high = p.requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (static_cast<long long>(begins[middle]) * p.kv_heads <= unit)
        low = middle;
      else
        high = middle;
    }
    const int request = low, length = p.kv_lens[request], row = p.row(request);
    const int per_head = begins[request + 1] - begins[request];
    const long long offset = unit - static_cast<long long>(begins[request]) * p.kv_heads;
    const int kv_head = static_cast<int>(offset / per_head), first = static_cast<int>(offset % per_head);
    const int last = static_cast<int>(min(static_cast<long long>(per_head), first + (end - unit)));
    const int first_head = p.first_head(kv_head), group = p.first_head(kv_head + 1) - first_head;
    const long long head0 = static_cast<long long>(row) * heads + first_head;
    const int* pages = p.indices + p.indptr[request];
    const bf16 *k = p.k + kv_head * p.head_stride, *v = p.v + kv_head * p.head_stride;

    // Row r of the tile is head first_head + r; rows past the group are zeros.
    uint32_t q[kSteps][4];
    {
      const bf16* from = p.q + row * p.q_stride + first_head * D;
      const int r = lane / 4, c = lane % 4 * 2;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const auto at = [&](int row, int col) {
          return row < group ? *reinterpret_cast<const uint32_t*>(from + row * D + s * 16 + col) : 0u;
        };
        q[s][0] = at(r, c), q[s][1] = at(r + 8, c), q[s][2] = at(r, c + 8), q[s][3] = at(r + 8, c + 8);
      }
    }
    State st;
#pragma unroll
    for (int i = 0; i < kOut; ++i) st.out[i][0] = st.out[i][1] = st.out[i][2] = st.out[i][3] = 0;
    st.top[0] = st.top[1] = -kInf, st.total[0] = st.total[1] = 0;

    const int count = last - first;  // tiles of this warp
    const auto ask = [&](int i) {
      if (i < count) {
        const int token0 = (first + i) * kBlock + warp * kTile;
        char* const to = tiles + i % kStages * 2 * kTileBytes;
        constexpr int kChunks = kRow / 16;  // of a row
        constexpr int kRowsAtOnce = 32 / kChunks > 0 ? 32 / kChunks : 1;
#pragma unroll
        for (int j = 0; j < kTile * kChunks / 32; ++j) {
          const int at = j * 32 + lane, row = at / kChunks, c = at % kChunks;
          const int token = token0 + row;
          const bool is_there = token < length;
          const int page = is_there ? __ldg(pages + (token >> p.page_shift)) : 0;
          const long long from = page * p.page_stride + (token & ((1 << p.page_shift) - 1)) * p.token_stride + c * 8;
          copy16(smem(to + chunk(row, c)), k + (is_there ? from : 0), is_there);
          copy16(smem(to + kTileBytes + chunk(row, c)), v + (is_there ? from : 0), is_there);
        }
      }
      commit();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) ask(i);
    for (int i = 0; i < count; ++i) {
      wait_for<kStages - 2>();
      __syncwarp();
      ask(i + kStages - 1);
      const uint32_t keys = smem(tiles + i % kStages * 2 * kTileBytes), values = keys + kTileBytes;
      float s[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t b[4];  // tokens 0-7 and 8-15, elements 0-7 and 8-15 of the step
        load4(b, keys + chunk(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
        multiply(s[0], q[step], b[0], b[1]);
        multiply(s[1], q[step], b[2], b[3]);
      }
      const int token0 = (first + i) * kBlock + warp * kTile;
      if (token0 + kTile > length) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (token0 + n * 8 + lane % 4 * 2 + e % 2 >= length) s[n][e] = -kInf;
      }
      float weight[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = fmaxf(fmaxf(s[0][h * 2], s[0][h * 2 + 1]), fmaxf(s[1][h * 2], s[1][h * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top * p.scale_log2, st.top[h]);
        const float base = top == -kInf ? 0 : top;
        const float keep = power(st.top[h] - base);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum += weight[n][h * 2 + e] = power(s[n][h * 2 + e] * p.scale_log2 - base);
        st.total[h] = st.total[h] * keep + sum;
        if (keep != 1.0f) {
#pragma unroll
          for (int n = 0; n < kOut; ++n) st.out[n][h * 2] *= keep, st.out[n][h * 2 + 1] *= keep;
        }
        st.top[h] = top;
      }
      const uint32_t a[4] = {pack(weight[0][0], weight[0][1]), pack(weight[0][2], weight[0][3]),
                             pack(weight[1][0], weight[1][1]), pack(weight[1][2], weight[1][3])};
#pragma unroll
      for (int n = 0; n < kOut; n += 2) {
        uint32_t b[4];  // elements n*8 … n*8+7 for tokens 0-7, 8-15; then the next 8
        load4_transposed(b, values + chunk(lane % 16, n + lane / 16));
        multiply(st.out[n], a, b[0], b[1]);
        multiply(st.out[n + 1], a, b[2], b[3]);
      }
    }
    wait_for<0>();
    __syncthreads();

    // Merge the warps: over what the tiles held.
    float* const merged = reinterpret_cast<float*>(shared);  // [warps][16][D]
    float* const tops = merged + kWarps * 16 * D;            // [warps][16], then totals
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      st.total[h] += __shfl_xor_sync(~0u, st.total[h], 1);
      st.total[h] += __shfl_xor_sync(~0u, st.total[h], 2);
      const int row = lane / 4 + h * 8;
      if (lane % 4 == 0) tops[warp * 16 + row] = st.top[h], tops[(kWarps + warp) * 16 + row] = st.total[h];
      if (row < group)
#pragma unroll
        for (int n = 0; n < kOut; ++n)
          *reinterpret_cast<float2*>(merged + (warp * 16 + row) * D + n * 8 + lane % 4 * 2) =
              make_float2(st.out[n][h * 2], st.out[n][h * 2 + 1]);
    }
    __syncthreads();
    const bool whole = first == 0 && last == per_head;
    float* const mine = p.partial + (static_cast<long long>(blockIdx.x) * 2 + (first != 0 ? 0 : 1)) * 16 * (D + 2);
    for (int at = threadIdx.x; at < group * (D / 4); at += kThreads) {
      const int row = at / (D / 4), col = at % (D / 4) * 4;
      float top = -kInf;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w * 16 + row]);
      const float base = top == -kInf ? 0 : top;
      float total = 0;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float by = power(tops[w * 16 + row] - base);
        total += tops[(kWarps + w) * 16 + row] * by;
        const float4 x = *reinterpret_cast<const float4*>(merged + (w * 16 + row) * D + col);
        sum.x += x.x * by, sum.y += x.y * by, sum.z += x.z * by, sum.w += x.w * by;
      }
      if (whole) {
        const float by = 1.0f / total;
        const long long head = head0 + row;
        *reinterpret_cast<uint2*>(p.out + head * D + col) =
            make_uint2(pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by));
        if (p.lse && col == 0) p.lse[head] = base + log2f(total);
      } else {
        *reinterpret_cast<float4*>(mine + row * D + col) = sum;
        if (col == 0) mine[16 * D + row] = base, mine[16 * D + 16 + row] = total;
      }
    }
    if (!whole) {
      // The stretches that have parts of this pair are those of neighbouring thread blocks.
      const long long pair0 =
          static_cast<long long>(begins[request]) * p.kv_heads + static_cast<long long>(kv_head) * per_head;
      const auto owner = [&](long long u) {  // the thread block whose stretch holds unit u
        long long b = (u * grid) / units;
        while (units * (b + 1) / grid <= u) ++b;
        while (units * b / grid > u) --b;
        return static_cast<int>(b);
      };
      const int begin_block = owner(pair0), end_block = owner(pair0 + per_head - 1);
      __shared__ int is_last;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        int* const counter = p.counters + request * p.kv_heads + kv_head;
        is_last = atomicAdd(counter, 1) == end_block - begin_block;
        if (is_last) *counter = 0;
      }
      __syncthreads();
      if (is_last) {
        __threadfence();
        // Only the first block can have begun before the pair; all others have it as their first piece.
        const int first_slot = units * begin_block / grid > pair0 ? 0 : 1;
        merge(p, reinterpret_cast<float*>(shared), begin_block, end_block - begin_block + 1, first_slot, head0, group);
      }
    }
    __syncthreads();
    unit += last - first;
  }
}
